"""Runs calls, loops and branches of a traced program with other bodies.

They are put back through JAX's public functions, because the parameters of its
higher-order primitives are not an interface.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import jax
from jax import lax
from jax.custom_derivatives import zero_from_primal
from jax.extend.core import Primitive

from .. import _jaxpr
from .._jaxpr import JaxprEqn, Program
from .dot_general import is_zero

Values = list[jax.Array]


class Body(Protocol):
    """Makes the function that runs in place of a nested jaxpr."""

    def __call__(
        self,
        jaxpr: Program,
        *,
        places: Sequence[int | None],
        part_of: Literal["loop", "rule", ""],
    ) -> Callable[..., list[jax.Array]]:
        """A function of the jaxpr's inputs.

        `places` has for each of these the position of the operand of the equation that
        it is in every run, or None.
        """
        ...


def _scan(eqn: JaxprEqn, values: Values, body: Body) -> Values | None:
    loop = _jaxpr.loop_of(eqn)
    if loop is None:
        return None
    first, last = loop.consts, loop.consts + loop.carry
    places = [None if first <= i < last else i for i in range(len(values))]
    run = body(loop.body, places=places, part_of="loop")

    def step(carry: Values, xs: Values) -> tuple[Values, Values]:
        results = run(*values[:first], *carry, *xs)
        return results[: loop.carry], results[loop.carry :]

    carry, ys = lax.scan(
        step,
        init=values[first:last],
        xs=values[last:],
        length=loop.trips,
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *ys]


def _while(eqn: JaxprEqn, values: Values, body: Body) -> Values | None:
    loop = _jaxpr.loop_of(eqn)
    condition = eqn.params["cond_jaxpr"]
    # Under `vmap` a loop ends for one index after the other.
    if loop is None or _jaxpr.shape(_jaxpr.bare(condition).outvars[0]):
        return None
    count, first = loop.offset, loop.offset + loop.consts
    carry = [None] * loop.carry
    run = body(loop.body, places=[*range(count, first), *carry], part_of="loop")
    test = body(condition, places=[*range(count), *carry], part_of="loop")
    return lax.while_loop(
        lambda carry: test(*values[:count], *carry)[0],
        lambda carry: run(*values[count:first], *carry),
        values[first:],
    )


def _cond(eqn: JaxprEqn, values: Values, body: Body) -> Values | None:
    if eqn.params.get("branches_platforms"):
        return None  # public functions cannot put these branches back
    places = range(1, len(values))
    branches = [body(b, places=places, part_of="") for b in eqn.params["branches"]]
    return lax.switch(values[0], branches, *values[1:])


def _remat(eqn: JaxprEqn, values: Values, body: Body) -> Values:
    policy, prevent_cse = eqn.params["policy"], eqn.params["prevent_cse"]
    # With a policy, that alone says what is kept.
    part_of = "rule" if policy else ""
    run = body(_jaxpr.subjaxprs(eqn)[0], places=range(len(values)), part_of=part_of)
    policy = policy and functools.partial(_saves, policy)
    return jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)(*values)


def _saves(
    policy: Callable[..., Any], primitive: Primitive, *avals: Any, **params: Any
) -> Any:
    """A policy of `jax.checkpoint` for products that are functions with a rule."""
    if primitive.name == "custom_jvp_call":
        for inner in _jaxpr.equations(params["call_jaxpr"]):
            if inner.primitive.name in _jaxpr.PRODUCTS:
                primitive, params = inner.primitive, inner.params
    return policy(primitive, *avals, **params)


def _custom_jvp(eqn: JaxprEqn, values: Values, body: Body) -> Values | None:
    given = _jaxpr.jvp_rule(eqn)
    if given is None:
        return None
    jaxpr = _jaxpr.subjaxprs(eqn)[0]
    fun = jax.custom_jvp(body(jaxpr, places=range(len(values)), part_of=""))
    first, count = eqn.params["num_consts"], len(eqn.outvars)

    def rule(primals: Values, tangents: list[Any]) -> tuple[Values, list[Any]]:
        pairs = zip(primals, tangents, strict=True)
        moving = [zero_from_primal(x) if is_zero(t) else t for x, t in pairs]
        inputs = [*primals[first:], *moving[first:]]
        run = body(given.jaxpr, places=[None] * len(inputs), part_of="rule")
        results = run(*inputs)
        outs, moved = results[:count], iter(results[count:])
        # JAX takes symbolic zeros of rules that may be given some.
        return outs, [
            zero_from_primal(x, symbolic_zeros=True) if stays else next(moved)
            for x, stays in zip(outs, given.zeros, strict=True)
        ]

    fun.defjvp(rule, symbolic_zeros=True)
    return fun(*values)


def _shard_map(eqn: JaxprEqn, values: Values, body: Body) -> Values:
    params = eqn.params
    axes = params["manual_axes" if "manual_axes" in params else "newly_manual_axes"]
    run = body(_jaxpr.subjaxprs(eqn)[0], places=range(len(values)), part_of="")
    fun = jax.shard_map(
        lambda *xs: tuple(run(*xs)),
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        axis_names={*axes},
        check_vma=params["check_vma"],
    )
    return [*fun(*values)]


# The results of an equation whose nested jaxprs are `body`'s functions, by its
# primitive; None if it cannot be put back.
RUNS: dict[str, Callable[[JaxprEqn, Values, Body], Values | None]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "remat2": _remat,
    "custom_jvp_call": _custom_jvp,
    "shard_map": _shard_map,
}
