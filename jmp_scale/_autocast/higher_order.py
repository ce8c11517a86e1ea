"""Evaluates calls, loops and branches of a traced program with other bodies.

They are called again through JAX's public functions, because the parameters of its
higher-order primitives are not an interface.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from .. import _jaxpr
from .._jaxpr import JaxprEqn
from .._types import Arrays

# "policy": of a checkpoint that chooses itself what is saved. "rule" and "tangents": of
# a `custom_jvp`'s rule, its results and their tangents.
Part = Literal["loop", "rule", "tangents", "policy", ""]
# `body(jaxpr, places, part_of)` returns a function in place of the jaxpr. `places` has,
# for each input, the position of the equation's operand that it is in every run, or
# None.
Body = Callable[..., Callable[..., Arrays]]


def _scan(eqn: JaxprEqn, operands: Arrays, body: Body) -> Arrays | None:
    """Runs a scan; a `scan3` passes values on in references, which iterations write."""
    params, loop = _jaxpr.params_of(eqn), _jaxpr.loop_of(eqn)
    if loop:
        last = loop.consts + loop.carry
        carried, scanned = range(loop.consts, last), [*range(last, len(operands))]
        program, changed = loop.body, {*carried}
    elif _jaxpr.name_of(eqn) == "scan3":
        carried, scanned = (), [i for i, x in enumerate(params["extensives"]) if x]
        program, atoms = params["jaxpr"], enumerate(eqn.invars)
        changed = {i for i, v in atoms if _jaxpr.is_reference(v)}
    else:
        return None
    places = [None if i in changed else i for i in range(len(operands))]
    function = body(program, places, "loop")

    def step(carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        turn = [*operands]
        for i, x in [*zip(carried, carry, strict=True), *zip(scanned, xs, strict=True)]:
            turn[i] = x
        results = function(*turn)
        return results[: len(carried)], results[len(carried) :]

    carry, ys = lax.scan(
        step,
        init=[operands[i] for i in carried],
        xs=[operands[i] for i in scanned],
        length=None if scanned else params["length"],  # it may be symbolic
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _while(eqn: JaxprEqn, operands: Arrays, body: Body) -> Arrays | None:
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
        lambda carry: test(*operands[:count], *carry)[0],
        lambda carry: function(*operands[count:first], *carry),
        [*operands[first:]],
    )


def _cond(eqn: JaxprEqn, operands: Arrays, body: Body) -> Arrays | None:
    if _chooses_platform(eqn):
        return None  # public functions cannot put these branches back
    places = range(1, len(operands))
    branches = [body(branch, places, "") for branch in eqn.params["branches"]]
    return lax.switch(operands[0], branches, *operands[1:])


def _chooses_platform(eqn: JaxprEqn) -> bool:
    return bool(eqn.params.get("branches_platforms"))


def _jit(eqn: JaxprEqn, operands: Arrays, body: Body) -> Arrays:
    """Runs a call that stays float32; the others are opened before."""
    return jax.jit(body(_jaxpr.subjaxprs(eqn)[0], range(len(operands)), ""))(*operands)


def _remat(eqn: JaxprEqn, operands: Arrays, body: Body) -> Arrays:
    params, (jaxpr,) = _jaxpr.params_of(eqn), _jaxpr.subjaxprs(eqn)
    policy = params["policy"]
    # With a policy, that alone says what is saved.
    function = body(jaxpr, range(len(operands)), "policy" if policy else "")
    prevent_cse = params.get("prevent_cse", True)  # not with `JAX_REMAT3` of jax 0.10
    fun = jax.checkpoint(function, policy=policy, prevent_cse=prevent_cse)
    return fun(*operands)


def _custom_jvp(eqn: JaxprEqn, operands: Arrays, body: Body) -> Arrays | None:
    given = _jaxpr.jvp_rule(eqn)
    if given is None:
        return None
    jaxpr = _jaxpr.subjaxprs(eqn)[0]
    fun = jax.custom_jvp(body(jaxpr, range(len(operands)), ""))
    first, count = _jaxpr.params_of(eqn).get("num_consts", 0), len(eqn.outvars)

    def rule(primals: Arrays, tangents: list[Any]) -> tuple[Arrays, list[Any]]:
        pairs = zip(primals, tangents, strict=True)
        instantiated = [
            zero_from_primal(x) if isinstance(t, SymbolicZero) else t for x, t in pairs
        ]
        inputs = [*primals[first:], *instantiated[first:]]
        places = [None] * len(inputs)
        of_results = body(given.jaxpr, places, "rule")
        of_tangents = body(given.jaxpr, places, "tangents")
        results = found = of_results(*inputs)
        if of_tangents is not of_results:  # the backward pass has a dtype of its own
            found = of_tangents(*inputs)
        outs, nonzero = results[:count], iter(found[count:])
        # JAX takes symbolic zeros of rules that may be given some.
        return outs, [
            zero_from_primal(x, symbolic_zeros=True) if is_zero else next(nonzero)
            for x, is_zero in zip(outs, given.zeros, strict=True)
        ]

    fun.defjvp(rule, symbolic_zeros=True)
    return fun(*operands)


def _shard_map(eqn: JaxprEqn, operands: Arrays, body: Body) -> Arrays:
    params = eqn.params
    axes = params["manual_axes" if "manual_axes" in params else "newly_manual_axes"]
    (jaxpr,) = _jaxpr.subjaxprs(eqn)
    function = body(jaxpr, range(len(operands)), "")
    fun = jax.shard_map(
        lambda *xs: tuple(function(*xs)),
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        axis_names={*axes},
        check_vma=params["check_vma"],
    )
    return [*fun(*operands)]


# The results of an equation whose nested jaxprs are `body`'s functions, by its
# primitive; None if it cannot be called again.
CALLS: dict[str, Callable[[JaxprEqn, Arrays, Body], Arrays | None]] = {
    "scan": _scan,
    "scan3": _scan,
    "while": _while,
    "cond": _cond,
    "jit": _jit,
    "remat2": _remat,
    "custom_jvp_call": _custom_jvp,
    "shard_map": _shard_map,
}


def places_as_stored(eqn: JaxprEqn) -> Sequence[int]:
    """Returns the positions of operands that a call may get in half precision.

    Each iteration of a scan reads one slice of a stack, of which a float32 copy would
    be made as a whole. Behind the barriers of a checkpoint there would be one, too.
    """
    if loop := _jaxpr.loop_of(eqn):
        first = loop.offset + loop.consts  # of the carry
        return [*range(first), *range(first + loop.carry, len(eqn.invars))]
    # The rule of a function is traced for operands of its own types.
    is_entered = _jaxpr.name_of(eqn) in CALLS and not _chooses_platform(eqn)
    has_rule = _jaxpr.name_of(eqn) == "custom_jvp_call"
    return range(len(eqn.invars) if is_entered and not has_rule else 0)


def places_in_every_run(eqn: JaxprEqn) -> Sequence[int]:
    """Returns the positions of operands that a loop reads in each iteration."""
    loop = _jaxpr.loop_of(eqn)
    return range(loop.offset + loop.consts if loop else 0)


def loops_that_add_up(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Finds loops that add up the gradient of a half-precision operand as traced.

    It is added to in each iteration: where it is the carry of a loop, or where a loop
    reads it within a call that is not entered, or that has a rule.
    """
    loop = _jaxpr.loop_of(eqn)
    if loop and _jaxpr.name_of(eqn) == "scan":
        carry = eqn.invars[loop.consts : loop.consts + loop.carry]
        return [eqn] if _jaxpr.any_half(carry) else []
    if places_as_stored(eqn):
        return []
    found = []
    for each in _jaxpr.equations_within(eqn):
        # A `while` has a gradient only within a function that has its own.
        loop = _jaxpr.loop_of(each)
        if loop is not None and loop.trips != 1:
            read = each.invars[loop.offset : loop.offset + loop.consts]
            found += [each] if _jaxpr.any_half(read) else []
    return found
