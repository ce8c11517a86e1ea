"""`value_and_grad` and `grad` with the loss scaled internally."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._contexts import UNSCALED
from .._tree import map_gradients, promote_to_float32
from .._validation import described, require_callable, warn
from .loss_scale import DynamicLossScale, LossScale, NoOpLossScale, checked_loss_scale


def value_and_grad(
    fun: Callable[..., Any],
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    transform: Callable[..., Any] = jax.value_and_grad,
    **kwargs: Any,
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` that scales the loss inside; its results are unscaled.

    The loss is multiplied by S, and its gradients are divided by the same S in float32.
    A power-of-two S changes no bit unless something over- or underflowed.

    `fun` is the whole loss, regularization terms included; never scale anything in it
    yourself. End it in float32 (`.astype(jnp.float32)` before the last mean): the
    gradient that enters a float16 loss is S cast to float16, infinite from S = 2^16 on.

    Average over devices afterwards. New values in Flax's float8 collection
    `_overwrite_with_gradient` pass unchanged.

    Args:
      fun: returns a real scalar loss, or `(loss, aux)` with `has_aux`.
      loss_scale: the loss scale of this step, with S of shape [].
      argnums: positions of the differentiated arguments, as in JAX.
      has_aux: whether `fun` returns `(loss, aux)`.
      transform: what differentiates: `jax.value_and_grad` (default),
        `flax.nnx.value_and_grad` or `equinox.filter_value_and_grad`.
      **kwargs: further arguments of `transform` (`holomorphic`, `allow_int`, ...).

    Returns:
      A function of `fun`'s own arguments that returns `(loss, grads)` or `((loss, aux),
      grads)`. Loss and gradients are float32 where they were narrower.

    Raises:
      TypeError: `fun` is not a function, `loss_scale` not a loss scale, or `axis_name`
        is given; while tracing, `fun` returns no scalar, or not what `has_aux` says.
      ValueError: the loss scale has a shape other than ().

    Warns:
      UserWarning: while tracing, float16 gradients of `autocast` and a `NoOpLossScale`;
        or a captured `DynamicLossScale`, which is the same in every call.

    Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale
      >>> square = lambda w: (w.astype(jnp.float32) ** 2).sum()
      >>> loss_scale = jmp_scale.StaticLossScale(2.0**10)
      >>> loss, grads = jmp_scale.value_and_grad(square, loss_scale)(jnp.ones(2))
      >>> float(loss), grads.tolist()
      (2.0, [2.0, 2.0])
    """
    return _differentiated(
        "value_and_grad", fun, loss_scale, argnums, has_aux, transform, kwargs
    )


def grad(
    fun: Callable[..., Any],
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    transform: Callable[..., Any] = jax.value_and_grad,
    **kwargs: Any,
) -> Callable[..., Any]:
    """`jax.grad` that scales the loss inside: unscaled float32 gradients.

    As `value_and_grad`, but it returns `grads`, or `(grads, aux)` with `has_aux`.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale
      >>> gradient = jmp_scale.grad(lambda w: w**2, jmp_scale.DynamicLossScale())
      >>> float(gradient(jnp.float32(3.0)))
      6.0
    """
    differentiated = _differentiated(
        "grad", fun, loss_scale, argnums, has_aux, transform, kwargs
    )

    def unscaled_grad(*args: Any, **fun_kwargs: Any) -> Any:
        value, grads = differentiated(*args, **fun_kwargs)
        return (grads, value[1]) if has_aux else grads

    return unscaled_grad


class _Output(NamedTuple):
    """What `fun` returned. Its type shows that a transform passed it on."""

    loss: Any
    aux: Any


def _differentiated(
    function: str,
    fun: Callable[..., Any],
    loss_scale: LossScale,
    argnums: int | Sequence[int],
    has_aux: bool,
    transform: Callable[..., Any],
    kwargs: dict[str, Any],
) -> Callable[..., tuple[Any, Any]]:
    numbers = loss_scale if isinstance(loss_scale, (tuple, list)) else (loss_scale,)
    if numbers and all(type(number) is int for number in numbers):
        raise TypeError(
            f"{function}: expected a loss scale as the second argument, got "
            f"{loss_scale!r}; argnums is the third: {function}(fun, loss_scale, "
            f"{loss_scale!r}) with a loss scale such as DynamicLossScale()"
        )
    loss_scale = checked_loss_scale(function, loss_scale)
    call = f"{function}(loss_fn, loss_scale)(params, batch)"
    require_callable(function, fun, f"write {call}")
    if "axis_name" in kwargs:
        raise TypeError(
            f"{function}: expected no axis_name, got {kwargs['axis_name']!r}; take the "
            f"mean afterwards, jax.lax.pmean(grads, {kwargs['axis_name']!r})"
        )
    # Every transform differentiates the first argument; Equinox's has no argnums.
    if argnums != 0:
        kwargs["argnums"] = argnums

    def scaled_fun(*args: Any, **fun_kwargs: Any) -> tuple[Any, _Output]:
        output = checked_output(function, fun(*args, **fun_kwargs), has_aux)
        # The unscaled loss leaves as auxiliary output: the scaled one may be infinite.
        return loss_scale.scale(output.loss), output

    scaled_value_and_grad = transform(scaled_fun, has_aux=True, **kwargs)

    def unscaled_value_and_grad(*args: Any, **fun_kwargs: Any) -> tuple[Any, Any]:
        _warn_if_captured(function, loss_scale, args)
        with UNSCALED(isinstance(loss_scale, NoOpLossScale)):
            result = scaled_value_and_grad(*args, **fun_kwargs)
        output, grads = _checked_result(function, result)
        # A NoOpLossScale returns float16 gradients as they are.
        value = tuple(output) if has_aux else output.loss
        return value, map_gradients(promote_to_float32, loss_scale.unscale(grads))

    return unscaled_value_and_grad


def _warn_if_captured(function: str, loss_scale: LossScale, args: Any) -> None:
    """Warns where a traced function gets its arguments, but S from outside."""
    if not isinstance(loss_scale, DynamicLossScale):
        return
    s = loss_scale.loss_scale
    given = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
    is_traced = bool(given) and all(isinstance(x, Tracer) for x in given)
    is_constant = isinstance(s, (jax.Array, np.ndarray)) and not isinstance(s, Tracer)
    # In a vmap without jit, which runs at once, a new array is not traced.
    if is_traced and is_constant and isinstance(jnp.zeros(()), Tracer):
        warn(
            f"{function}: expected S as an argument of the traced function, got "
            f"{loss_scale!r} from outside, which stays so in every call. Pass what "
            "holds it (opt_state, the optimizer) into the function, or take a "
            "StaticLossScale if S is to be constant"
        )


def checked_output(function: str, output: Any, has_aux: bool) -> _Output:
    """The loss in float32 or wider, and the auxiliary output of `fun`."""
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


def _checked_result(function: str, result: Any) -> tuple[_Output, Any]:
    try:
        (_, output), grads = result
    except (TypeError, ValueError):  # not pairs, or a tracer, which is not iterable
        output, grads = None, None
    # Unpacking alone would take ((a, b), c) of a transform without a value for one.
    if not isinstance(output, _Output):
        raise TypeError(
            f"{function}: expected transform to return ((value, aux), grads) as "
            f"jax.value_and_grad does, got {described(result)}; give the "
            "value_and_grad of your framework (jmp_scale.grad takes it too)"
        )
    return output, grads
