"""`sensitive_products`: finds matrix products that must stay float32, by a search."""

import dataclasses
import functools
import itertools
import math
import os
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from ... import _jaxpr
from ..._autocast.casting import Notes
from ..._autocast.derivatives import Traces, linear, live_of
from ..._autocast.higher_order import Part
from ..._autocast.interpreter import Interpreter, Values
from ..._autocast.marks import matched, tracing
from ..._autocast.products import Product, becomes_half, sum_of_terms
from ..._autocast.provenance import Origin
from ..._autocast.recompute.plan import Unit
from ..._jaxpr import JaxprEqn, NameStack, Program, Var
from ..._policy import checked_half
from ..._scaling.finite import all_finite
from ..._scaling.loss_scale import LossScale
from ..._tree import promote_to_float32, split_arrays
from ..._types import Arrays, Function, PyTree
from ..._validation import Arguments
from .. import _backward
from .._backward import Backward, Loss, Start
from .._findings import Finding, are_notes, error_rule, finding, summary_of
from .._source import Place, begin_user_code, place_of
from .._tables import percent, power, printed, table, with_progress
from . import comparison
from .comparison import GradientComparison, Reference, judged_error
from .facts import flops

RULES = {
    "float32 not finite": comparison.RULES["float32 not finite"],
    "backward rule sees S": comparison.RULES["backward rule sees S"],
    "loss scale at fault": error_rule(
        "{change} at loss scale {s}. At {other} the gradient is off by {there}.",
        "compare_gradients finds where to start.",
    ),
    "not precise": error_rule(
        "{change}. Where this stays float32, the gradient is off by {after}.",
        'jmp_scale.autocast(loss, "{forward}"{options}, keep_float32={keep})',
    ),
    "loss not finite": error_rule(
        "The forward pass leaves float16's range.", "Try bfloat16."
    ),
}

_NUMBER = re.compile(r"float32_or_half_(\d+)")
_MOST_FLAGS = 4096  # flags of the compiled program, one for each group


class SensitiveProduct(NamedTuple):
    """The matrix products and convolutions of one line, in one name scope.

    Attributes:
      file: path of the user's source file, or None if it is unknown.
      line: line in that file, from 1, or None.
      library: their line in a library, such as "ott/costs.py:560", or "".
      scope: names of their scopes and modules, joined by "/".
      share: their share of the program's matrix work, from 0 to 1.
      alone: error of the gradient if only they are half precision.
      without: error of the gradient if all other products are half precision.
    """

    file: str | None
    line: int | None
    library: str
    scope: str
    share: float
    alone: float
    without: float


@printed
class SensitiveProducts(NamedTuple):
    """The result of `sensitive_products`, in Python values.

    Errors are those of `GradientComparison`: `error`, or a third of `scaled_error` if
    that is more; infinite if anything is not finite.

    Attributes:
      products: the products that `autocast` would cast, in program order.
      keep: names for `autocast`'s `keep_float32=`; () if none is needed, or something
        else is at fault.
      half_share: share of the program's matrix work that is then in half precision.
      error_before: error of the gradient with all products in half precision.
      error_after: error of the gradient with the products of `keep` in float32.
      findings: why half precision is not precise enough, and the code to write.
    """

    products: tuple[SensitiveProduct, ...]
    keep: tuple[str, ...]
    half_share: float
    error_before: float
    error_after: float
    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no product must stay float32, and nothing else is at fault."""
        return are_notes(self.findings)

    def summary(self, k: int = 20) -> str:
        """Returns the findings, and the k lines that change the gradient most."""
        rows: list[tuple[str, ...]] = [("line", "scope", "share", "alone", "without")]
        for row in sorted(self.products, key=lambda row: -row.alone):
            shares = map(percent, (row.share, row.alone, row.without))
            rows.append((where(row), row.scope, *shares))
        share = f"{100 * self.half_share:.1f} % of the matrix work is half precision."
        details = [share, *table(rows, names=2, k=k)] if self.products else []
        fine = f"{_change(self.error_before)}, which is precise enough."
        return summary_of(fine, self.findings, *details)


@_backward.meets_nonfinite
def sensitive_products(
    loss: Function,
    *args: PyTree,
    dtype: DTypeLike = "float16",
    backward: DTypeLike | None = None,
    loss_scale: LossScale | ArrayLike | None = None,
    tolerance: float = 0.05,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    transform: Function | None = None,
) -> SensitiveProducts:
    """Finds the matrix products that must stay float32 for a precise gradient.

    Use it if `compare_gradients` says that half precision is not precise enough, and
    pass its names to `autocast` as `keep_float32=`.

    ```
    for each line:  measure the error with only this line in half precision, and the
                    error with all other lines in half precision
    float32 := none       if all lines in half precision are precise enough, else
               all lines  without each that need not, the smallest errors first
    ```

    It is called on the host, compiles the loss once, and runs it two or three times per
    line, in float32 with the roundings of `autocast`. The result holds for these
    parameters and this batch. Lines in different modules are different lines.

    Args:
      loss: the whole loss in float32, without `autocast`. Its arguments, `argnums`,
        `has_aux` and `transform` are those of `precision_report`.
      dtype: as in `autocast`.
      backward: as in `autocast`.
      loss_scale: as in `compare_gradients`.
      tolerance: the largest error of the gradient, relative to its norm; default 5 %,
        half of the limit of `compare_gradients`.

    Raises:
      TypeError: as `compare_gradients`.
      ValueError: `dtype` or `backward` is not float16 or bfloat16, or `tolerance` is
        negative.
    """
    function = "sensitive_products"
    checked = Loss(function, loss, args, argnums, has_aux, transform)
    arguments = Arguments(function)
    is_valid = arguments.number("tolerance", tolerance) >= 0
    arguments.require(is_valid, "tolerance", tolerance, "a number >= 0")
    forward = checked_half("dtype", dtype)
    back = checked_half("backward", dtype if backward is None else backward)
    start = _backward.start_of(function, loss_scale, {forward.name, back.name})
    probe = Probe(checked, forward, back, start)
    if not all_finite(probe.reference.backward):
        broken = finding(RULES, "float32 not finite")
        return SensitiveProducts((), (), 0.0, math.inf, math.inf, (broken,))
    rows = [_row(probe, group) for group in with_progress(probe.groups, function)]
    whole = probe.compared(probe.groups)
    before, share = judged_error(whole), probe.share(probe.groups)
    told = [*_other_faults(probe, whole, tolerance)]
    if before <= tolerance or told:
        return SensitiveProducts(tuple(rows), (), share, before, before, tuple(told))
    keep = _names(_required(probe, rows, tolerance), probe.groups)
    half = probe.groups_without(keep)
    after, share = probe.error(half), probe.share(half)
    options = f', backward="{back.name}"' * (back != forward)
    values = {"forward": forward.name, "options": options, "keep": keep}
    values |= {"change": _change(before), "after": percent(after)}
    told = [finding(RULES, "not precise", ", ".join(keep), **values)]
    if not half and forward == "float16" and not math.isfinite(whole.half_loss):
        told.append(finding(RULES, "loss not finite"))
    return SensitiveProducts(tuple(rows), keep, share, before, after, tuple(told))


def _row(probe: "Probe", group: "ProductGroup") -> SensitiveProduct:
    return SensitiveProduct(
        file=group.place.file,
        line=group.place.line,
        library=group.place.library,
        scope="/".join(group.scopes),
        share=probe.share([group]),
        alone=probe.error([group]),
        without=probe.error([other for other in probe.groups if other is not group]),
    )


def _change(error: float) -> str:
    if error == math.inf:
        return "In half precision the loss or its gradient is not finite"
    return f"Half precision changes the gradient by {percent(error)}"


@dataclasses.dataclass(eq=False)
class ProductGroup:
    """The matrix products and convolutions of one line of the program, in one scope."""

    number: int
    # A product or a call with a rule, after those around it.
    equations: tuple[JaxprEqn, ...]
    place: Place
    work: int = 0  # floating-point operations forward

    @property
    def scopes(self) -> tuple[str, ...]:
        """Names of the scopes and modules that it is in, without transformations."""
        stacks = [eqn.source_info.name_stack.stack for eqn in self.equations]
        scopes = itertools.chain.from_iterable(stacks)
        return tuple(s.name for s in scopes if type(s).__name__ == "Scope")

    def is_kept(self, name: str) -> bool:
        return any(matched({name}, eqn).is_exempt for eqn in self.equations)

    def names(self) -> list[str]:
        """Names that keep it: of its function, of itself, of its scopes."""
        parts = self.place.function.split(".")
        functions = [p for p in parts if p.isidentifier() and not p.startswith("__")]
        scopes = self.scopes
        paths = [".".join(scopes[-n:]) for n in range(1, len(scopes) + 1)]
        return [*functions[-1:], where(self.place), *paths]


def where(place: Any) -> str:
    """Returns the name of a line for `keep_float32=`."""
    return place.library or f"{os.path.basename(place.file or '?')}:{place.line}"


class Probe:
    """A loss and its backward pass, compiled once for all choices of its products.

    Each product names the number of its group in its name scopes, by which the
    interpreter of `autocast` finds it in loops, branches and derivative rules.
    """

    def __init__(
        self, loss: Loss, forward: np.dtype, backward: np.dtype, start: Start
    ) -> None:
        self._loss, self._forward, self._backward = loss, forward, backward
        self.start = start
        arrays, self._rejoin = _backward.concrete_arrays(loss.function, loss.args)
        # As the gradients of `compare_gradients`, these are of float32 parameters.
        self._arrays = promote_to_float32(arrays)
        self._by_place: dict[Hashable, ProductGroup] = {}
        self._cast: set[int] = set()  # numbers of those that `autocast` casts
        self._work = 0  # of all
        # At level 3 small products need six times as long to compile, and run as fast.
        options = {**_backward.ALL_ROUNDINGS, "xla_backend_optimization_level": 1}
        self._program = jax.jit(self._backward_pass, compiler_options=options)
        in_float32 = np.zeros(_MOST_FLAGS, bool), jnp.float32(1)
        run = functools.partial(self._program, *in_float32)
        self.reference = Reference(run, self._arrays)
        self.groups = [g for g in self._by_place.values() if g.number in self._cast]

    def error(self, half: Sequence[ProductGroup]) -> float:
        """Returns the error of the gradient with these products in half precision."""
        return judged_error(self.compared(half))

    def share(self, groups: Iterable[ProductGroup]) -> float:
        """Returns the share of the program's matrix work of these products."""
        return sum(group.work for group in groups) / max(self._work, 1)

    def groups_without(self, keep: Sequence[str]) -> list[ProductGroup]:
        """Returns the groups that none of these names keeps in float32."""
        return [g for g in self.groups if not any(map(g.is_kept, keep))]

    def compared(
        self, half: Sequence[ProductGroup], start: Start | None = None
    ) -> GradientComparison:
        """Compares the gradient that has these products in half precision."""
        flags = np.zeros(_MOST_FLAGS, bool)
        flags[[group.number for group in half]] = True
        run = functools.partial(self._program, flags)
        found = (start or self.start).found(lambda s: run(s, self._arrays))
        return self.reference.compared(*found)

    def _backward_pass(
        self, flags: jax.Array, s: jax.Array, arrays: Arrays
    ) -> Backward:
        fun = functools.partial(self._flagged, flags)
        flagged = dataclasses.replace(self._loss, fun=fun, has_aux=False)
        return flagged.run(s, self._rejoin(arrays))

    def _flagged(self, flags: jax.Array, *args: PyTree) -> jax.Array:
        arrays, rejoin = split_arrays(args)

        def loss(*arrays: jax.Array) -> jax.Array:
            return self._loss.of(begin_user_code(self._loss.fun, *rejoin(arrays)))

        # As in `autocast`, the setting is no precision that a product asked for.
        setting = getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009
        with tracing(self._forward), jax.default_matmul_precision(None):
            trace = functools.partial(jax.make_jaxpr(loss), *arrays)
            program = _backward.traced_in_float32(self._loss.function, trace)
        flagged = _Flagged(
            forward=self._forward,
            backward=self._backward,
            names=frozenset(),
            traces=Traces(),
            notes=Notes(warned=set()),
            setting=setting,
            recompute=False,
            flags=flags,
            evaluated=self._cast,
        )
        program = self._numbered(program, (), Place(), 1)
        origins = [Origin.PARAMETER] * len(arrays)
        return flagged.evaluate(program, origins, *arrays)[0]

    def _numbered(
        self, jaxpr: Program, outer: tuple[JaxprEqn, ...], place: Place, times: int
    ) -> Program:
        """Returns a jaxpr whose products, and calls with rules, name their numbers."""

        def change(eqn: JaxprEqn) -> JaxprEqn:
            work = sum(map(flops, (eqn, *_jaxpr.equations_within(eqn))))
            if not work:
                return eqn
            self._work += times * flops(eqn)
            chain, here = (*outer, eqn), place_of(eqn, place)

            def numbered(nested: Program) -> Program:
                return self._numbered(nested, chain, here, times * _jaxpr.repeats(eqn))

            params = _jaxpr.map_jaxprs(numbered, eqn)
            # A call with a rule has a number for the products of the rule.
            if not becomes_half(eqn) and _jaxpr.name_of(eqn) != "custom_jvp_call":
                return eqn.replace(params=params)
            new = ProductGroup(len(self._by_place), chain, here)
            key = *here[:2], here.library, new.scopes
            group = self._by_place.setdefault(key, new)
            group.work += times * work
            stack = eqn.source_info.name_stack.extend(f"float32_or_half_{group.number}")
            return _jaxpr.with_scopes(eqn.replace(params=params), stack)

        return _jaxpr.map_equations(change, jaxpr)


def _required(
    probe: Probe, rows: Iterable[SensitiveProduct], tolerance: float
) -> list[ProductGroup]:
    """Returns few products whose float32 is precise enough."""
    required = probe.groups
    pairs = [*zip(rows, required, strict=True)]
    for _, group in sorted(pairs, key=lambda pair: (pair[0].alone, -pair[0].share)):
        fewer = [other for other in required if other is not group]
        half = [other for other in probe.groups if other not in fewer]
        if probe.error(half) <= tolerance:
            required = fewer
    return required


def _other_faults(
    probe: Probe, whole: GradientComparison, tolerance: float
) -> Iterator[Finding]:
    """Yields what else than products is at fault: a rule in the loss, or S."""
    error, s = judged_error(whole), power(whole.loss_scale)
    if error <= tolerance:
        return
    of_float32 = probe.error([])
    if tolerance < of_float32 < math.inf:
        errors = {"error": percent(error), "of_float32": percent(of_float32)}
        yield finding(RULES, "backward rule sees S", s=s, **errors)
        return
    start = Start(2.0**24 if probe.start.settles else 2.0**15, settles=True)
    found = probe.compared(probe.groups, start)
    there = judged_error(found)
    if there <= tolerance:
        other = {"other": power(found.loss_scale), "there": percent(there)}
        yield finding(RULES, "loss scale at fault", s=s, change=_change(error), **other)


def _names(
    required: Sequence[ProductGroup], groups: Sequence[ProductGroup]
) -> tuple[str, ...]:
    """Returns names that match the required groups, and as few others as possible."""

    def others(name: str) -> int:
        kept = [g for g in groups if g.is_kept(name) and g not in required]
        return sum(group.work for group in kept)

    chosen: list[str] = []
    for group in required:
        if not any(map(group.is_kept, chosen)):
            chosen.append(min(filter(group.is_kept, group.names()), key=others))
    return tuple(chosen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Flagged(Interpreter):
    """Evaluates each product in half precision where its flag is set."""

    flags: Any = dataclasses.field(compare=False)  # bool[N], by group
    # The numbers of the groups that it evaluated.
    evaluated: set[int] = dataclasses.field(default_factory=set, compare=False)
    rule: int = -1  # number of the call whose rule for derivatives this is

    def named(self, v: Var, x: jax.Array, values: Values) -> jax.Array:
        """Leaves results without names: not all of them are in half precision."""
        return x

    def within(self, eqn: JaxprEqn, part_of: Part) -> Interpreter:
        nested = dataclasses.replace(self, rule=self._number(NameStack(), eqn))
        return Interpreter.within(nested, eqn, part_of)

    def evaluate_unit(self, unit: Unit, values: Values) -> None:
        ((product, _),) = unit.products  # nothing is recomputed
        inputs = [values[v] for v in product.jaxpr.invars]
        number = self._number(product.scope, product.equation)
        self.evaluated.add(number)
        half = self.flags[number]
        # JAX keeps the rule, which so must not hold `self` with its traced flags.
        forward, backward = self.forward, self.backward
        copies = [_rounded(x, half, forward) for x in inputs[:2]]

        def term(side: int, *copies: jax.Array) -> jax.Array:
            float32 = side if product.float32_grads[side] else None
            return _multiply(product, backward, float32, *copies)

        # Copies are multiplied, and the operands differentiated.
        @jax.custom_jvp
        def run(operands: Arrays, copies: Arrays) -> jax.Array:
            return _multiply(product, forward, None, *copies)

        def rule(primals: Any, tangents: Any) -> Any:
            terms = functools.partial(sum_of_terms, term)
            return run(*primals), linear(terms, primals[1], live_of(tangents[0]))

        run.defjvp(rule, symbolic_zeros=True)
        with _jaxpr.scope(product.scope):
            x = run(inputs[:2], [*copies, *inputs[2:], half])
        self.add({product.result: x}, values)

    def _number(self, scope: NameStack, eqn: JaxprEqn) -> int:
        """Returns the number of the innermost product or call, or of the rule."""
        scopes = f"{scope}/{eqn.source_info.name_stack}"
        return int([self.rule, *_NUMBER.findall(scopes)][-1])


def _multiply(
    product: Product, dtype: DTypeLike, float32: int | None, *values: jax.Array
) -> jax.Array:
    """Multiplies, and rounds where the last value is True; operand `float32` stays."""
    *operands, half = values
    for side in {0, 1} - {float32}:
        operands[side] = _rounded(operands[side], half, dtype)
    precision = (jax.lax.Precision.HIGHEST,) * 2  # the flag decides, not the machine
    moved = product.moved(operands)
    (result,) = _jaxpr.evaluate(product.equation, moved, precision=precision)
    return _rounded(result, half, dtype)


def _rounded(x: jax.Array, half: jax.Array, dtype: DTypeLike) -> jax.Array:
    return jnp.where(half, x.astype(dtype).astype(x.dtype), x)
