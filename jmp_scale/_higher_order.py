"""Runs calls, loops and branches of a traced program with other bodies.

They are put back through JAX's public functions, because the parameters of its
higher-order primitives are not an interface.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax import lax

from . import _jaxpr

# Of a nested jaxpr, for each of its inputs the position of the operand of the equation
# that it is in every run, or None, and what it is a part of, a function of its inputs.
Body = Callable[[Any, Sequence[int | None], Literal["loop", "rule", ""]], Any]


def _scan(eqn: Any, values: list[Any], body: Body) -> list[Any] | None:
    loop = _jaxpr.loop_of(eqn)
    if loop is None:
        return None
    first, last = loop.consts, loop.consts + loop.carry
    places = [None if first <= i < last else i for i in range(len(values))]
    run = body(loop.body, places, "loop")

    def step(carry: Any, xs: Any) -> Any:
        results = run(*values[:first], *carry, *xs)
        return results[: loop.carry], results[loop.carry :]

    inputs = values[first:last], values[last:], loop.trips
    carry, ys = lax.scan(step, *inputs, eqn.params["reverse"], eqn.params["unroll"])
    return [*carry, *ys]


def _while(eqn: Any, values: list[Any], body: Body) -> list[Any] | None:
    loop: Any = _jaxpr.loop_of(eqn)
    condition = eqn.params["cond_jaxpr"]
    if _jaxpr.shape(_jaxpr.open_jaxpr(condition)[0].outvars[0]):
        return None  # under `vmap`, where it ends for one index after the other
    count, first = loop.offset, loop.offset + loop.consts
    carry = [None] * loop.carry
    run = body(loop.body, [*range(count, first), *carry], "loop")
    test = body(condition, [*range(count), *carry], "loop")
    return lax.while_loop(
        lambda carry: test(*values[:count], *carry)[0],
        lambda carry: run(*values[count:first], *carry),
        values[first:],
    )


def _cond(eqn: Any, values: list[Any], body: Body) -> list[Any] | None:
    if eqn.params.get("branches_platforms"):
        return None  # public functions cannot put these branches back
    places = range(1, len(values))
    branches = [body(b, places, "") for b in eqn.params["branches"]]
    return lax.switch(values[0], branches, *values[1:])


def _remat(eqn: Any, values: list[Any], body: Body) -> list[Any]:
    policy, prevent = eqn.params["policy"], eqn.params["prevent_cse"]
    part = "rule" if policy else ""  # the policy alone says what is kept
    run = body(_jaxpr.subjaxprs(eqn)[0], range(len(values)), part)
    policy = policy and functools.partial(_saves, policy)
    return jax.checkpoint(run, policy=policy, prevent_cse=prevent)(*values)


def _saves(policy: Any, primitive: Any, *avals: Any, **params: Any) -> Any:
    """A policy of `jax.checkpoint` for products that are functions with a rule."""
    if primitive.name == "custom_jvp_call":
        for inner in _jaxpr.equations(params["call_jaxpr"]):
            if inner.primitive.name in _jaxpr.PRODUCTS:
                primitive, params = inner.primitive, inner.params
    return policy(primitive, *avals, **params)


def _custom_jvp(eqn: Any, values: list[Any], body: Body) -> list[Any] | None:
    traced = _jaxpr.jvp_rule(eqn)
    if traced is None:
        return None
    fun = jax.custom_jvp(body(_jaxpr.subjaxprs(eqn)[0], range(len(values)), ""))
    first, count = eqn.params["num_consts"], len(eqn.outvars)

    def rule(primals: Any, tangents: Any) -> Any:
        inputs = [*primals[first:], *tangents[first:]]
        results = body(traced, [None] * len(inputs), "rule")(*inputs)
        return results[:count], results[count:]

    fun.defjvp(rule)
    return fun(*values)


def _shard_map(eqn: Any, values: list[Any], body: Body) -> Any:
    params = eqn.params
    axes = {*params.get("manual_axes", params.get("newly_manual_axes"))}
    run = body(_jaxpr.subjaxprs(eqn)[0], range(len(values)), "")
    same = {k: params[k] for k in ("mesh", "in_specs", "out_specs", "check_vma")}
    fun = jax.shard_map(lambda *xs: tuple(run(*xs)), axis_names=axes, **same)
    return fun(*values)


# The results of an equation whose nested jaxprs are `body`'s functions, by its
# primitive; None if it cannot be put back.
RUNS: dict[str, Callable[[Any, list[Any], Body], list[Any] | None]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "remat2": _remat,
    "custom_jvp_call": _custom_jvp,
    "shard_map": _shard_map,
}
