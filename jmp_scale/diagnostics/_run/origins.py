"""Finds the operation that gave the first NaN or infinity of a traced program."""

import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from ... import _jaxpr
from ..._jaxpr import CALLS, open_jaxpr, value_of, words
from ..._types import Arrays, Function
from .._source import Place, place_of

_NAMES = {"conv_general_dilated": "a convolution", "dot_general": "a matrix product"}
_ENTERED = CALLS | words("""
    checkpoint cond custom_jvp_call custom_vjp_call remat2""")
# Operations that compute each entry of the result from the same entry of the operands.
_ENTRYWISE = words("add add_any convert_element_type div exp mul sub")


class NonfiniteOrigin(NamedTuple):
    """Where a value that is not finite comes from: an operation, or what was given.

    Of several origins the one of the highest rank counts: 0 is an infinity that was
    given, and 1 a -inf that an operation gave. Both may be a mask. Others have 2, and
    finite values -1.
    """

    rank: int = -1
    given: str | None = None  # an argument or a constant
    operation: str | None = None


_FINITE = NonfiniteOrigin()
_Origins = Sequence[NonfiniteOrigin]
_rank = operator.attrgetter("rank")


def origin_of(
    program: Function, arrays: Sequence[jax.Array], names: Sequence[str]
) -> NonfiniteOrigin:
    """Runs a program of named arrays, and returns where its NaN or infinity is from."""
    given = [*map(_of_given, arrays, names)]
    _, (found,) = _run(jax.make_jaxpr(program)(arrays), arrays, given, Place())
    return found


def _run(
    jaxpr: _jaxpr.Program, args: Arrays, given: _Origins, outer: Place
) -> tuple[list[jax.Array], _Origins]:
    """Evaluates a jaxpr; returns its outputs, and the origins of those."""
    inner, consts = open_jaxpr(jaxpr)
    inputs = [*inner.constvars, *inner.invars]
    values = dict(zip(inputs, [*consts, *args], strict=True))
    origins = dict(zip(inner.invars, given, strict=True))
    last_reader = {v: eqn for eqn in inner.eqns for v in _jaxpr.variables(eqn.invars)}
    kept = {*_jaxpr.variables(inner.outvars)}

    def origin(atom: core.Var | core.Literal, place: Place) -> NonfiniteOrigin:
        if isinstance(atom, core.Literal) or atom in inner.constvars:
            return _of_constant(value_of(atom, values), place)
        return origins.get(atom, _FINITE)

    for eqn in inner.eqns:
        ins = [value_of(a, values) for a in eqn.invars]
        # Equations run one by one: compiled together, they might round differently.
        results = _jaxpr.evaluate(eqn, ins)
        if any(map(_kind, results)):
            place = _place(eqn, inner.eqns, outer)
            known = [origin(a, place) for a in eqn.invars]
            found = _found(eqn, ins, known, results, place)
            origins.update(zip(eqn.outvars, found, strict=True))
        values.update(zip(eqn.outvars, results, strict=True))
        for v in {*_jaxpr.variables(eqn.invars)} - kept:
            if last_reader[v] is eqn:
                del values[v]
    outs = _jaxpr.results_of(inner, values)
    return outs, [origin(atom, outer) for atom in inner.outvars]


def _found(
    eqn: core.JaxprEqn, ins: Arrays, known: _Origins, results: Arrays, place: Place
) -> _Origins:
    """Returns the origins of an equation's results."""
    # What is known already is not looked for in a loop or a call.
    is_known = any(each.rank == 2 for each in known)
    found = None if is_known else _in_nested(eqn, ins, known, place)
    return found or [_origin(eqn, ins, known, x, place) for x in results]


def _of_given(value: jax.Array, name: str) -> NonfiniteOrigin:
    kind = _kind(value)
    return NonfiniteOrigin(2 if kind == "NaN" else 0, name) if kind else _FINITE


def _of_constant(value: jax.Array, place: Place) -> NonfiniteOrigin:
    if jnp.shape(value) == () and _kind(value) == "infinity":
        # The program names this infinity, so it is no input.
        return NonfiniteOrigin(0, None, f"infinity is written{_at(place)}")
    shape = ",".join(map(str, jnp.shape(value)))
    name = f"a constant {jnp.result_type(value)}[{shape}]{_at(place)}"
    return _of_given(value, name)


def _origin(
    eqn: core.JaxprEqn, ins: Arrays, known: _Origins, result: jax.Array, place: Place
) -> NonfiniteOrigin:
    """Returns the origin of a result: that of an operand, or the equation itself."""
    kind = _kind(result)
    if not kind:
        return _FINITE
    # Without a NaN among the operands, infinities make one, as by their difference.
    of_nan = [o for x, o in zip(ins, known, strict=True) if _kind(x) == kind == "NaN"]
    source = max(of_nan or known, key=_rank, default=_FINITE)
    if source.rank == 2:
        return source
    gave = f"{_name(eqn)} gave {kind}{_at(place)}"
    if source == _FINITE or _is_new(eqn, ins, result):
        is_mask = (jnp.isfinite(result) | (result == -jnp.inf)).all()
        return NonfiniteOrigin(1 if is_mask else 2, None, gave)
    if kind == "infinity":
        return source
    if source.rank == 1:  # the -inf of an operation, such as log 0, made this NaN
        return source._replace(rank=2)
    return NonfiniteOrigin(2, source.given, gave)


def _is_new(eqn: core.JaxprEqn, ins: Arrays, result: jax.Array) -> bool:
    """Whether an entry is not finite though the same entry of each operand is."""
    if _jaxpr.name_of(eqn) not in _ENTRYWISE:
        return False
    new = ~jnp.isfinite(result)
    for x in filter(_kind, ins):
        new &= jnp.isfinite(x)
    return bool(new.any())


def _kind(x: jax.Array) -> str:
    """Returns "NaN" or "infinity" if the value has such elements, else ""."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.inexact) or jnp.isfinite(x).all():
        return ""
    return "NaN" if jnp.isnan(x).any() else "infinity"


def _name(eqn: core.JaxprEqn) -> str:
    name = _jaxpr.name_of(eqn)
    if name == "convert_element_type":
        return f"a cast to {_jaxpr.dtype_name(eqn.outvars[0])}"
    return _NAMES.get(name, name)


def _at(place: Place) -> str:
    return f" at {place.where}" if place.file else ""


def _place(eqn: core.JaxprEqn, eqns: Sequence[core.JaxprEqn], outer: Place) -> Place:
    """Returns an equation's line; for a cast of `autocast`, that of what reads it."""
    near = eqn, *_readers({*eqn.outvars}, eqns)
    places = [place_of(each, Place()) for each in near]
    return next((p for p in places if p.file), place_of(eqn, outer))


def _readers(
    made: set[core.Var], eqns: Sequence[core.JaxprEqn]
) -> Iterator[core.JaxprEqn]:
    """Yields the equations that read one of these variables, those in calls too."""
    for eqn in eqns:
        read = made.intersection(_jaxpr.variables(eqn.invars))
        if read:
            yield eqn
        for program, places in _jaxpr.bodies(eqn) if read else []:
            inner = _jaxpr.bare(program)
            pairs = zip(inner.invars, places, strict=True)
            given = {v for v, i in pairs if eqn.invars[i] in [*read]}
            yield from _readers(given, inner.eqns)


def _in_nested(
    eqn: core.JaxprEqn, ins: Arrays, known: _Origins, place: Place
) -> _Origins | None:
    """Returns the origins of the results of the jaxpr that an equation runs, if any."""
    loop, bodies = _jaxpr.loop_of(eqn), _jaxpr.bodies(eqn)
    if loop is not None:
        return _in_loop(eqn, loop, ins, known, place) if loop.trips else None
    if not bodies or _jaxpr.name_of(eqn) not in _ENTERED:
        return None
    program, places = bodies[int(ins[0]) if len(bodies) > 1 else 0]
    operands, origins = [ins[i] for i in places], [known[i] for i in places]
    return _run(program, operands, origins, place)[1]


def _in_loop(
    eqn: core.JaxprEqn, loop: _jaxpr.Loop, ins: Arrays, known: _Origins, place: Place
) -> _Origins:
    """Returns for each result of a scan the first origin of the highest rank."""
    carry, scanned = loop.consts, loop.consts + loop.carry
    values, of_values = [*ins[:scanned]], [*known[:scanned]]
    best = [_FINITE] * len(eqn.outvars)
    trips = range(loop.trips or 0)
    for i in reversed(trips) if eqn.params["reverse"] else trips:
        args = [*values, *(x[i] for x in ins[scanned:])]
        outs, found = _run(loop.body, args, [*of_values, *known[scanned:]], place)
        values[carry:], of_values[carry:] = outs[: loop.carry], found[: loop.carry]
        best = [max(pair, key=_rank) for pair in zip(best, found, strict=True)]
    return best
