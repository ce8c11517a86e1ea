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
    "eigh": "an eigendecomposition",
    "lu": "an LU factorization",
}
_CALLS = CALLS | words("checkpoint custom_jvp_call custom_vjp_call remat2")


def nonfinite_operation(fun: Callable[..., Any], *args: Any) -> str | None:
    """What made the result infinite or NaN, as "log gave NaN at model.py:41"."""
    return _run(jax.make_jaxpr(fun)(*args), args, Place(None, None))[1]


def _run(jaxpr: Any, args: Sequence[Any], outer: Place) -> tuple[list[Any], str | None]:
    """The outputs, and what made the first that is not finite, if that was here."""
    inner, consts = open_jaxpr(jaxpr)
    values = dict(zip([*inner.constvars, *inner.invars], [*consts, *args], strict=True))
    makers: dict[Any, Any] = {}
    # One after the other: compiled together, they might not round as they are written.
    for eqn in inner.eqns:
        results = jaxprs.evaluate(eqn, [value_of(v, values) for v in eqn.invars])
        values |= zip(eqn.outvars, results, strict=True)
        makers |= dict.fromkeys(eqn.outvars, eqn)

    def made(v: Any) -> str | None:
        """What made a value infinite or NaN; None if it came so, or is a constant."""
        while not is_literal(v) and v in makers:
            eqn, kind = makers[v], _kind(values[v])
            bad = [a for a in eqn.invars if _kind(value_of(a, values))]
            same = [
                a for a in bad if kind != "NaN" or _kind(value_of(a, values)) == kind
            ]
            if not same:
                # NaN of infinities, as of their difference: which may be a mask's.
                earlier = next(filter(None, map(made, bad)), None)
                return earlier or within(eqn, kind)
            v = same[0]
        return None

    def within(eqn: Any, kind: str) -> str:
        place = place_of(eqn, outer)
        ins = [value_of(a, values) for a in eqn.invars]
        name = _NAMES.get(eqn.primitive.name, eqn.primitive.name)
        at = f" at {place.file}:{place.line}" if place.file else ""
        return _in_nested(eqn, ins, place) or f"{name} gave {kind}{at}"

    outs = jaxprs.results_of(inner, values)
    bad = [v for v, x in zip(inner.outvars, outs, strict=True) if _kind(x)]
    return outs, made(bad[0]) if bad else None


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
