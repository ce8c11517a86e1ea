"""`diagnose_nonfinite`: finds the cause of a step that is not finite."""

import contextlib
import functools
import inspect
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.typing import ArrayLike

from ... import _jaxpr
from ..._jaxpr import CALLS, open_jaxpr, value_of, words
from ..._scaling.finite import all_finite
from ..._scaling.loss_scale import LossScale, scale_value
from ..._tree import named_inexact_leaves
from ..._types import Function, PyTree
from .._backward import Backward, Loss, concrete_arrays, described
from .._source import Place, place_of
from .._tables import printed

_NAMES = {
    "cholesky": "a Cholesky factorization",
    "conv_general_dilated": "a convolution",
    "dot_general": "a matrix product",
}
_Maker = tuple[str | None, str | None]  # a constant, or an operation
# The equation that made "NaN" or "infinity", or read a constant that has it.
_Origin = tuple[core.JaxprEqn, str, jax.Array | None]
_LOWEST_TRIED = -14  # log2 of S; some overflows persist at S = 1
_NOWHERE = Place(None, None)
_CALLS = CALLS | words("checkpoint custom_jvp_call custom_vjp_call remat2")


@printed
class Diagnosis(NamedTuple):
    """The result of `diagnose_nonfinite`, in Python values.

    Attributes:
      cause: "none", "forward" (the loss is not finite, at any S), "overflow" (the
        gradients are finite at a smaller S) or "nan" (at no S).
      path: the first gradient leaf that is not finite, as `jax.tree_util.keystr` names
        it; for "overflow" the first that overflows as S grows. Or None.
      finite_at_log2: for "overflow", log2 of the largest power of two below S whose
        gradients are finite.
      nonfinite_paths: all gradient leaves that are not finite at that S.
      nonfinite_argument: the first leaf of the arguments that is not finite itself,
        such as `args[1]['x']`, or a constant of `fun` that made the loss NaN. Or None.
      operation: for "forward", the operation that produced the NaN or infinity, such as
        "log gave NaN at /home/me/model.py:41". None if it is unknown.
      float32_loss: for "forward", the loss of the function inside `autocast`, if it is
        finite; else None.
    """

    cause: Literal["none", "forward", "overflow", "nan"]
    path: str | None = None
    finite_at_log2: int | None = None
    nonfinite_paths: tuple[str, ...] = ()
    nonfinite_argument: str | None = None
    operation: str | None = None
    float32_loss: float | None = None

    def summary(self) -> str:
        """Returns the cause and a remedy, in one or two sentences."""
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
            cure = "fix this operation, or compute it in float32"
            if not self.operation:
                cure = "look for its cause with jax.debug_nans and jax.debug_infs"
            if self.float32_loss is not None:
                # An S that is never unscaled lets parameters grow until they overflow.
                cure = (
                    f"float32 gives a loss of {self.float32_loss:.3g}. If that is a "
                    "usual one, keep this part float32; if not, the parameters have "
                    "diverged: lower the learning rate, and see that check_step("
                    "train_step, ...) finds no gradients that are never unscaled"
                )
            return f"The loss itself is not finite{what}. No loss scale helps; {cure}."
        return (
            f"The loss is finite, but the gradient of {self.path} is not at any loss "
            "scale: look for the derivative of sqrt, log or a division at zero, with "
            "jax.debug_nans."
        )


def diagnose_nonfinite(
    fun: Function,
    loss_scale: LossScale | ArrayLike,
    *args: PyTree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    transform: Function = jax.value_and_grad,
) -> Diagnosis:
    """Finds out why a step is not finite, by rerunning it at smaller loss scales.

    Use it with the parameters and the batch of a step that was skipped. If the loss is
    not finite, it evaluates the loss operation by operation and names the first one
    that yields a NaN or infinity. It runs on the host, and calls one compiled backward
    pass for each S, down to 2^-14.

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
    arrays, rejoin = concrete_arrays(function, args)

    if not 0 < float(s) < np.inf:
        raise ValueError(
            "diagnose_nonfinite: expected a positive finite loss scale, got "
            f"{float(s)}; diagnose at 1, and start again from a new loss scale"
        )

    # S is an argument of the compiled function, so that it compiles once for all S.
    @jax.jit
    def flags(s: jax.Array, arrays: list[jax.Array]) -> Backward:
        return jax.tree.map(all_finite, loss.run(s, rejoin(arrays)))

    def run(s: ArrayLike) -> tuple[bool, tuple[str, ...]]:
        finite = jax.device_get(flags(jnp.asarray(s, jnp.float32), arrays))
        pairs = zip(finite.paths, finite.leaves, strict=True)
        return bool(finite.loss), tuple(path for path, flag in pairs if not flag)

    loss_finite, nonfinite = run(s)
    first = nonfinite[0] if nonfinite else None
    if not loss_finite:
        (constant, operation), float32_loss = _forward(loss, arrays, rejoin)
        found = _nonfinite_argument(args) or constant, operation, float32_loss
        return Diagnosis("forward", first, None, nonfinite, *found)
    if not nonfinite:
        return Diagnosis("none")
    # Start from the largest power of two below S.
    for log2_scale in range(int(np.ceil(np.log2(float(s)))) - 1, _LOWEST_TRIED - 1, -1):
        _, smaller = run(2.0**log2_scale)
        if not smaller:
            return Diagnosis("overflow", nonfinite[0], log2_scale, nonfinite)
        # Leaves that still overflow at the smallest S overflow first as S grows.
        nonfinite = smaller
    return Diagnosis("nan", nonfinite[0], None, nonfinite, _nonfinite_argument(args))


def _forward(
    loss: Loss, arrays: list[jax.Array], rejoin: Function
) -> tuple[_Maker, float | None]:
    """Returns the maker of a loss that is not finite, and the loss in float32."""

    def of_arrays(fun: Function, *arrays: jax.Array) -> PyTree:
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


def _nonfinite_argument(args: tuple[PyTree, ...]) -> str | None:
    for path, leaf in zip(*named_inexact_leaves(args), strict=True):
        if not all_finite(leaf):
            return f"args{path}"
    return None


def _run(
    jaxpr: core.Jaxpr | core.ClosedJaxpr, args: Sequence[jax.Array], outer: Place
) -> tuple[list[jax.Array], _Maker | None]:
    """Evaluates a jaxpr; returns outputs, and the maker of the first nonfinite one.

    The maker is None if all outputs are finite, or the value came from the arguments.
    """
    inner, consts = open_jaxpr(jaxpr)
    inputs = [*inner.constvars, *inner.invars]
    values = dict(zip(inputs, [*consts, *args], strict=True))
    origins: dict[core.Var, _Origin | None] = {}  # of values that are not finite

    def origin(eqn: core.JaxprEqn, kind: str) -> _Origin | None:
        kinds = [(a, _kind(value_of(a, values))) for a in eqn.invars]
        bad = [a for a, own in kinds if own]
        same = [a for a, own in kinds if own and (kind == "infinity" or own == "NaN")]
        if not same:
            # A NaN made of infinities, such as their difference, may be a mask's.
            earlier = [origins.get(v) for v in _jaxpr.variables(bad)]
            return next(filter(None, earlier), (eqn, kind, None))
        first = same[0]
        if not isinstance(first, core.Literal) and first not in inner.constvars:
            return origins.get(first)
        constant = jnp.asarray(value_of(first, values))
        # An infinite constant may be a mask.
        return (eqn, "NaN", constant) if _kind(constant) == "NaN" else None

    for eqn in inner.eqns:
        # Equations run one by one: compiled together, they might round differently.
        results = _jaxpr.evaluate(eqn, [value_of(a, values) for a in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
        for v, value in zip(eqn.outvars, results, strict=True):
            if kind := _kind(value):
                origins[v] = origin(eqn, kind)
    outs = _jaxpr.results_of(inner, values)
    bad = [v for v, x in zip(inner.outvars, outs, strict=True) if _kind(x)]
    found = next((origins.get(v) for v in _jaxpr.variables(bad)), None)
    if found is None:
        return outs, None
    eqn, kind, constant = found
    place = _place(eqn, inner.eqns, outer)
    at = f" at {place.file}:{place.line}" if place.file else ""
    if constant is not None:
        return outs, (f"a constant {described(constant)}{at}", None)
    name = _NAMES.get(eqn.primitive.name, eqn.primitive.name)
    if name == "convert_element_type":
        name = f"a cast to {_jaxpr.dtype_name(eqn.outvars[0])}"
    nested = _in_nested(eqn, [value_of(a, values) for a in eqn.invars], place)
    return outs, nested or (None, f"{name} gave {kind}{at}")


def _kind(x: jax.Array) -> str:
    """Returns "NaN" or "infinity" if the value has such elements, else ""."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.inexact) or jnp.isfinite(x).all():
        return ""
    return "NaN" if jnp.isnan(x).any() else "infinity"


def _place(eqn: core.JaxprEqn, eqns: Sequence[core.JaxprEqn], outer: Place) -> Place:
    """Returns an equation's line; for a cast of `autocast`, that of a neighbor."""
    ins, outs = set(_jaxpr.variables(eqn.invars)), set(eqn.outvars)
    readers = [e for e in eqns if outs & set(_jaxpr.variables(e.invars))]
    read = [e for e in eqns if ins & set(e.outvars)]
    places = [place_of(e, _NOWHERE) for e in (eqn, *readers, *read)]
    return next((p for p in places if p.file), place_of(eqn, outer))


def _in_nested(eqn: core.JaxprEqn, ins: list[jax.Array], place: Place) -> _Maker | None:
    """Finds the maker in the jaxpr that an equation runs; in a loop, the first one."""
    bodies, loop = _jaxpr.subjaxprs(eqn), _jaxpr.loop_of(eqn)
    if loop is not None and loop.trips:
        carry, scanned = loop.consts, loop.consts + loop.carry
        trips = range(loop.trips)
        for i in reversed(trips) if eqn.params["reverse"] else trips:
            slices = [x[i] for x in ins[scanned:]]
            outs, made = _run(loop.body, [*ins[:scanned], *slices], place)
            if made:
                return made
            ins[carry:scanned] = outs[: loop.carry]
    elif eqn.primitive.name == "cond":
        return _run(bodies[int(ins[0])], ins[1:], place)[1]
    elif eqn.primitive.name in _CALLS:
        return _run(bodies[0], ins, place)[1]
    return None
