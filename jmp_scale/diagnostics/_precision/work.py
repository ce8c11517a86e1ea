"""Counts the work of matrix products, and finds products in float32."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from ..._autocast.dot_general import ALGORITHMS
from ..._autocast.products import has_matrix_work, stays_float32
from ..._jaxpr import PRODUCTS, dtype_name, shape, size
from ..._policy import is_half
from .._tables import printed
from .facts import entries_added
from .rules import is_cast_by_user, is_narrowed_by_user
from .step import Fact, Finding, Step, is_wide

_FLOATING = ("float", "bfloat", "complex")
_NARROW = ("float16", "bfloat16", "float8", "float4")
# Algorithms that compute in half precision, whatever the dtype of the operands.
_DTYPES = {preset: dtype for dtype, preset in ALGORITHMS.items()}

SourceLine = tuple[str | None, int | None]


@printed
class Operation(NamedTuple):
    """How often a program runs an operation in a dtype, forward and backward.

    Attributes:
      primitive: JAX's name of the operation.
      dtype: dtype of its operands, joined by " x " if they differ.
      executions: how often it runs. In a scan each iteration counts, in a while loop
        one iteration, in a cond each branch.
      flops: floating-point operations of matrix products and convolutions; else 0.
      share: share of the program's `flops`, from 0 to 1.
    """

    primitive: str
    dtype: str
    executions: int
    flops: int
    share: float


def flops(eqn: JaxprEqn) -> int:
    """Counts multiplications and additions of a matrix product or convolution."""
    name = eqn.primitive.name
    if name not in PRODUCTS or not dtype_name(eqn.outvars[0]).startswith(_FLOATING):
        return 0
    left, right, result = eqn.invars[0], eqn.invars[1], eqn.outvars[0]
    match name:
        case "dot_general":
            return 2 * size(result) * entries_added(eqn)
        case "conv_general_dilated":
            features = shape(right)[eqn.params["dimension_numbers"].rhs_spec[0]]
            # Zeros inside a dilated input are not multiplied.
            zeros = math.prod(eqn.params.get("lhs_dilation") or (1,))
            return 2 * size(result) * (size(right) // max(features, 1)) // zeros
        case "ragged_dot_general":
            # Each row of the first operand meets one group of the second.
            numbers = eqn.params["ragged_dot_dimension_numbers"]
            (_, contracted), (_, batch) = numbers.dot_dimension_numbers
            others = {*contracted, *batch, *numbers.rhs_group_dimensions}
            free = [n for axis, n in enumerate(shape(right)) if axis not in others]
            return 2 * size(left) * math.prod(free)
    return 0


def operand_dtypes(eqn: JaxprEqn) -> tuple[str, ...]:
    algorithm = eqn.params.get("precision")
    if algorithm in _DTYPES:
        return (_DTYPES[algorithm],)
    operands = eqn.invars[:2] if eqn.primitive.name in PRODUCTS else eqn.invars[:1]
    return tuple(dict.fromkeys(dtype_name(v) for v in operands))


def operations(steps: Iterable[Step]) -> tuple[Operation, ...]:
    """Sums up steps by primitive and dtype, most matrix work first."""
    runs: Counter[tuple[str, str]] = Counter()
    work: Counter[tuple[str, str]] = Counter()
    for step in steps:
        dtypes = operand_dtypes(step.eqn)
        if not dtypes or not dtypes[0].startswith(_FLOATING):
            continue
        row = step.name, " x ".join(dtypes)
        runs[row] += step.times
        work[row] += step.times * flops(step.eqn)
    total = max(work.total(), 1)
    table = [Operation(*row, runs[row], work[row], work[row] / total) for row in runs]
    return tuple(sorted(table, key=lambda row: (-row.flops, row.primitive, row.dtype)))


def half_share(table: Iterable[Operation]) -> float:
    work = sum(row.flops for row in table)
    half = sum(row.flops for row in table if _is_narrow(row.dtype.split(" x ")))
    return half / max(work, 1)


def _is_narrow(dtypes: Iterable[str]) -> bool:
    return all(dtype.startswith(_NARROW) for dtype in dtypes)


def follow(step: Step, fact: Fact) -> Fact:
    """Adds to the fact of a result whether the user cast it, or JAX promoted it."""
    if step.name == "convert_element_type" and is_half(step.source):
        # If the user did not write this cast, JAX or a library promotes.
        promotes = is_wide(step.result) and not is_cast_by_user(step.place())
        cast = promotes and step.ins[0].cast
        promoted = step if promotes else None
        return dataclasses.replace(fact, cast=cast, promoted=promoted)
    return dataclasses.replace(fact, cast=True) if is_narrowed_by_user(step) else fact


def useless_cast(step: Step) -> Finding | None:
    """Finds a matrix product in float32 although the user cast an operand."""
    if not flops(step.eqn) or not has_matrix_work(step.eqn, lambda v: False):
        return None
    operands = [*zip(step.eqn.invars[:2], step.ins[:2], strict=True)]
    wide = [f for v, f in operands if is_wide(dtype_name(v))]
    half = [f for v, f in operands if is_half(dtype_name(v))]
    promotion = next((f.promoted for f in wide if half or f.cast), None)
    if promotion is None and wide and any(f.cast for f in half):
        promotion = step
    if promotion is None:
        return None
    dtype = next(d for d in map(dtype_name, promotion.eqn.invars) if is_half(d))
    message = (
        f"a float32 operand makes float32 of {dtype} here, so that matrix products run "
        "in float32 and casts have no effect; cast this operand too"
    )
    found = promotion.finding("full-matmul", "warning", message)
    return found._replace(dtype="float32")


def full_matmuls(steps: Iterable[Step], told: set[SourceLine]) -> Iterator[Finding]:
    """Finds products in float32 while others are half precision, at new lines."""
    products = [step for step in steps if flops(step.eqn)]
    wide = [step for step in products if not _is_narrow(operand_dtypes(step.eqn))]
    for step in wide if len(wide) < len(products) else ():
        # A solve, or its derivative, needs the precision.
        needed = stays_float32(step.eqn) or "linalg" in step.place().packages
        if needed or step.line in told:
            continue
        message = (
            f"a matrix product runs in {' x '.join(operand_dtypes(step.eqn))} while "
            "others are half precision; cast both operands if its time matters"
        )
        found = step.finding("full-matmul", "note", message, step.eqn.outvars[0])
        yield found._replace(dtype="float32")
