"""`diagnose_nonfinite`: finds the cause of a step that is not finite."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._scaling.finite import all_finite
from ..._scaling.loss_scale import LossScale, scale_value
from ..._tree import is_array
from ..._types import Arrays, Function, PyTree
from .._backward import Backward, Loss, concrete_arrays
from .._source import is_own_wrapper
from .._tables import printed
from .origins import Origin, origin_of

_LOWEST_TRIED = -14  # log2 of S; some overflows persist at S = 1


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
      nonfinite_argument: the leaf of the arguments, such as `args[1]['x']`, or the
        constant of `fun` whose NaN or infinity reached the loss or the gradient. Or
        None; also for a mask of -inf that did no harm.
      operation: the operation that produced the NaN or infinity, in the backward pass
        unless the cause is "forward", such as "log gave NaN at /home/me/model.py:41".
        None if it was an argument.
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
        operation = self.operation or "by an unknown operation"
        if self.cause == "overflow":
            return (
                f"The gradients overflow, first in {self.path}, and are finite at loss "
                f"scale 2^{self.finite_at_log2}: in the backward pass {operation}."
            )
        if self.nonfinite_argument and not self.operation:
            what = f"{self.nonfinite_argument} is not finite itself"
            return f"{what}. No loss scale helps: fix the input."
        cure = "fix this operation, or compute it in float32"
        if self.nonfinite_argument:
            operation += f", of the infinities in {self.nonfinite_argument}"
            cure = (
                "if they are a mask, a whole row is masked: leave it out, or mask with "
                "a large negative number"
            )
        elif self.float32_loss is not None:
            # An S that is never unscaled lets parameters grow until they overflow.
            cure = (
                f"float32 gives a loss of {self.float32_loss:.3g}. If that is a "
                "usual one, keep this part float32; if not, the parameters have "
                "diverged: lower the learning rate, and see that check_step("
                "train_step, ...) finds no gradients that are never unscaled"
            )
        if self.cause == "forward":
            what = f"The loss itself is not finite: {operation}"
            return f"{what}. No loss scale helps; {cure}."
        if not self.nonfinite_argument:
            cure = (
                "if it is a derivative of sqrt, log or a division at zero, replace the "
                "operand there: jnp.sqrt(jnp.where(x > 0, x, 1))"
            )
        return (
            f"The loss is finite, but the gradient of {self.path} is not at any loss "
            f"scale: in the backward pass {operation}; {cure}."
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

    Use it with the parameters and the batch of a step that was skipped. It calls one
    compiled backward pass for each S, down to 2^-14. Then it evaluates the loss, or the
    gradient if the loss is finite, operation by operation on the host, and names the
    first operation whose NaN or infinity reached the result.

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
    plain = dataclasses.replace(loss, fun=_plain(fun))
    arrays, rejoin = concrete_arrays(function, args)
    leaves = jax.tree_util.tree_leaves_with_path(args)
    named = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    names = [f"args{path}" for path, leaf in named if is_array(leaf)]

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

    def backward_origin(path: str, s: float) -> Origin:
        def of(loss: Loss) -> Origin:
            def leaf(arrays: Arrays) -> PyTree:
                found = loss.run(s, rejoin(arrays))
                return found.leaves[found.paths.index(path)]

            return origin_of(leaf, arrays, names)

        found = of(loss)
        if " at " in f"{found.operation}" or plain.fun is fun:
            return found
        # `autocast` loses the line around a function that JAX has jitted (norm, var).
        in_float32 = of(plain)
        return in_float32 if in_float32.operation else found

    loss_finite, nonfinite = run(s)
    first = nonfinite[0] if nonfinite else None
    if not loss_finite:
        found = origin_of(lambda x: loss.of(fun(*rejoin(x))), arrays, names)
        float32_loss = None
        if plain.fun is not fun:
            value = jax.jit(lambda x: plain.of(plain.fun(*rejoin(x))))(arrays)
            float32_loss = float(value) if np.isfinite(value) else None
        return Diagnosis("forward", first, None, nonfinite, *found[1:], float32_loss)
    if not nonfinite:
        return Diagnosis("none")
    # Start from the largest power of two below S.
    too_large = float(s)
    for log2_scale in range(int(np.ceil(np.log2(float(s)))) - 1, _LOWEST_TRIED - 1, -1):
        _, smaller = run(2.0**log2_scale)
        if not smaller:
            found = backward_origin(nonfinite[0], too_large)
            known = nonfinite[0], log2_scale, nonfinite, *found[1:]
            return Diagnosis("overflow", *known)
        # Leaves that still overflow at the smallest S overflow first as S grows.
        nonfinite, too_large = smaller, 2.0**log2_scale
    found = backward_origin(nonfinite[0], too_large)
    return Diagnosis("nan", nonfinite[0], None, nonfinite, *found[1:])


def _plain(fun: Function) -> Function:
    """Returns the function in `autocast` and `jax.jit`."""
    while isinstance(fun, jax.stages.Wrapped) or is_own_wrapper(fun):
        fun = getattr(fun, "__wrapped__")  # noqa: B009
    return fun
