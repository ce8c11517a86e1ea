"""Runs a plan: products in half precision, and a backward pass that computes again.

```
forward:   island -> half(operand) -> product in half precision -> float32
backward:  what is kept -> island once more -> its derivative, and half(operand)
           half(cotangent) -> products of the gradients of both operands
```

What the backward pass reads is a copy of what the forward pass read: the half-precision
result of a product, or the array itself. Kinds of machines differ in the barriers
between the two passes, but not in values.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import _jaxpr
from ._autocast_kept import small_sums, softmaxes_of
from ._autocast_plan import Plan, Step, Unit, is_float32, make_plan
from ._dot_general import is_zero, wide_dot_general
from ._higher_order import run_with
from ._marks import Names
from ._validation import warn

DEFAULT = lax.Precision.DEFAULT  # whatever the setting is


@dataclasses.dataclass(frozen=True)
class Cast:
    """How plans are run. `shared` makes one function of equal units: traced once."""

    forward: Any  # dtype of the products of the forward pass
    backward: Any
    recompute: bool
    share_casts: bool
    names: Names
    setting: Any  # precision of products that stay float32 and have none of their own
    warned: set[str] = dataclasses.field(compare=False)
    shared: Any = dataclasses.field(compare=False)
    halved: set[str] = dataclasses.field(default_factory=set, compare=False)
    in_loop: bool = False

    def run(self, jaxpr: Any, weights: Sequence[bool], *values: Any) -> list[Any]:
        """The results of a program, for these values of its inputs.

        `weights`: whether each input is computed from arguments alone.
        """
        plan = make_plan(jaxpr, weights, self.names, self.share_casts)
        env = dict(zip(plan.jaxpr.invars, values, strict=True)) | plan.constants
        env |= {v: self.rounded(env[v]) for v in plan.jaxpr.invars if v in plan.shared}
        halves: dict[Any, jax.Array] = {}
        for unit in plan.units:
            for part in (unit,) if self.recompute else unit.apart():
                again = part.step.kind == "island" and self.recompute
                with part.step.context:
                    if again or part.step.kind == "product":
                        self._run_unit(part, plan, env, halves)
                    else:
                        self._run_step(part.step, plan, env)
        return _jaxpr.results_of(plan.jaxpr, env)

    def rounded(self, x: jax.Array) -> jax.Array:
        """`x` and its cotangent in half precision: one array serves all readers."""
        dtypes = self.backward, self.forward
        return _with_value(*(x.astype(d).astype(x.dtype) for d in dtypes))

    def apart(self, x: Any) -> Any:
        """Arrays from which XLA:GPU computes again what else it had kept in float32."""
        with_barrier = self.recompute and not self.in_loop
        return jax.tree.map(_kept_apart, x) if with_barrier else x

    def _run_unit(self, unit: Unit, plan: Plan, env: Any, halves: Any) -> None:
        """Runs an island and its products, or a product alone."""
        self.halved.update(p.kind for p in unit.products)

        def half(v: Any) -> jax.Array:
            if v not in halves:
                halves[v] = env[v].astype(self.forward)
            return halves[v]

        def operand(v: Any) -> Any:
            return env[v] if v in plan.given or not is_float32(v) else half(v)

        inputs = unit.island.invars if unit.island else []
        copies = [half(v) if v in plan.halves else env[v] for v in inputs]
        shared = self.shared(_Unit, unit, self)
        others = [
            [None if v in unit.results else v for v in p.operands]
            for p in unit.products
        ]
        results = shared.function(unit)(
            [env[v] for v in inputs],
            copies,
            jax.tree.map(env.get, others),
            jax.tree.map(operand, others),
            [[env[v] for v in p.jaxpr.invars[2:]] for p in unit.products],
        )
        env |= zip(unit.results, results.outs, strict=True)
        env |= zip(unit.made, results.made, strict=True)
        halves |= {unit.results[i]: x for i, x in results.kept.items()}

    def _run_step(self, step: Step, plan: Plan, env: Any) -> None:
        """Runs equations as they are, or one whose nested jaxprs hold products."""

        shared = {step.jaxpr.outvars[i] for i in step.shared}

        def change(v: Any, x: Any) -> Any:
            return self.rounded(x) if v in shared else x

        with _jaxpr.scope(step.scope):
            results = self._call(step, plan, env) if step.kind == "call" else None
            if results is None:
                inputs = [env[v] for v in step.jaxpr.invars]
                jaxpr = _jaxpr.with_precision(step.jaxpr, self.setting)
                results = _jaxpr.evaluate_all(jaxpr, inputs, change=change)
            else:
                results = map(change, step.jaxpr.outvars, results)
        env |= zip(step.jaxpr.outvars, results, strict=True)

    def _call(self, step: Step, plan: Plan, env: Any) -> list[Any] | None:
        """Runs an equation whose nested jaxprs hold products, if that can be done."""
        (eqn,) = step.jaxpr.eqns
        values = [_jaxpr.value_of(v, env) for v in eqn.invars]
        results = run_with(eqn, values, self._bodies(eqn, plan))
        inner, _ = _jaxpr.open_jaxpr(_jaxpr.subjaxprs(eqn)[0])
        name = eqn.params.get("name") or getattr(inner.debug_info, "func_name", "")
        if results is None and name not in self.warned:
            self.warned.add(name)
            warn(
                f"autocast: {name} ({eqn.primitive.name}) holds matrix products and "
                "cannot be read: they stay float32; mark it by jmp_scale.in_half to "
                "give it half precision, or by jmp_scale.keep_float32"
            )
        return results

    def _bodies(self, eqn: Any, plan: Plan) -> Any:
        weights = [_jaxpr.is_literal(v) or v in plan.weights for v in eqn.invars]

        def body(jaxpr: Any, places: Any, part: str) -> Callable[..., list[Any]]:
            flags = tuple(i is not None and weights[i] for i in places)
            # A rule is transposed: what is computed again has no derivative there.
            recompute = self.recompute and part != "rule"
            in_loop = self.in_loop or part == "loop"
            cast = dataclasses.replace(self, recompute=recompute, in_loop=in_loop)
            return self.shared(functools.partial, Cast.run, cast, jaxpr, flags)

        return body


class _Results(NamedTuple):
    """What a unit gives.

    Attributes:
      outs: results of its island.
      made: results of its products.
      known: small sums and streams of the island, by number.
      kept: half-precision copies of results, by position.
    """

    outs: list[Any]
    made: list[Any]
    known: dict[int, Any]
    kept: dict[int, Any]


class _Unit:
    """An island and its products, with a derivative that runs the island again."""

    def __init__(self, unit: Unit, cast: Cast) -> None:
        self._cast, self._island, self._kept = cast, unit.island, unit.kept
        outvars = unit.results
        places = {v: i for i, v in enumerate(outvars)}
        # Where each product's operands come from: a position, or None.
        self._wires = [[places.get(v) for v in p.operands] for p in unit.products]
        here = {i for pair in self._wires for i in pair if i is not None}
        self._again = tuple(sorted(here.difference(unit.kept)))
        found = softmaxes_of(unit.island) if unit.island else {}
        self._softmaxes = {outvars[i]: (i, found[outvars[i]]) for i in unit.softmaxes}
        self._shared = {outvars[i] for i in unit.step.shared}
        known = [*small_sums(unit.island)] if unit.island else []
        known += [outvars[i] for i in unit.streams]
        self._known = {v: i for i, v in enumerate(known)}
        self._tangents = jax.jit(self._island_tangents)
        self._products = [
            cast.shared(_product_tangent, p, cast.backward) for p in unit.products
        ]

    def function(self, unit: Unit) -> Callable[..., _Results]:
        """The unit as a function, in the scopes of this one of all equal units.

        Of inputs of the island, their copies, operands of products from elsewhere,
        their copies, and other operands of the products.
        """
        cast = self._cast

        @jax.custom_jvp
        def run(xs: Any, copies: Any, others: Any, halves: Any, rest: Any) -> _Results:
            with _jaxpr.scope(unit.step.scope):
                outs, known = self._run_island(xs)
                read = {i: outs[i].astype(cast.forward) for i in self._again}
                kept = {i: outs[i].astype(cast.forward) for i in self._kept}
            made = []
            for k, product in enumerate(unit.products):
                pair = self._pair(k, read | kept, halves)
                with _jaxpr.scope(product.scope), product.context:
                    made.append(_multiply(product, cast.forward, None, *pair, *rest[k]))
            return _Results(outs, made, known, kept)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def tangents_of(
            inputs: Any, known: Any, kept: Any, halves: Any, rest: Any, live: Any
        ) -> Any:
            outs, noted, read = {}, {}, {}
            inputs, known, kept = cast.apart((inputs, known, kept))
            live_inputs, live_operands = live
            if self._island:
                with _jaxpr.scope(unit.step.scope):
                    values = inputs, known, kept, live_inputs
                    outs, noted, read = self._tangents(*values)
            made = {}
            for k, product in enumerate(unit.products):
                tangents = enumerate(self._pair(k, outs, live_operands))
                moving = {side: t for side, t in tangents if t is not None}
                if moving:
                    pair = self._pair(k, read | kept, halves)
                    with _jaxpr.scope(product.scope), product.context:
                        tangent = self._products[k]([*pair, *rest[k]], moving)
                        # So the cotangent is half precision, and an array of its own.
                        made[k] = cast.apart(tangent)
            return outs, made, noted

        def rule(primals: Any, tangents: Any) -> Any:
            _, copies, _, halves, rest = primals
            results = run(*primals)
            live = {i: t for i, t in enumerate(tangents[0]) if not is_zero(t)}
            others = [[None if is_zero(t) else t for t in ts] for ts in tangents[2]]
            kept = copies, results.known, results.kept
            found = tangents_of(*kept, halves, rest, (live, others))
            return results, _Results(
                *(_tangents(x, t) for x, t in zip(results, found, strict=False)),
                kept=_tangents(results.kept, found[0]),
            )

        run.defjvp(rule, symbolic_zeros=True)
        return run

    def _pair(self, k: int, here: dict[int, Any], elsewhere: Any) -> list[Any]:
        """The operands of a product, or what belongs to them."""
        pairs = zip(self._wires[k], elsewhere[k], strict=True)
        return [x if i is None else here.get(i) for i, x in pairs]

    def _run_island(self, inputs: Sequence[Any]) -> tuple[list[Any], dict[int, Any]]:
        """Its results, and what is known of it later."""
        known: dict[int, Any] = {}

        def note(v: Any, x: Any) -> Any:
            x = self._cast.rounded(x) if v in self._shared else x
            if v in self._known:
                known[self._known[v]] = x
            return x

        if not self._island:
            return [], known
        return _jaxpr.evaluate_all(self._island, inputs, change=note), known

    def _island_tangents(
        self, inputs: Any, known: Any, kept: Any, live: dict[int, Any]
    ) -> tuple[dict[int, Any], dict[int, Any], dict[int, Any]]:
        """Tangents of results and of what is known, and operands made again.

        `live`: tangents of some of the inputs.
        """
        types = zip(inputs, self._island.invars, strict=True)
        inputs = [x.astype(v.aval.dtype) for x, v in types]
        reached = _reached(self._island, live)
        positions = [i for i, v in enumerate(self._island.outvars) if v in reached]
        numbers = [i for v, i in self._known.items() if v in reached]

        def again(some: dict[int, Any]) -> Any:
            values = [some.get(i, x) for i, x in enumerate(inputs)]
            outs, noted = self._run_again(values, known, kept, reached)
            results = {i: outs[i] for i in positions}
            return (results, {i: noted[i] for i in numbers}), outs

        primals = {i: inputs[i] for i in live}
        (_, outs), ((tangents, noted), _) = jax.jvp(again, (primals,), (live,))
        operands = {i: outs[i].astype(self._cast.forward) for i in self._again}
        return tangents, noted, operands

    def _run_again(
        self, inputs: Sequence[Any], known: Any, kept: Any, reached: Collection[Any]
    ) -> tuple[list[Any], dict[int, Any]]:
        """As `_run_island`, from what is known and the kept results of softmaxes.

        `reached`: variables with tangents, which are those of what is computed.
        """
        noted: dict[int, Any] = {}
        values: dict[Any, Any] = {}

        def replace(v: Any, x: Any) -> Any:
            x = values[v] = self._cast.rounded(x) if v in self._shared else x
            if v in self._softmaxes:
                i, (exponents, axes) = self._softmaxes[v]
                return _softmax(values[exponents], kept[i].astype(x.dtype), axes)
            if v not in self._known:
                return x
            noted[self._known[v]] = x
            value = known[self._known[v]]
            return _with_value(x, value) if v in reached else value

        return _jaxpr.evaluate_all(self._island, inputs, change=replace), noted


def _reached(island: Any, live: Collection[int]) -> set[Any]:
    """Floating-point variables that depend on some of the inputs."""
    found = {island.invars[i] for i in live}
    for eqn in island.eqns:
        if not found.isdisjoint(v for v in eqn.invars if not _jaxpr.is_literal(v)):
            found.update(v for v in eqn.outvars if _jaxpr.is_floating(v))
    return found


def _tangents(primals: Any, found: dict[int, Any]) -> Any:
    """Those that were found, by key or position, and zeros for the others."""
    is_list = isinstance(primals, list)
    tangents = {
        i: found[i].astype(x.dtype) if i in found else _no_tangent(x)
        for i, x in (enumerate(primals) if is_list else primals.items())
    }
    return [*tangents.values()] if is_list else tangents


def _multiply(
    step: Step, dtype: Any, wide: int | None, *values: jax.Array
) -> jax.Array:
    """A product in half precision; only the operand `wide` stays float32."""
    *moves, eqn = step.jaxpr.eqns
    pair = [x if i == wide else x.astype(dtype) for i, x in enumerate(values[:2])]
    for i, move in enumerate(moves):
        side = int(i >= step.moves)
        (pair[side],) = _jaxpr.evaluate(move, [pair[side]])
    if wide is None:
        params = {"precision": None, "preferred_element_type": dtype}
        (result,) = _jaxpr.evaluate(eqn, [*pair, *values[2:]], **params)
    else:
        numbers = eqn.params["dimension_numbers"]
        sharding = eqn.params.get("out_sharding")
        result = wide_dot_general(*pair, numbers, dtype, DEFAULT, sharding)
    return result.astype(jnp.float32)


def _product_tangent(step: Step, dtype: Any) -> Callable[..., jax.Array]:
    """A product's tangent, for tangents of operands by side, in half precision."""

    @jax.jit
    def tangent(copies: Sequence[Any], live: dict[int, jax.Array]) -> jax.Array:
        def term(side: int) -> jax.Array:
            wide = side if step.weights[side] else None
            operands = [*copies[:side], live[side], *copies[side + 1 :]]
            return _multiply(step, dtype, wide, *operands)

        return functools.reduce(jnp.add, map(term, live)).astype(dtype)

    return tangent


@jax.jit
def _kept_apart(x: jax.Array) -> jax.Array:
    apart = lax.optimization_barrier
    return lax.platform_dependent(x, cuda=apart, rocm=apart, default=lambda x: x)


# The second array, which is what the first should be, with the first one's derivative.
_with_value = jax.custom_jvp(lambda _, value: value)
_with_value.defjvp(lambda primals, t: (primals[1], t[0]), symbolic_zeros=True)

_no_tangent = jax.custom_derivatives.SymbolicZero.from_primal_value


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _softmax(exponents: Any, result: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """`result`, which is the softmax of the exponents and gives their derivative."""
    del exponents, axes
    return result


@functools.partial(_softmax.defjvp, symbolic_zeros=True)
def _softmax_rule(axes: tuple[int, ...], primals: Any, tangents: Any) -> Any:
    result, tangent = primals[1], tangents[0]
    if is_zero(tangent):
        return result, _no_tangent(result)
    # XLA:GPU has one kernel for what begins with a reduction of the rows.
    alike = functools.partial(_less_nothing, axes=axes)
    p = lax.platform_dependent(result, cuda=alike, rocm=alike, default=lambda x: x)
    product = p * tangent
    return result, product + p * -jnp.sum(product, axes, keepdims=True)


def _less_nothing(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return x - 0 * jnp.max(x, axes, keepdims=True)
