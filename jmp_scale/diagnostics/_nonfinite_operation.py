"""Which operation of a forward pass gave the NaN or infinity that reaches the loss."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jaxpr as jaxprs
from .._jaxpr import is_literal, open_jaxpr, value_of, words
from .._operations import CALLS
from ._precision.source import Place, place_of

_NAMES = {
    "cholesky": "a Cholesky factorization",
    "conv_general_dilated": "a convolution",
    "dot_general": "a matrix product",
}
_CALLS = CALLS | words("checkpoint custom_jvp_call custom_vjp_call remat2")


def nonfinite_operation(fun: Callable[..., Any], *args: Any) -> str | None:
    """What made the result infinite or NaN, as "log gave NaN at model.py:41"."""
    return _run(jax.make_jaxpr(fun)(*args), args, Place(None, None))[1]


def _run(jaxpr: Any, args: Sequence[Any], outer: Place) -> tuple[list[Any], str | None]:
    """The outputs, and what made the first that is not finite, if that was here."""
    inner, consts = open_jaxpr(jaxpr)
    given = zip([*inner.constvars, *inner.invars], [*consts, *args], strict=True)
    values = dict(given)
    makers = {v: eqn for eqn in inner.eqns for v in eqn.outvars}

    def recorded(v: Any, value: Any) -> Any:
        values[v] = value
        return value

    # One after the other: compiled together, they might not round as they are written.
    outs = jaxprs.evaluate_all(inner, args, consts, recorded)

    def kind_of(atom: Any) -> str:
        return _kind(value_of(atom, values))

    def made(v: Any) -> str | None:
        """What made a value infinite or NaN; None if it came so, or is a constant."""
        while not is_literal(v) and v in makers:
            eqn, kind = makers[v], kind_of(v)
            bad = [a for a in eqn.invars if kind_of(a)]
            same = [a for a in bad if kind == "infinity" or kind_of(a) == "NaN"]
            if not same:
                # NaN of infinities, as of their difference: which may be a mask's.
                earlier = next(filter(None, map(made, bad)), None)
                return earlier or _in_equation(eqn, kind, values, outer)
            v = same[0]
        return None

    bad = [v for v in inner.outvars if kind_of(v)]
    return outs, made(bad[0]) if bad else None


def _in_equation(eqn: Any, kind: str, values: dict[Any, Any], outer: Place) -> str:
    place = place_of(eqn, outer)
    nested = _in_nested(eqn, [value_of(a, values) for a in eqn.invars], place)
    name = _NAMES.get(eqn.primitive.name, eqn.primitive.name)
    at = f" at {place.file}:{place.line}" if place.file else ""
    return nested or f"{name} gave {kind}{at}"


def _in_nested(eqn: Any, ins: list[Any], place: Place) -> str | None:
    """The same in the jaxpr that an equation runs, of a loop in the first such turn."""
    bodies, loop = jaxprs.subjaxprs(eqn), jaxprs.loop_of(eqn)
    if loop is not None and loop.trips:
        carry, scanned = loop.consts, loop.consts + loop.carry
        turns = range(loop.trips)
        for i in reversed(turns) if eqn.params["reverse"] else turns:
            outs, made = _run(
                loop.body, [*ins[:scanned], *(x[i] for x in ins[scanned:])], place
            )
            if made:
                return made
            ins[carry:scanned] = outs[: loop.carry]
    elif eqn.primitive.name == "cond":
        return _run(bodies[int(ins[0])], ins[1:], place)[1]
    elif eqn.primitive.name in _CALLS:
        return _run(bodies[0], ins, place)[1]
    return None


def _kind(x: Any) -> str:
    """ "NaN" or "infinity", whichever comes first, if entries are; else ""."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.inexact) or jnp.isfinite(x).all():
        return ""
    return "NaN" if jnp.isnan(x).any() else "infinity"
