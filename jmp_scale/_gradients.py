"""Gradients that were scaled inside, and are true outside."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._loss_scale import LossScale
from ._scaling import widen_gradients
from ._tree import widen


def value_and_grad(
    fun: Callable[..., Any],
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    transform: Callable[..., Any] = jax.value_and_grad,
    **kwargs: Any,
) -> Callable[..., Any]:
    """`jax.value_and_grad` with the loss scaled inside: the true loss and true float32 gradients.

    The loss is multiplied by S, differentiated, and the gradients are divided by the same S in
    float32. A power-of-two S changes no bit of the result unless something over- or underflowed.

    `fun` is the whole loss, regularization terms included; never scale anything in it yourself. End it
    in float32 (`.astype(jnp.float32)` before the last mean): the gradient of a float16 loss is S cast to
    float16, which is infinite from S = 2^16 on.

    Reductions over devices come after, on these float32 gradients: `jax.lax.pmean(grads, axis)` in
    `pmap` and in `shard_map(check_vma=False)`. In `shard_map(check_vma=True)` JAX has already *summed*
    the gradients of replicated parameters over the mesh axis: divide by the axis size there, and do not
    average again. Nothing is added on top here. JAX sums them in the dtype of the computation and before
    they are unscaled, where float16 may overflow (a skipped step); to average in float32 instead, let the
    parameters vary, `jax.lax.pcast(params, axis, to="varying")` (`pvary` in jax 0.8), and take `pmean`.

    Args:
      fun: returns a real scalar loss, or `(loss, aux)` with `has_aux`.
      loss_scale: the loss scale of this step, with S of shape [].
      argnums: positions of the differentiated arguments, as in JAX.
      has_aux: whether `fun` returns `(loss, aux)`.
      transform: what differentiates: `jax.value_and_grad` (default), `flax.nnx.value_and_grad` or
        `equinox.filter_value_and_grad`.
      **kwargs: further arguments of `transform` (`holomorphic`, `allow_int`, ...).

    Returns:
      A function of `fun`'s own arguments that returns `(loss, grads)` or `((loss, aux), grads)`: the
      loss is float32 (float64 if it was), and so are the gradients of leaves narrower than that.

    Raises:
      TypeError: the loss is no scalar (while tracing).
      ValueError: the loss scale has a shape other than ().

    Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.

    Example:
      >>> import jax.numpy as jnp, jmp_scale
      >>> square = lambda w: (w.astype(jnp.float32) ** 2).sum()
      >>> loss, grads = jmp_scale.value_and_grad(square, jmp_scale.StaticLossScale(2.0**10))(jnp.ones(2))
      >>> float(loss), grads.tolist()
      (2.0, [2.0, 2.0])
    """

    def scaled_fun(*args: Any, **fun_kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        loss, aux = (
            fun(*args, **fun_kwargs) if has_aux else (fun(*args, **fun_kwargs), None)
        )
        if jnp.shape(loss) != ():
            raise TypeError(
                f"value_and_grad: expected fun to return a scalar loss, got shape {jnp.shape(loss)}; "
                "take its mean or sum"
            )
        loss = widen(loss)
        return loss_scale.scale(loss), (loss, aux)

    if (
        argnums != 0
    ):  # all three transforms differentiate the first argument; Equinox only that one
        kwargs["argnums"] = argnums
    scaled_value_and_grad = transform(scaled_fun, has_aux=True, **kwargs)

    def unscaled_value_and_grad(*args: Any, **fun_kwargs: Any) -> tuple[Any, Any]:
        (_, (loss, aux)), grads = scaled_value_and_grad(*args, **fun_kwargs)
        grads = widen_gradients(loss_scale.unscale(grads))
        return ((loss, aux) if has_aux else loss), grads

    return unscaled_value_and_grad


def grad(
    fun: Callable[..., Any],
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    transform: Callable[..., Any] = jax.value_and_grad,
    **kwargs: Any,
) -> Callable[..., Any]:
    """`jax.grad` with the loss scaled inside: true float32 gradients, or `(grads, aux)` with `has_aux`.

    Arguments, errors and dtypes are those of `value_and_grad`, also that of `transform`.

    Example:
      >>> import jax.numpy as jnp, jmp_scale
      >>> float(jmp_scale.grad(lambda w: w**2, jmp_scale.DynamicLossScale())(jnp.float32(3.0)))
      6.0
    """
    with_value = value_and_grad(
        fun, loss_scale, argnums, has_aux, transform=transform, **kwargs
    )

    def only_grad(*args: Any, **fun_kwargs: Any) -> Any:
        value, grads = with_value(*args, **fun_kwargs)
        return (grads, value[1]) if has_aux else grads

    return only_grad
