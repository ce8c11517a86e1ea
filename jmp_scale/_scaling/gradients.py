"""`value_and_grad` and `grad`, which scale the loss internally."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from .._state import UNSCALED, LossScale
from .._tree import is_inexact, map_gradients, promote_to_float32
from .._types import Function, PyTree
from .._validation import described, require_callable, warn
from .loss_scale import NoOpLossScale, checked_loss_scale


def value_and_grad(
    fun: Function,
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    transform: Function = jax.value_and_grad,
    **kwargs: Any,
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Returns `jax.value_and_grad(fun)`, which scales internally; results are unscaled.

    Use it wherever a loss is computed in float16, with the loss scale of the current
    step: `value_and_grad(loss_fn, state.loss_scale)`. It multiplies the loss by S, and
    divides the gradients by the same S in float32. If S is a power of two, no bit of a
    gradient changes unless it over- or underflowed.

    `fun` is the whole loss, including regularization terms; do not scale anything in it
    yourself. Cast to float32 before the last mean (`.astype(jnp.float32)`). Otherwise
    the gradient that enters a float16 loss is S cast to float16, which is infinite from
    S = 2^16 on. Average over devices afterwards.

    Args:
      fun: returns a real scalar loss, or `(loss, aux)` with `has_aux`.
      loss_scale: the loss scale of this step, with S of shape [].
      argnums: positions of the differentiated arguments, as in JAX.
      has_aux: whether `fun` returns `(loss, aux)`.
      transform: differentiates `fun`: `jax.value_and_grad` (default),
        `flax.nnx.value_and_grad` or `equinox.filter_value_and_grad`.
      **kwargs: further arguments of `transform` (`holomorphic`, `allow_int`, ...).

    Returns:
      A function of the arguments of `fun` that returns `(loss, grads)` or
      `((loss, aux), grads)`. Loss and gradients are float32 or wider.

    Raises:
      TypeError: an argument of another type; while tracing, `fun` does not return a
        scalar, or `(loss, aux)` with `has_aux`.
      ValueError: the loss scale has a shape other than ().

    Warns:
      UserWarning: while tracing, float16 gradients of `autocast` with a
        `NoOpLossScale`, or a captured `DynamicLossScale`, whose S never changes.

    Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
    """
    return differentiated(
        "value_and_grad", fun, loss_scale, argnums, has_aux, transform, kwargs
    )


def grad(
    fun: Function,
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    transform: Function = jax.value_and_grad,
    **kwargs: Any,
) -> Function:
    """Returns `jax.grad(fun)`, which scales internally and gives unscaled gradients.

    It is `value_and_grad`, except that it returns `grads`, or `(grads, aux)` with
    `has_aux`.
    """
    gradient = differentiated(
        "grad", fun, loss_scale, argnums, has_aux, transform, kwargs
    )

    def unscaled_grad(*args: PyTree, **fun_kwargs: PyTree) -> PyTree:
        value, grads = gradient(*args, **fun_kwargs)
        return (grads, value[1]) if has_aux else grads

    return unscaled_grad


class _Output(NamedTuple):
    """The results of `fun`; by this type they are recognized behind a transform."""

    loss: ArrayLike
    aux: PyTree


def differentiated(
    function: str,
    fun: Function,
    loss_scale: LossScale,
    argnums: int | Sequence[int],
    has_aux: bool,
    transform: Function,
    kwargs: dict[str, object],
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Returns `value_and_grad` of `fun`; errors name the public `function`."""
    numbers = loss_scale if isinstance(loss_scale, (tuple, list)) else (loss_scale,)
    if numbers and all(type(number) is int for number in numbers):
        raise TypeError(
            f"{function}: expected a loss scale as the second argument, got "
            f"{loss_scale!r}; argnums is the third: {function}(fun, loss_scale, "
            f"{loss_scale!r}) with a loss scale such as DynamicLossScale()"
        )
    loss_scale = checked_loss_scale(function, loss_scale)
    if any(map(is_inexact, jax.tree.leaves((argnums, has_aux)))):
        raise TypeError(
            f"{function}: expected argnums and has_aux after the loss scale, got "
            f"arrays; write {function}(fun, loss_scale)(params, batch)"
        )
    call = f"{function}(loss_fn, loss_scale)(params, batch)"
    require_callable(function, fun, f"write {call}")
    # All transforms differentiate the first argument; Equinox's has no argnums.
    options = kwargs if argnums == 0 else {**kwargs, "argnums": argnums}

    def scaled_fun(*args: PyTree, **fun_kwargs: PyTree) -> tuple[ArrayLike, _Output]:
        output = checked_output(function, fun(*args, **fun_kwargs), has_aux)
        # The scaled loss may be infinite, so the unscaled one is an auxiliary output.
        return loss_scale.scale(output.loss), output

    scaled_value_and_grad = transform(scaled_fun, has_aux=True, **options)

    def unscaled_value_and_grad(
        *args: PyTree, **fun_kwargs: PyTree
    ) -> tuple[PyTree, PyTree]:
        # A captured batch does not make a step eager; constant parameters do.
        params = args
        if isinstance(argnums, int) and -len(args) <= argnums < len(args):
            params = args[argnums]
        _warn_if_captured(function, loss_scale, params)
        with _in_context(loss_scale):
            pair, grads = scaled_value_and_grad(*args, **fun_kwargs)
        if not (isinstance(pair, tuple) and isinstance(pair[-1], _Output)):
            raise TypeError(
                f"{function}: expected transform to return ((value, aux), grads), as "
                f"jax.value_and_grad does, but {transform!r} does not; write "
                "transform=nnx.value_and_grad or equinox.filter_value_and_grad"
            )
        output = pair[-1]
        # `NoOpLossScale.unscale` would leave float16 gradients in float16.
        value = (output.loss, output.aux) if has_aux else output.loss
        return value, map_gradients(promote_to_float32, loss_scale.unscale(grads))

    return unscaled_value_and_grad


def _in_context(loss_scale: LossScale) -> AbstractContextManager[Any]:
    """Returns the context of a call; cloudpickle takes a function, and no context."""
    return UNSCALED(isinstance(loss_scale, NoOpLossScale))


def _warn_if_captured(
    function: str, loss_scale: LossScale, differentiated: PyTree
) -> None:
    """Warns if parameters are traced, but S is a constant of the traced function."""
    numbers = [x for x in jax.tree.leaves(loss_scale) if hasattr(x, "dtype")]
    params = [x for x in jax.tree.leaves(differentiated) if isinstance(x, jax.Array)]
    # A new array is traced inside `jit`, but not inside an eager `vmap`.
    groups = [jnp.zeros(())], params, numbers
    are_traced = [{isinstance(x, Tracer) for x in group} for group in groups]
    if are_traced == [{True}, {True}, {False}]:
        warn(
            f"{function}: expected S as an argument of the traced function, got "
            f"{loss_scale!r} from outside, which stays so in every call. Pass what "
            "holds it (opt_state, the optimizer) into the function, or take a "
            "StaticLossScale if S is to be constant"
        )


def checked_output(function: str, output: PyTree, has_aux: bool) -> _Output:
    """Returns the loss, in float32 or wider, and the auxiliary output of `fun`."""
    loss, aux = output, None
    if has_aux:
        if not isinstance(output, (tuple, list)) or len(output) != 2:
            raise TypeError(
                f"{function}: expected fun to return (loss, aux) with has_aux=True, "
                f"got {described(output)}; return everything but the loss as one aux"
            )
        loss, aux = output
    is_number = hasattr(loss, "shape") or isinstance(loss, (int, float, complex))
    if not is_number or jnp.shape(loss) != ():
        raise TypeError(
            f"{function}: expected fun to return a scalar loss, got {described(loss)}; "
            "return its mean or sum, and pass has_aux=True if fun returns (loss, aux)"
        )
    return _Output(promote_to_float32(loss), aux)
