"""The cause of a step that is not finite: smaller loss scales, then each operation."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ... import _jaxpr as jaxprs
from ..._jaxpr import CALLS, is_literal, open_jaxpr, value_of, words
from ..._scaling.finite import all_finite
from ..._scaling.loss_scale import scale_value
from ..._tree import named_inexact_leaves
from .._backward import Backward, Loss, described, split_arrays
from .._source import Place, place_of
from .._tables import printed

_NAMES = {
    "cholesky": "a Cholesky factorization",
    "conv_general_dilated": "a convolution",
    "dot_general": "a matrix product",
}
_Maker = tuple[str | None, str | None]  # the constant, or the operation
_LOWEST_TRIED = -14  # log2 of S; some overflows persist at S = 1
_NOWHERE = Place(None, None)
_CALLS = CALLS | words("checkpoint custom_jvp_call custom_vjp_call remat2")


@printed
class Diagnosis(NamedTuple):
    """The result of `diagnose_nonfinite`, in Python values.

    Attributes:
      cause: "none", "forward" (the loss is not finite, at any S), "overflow" (a smaller
        S cures it) or "nan" (none does).
      path: the gradient leaf where it first shows, as `jax.tree_util.keystr` names it;
        with "overflow" the first to overflow as S grows. Or None.
      finite_at_log2: for "overflow", log2 of the largest power of two below S whose
        gradients are finite.
      nonfinite_paths: all gradient leaves that are not finite there.
      nonfinite_argument: the first leaf of the arguments that is not finite itself, as
        `args[1]['x']`, or a constant of `fun` that made the loss NaN. Or None.
      operation: for "forward", what made the NaN or infinity, as "log gave NaN at
        /home/me/model.py:41". None if it is unknown.
      float32_loss: for "forward", the loss of the function that `autocast` was given,
        if that is finite; else None.
    """

    cause: Literal["none", "forward", "overflow", "nan"]
    path: str | None = None
    finite_at_log2: int | None = None
    nonfinite_paths: tuple[str, ...] = ()
    nonfinite_argument: str | None = None
    operation: str | None = None
    float32_loss: float | None = None

    def summary(self) -> str:
        """The cause, and what to do, in one or two sentences."""
        if self.cause == "none":
            return "Loss and gradients are finite."
        if self.cause == "overflow":
            return (
                f"The gradients overflow, first in {self.path}, and are finite at loss "
                f"scale 2^{self.finite_at_log2}."
            )
        if self.nonfinite_argument is not None:
            what = f"{self.nonfinite_argument} is not finite itself"
            return f"{what}. No loss scale helps: fix the input."
        if self.cause == "forward":
            what = f": {self.operation}" if self.operation else ""
            cure = "mend this operation, or compute it in float32"
            if not self.operation:
                cure = "look for its cause with jax.debug_nans and jax.debug_infs"
            if self.float32_loss is not None:
                cure = "float32 gives a finite loss: keep this part float32"
            return f"The loss itself is not finite{what}. No loss scale helps; {cure}."
        return (
            f"The loss is finite, but the gradient of {self.path} is not at any loss "
            "scale: look for the derivative of sqrt, log or a division at zero, with "
            "jax.debug_nans."
        )


def diagnose_nonfinite(
    fun: Callable[..., Any],
    loss_scale: Any,
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> Diagnosis:
    """Finds out why a step is not finite by running it again at smaller loss scales.

    Runs on the host: one call of one compiled backward pass for each S, down to 2^-14.

    Args:
      fun: the whole loss with its casts to low precision. Its arguments, `argnums`,
        `has_aux` and `transform` are those of `precision_report`.
      loss_scale: the loss scale of the step, or its S as a number.
      *args: parameters and batch of the step that was skipped.

    Raises:
      TypeError: as `precision_report`; also if `loss_scale` is neither a loss scale nor
        a number.
      ValueError: as `precision_report`; also if S is not above 0 or not finite.
    """
    function = "diagnose_nonfinite"
    s = scale_value(function, loss_scale)
    loss = Loss(function, fun, args, argnums, has_aux, transform)
    arrays, rejoin = split_arrays(args)

    # S is an argument of the compiled function: one compilation for all S.
    @jax.jit
    def flags(s: jax.Array, arrays: list[Any]) -> Backward:
        return jax.tree.map(all_finite, loss.run(s, rejoin(arrays)))

    def run(s: Any) -> tuple[bool, tuple[str, ...]]:
        finite = jax.device_get(flags(jnp.asarray(s, jnp.float32), arrays))
        pairs = zip(finite.paths, finite.leaves, strict=True)
        return bool(finite.loss), tuple(path for path, flag in pairs if not flag)

    if not 0 < float(s) < np.inf:
        raise ValueError(
            "diagnose_nonfinite: expected a positive finite loss scale, got "
            f"{float(s)}; diagnose at 1, and start again from a new loss scale"
        )
    loss_finite, nonfinite = run(s)
    first = nonfinite[0] if nonfinite else None
    if not loss_finite:
        (constant, operation), float32_loss = _forward(loss, arrays, rejoin)
        found = _nonfinite_argument(args) or constant, operation, float32_loss
        return Diagnosis("forward", first, None, nonfinite, *found)
    if not nonfinite:
        return Diagnosis("none")
    # The first is the largest power of two below S, which has just been tried.
    for log2_scale in range(int(np.ceil(np.log2(float(s)))) - 1, _LOWEST_TRIED - 1, -1):
        _, smaller = run(2.0**log2_scale)
        if not smaller:
            return Diagnosis("overflow", nonfinite[0], log2_scale, nonfinite)
        # The leaves left at the smallest S that overflows do so first as S grows.
        nonfinite = smaller
    return Diagnosis("nan", nonfinite[0], None, nonfinite, _nonfinite_argument(args))


def _forward(
    loss: Loss, arrays: list[Any], rejoin: Callable[..., Any]
) -> tuple[_Maker, float | None]:
    """The maker of a loss that is not finite, and the loss in float32."""

    def of_arrays(fun: Callable[..., Any], *arrays: Any) -> Any:
        out = fun(*rejoin(arrays))
        return out[0] if loss.has_aux else out

    made, float32_loss = None, np.nan
    with contextlib.suppress(Exception):  # what runs only as a whole has no operations
        program = jax.make_jaxpr(functools.partial(of_arrays, loss.fun))(*arrays)
        made = _run(program, arrays, _NOWHERE)[1]
    with contextlib.suppress(Exception):  # other wrappers change the arguments
        plain = inspect.unwrap(loss.fun)
        float32_loss = float(jax.jit(of_arrays, static_argnums=0)(plain, *arrays))
    return made or (None, None), float32_loss if np.isfinite(float32_loss) else None


def _nonfinite_argument(args: tuple[Any, ...]) -> str | None:
    for path, leaf in zip(*named_inexact_leaves(args), strict=True):
        if not all_finite(leaf):
            return f"args{path}"
    return None


def _run(
    jaxpr: core.Jaxpr | core.ClosedJaxpr, args: Sequence[Any], outer: Place
) -> tuple[list[Any], _Maker | None]:
    """The outputs, and the maker of the first that is not finite, if that was here."""
    inner, consts = open_jaxpr(jaxpr)
    given = zip([*inner.constvars, *inner.invars], [*consts, *args], strict=True)
    values = dict(given)
    makers = {v: eqn for eqn in inner.eqns for v in eqn.outvars}

    def recorded(v: core.Var, value: Any) -> Any:
        values[v] = value
        return value

    # One after the other: compiled together, they might not round as they are written.
    outs = jaxprs.evaluate_all(inner, args, consts, recorded)

    def kind_of(atom: core.Var | core.Literal) -> str:
        """ "NaN" or "infinity", whichever comes first, if entries are; else ""."""
        x = value_of(atom, values)
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact) or jnp.isfinite(x).all():
            return ""
        return "NaN" if jnp.isnan(x).any() else "infinity"

    def place(eqn: core.JaxprEqn) -> Place:
        """Its line; of a cast by `autocast` that of what reads it, or what it reads."""
        readers = [e for e in inner.eqns if any(v in eqn.outvars for v in e.invars)]
        read = [makers[v] for v in jaxprs.variables(eqn.invars) if v in makers]
        places = [place_of(e, _NOWHERE) for e in (eqn, *readers, *read)]
        return next((p for p in places if p.file), place_of(eqn, outer))

    def made(v: core.Var | core.Literal) -> _Maker | None:
        """The maker of an infinite or NaN value; None if it came so."""
        eqn, kind = None, ""
        while not isinstance(v, core.Literal) and v in makers:
            eqn, kind = makers[v], kind_of(v)
            bad = [a for a in eqn.invars if kind_of(a)]
            same = [a for a in bad if kind == "infinity" or kind_of(a) == "NaN"]
            if not same:
                # NaN of infinities, as of their difference: which may be a mask's.
                earlier = next(filter(None, map(made, bad)), None)
                return earlier or _in_equation(eqn, kind, values, place(eqn))
            v = same[0]
        is_constant = is_literal(v) or v in inner.constvars
        if eqn is None or kind_of(v) != "NaN" or not is_constant:
            return None  # an infinite constant may be a mask's
        what = described(jnp.asarray(value_of(v, values)))
        return f"a constant {what}{_at(place(eqn))}", None

    bad = [v for v in inner.outvars if kind_of(v)]
    return outs, made(bad[0]) if bad else None


def _in_equation(
    eqn: core.JaxprEqn, kind: str, values: dict[core.Var, Any], place: Place
) -> _Maker:
    nested = _in_nested(eqn, [value_of(a, values) for a in eqn.invars], place)
    name = _NAMES.get(eqn.primitive.name, eqn.primitive.name)
    if name == "convert_element_type":
        name = f"a cast to {jaxprs.dtype_name(eqn.outvars[0])}"
    return nested or (None, f"{name} gave {kind}{_at(place)}")


def _at(place: Place) -> str:
    return f" at {place.file}:{place.line}" if place.file else ""


def _in_nested(eqn: core.JaxprEqn, ins: list[Any], place: Place) -> _Maker | None:
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
