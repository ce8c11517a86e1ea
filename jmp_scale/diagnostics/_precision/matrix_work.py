"""Counts the work of matrix products, and finds what keeps it from half precision."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ..._dot_general import ALGORITHMS
from ..._jaxpr import PRODUCTS, dtype_name, is_literal, shape, size, words
from ..._operations import is_sum, stays_float32
from .facts import Fact, is_wide
from .origins import entries_added, is_half
from .rules import is_cast_by_user
from .step import Finding, Step

_FLOATING = ("float", "bfloat", "complex")
_NARROW = ("float16", "bfloat16", "float8", "float4")
# Algorithms that compute with half precision whatever the operands' dtype.
_DTYPES = {preset: dtype for dtype, preset in ALGORITHMS.items()}
MOVES = words(
    "broadcast_in_dim concatenate convert_element_type copy copy_p device_put "
    "dynamic_slice dynamic_update_slice eq expand_dims gather ge gt is_finite le lt "
    "name ne optimization_barrier pad pcast pvary reshape rev select_n "
    "sharding_constraint slice split squeeze stack stop_gradient tile transpose unstack"
)

Line = tuple[str | None, int | None]


class Operation(NamedTuple):
    """How often a program runs an operation in a dtype, forward and backward.

    Attributes:
      primitive: JAX's name of the operation.
      dtype: dtype of its operands, joined by " x " where they differ.
      executions: how often it runs; the body of a scan counts for each iteration, that
        of a while loop once, and of a branch each alternative.
      flops: floating-point operations of matrix products and convolutions; else 0.
      share: of all such operations of the program, from 0 to 1.
    """

    primitive: str
    dtype: str
    executions: int
    flops: int
    share: float


def flops(eqn: Any) -> int:
    """Multiplications and additions of one matrix product or convolution; else 0."""
    name = eqn.primitive.name
    if name not in PRODUCTS or not dtype_name(eqn.outvars[0]).startswith(_FLOATING):
        return 0
    left, right, result = eqn.invars[0], eqn.invars[1], eqn.outvars[0]
    if name == "dot_general":
        return 2 * size(result) * entries_added(eqn)
    if name == "conv_general_dilated":
        features = shape(right)[eqn.params["dimension_numbers"].rhs_spec[0]]
        # The zeros inside a dilated input are not multiplied.
        zeros = math.prod(eqn.params.get("lhs_dilation") or (1,))
        return 2 * size(result) * (size(right) // max(features, 1)) // zeros
    return 2 * size(left) * shape(right)[-1]


def operand_dtypes(eqn: Any) -> tuple[str, ...]:
    """The dtypes that an operation computes with, each once."""
    algorithm = eqn.params.get("precision")
    if algorithm in _DTYPES:
        return (_DTYPES[algorithm],)
    operands = eqn.invars[:2] if eqn.primitive.name in PRODUCTS else eqn.invars[:1]
    return tuple(dict.fromkeys(dtype_name(v) for v in operands))


def is_narrow(eqn: Any) -> bool:
    """Whether the operands of an operation all have 16 bits or fewer."""
    return all(dtype.startswith(_NARROW) for dtype in operand_dtypes(eqn))


def operations(steps: Iterable[Step]) -> tuple[Operation, ...]:
    """Sums steps up by primitive and dtype, most matrix work first."""
    runs: Counter[tuple[str, str]] = Counter()
    work: Counter[tuple[str, str]] = Counter()
    for step in steps:
        dtypes = operand_dtypes(step.eqn)
        if step.name in MOVES or not dtypes or not dtypes[0].startswith(_FLOATING):
            continue
        row = step.name, " x ".join(dtypes)
        runs[row] += step.times
        work[row] += step.times * flops(step.eqn)
    total = max(work.total(), 1)
    table = [Operation(*row, runs[row], work[row], work[row] / total) for row in runs]
    return tuple(sorted(table, key=lambda row: (-row.flops, row.primitive, row.dtype)))


def half_share(steps: Sequence[Step]) -> float:
    """Share of the matrix work whose operands are half precision; 0 without any."""
    work = sum(step.times * flops(step.eqn) for step in steps)
    half = sum(step.times * flops(step.eqn) for step in steps if is_narrow(step.eqn))
    return half / max(work, 1)


class Promotions:
    """Follows the values that float32 made of half precision to the matrix products.

    `products` are those in float32 that each promotion has led to, by the variable that
    it made; `maker_of` gives the step that made a variable.
    """

    def __init__(self, maker_of: Callable[[Any], Any]):
        self.products: dict[Any, list[Step]] = {}
        self._origins: dict[Any, str] = {}
        self._maker_of = maker_of

    def follow(self, step: Step, outs: list[Fact]) -> list[Fact]:
        """Marks the outputs of a step that promotes, and notes its matrix products."""
        if flops(step.eqn):
            self._note_product(step)
        elif step.name == "convert_element_type" and is_half(step.source):
            # What the user did not write: JAX or a library promotes.
            promotes = is_wide(step.result) and not is_cast_by_user(step.place())
            promoted = step.eqn.outvars[0] if promotes else None
            cast = promotes and step.ins[0].cast
            return [dataclasses.replace(outs[0], cast=cast, promoted=promoted)]
        else:
            self._note_origin(step)
        return outs

    def findings(self) -> Iterator[tuple[int, Finding]]:
        """The places at which casts lose their effect, with their order."""
        for made, products in self.products.items():
            step = self._maker_of(made)
            half = next(d for d in map(dtype_name, step.eqn.invars) if is_half(d))
            count = len(products)
            runs = (
                f"{count} matrix products run" if count > 1 else "a matrix product runs"
            )
            origin = self._origins.get(made, "an argument or a constant")
            message = (
                f"a float32 operand, {origin}, makes float32 of {half} here, so that "
                f"{runs} in float32 and casts have no effect; cast this operand too"
            )
            finding = step.finding("full-matmul", "warning", message, dtype="float32")
            yield step.order, finding

    def _note_product(self, step: Step) -> None:
        operands = list(zip(step.eqn.invars[:2], step.ins[:2], strict=True))
        wide = [(v, fact) for v, fact in operands if is_wide(dtype_name(v))]
        half = [fact for v, fact in operands if is_half(dtype_name(v))]
        if not wide or is_sum(step.eqn):
            return
        made = next((fact.promoted for _, fact in wide if half or fact.cast), None)
        if made is None and any(fact.cast for fact in half):
            made = step.eqn.outvars[0]
            self._origins[made] = self._origin_of(wide[0][0])
        if made is not None:
            self.products.setdefault(made, []).append(step)

    def _note_origin(self, step: Step) -> None:
        """Notes the float32 operand that a half one has been promoted for."""
        promoted = {fact.promoted for fact in step.ins} - {None}
        for v, fact in zip(step.eqn.invars, step.ins, strict=True):
            if is_wide(dtype_name(v)) and not fact.promoted and not is_literal(v):
                for made in promoted - self._origins.keys():
                    self._origins[made] = self._origin_of(v)

    def _origin_of(self, atom: Any) -> str:
        step = self._maker_of(atom)
        while step and step.name in MOVES and not is_literal(step.eqn.invars[0]):
            step = self._maker_of(step.eqn.invars[0])
        if step is None or step.place().line is None:
            return "an argument or a constant"
        public = [c for c in step.place().calls if c.isidentifier() and c[0] != "_"]
        made_by = public[-1] if public else step.name
        return f"made by {made_by} at line {step.place().line}"


def full_matmuls(
    steps: Iterable[Step], told: set[Line]
) -> Iterator[tuple[int, Finding]]:
    """Matrix products in float32 while others are half precision, at new lines."""
    products = [step for step in steps if flops(step.eqn)]
    if not any(is_narrow(step.eqn) for step in products):
        return
    for step in products:
        left = is_narrow(step.eqn) or stays_float32(step.eqn)
        # A solve, or its derivative, needs the digits.
        if left or step.place()[:2] in told or "linalg" in step.place().packages:
            continue
        message = (
            f"a matrix product runs in {' x '.join(operand_dtypes(step.eqn))} while "
            "others are half precision; cast both operands if its time matters"
        )
        atom = step.eqn.outvars[0]
        found = step.finding("full-matmul", "note", message, atom, "float32")
        yield step.order, found
