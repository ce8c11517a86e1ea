"""Runs a plan: products in half precision, and a backward pass that computes again.

```
forward:   island -> half(operand) -> product in half precision -> float32
backward:  kept inputs -> island once more -> its derivative, and half(operand)
           cotangent -> half -> products of its operands' gradients
```

What the backward pass reads is a copy of what the forward pass read: the half-precision
result of a product, or the array itself. Kinds of machines differ in barriers between
the two passes and in which small sums are kept, but not in values.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _jaxpr
from ._autocast_kept import small_sums, softmaxes_of
from ._autocast_plan import Plan, Step, Unit, is_float32, make_plan
from ._dot_general import bilinear, is_zero, wide_dot_general
from ._marks import Names
from ._validation import warn


@dataclasses.dataclass(frozen=True)
class Cast:
    """How plans are run. `shared` makes one function of equal steps: traced once."""

    forward: Any  # dtype of the products of the forward pass
    backward: Any
    recompute: bool
    share_casts: bool
    names: Names
    unread: set[str] = dataclasses.field(compare=False)
    shared: Any = dataclasses.field(compare=False)
    in_loop: bool = False

    def run(
        self, jaxpr: Any, alive: Sequence[bool], weights: Sequence[bool], *values: Any
    ) -> list[Any]:
        """The results of a program, for these values of its inputs.

        `alive` and `weights` are those of `make_plan`.
        """
        plan = make_plan(jaxpr, alive, weights, self.names, self.share_casts)
        env = _Values(self, plan, values)
        for unit in plan.units:
            if unit.step.kind == "island" and self.recompute:
                with unit.step.context:
                    self._run_unit(unit, env)
            else:
                for step in (unit.step, *unit.products):
                    with _jaxpr.scope(step.scope), step.context:
                        env.set(step, self._run_step(step, plan, env))
        return env.results()

    @property
    def apart(self) -> Callable[[jax.Array], jax.Array]:
        """What keeps a value of the forward pass apart from the backward pass."""
        return _unchanged if self.in_loop or not self.recompute else _kept_apart

    @property
    def _dtypes_and_barrier(self) -> Any:
        return self.forward, self.backward, self.apart

    def rounded(self, x: jax.Array) -> jax.Array:
        """`x` and its cotangent in half precision: one array serves all readers."""
        dtypes = self.backward, self.forward
        return _with_value(*(x.astype(d).astype(x.dtype) for d in dtypes))

    def _run_step(self, step: Step, plan: Plan, env: "_Values") -> list[Any]:
        inputs = env.of(step.jaxpr.invars)
        if step.kind == "call":
            return self._call(step.jaxpr.eqns[0], plan, env)
        if step.kind != "product":
            change = _rounding(step, self.rounded)
            return _jaxpr.evaluate_all(step.jaxpr, inputs, change=change)
        product = self.shared(_Product, step, *self._dtypes_and_barrier)
        copies = [*map(env.operand, step.operands), *inputs[2:]]
        return [bilinear(product.multiply, product.derivative, inputs[:2], copies)]

    def _run_unit(self, unit: Unit, env: "_Values") -> None:
        step = unit.step
        island = self.shared(_Island, step, unit.softmaxes, unit.streams, self)
        products = [
            self.shared(_Product, p, *self._dtypes_and_barrier) for p in unit.products
        ]
        run = _unit_function(unit, island, products)
        place = {v: i for i, v in enumerate(step.jaxpr.outvars)}
        pairs = [p.operands for p in unit.products]
        others = {
            (k, side): v
            for k, operands in enumerate(pairs)
            for side, v in enumerate(operands)
            if v not in place
        }
        outs, made, _, given = run(
            env.of(step.jaxpr.invars),
            [*map(env.copy, step.jaxpr.invars)],
            {key: env.of([v])[0] for key, v in others.items()},
            {key: env.operand(v) for key, v in others.items()},
            [env.of(p.jaxpr.invars[2:]) for p in unit.products],
        )
        env.set(step, outs, given)
        for product, result in zip(unit.products, made, strict=True):
            env.set(product, [result])

    def _body(
        self, jaxpr: Any, alive: Sequence[bool], weights: Any = None, **changes: bool
    ) -> Any:
        """A nested jaxpr as a function of its inputs."""
        cast = dataclasses.replace(self, **changes)
        flags = tuple(alive), tuple(alive if weights is None else weights)
        return self.shared(functools.partial, Cast.run, cast, jaxpr, *flags)

    def _call(self, eqn: Any, plan: Plan, env: "_Values") -> list[Any]:
        """Runs an equation whose nested jaxprs hold products."""
        values = env.of(eqn.invars)
        weights = [_jaxpr.is_literal(v) or v in plan.weights for v in eqn.invars]
        run = getattr(self, "_" + eqn.primitive.name, None)
        if run and (results := run(eqn, values, weights)) is not None:
            return results
        body, _ = _jaxpr.open_jaxpr(_jaxpr.subjaxprs(eqn)[0])
        name = eqn.params.get("name") or getattr(body.debug_info, "func_name", "")
        if name not in self.unread:
            self.unread.add(name)
            warn(
                f"autocast: {name} ({eqn.primitive.name}) holds matrix products and "
                "cannot be read: they stay float32; mark it by jmp_scale.in_half, or "
                "by keep_float32 if it should be so"
            )
        return _jaxpr.evaluate(eqn, values)

    def _scan(self, eqn: Any, values: list[Any], weights: list[bool]) -> Any:
        loop = _jaxpr.loop_of(eqn)
        if loop is None:
            return None
        first, last = loop.consts, loop.consts + loop.carry
        weights[first:last] = [False] * loop.carry
        body = self._body(loop.body, weights, in_loop=True)

        def step(carry: Any, xs: Any) -> Any:
            results = body(*values[:first], *carry, *xs)
            return results[: loop.carry], results[loop.carry :]

        options = {k: eqn.params[k] for k in ("reverse", "unroll") if k in eqn.params}
        inputs = values[first:last], values[last:], loop.trips
        carry, ys = lax.scan(step, *inputs, **options)
        return [*carry, *ys]

    def _while(self, eqn: Any, values: list[Any], weights: list[bool]) -> Any:
        loop: Any = _jaxpr.loop_of(eqn)
        if _jaxpr.shape(_jaxpr.open_jaxpr(eqn.params["cond_jaxpr"])[0].outvars[0]):
            return None  # under `vmap`, where it ends for one index after the other
        count, first = loop.offset, loop.offset + loop.consts
        carry = [False] * loop.carry
        body = self._body(loop.body, weights[count:first] + carry, in_loop=True)
        test = self._body(eqn.params["cond_jaxpr"], weights[:count] + carry)
        return lax.while_loop(
            lambda carry: test(*values[:count], *carry)[0],
            lambda carry: body(*values[count:first], *carry),
            values[first:],
        )

    def _cond(self, eqn: Any, values: list[Any], weights: list[bool]) -> Any:
        if eqn.params.get("branches_platforms"):
            return None  # public functions cannot put these branches back
        branches = [self._body(b, weights[1:]) for b in eqn.params["branches"]]
        return lax.switch(values[0], branches, *values[1:])

    def _remat2(self, eqn: Any, values: list[Any], weights: list[bool]) -> Any:
        policy, prevent = eqn.params["policy"], eqn.params["prevent_cse"]
        # A policy says what is kept, so nothing else decides that.
        recompute = self.recompute and policy is None
        body = _jaxpr.subjaxprs(eqn)[0]
        run = self._body(body, [True] * len(values), weights, recompute=recompute)
        policy = policy and self.shared(_for_products, policy)
        return jax.checkpoint(run, policy=policy, prevent_cse=prevent)(*values)

    def _custom_jvp_call(self, eqn: Any, values: list[Any], weights: list[bool]) -> Any:
        traced = _jaxpr.jvp_rule(eqn)
        if traced is None:
            return None
        fun = jax.custom_jvp(self._body(_jaxpr.subjaxprs(eqn)[0], weights))
        first, count = eqn.params["num_consts"], len(eqn.outvars)

        def rule(primals: Any, tangents: Any) -> Any:
            inputs = [*primals[first:], *tangents[first:]]
            # It is transposed, and what is computed again has no derivative in that.
            flags = [False] * len(inputs)
            results = self._body(traced, flags, recompute=False)(*inputs)
            return results[:count], results[count:]

        fun.defjvp(rule)
        return fun(*values)

    def _shard_map(self, eqn: Any, values: list[Any], weights: list[bool]) -> Any:
        params = eqn.params
        axes = params.get("manual_axes", params.get("newly_manual_axes"))
        body = self._body(_jaxpr.subjaxprs(eqn)[0], weights)
        return jax.shard_map(
            lambda *shards: tuple(body(*shards)),
            axis_names=set(axes),
            **{k: params[k] for k in ("mesh", "in_specs", "out_specs", "check_vma")},
        )(*values)


class _Values:
    """The values of a plan's variables, and what the backward pass keeps of them."""

    def __init__(self, cast: Cast, plan: Plan, values: Sequence[Any]) -> None:
        self._cast, self._plan = cast, plan
        self._values = dict(zip(plan.jaxpr.invars, values, strict=True))
        self._values |= {
            v: cast.rounded(x) for v, x in self._values.items() if v in plan.shared
        }
        self._values |= plan.constants
        self._halves: dict[Any, jax.Array] = {}

    def of(self, atoms: Sequence[Any]) -> list[Any]:
        return [_jaxpr.value_of(v, self._values) for v in atoms]

    def results(self) -> list[Any]:
        return _jaxpr.results_of(self._plan.jaxpr, self._values)

    def set(self, step: Step, results: Sequence[Any], halves: Any = None) -> None:
        """Results of a step; half-precision copies of some of them, by position."""
        outvars = step.jaxpr.outvars
        self._values |= zip(outvars, results, strict=True)
        self._halves |= {outvars[i]: x for i, x in (halves or {}).items()}

    def copy(self, v: Any) -> Any:
        """What the backward pass keeps of a variable: exact."""
        return self._half(v) if v in self._plan.halves else self._values[v]

    def operand(self, v: Any) -> Any:
        """What it keeps of a product's operand."""
        whole = v in self._plan.given or not is_float32(v)
        return self._values[v] if whole else self._half(v)

    def _half(self, v: Any) -> jax.Array:
        if v not in self._halves:
            self._halves[v] = self._values[v].astype(self._cast.forward)
        return self._halves[v]


class _Product:
    """A product in half precision."""

    def __init__(
        self, step: Step, forward: Any, backward: Any, apart: Callable[[Any], Any]
    ) -> None:
        self._step, self._backward, self._apart = step, backward, apart
        self.multiply = functools.partial(self._multiply, forward, None)
        self.tangent = jax.jit(self._tangent)
        self._alone = jax.checkpoint(self._tangent_of_copies, prevent_cse=False)

    def derivative(self, copies: Any, live: dict[int, jax.Array]) -> jax.Array:
        """The tangent of the product alone, as `bilinear` takes it."""
        return self._alone(copies, live).astype(jnp.float32)

    def _tangent_of_copies(self, copies: Any, live: dict[int, jax.Array]) -> jax.Array:
        return self._apart(self._tangent(copies, live))

    def _tangent(self, copies: Any, live: dict[int, jax.Array]) -> jax.Array:
        """That of the product, for tangents of operands, in half precision."""

        def term(side: int) -> jax.Array:
            wide = side if self._step.weights[side] else None
            operands = [*copies[:side], live[side], *copies[side + 1 :]]
            return self._multiply(self._backward, wide, *operands)

        return functools.reduce(jnp.add, map(term, live)).astype(self._backward)

    def _multiply(self, dtype: Any, wide: int | None, *values: jax.Array) -> jax.Array:
        """In half precision; only the operand `wide` stays float32."""
        *moves, eqn = self._step.jaxpr.eqns
        pair = [x if i == wide else x.astype(dtype) for i, x in enumerate(values[:2])]
        for i, move in enumerate(moves):
            side = int(i >= self._step.moves)
            (pair[side],) = _jaxpr.evaluate(move, [pair[side]])
        if wide is None:
            params = {"precision": None, "preferred_element_type": dtype}
            (result,) = _jaxpr.evaluate(eqn, [*pair, *values[2:]], **params)
        else:
            numbers = eqn.params["dimension_numbers"]
            sharding = eqn.params.get("out_sharding")
            result = wide_dot_general(*pair, numbers, dtype, None, sharding)
        return result.astype(jnp.float32)


class _Island:
    """Cheap equations, which the backward pass runs again.

    Each method is a function of values alone, traced once for equal islands.
    """

    def __init__(
        self, step: Step, softmaxes: Sequence[int], streams: Sequence[int], cast: Cast
    ) -> None:
        self._step, self.dtype, self.apart = step, cast.forward, cast.apart
        self._round = _rounding(step, cast.rounded)
        outvars, found = step.jaxpr.outvars, softmaxes_of(step.jaxpr)
        self._softmaxes = {outvars[i]: (i, found[outvars[i]]) for i in softmaxes}
        self._exponents = {s.exponents for _, s in self._softmaxes.values()}
        # Sums of rows in loops on a TPU only: there it would run a kernel for them.
        rows = small_sums(step.jaxpr)
        known = [v for v, is_row in rows.items() if cast.in_loop or not is_row]
        known += [outvars[i] for i in streams]
        self._known = {v: i for i, v in enumerate(known)}
        self._rows = {v for v in known if rows.get(v)}
        self.tangents = jax.jit(self._tangents, static_argnums=0)

    def run(self, inputs: Sequence[Any]) -> tuple[list[Any], dict[int, Any]]:
        """The results, and the sums and streams that are kept."""
        noted: dict[int, Any] = {}

        def note(v: Any, x: Any) -> Any:
            x = self._round(v, x)
            if v in self._known:
                noted[self._known[v]] = x
            return x

        return _jaxpr.evaluate_all(self._step.jaxpr, inputs, change=note), noted

    def _tangents(
        self, again: tuple[int, ...], live: dict[int, Any], inputs: Any, *kept: Any
    ) -> tuple[dict[int, Any], dict[int, Any], dict[int, Any]]:
        """Results `again`, and tangents of results and sums for those of some inputs.

        `kept`: sums and streams that are known, and results of softmaxes.
        """
        reached = self._reached(live)

        def results(some: dict[int, Any]) -> Any:
            values = [some.get(i, x) for i, x in enumerate(inputs)]
            outs, noted = self._again(values, *kept, reached)
            noted = {i: noted[i] for v, i in self._known.items() if v in reached}
            return {i: outs[i] for i in self._positions(reached)}, noted, outs

        outs, tangents = jax.jvp(results, ({i: inputs[i] for i in live},), (live,))
        operands = {i: outs[-1][i].astype(self.dtype) for i in again}
        return tangents[0], tangents[1], operands

    def _again(
        self, inputs: Sequence[Any], known: Any, kept: Any, reached: Collection[Any]
    ) -> tuple[list[Any], dict[int, Any]]:
        """As `run`, from sums, streams and softmaxes that are known.

        `reached`: what has tangents, which are those of what is computed.
        """
        noted: dict[int, Any] = {}
        exponents: dict[Any, Any] = {}

        def replace(v: Any, x: Any) -> Any:
            x = self._round(v, x)
            if v in self._exponents:
                exponents[v] = x
            if v in self._softmaxes and kept:
                i, softmax = self._softmaxes[v]
                result = kept[i].astype(x.dtype)
                return _softmax(exponents[softmax.exponents], result, softmax.axes)
            if v not in self._known:
                return x
            noted[self._known[v]] = x
            value = known[self._known[v]]
            if v in self._rows:
                value = lax.platform_dependent(
                    x, value, tpu=lambda _, value: value, default=lambda x, _: x
                )
            return _with_value(x, value) if v in reached else value

        return _jaxpr.evaluate_all(self._step.jaxpr, inputs, change=replace), noted

    def _reached(self, live: Collection[int]) -> set[Any]:
        """What depends on some of the inputs, of floating-point variables."""
        jaxpr = self._step.jaxpr
        found = {jaxpr.invars[i] for i in live}
        for eqn in jaxpr.eqns:
            if not found.isdisjoint(v for v in eqn.invars if not _jaxpr.is_literal(v)):
                found.update(v for v in eqn.outvars if _jaxpr.is_floating(v))
        return found

    def _positions(self, variables: Collection[Any]) -> list[int]:
        outvars = self._step.jaxpr.outvars
        return [i for i, v in enumerate(outvars) if v in variables]


def _unit_function(
    unit: Unit, island: _Island, products: Sequence[_Product]
) -> Callable[..., Any]:
    """Runs an island and its products, with a derivative that runs the island again.

    The function takes inputs of the island, their copies, operands from elsewhere by
    (product, side), copies of these, and other operands of each product. It returns
    the island's results, the products' results, small sums and kept results.
    """
    place = {v: i for i, v in enumerate(unit.step.jaxpr.outvars)}
    wires = [[place.get(v) for v in p.operands] for p in unit.products]
    again = tuple(sorted({*sum(wires, [])} - {None, *unit.kept}))
    apart = island.apart

    def pair_of(k: int, here: Any, elsewhere: Any) -> list[Any]:
        """The operands of a product, by where they come from; None if in neither."""
        pair = enumerate(wires[k])
        return [elsewhere.get((k, s)) if i is None else here.get(i) for s, i in pair]

    @jax.custom_jvp
    def run(xs: Any, copies: Any, others: Any, halves: Any, rest: Any) -> Any:
        with _jaxpr.scope(unit.step.scope), unit.step.context:
            outs, sums = island.run(xs)
            read = {i: outs[i].astype(island.dtype) for i in (*again, *unit.kept)}
        made = []
        for k, (step, product) in enumerate(zip(unit.products, products, strict=True)):
            with _jaxpr.scope(step.scope), step.context:
                made.append(product.multiply(*pair_of(k, read, halves), *rest[k]))
        return outs, made, sums, {i: read[i] for i in unit.kept}

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def tangents_of(
        copies: Any,
        known: Any,
        kept: Any,
        halves: Any,
        rest: Any,
        live: Any,
        others: Any,
    ) -> Any:
        copies, known, kept = jax.tree.map(apart, (copies, known, kept))
        pairs = zip(copies, unit.step.jaxpr.invars, strict=True)
        with _jaxpr.scope(unit.step.scope), unit.step.context:
            inputs = [c.astype(v.aval.dtype) for c, v in pairs]
            outs, sums, read = island.tangents(again, live, inputs, known, kept)
        read |= kept
        made = {}
        for k, (step, product) in enumerate(zip(unit.products, products, strict=True)):
            pair = [*pair_of(k, read, halves), *rest[k]]
            tangents = enumerate(pair_of(k, outs, others))
            with _jaxpr.scope(step.scope), step.context:
                if moving := {side: t for side, t in tangents if t is not None}:
                    # So the cotangent is half precision, and an array of its own.
                    made[k] = apart(product.tangent(pair, moving))
        return outs, sums, made

    def rule(primals: Any, tangents: Any) -> Any:
        _, copies, _, halves, rest = primals
        outs, made, known, kept = results = run(*primals)
        live = {i: t for i, t in enumerate(tangents[0]) if not is_zero(t)}
        others = {key: t for key, t in tangents[2].items() if not is_zero(t)}
        found = tangents_of(copies, known, kept, halves, rest, live, others)
        of_outs, of_sums, of_made = found
        return results, (
            [_tangent(of_outs, i, x) for i, x in enumerate(outs)],
            [_tangent(of_made, k, x) for k, x in enumerate(made)],
            {i: _tangent(of_sums, i, x) for i, x in known.items()},
            {i: _tangent(of_outs, i, x) for i, x in kept.items()},
        )

    run.defjvp(rule, symbolic_zeros=True)
    return run


def _tangent(found: dict[int, Any], key: int, primal: jax.Array) -> Any:
    return found[key].astype(primal.dtype) if key in found else _no_tangent(primal)


def _rounding(step: Step, rounded: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """What makes of a variable and its value the value that all operations read."""
    shared = {step.jaxpr.outvars[i] for i in step.shared}
    return lambda v, x: rounded(x) if v in shared else x


def _for_products(policy: Any) -> Any:
    """A policy of `jax.checkpoint` for products that are functions with a rule."""

    def saves(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive.name == "custom_jvp_call":
            for inner in _jaxpr.equations(params["call_jaxpr"]):
                if inner.primitive.name in _jaxpr.PRODUCTS:
                    primitive, params = inner.primitive, inner.params
        return policy(primitive, *avals, **params)

    return saves


def _unchanged(x: jax.Array) -> jax.Array:
    return x


@jax.jit
def _kept_apart(x: jax.Array) -> jax.Array:
    """An array from which XLA:GPU computes again what it would have kept in float32."""
    apart = lax.optimization_barrier
    return lax.platform_dependent(x, cuda=apart, rocm=apart, default=lambda x: x)


# The second array, which is what the first should be, with the first one's derivative.
_with_value = jax.custom_jvp(lambda _, value: value)
_with_value.defjvp(lambda primals, t: (primals[1], t[0]), symbolic_zeros=True)


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
    # What was rounded sums to one again, which XLA:GPU makes one kernel of.
    p = result / jnp.sum(result, axes, keepdims=True)
    product = p * tangent
    return result, product + p * -jnp.sum(product, axes, keepdims=True)


_no_tangent = jax.custom_derivatives.SymbolicZero.from_primal_value
