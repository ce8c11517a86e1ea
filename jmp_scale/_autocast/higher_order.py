"""Evaluates calls, loops and branches of a traced program with other bodies.

They are put back through JAX's public functions, because the parameters of its
higher-order primitives are not an interface.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from .. import _jaxpr
from .._jaxpr import JaxprEqn
from .stored import Value, array_of, places_of

Results = list[jax.Array]
Values = Sequence[Value]
# "policy": of a checkpoint that chooses itself what is saved.
Part = Literal["loop", "rule", "policy", ""]
# `body(jaxpr, places, part_of, stored=())` returns a function in place of the jaxpr.
# `places` has, for each input, the position of the equation's operand that it is in
# every run, or None. `stored` has the positions of further inputs whose cotangents are
# added up in float32 within the jaxpr.
Body = Callable[..., Callable[..., Results]]


def _scan(eqn: JaxprEqn, values: Values, body: Body) -> Results | None:
    loop = _jaxpr.loop_of(eqn)
    if loop is None:
        return None
    first, last = loop.consts, loop.consts + loop.carry
    places = [None if first <= i < last else i for i in range(len(values))]
    # A float32 copy of a stack would be made as a whole: a slice is read once a turn.
    slices = [i for i in places_of(values) if i >= last]
    function = body(loop.body, places, "loop", slices)

    def step(carry: Results, xs: Results) -> tuple[Results, Results]:
        results = function(*values[:first], *carry, *xs)
        return results[: loop.carry], results[loop.carry :]

    carry, ys = lax.scan(
        step,
        init=[*map(array_of, values[first:last])],
        xs=[*map(array_of, values[last:])],
        length=loop.trips,
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *ys]


def _scan3(eqn: JaxprEqn, values: Values, body: Body) -> Results:
    """Runs a scan that passes values on in references, which its iterations write."""
    params = _jaxpr.params_of(eqn)
    are_scanned, atoms = params["extensives"], enumerate(eqn.invars)
    places = [None if _jaxpr.is_reference(v) else i for i, v in atoms]
    slices = [i for i in places_of(values) if are_scanned[i]]
    function = body(params["jaxpr"], places, "loop", slices)
    pairs = [*zip(values, are_scanned, strict=True)]

    def step(_: None, xs: Results) -> tuple[None, Results]:
        turn = iter(xs)
        return None, function(*(next(turn) if each else x for x, each in pairs))

    scanned = [array_of(x) for x, each in pairs if each]
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    _, ys = lax.scan(step, None, scanned, **options)
    return ys


def _while(eqn: JaxprEqn, values: Values, body: Body) -> Results | None:
    loop = _jaxpr.loop_of(eqn)
    condition = eqn.params["cond_jaxpr"]
    # Under `vmap` a loop ends for one index after the other.
    if loop is None or _jaxpr.shape(_jaxpr.bare(condition).outvars[0]):
        return None
    count, first = loop.offset, loop.offset + loop.consts
    carry = [None] * loop.carry
    function = body(loop.body, [*range(count, first), *carry], "loop")
    test = body(condition, [*range(count), *carry], "loop")
    return lax.while_loop(
        lambda carry: test(*values[:count], *carry)[0],
        lambda carry: function(*values[count:first], *carry),
        [*map(array_of, values[first:])],
    )


def _cond(eqn: JaxprEqn, values: Values, body: Body) -> Results | None:
    if eqn.params.get("branches_platforms"):
        return None  # public functions cannot put these branches back
    places = range(1, len(values))
    branches = [body(branch, places, "") for branch in eqn.params["branches"]]
    return lax.switch(array_of(values[0]), branches, *values[1:])


def _remat(eqn: JaxprEqn, values: Values, body: Body) -> Results:
    params = _jaxpr.params_of(eqn)
    policy, jaxpr = params["policy"], _jaxpr.subjaxprs(eqn)[0]
    # With a policy, that alone says what is saved.
    part_of = "policy" if policy else ""
    # Their sums are within: barriers of the backward pass would make float32 copies.
    function = body(jaxpr, range(len(values)), part_of, places_of(values))
    fun = jax.checkpoint(function, policy=policy, prevent_cse=params["prevent_cse"])
    return fun(*map(array_of, values))


def _custom_jvp(eqn: JaxprEqn, values: Values, body: Body) -> Results | None:
    given = _jaxpr.jvp_rule(eqn)
    if given is None:
        return None
    jaxpr = _jaxpr.subjaxprs(eqn)[0]
    fun = jax.custom_jvp(body(jaxpr, range(len(values)), ""))
    first, count = _jaxpr.params_of(eqn).get("num_consts", 0), len(eqn.outvars)

    def rule(primals: Results, tangents: list[Any]) -> tuple[Results, list[Any]]:
        pairs = zip(primals, tangents, strict=True)
        moving = [
            zero_from_primal(x) if isinstance(t, SymbolicZero) else t for x, t in pairs
        ]
        inputs = [*primals[first:], *moving[first:]]
        results = body(given.jaxpr, [None] * len(inputs), "rule")(*inputs)
        outs, moved = results[:count], iter(results[count:])
        # JAX takes symbolic zeros of rules that may be given some.
        return outs, [
            zero_from_primal(x, symbolic_zeros=True) if stays else next(moved)
            for x, stays in zip(outs, given.zeros, strict=True)
        ]

    fun.defjvp(rule, symbolic_zeros=True)
    return fun(*map(array_of, values))


def _shard_map(eqn: JaxprEqn, values: Values, body: Body) -> Results:
    params = eqn.params
    axes = params["manual_axes" if "manual_axes" in params else "newly_manual_axes"]
    function = body(_jaxpr.subjaxprs(eqn)[0], range(len(values)), "")
    fun = jax.shard_map(
        lambda *xs: tuple(function(*xs)),
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        axis_names={*axes},
        check_vma=params["check_vma"],
    )
    return [*fun(*values)]


# The results of an equation whose nested jaxprs are `body`'s functions, by its
# primitive; None if it cannot be put back.
CALLS: dict[str, Callable[[JaxprEqn, Values, Body], Results | None]] = {
    "scan": _scan,
    "scan3": _scan3,
    "while": _while,
    "cond": _cond,
    "remat2": _remat,
    "custom_jvp_call": _custom_jvp,
    "shard_map": _shard_map,
}
