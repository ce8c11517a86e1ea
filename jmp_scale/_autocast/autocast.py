"""A float32 function in, a mixed-precision one out: it is traced, and run by a plan.

```
forward:   island -> half(operand) -> product in half precision -> float32
backward:  what is kept -> island once more -> its derivative, and half(operand)
           half(cotangent) -> products of the gradients of both operands
```

Kinds of machines differ in the barriers between the two passes, but not in values.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .. import _jaxpr
from .._jaxpr import Program, Var
from .._policy import checked_half
from .._tree import FlatCall, is_module
from .._validation import require_bool, require_function, warn
from . import marks as _marks
from . import operations as ops
from .dot_general import is_zero
from .function import CastFunction, not_default
from .identities import kept_apart, no_tangent, softmax_from, with_value
from .interpreter import ByVariable, Interpreter, Notes, TraceCache, Values
from .linear import linear
from .plan import Origin, Plan, Unit
from .policies import Shown, in_sight
from .stored import Stored, stored

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Arrays = Sequence[jax.Array]
ByPosition = dict[int, jax.Array]  # of a unit's outputs, or of its inputs
_CLOSURE = (
    "autocast: expected a custom_vjp function to read its arguments alone, got one "
    "that closes over an array of the function that autocast traces, which JAX allows "
    "in no jit, checkpoint or autocast that is differentiated. Pass the array to it as "
    "an argument (a solver of jaxopt: to run), or close over it outside of autocast"
)


def autocast(
    fun: F,
    dtype: DTypeLike | None = None,
    *,
    backward: DTypeLike | None = None,
    recompute: bool = True,
    keep_float32: Collection[str] = (),
    share_casts: bool = False,
) -> F:
    """`fun` with its matrix products and convolutions in half precision.

    | | runs in |
    |---|---|
    | matrix products and convolutions, forward and backward | half precision |
    | all other operations: norms, softmax, activations, losses | float32 |
    | parameters, their gradients, results | float32 |
    | products of `precision` HIGH or HIGHEST, of integers, outer products | float32 |
    | products with a weight stored in half precision | its dtype |
    | `custom_vjp` functions, kernels, a `while` under `vmap` | as traced |

    The backward pass reads what the forward pass read, bit for bit, with one exception:
    the derivative of a softmax reads the probabilities that the next product read,
    divided by their sum. Values do not depend on the machine. What the user cast stays
    as cast.

    Weights' gradients are float32 from the product on; those of convolutions and
    `ragged_dot` are half precision at first. The gradient of a weight that is stored in
    half precision is a float32 sum over all that read it, rounded once. Call the result
    inside `jax.jit`: outside of it, each call traces anew.
    `diagnostics.precision_report` lists its dtypes.

    Args:
      fun: what `jax.jit` could trace; an argument that is not an array is static.
      dtype: float16 or bfloat16, a dtype or one of `get_policy`'s names.
      backward: dtype of the products of the backward pass; default `dtype`. With
        "bfloat16", of float32's range, a float16 forward pass needs no loss scale.
      recompute: whether the backward pass recomputes cheap operations. It changes
        memory, never values or gradients; of second derivatives the roundings, but not
        the quality. False leaves that to the caller's `jax.checkpoint`. A policy of
        `jax.checkpoint`, around or within, saves half-precision arrays with either.
      keep_float32: names of what stays float32: functions in which a product is traced,
        scopes, modules, and places such as "costs.py:560".
      share_casts: whether what a product reads is cast once, and all later operations
        read the cast array, as in a cast by hand. For a ResNet's stream.

    Returns:
      A function with the arguments, results and result dtypes of `fun`.

    Raises:
      ValueError: `dtype` or `backward` is not float16 or bfloat16.
      TypeError: `fun` is not a function, or a name not a string; at the call, an
        argument is an NNX module.

    Warns:
      UserWarning: once, at the call, if no product became half precision, or a name in
        `keep_float32` matches nothing; once, if float16 gradients have no loss scale:
        in `jmp_scale.value_and_grad` of a `NoOpLossScale`, and where the
        `value_and_grad` of JAX, Equinox or NNX is given the result itself; once for
        each loop, with its line, that still sums a stored weight's gradient in half
        precision, as in a `custom_vjp`.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale
      >>> half = jmp_scale.autocast(lambda x, w: x @ w, "float16")
      >>> half(jnp.full((2, 2), 1 / 3), jnp.eye(2)).dtype
      dtype('float32')
    """
    require_function("autocast", fun)
    for name, value in (("recompute", recompute), ("share_casts", share_casts)):
        require_bool("autocast", name, value)
    if dtype is None:
        raise ValueError(
            "autocast: expected dtype float16 or bfloat16, got None; write "
            'autocast(fun, "bfloat16"), or above a function '
            '@functools.partial(jmp_scale.autocast, dtype="bfloat16")'
        )
    forward = checked_half("dtype", dtype)
    back = forward if backward is None else checked_half("backward", backward)
    names = _marks.checked_names(keep_float32)
    warned: set[str] = set()

    def in_half_precision(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_module)
        for module in filter(is_module, leaves):
            raise TypeError(
                f"autocast: expected no NNX modules, got a {type(module).__name__}, "
                "whose writes would be lost: use jmp_scale.nnx.autocast"
            )
        flat = FlatCall(fun, args, kwargs)
        # The setting is for what stays float32.
        setting = getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009
        with _marks.tracing(forward), jax.default_matmul_precision(None):
            jaxpr = jax.make_jaxpr(flat)(*flat.arrays)
        cast = Cast(
            forward=forward,
            backward=back,
            names=names,
            traces=TraceCache(),
            notes=Notes(warned, is_unscaled=_marks.is_unscaled(jaxpr)),
            recompute=bool(recompute),
            share_casts=bool(share_casts),
            setting=setting,
        )
        origins = [Origin.PARAMETER] * len(flat.arrays)
        try:
            results = cast.run(jaxpr, origins, *map(stored, flat.arrays))
        except jax.errors.UnexpectedTracerError as error:
            raise jax.errors.UnexpectedTracerError(_CLOSURE) from error
        cast.warn_of_nothing(jaxpr)
        return flat.result(results)

    settings = not_default(
        autocast,
        backward=None if back == forward else back,
        recompute=bool(recompute),
        keep_float32=tuple(sorted(names.names)),
        share_casts=bool(share_casts),
    )
    settings = {"dtype": forward, **settings}
    cast_function = CastFunction(in_half_precision, fun, autocast, "autocast", settings)
    return cast_function  # pyright: ignore[reportReturnType]


@dataclasses.dataclass(frozen=True)
class Cast(Interpreter):
    """Runs products in half precision, with derivatives that run islands again."""

    @property
    def is_mixed(self) -> bool:
        """Whether the backward pass has another range than the forward pass."""
        return self.forward != self.backward

    def warn_of_nothing(self, jaxpr: Program) -> None:
        """Warns once of names that match nothing, and where no product became half."""
        names, warned = self.names, self.notes.warned
        if missing := sorted(names.names - names.found - warned):
            warned.update(missing)
            there = ", ".join(sorted(names.there)) or "none"
            warn(
                "autocast: keep_float32 names nothing in which a product is: "
                f"{missing}; there are {there} (functions, scopes, Linen modules, and "
                "the classes of NNX modules, not their attributes)"
            )
        if not self.notes.any_half and "no product" not in warned:
            warned.add("no product")
            if reasons := ops.why_float32(jaxpr):
                warn(f"autocast: no product became half precision: {reasons}")

    def apart(self, x: T) -> T:
        """Arrays from which XLA:GPU computes values again, and keeps no float32."""
        with_barrier = self.recompute and not self.in_loop
        return jax.tree.map(kept_apart, x) if with_barrier else x

    def run_products(
        self, unit: Unit, plan: Plan, env: Values, halves: ByVariable
    ) -> ByVariable:
        """Runs an island and its products as one function with a rule of its own."""
        inputs = unit.jaxpr.invars
        whole = {*inputs[: unit.reads]}
        if self.in_loop:  # whose halves would be kept for each turn
            whole |= plan.given

        def copy(v: Any) -> Any:
            """What the backward pass keeps.

            Weights are cast once for both passes: where they are split over devices,
            the compiler then gathers them as in a cast by hand.
            """
            value = env.as_stored(v)
            if isinstance(value, Stored):
                return value.half
            if v not in plan.halves and (v in whole or not _jaxpr.is_float32(v)):
                return env[v]
            if v not in halves:
                halves[v] = env[v].astype(self.forward)
            return halves[v]

        run = _function_of(unit, self)
        outs, made, kept = run([env[v] for v in inputs], [*map(copy, inputs)])
        outputs = _jaxpr.variables(unit.jaxpr.outvars)
        halves.update({outputs[i]: x for i, x in kept.items()})
        if made:
            self.notes.any_half = True
        results = {unit.products[k][0].result: x for k, x in made.items()}
        return results | {outputs[i]: x for i, x in outs.items()}


class Results(NamedTuple):
    """Values that a unit makes, or their tangents."""

    outs: ByPosition  # of the island
    made: ByPosition  # of products, by their position in the unit
    kept: ByPosition  # half-precision copies of operands


class _Whole(NamedTuple):
    """Float32 values, whose derivatives copies in another dtype have."""

    inputs: Arrays
    operands: ByPosition


def _function_of(unit: Unit, cast: Cast) -> Callable[[Arrays, Arrays], Results]:
    """An island and its products, with a derivative that runs the island again.

    A function of the island's inputs, and of what the backward pass keeps of them. It
    gives by position what the island and the products make, and half-precision copies.
    """
    island = cast.traces.made(_Island, unit, cast)
    product_tangents = [
        cast.traces.made(ops.Product.tangent, p, cast.backward)
        for p, _ in unit.products
    ]

    operands = {i for _, wires in unit.products for i in wires[:2]}

    def rerun(given: ByPosition, inputs: Arrays, copies: Arrays) -> Results:
        with _jaxpr.scope(unit.scope):
            outs = island.run(inputs)
            values = island.halved(island.read(outs, copies))
        made = {k: x.astype(jnp.float32) for k, x in given.items()}
        for k, (product, wires) in enumerate(unit.products):
            if k not in given:
                with _jaxpr.scope(product.scope):
                    made[k] = product.run(cast.forward, *(values[i] for i in wires))
        own = {i: x for i, x in enumerate(outs) if i not in island.passed}
        return Results(own, made, {i: values[i] for i in unit.kept})

    def forward(inputs: Arrays, copies: Arrays) -> Results:
        return rerun({}, inputs, copies)

    def unchanged(results: Results, inputs: Arrays, copies: Arrays) -> Results:
        return results

    unchanged.__name__ = forward.__name__ = _marks.UNIT
    # Two functions with one rule. The rule of the first runs `forward` as it is, where
    # policies of `jax.checkpoint` see its products. The second attaches to these
    # results the derivatives that are left. Its inputs are not stopped: JAX drops the
    # rule of a function of known values, and with it second derivatives in a scan.
    run = jax.custom_jvp(forward)
    attach = jax.custom_jvp(unchanged)

    def tangents_of(
        residuals: tuple[Arrays, ByPosition, ByPosition, _Whole | None],
        live: ByPosition,
    ) -> tuple[ByPosition, ByPosition]:
        """Tangents of results and of products, by position, for those of inputs."""
        copies, known, kept, whole = residuals
        own, known, kept = cast.apart((copies[: unit.reads], known, kept))
        copies = [*own, *copies[unit.reads :]]
        with _jaxpr.scope(unit.scope):
            found, values = island.again(copies, known, kept, live, whole)
        # Cast once, so the cotangents of what several products read meet in half
        # precision: over devices they are added once, and travel so.
        halved = {i: found[i].astype(cast.backward) for i in operands & {*found}}
        made = {}
        for k, (product, wires) in enumerate(unit.products):
            moving = {}
            for side, i in enumerate(wires[:2]):
                if i in found:
                    moving[side] = found[i] if product.wide_sides[side] else halved[i]
            if moving:
                with _jaxpr.scope(product.scope):
                    tangent = product_tangents[k]([values[i] for i in wires], moving)
                    # The cotangent is then half precision, and an array of its own.
                    made[k] = cast.apart(tangent)
        return found, made

    def derivative(
        results: Results, inputs: Arrays, copies: Arrays, tangents: Sequence[Any]
    ) -> tuple[Results, Results]:
        if cast.notes.is_unscaled and cast.backward == jnp.float16:
            _marks.warn_of_no_loss_scale(cast.notes.warned)
        outs, made, kept = results = attach(results, inputs, copies)
        live = {i: t for i, t in enumerate(tangents) if not is_zero(t)}
        known = {i: outs[i] for i in unit.known}
        # Second derivatives need the range of `backward`, which float16 copies lack.
        whole = None
        if cast.is_mixed:
            whole = _Whole(inputs, {i: outs[i] for i in kept})
        found, moved = linear(tangents_of, (copies, known, kept, whole), live)
        return results, Results(
            outs=_tangents(outs, found),
            made=_tangents(made, moved),
            kept=_tangents(kept, found),
        )

    @functools.partial(run.defjvp, symbolic_zeros=True)
    def rule(
        primals: tuple[Arrays, Arrays], tangents: tuple[Sequence[Any], Any]
    ) -> tuple[Results, Results]:
        return derivative(forward(*primals), *primals, tangents[0])

    @functools.partial(attach.defjvp, symbolic_zeros=True)
    def rule_of_results(
        primals: tuple[Results, Arrays, Arrays],
        tangents: tuple[Any, Sequence[Any], Any],
    ) -> tuple[Results, Results]:
        return derivative(*primals, tangents[1])

    # JAX transposes what is in a rule, but not an object of hijax.
    if cast.in_rule:
        return run
    return in_sight(
        Shown(
            run=run,
            forward=forward,
            rerun=lambda given, *args: attach(rerun(given, *args), *args),
            given_by=lambda results: {
                k: x.astype(cast.forward) for k, x in results.made.items()
            },
            products=[product.jaxpr.eqns[-1] for product, _ in unit.products],
        )
    )


class _Island:
    """The island of equal units: what it computes, and once more for the derivative."""

    def __init__(self, unit: Unit, cast: Cast) -> None:
        self._cast, self._unit, self._jaxpr = cast, unit, unit.jaxpr
        inputs = {v: i for i, v in enumerate(unit.jaxpr.invars)}
        self._places = {v: i for i, v in enumerate(unit.jaxpr.outvars)}
        self.passed = {i: inputs[v] for v, i in self._places.items() if v in inputs}
        wires = [each for _, each in unit.products]
        self._halved = {i for each in wires for i in each[:2]}.union(unit.kept)
        self._read = self._halved.union(*wires)
        self._softmaxes = ops.softmaxes_of(unit.jaxpr)

        def again(*args: Any) -> tuple[ByPosition, ByPosition]:
            return self._again(*args)

        again.__name__ = _marks.UNIT
        self.again = jax.jit(again)

    def run(self, inputs: Arrays) -> list[jax.Array]:
        return _jaxpr.evaluate_all(self._jaxpr, inputs, change=self._rounded)

    def read(self, outs: Arrays, copies: Arrays) -> ByPosition:
        """The values that products read."""
        passed = self.passed
        return {i: copies[passed[i]] if i in passed else outs[i] for i in self._read}

    def halved(self, found: ByPosition) -> ByPosition:
        """The same, operands in half precision."""
        return found | {i: found[i].astype(self._cast.forward) for i in self._halved}

    def _rounded(self, v: Var, x: jax.Array) -> jax.Array:
        is_shared = self._places.get(v) in self._unit.shared
        return self._cast.rounded(x) if is_shared else x

    def _again(
        self,
        copies: Arrays,
        known: ByPosition,
        kept: ByPosition,
        live: ByPosition,
        whole: _Whole | None,
    ) -> tuple[ByPosition, ByPosition]:
        """Tangents of outputs, for those of inputs, and operands made again."""
        if whole:
            copies = [*map(_with_derivative_of, whole.inputs, copies)]
        types = zip(copies, self._jaxpr.invars, strict=True)
        inputs = [x.astype(_jaxpr.dtype_of(v)) for x, v in types]
        reached = ops.reached_by(self._jaxpr, (self._jaxpr.invars[i] for i in live))

        def run(some: ByPosition) -> tuple[ByPosition, list[jax.Array]]:
            values: dict[Var, jax.Array] = {}

            def replace(v: Var, x: jax.Array) -> jax.Array:
                x = values[v] = self._rounded(v, x)
                i = self._places.get(v)
                if i in self._unit.softmaxes:
                    exponents, axes = self._softmaxes[v]
                    result = kept[i].astype(x.dtype)
                    return softmax_from(values[exponents], result, axes)
                if i not in self._unit.known:
                    return x
                return with_value(x, known[i]) if v in reached else known[i]

            changed = [some.get(i, x) for i, x in enumerate(inputs)]
            outs = _jaxpr.evaluate_all(self._jaxpr, changed, change=replace)
            return {i: outs[i] for v, i in self._places.items() if v in reached}, outs

        primals = {i: inputs[i] for i in live}
        _, tangents, outs = jax.jvp(run, (primals,), (live,), has_aux=True)
        found = self.read(outs, copies)
        values = self.halved(found) | kept
        if whole:
            found |= whole.operands
            for i in self._halved:
                operands = (x[i].astype(self._cast.backward) for x in (found, values))
                values[i] = with_value(*operands)
        return tangents, values


def _with_derivative_of(x: jax.Array, copy: jax.Array) -> jax.Array:
    is_half = copy.dtype != x.dtype
    return with_value(x, copy.astype(x.dtype)) if is_half else copy


def _tangents(primals: ByPosition, found: ByPosition) -> dict[int, Any]:
    """The tangents that were found, and zeros for the others."""
    return {
        i: found[i].astype(x.dtype) if i in found else no_tangent(x)
        for i, x in primals.items()
    }
