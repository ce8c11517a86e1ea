"""Any Optax optimizer, with steps that overflowed skipped as a whole."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from ._finite import all_finite
from ._loss_scale import LossScale, LossScaleState, NoOpLossScale
from ._mesh import AxisName
from ._skip import update_or_keep
from ._tree import is_inexact, select_tree, widen


def with_loss_scale(
    inner: optax.GradientTransformation,
    loss_scale: LossScale | None = None,
    *,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an Optax optimizer: skips every step whose gradients are not all finite, and adjusts S.

    It takes true gradients, as `value_and_grad` gives them. When all are finite, `inner` runs. When
    not, the updates are -0.0 (parameters stay bit-identical when these are added, also -0.0) and the
    whole of `inner`'s state stays as it was: moments, step counts, schedules, keys. Both at once as
    selects in one XLA program, without a branch. The loss scale is adjusted in either case.

    Let it be the outermost wrapper: clipping, `zero_nans`, `MultiSteps`, schedules belong inside, where
    they see unscaled finite gradients and freeze on a skipped step. It checks the gradients that it is
    given, so nothing may hide an overflow before it. With `MultiSteps` inside, a skip drops one
    micro-batch from the window, and S is adjusted at each.

    Args:
      inner: any Optax optimizer or chain.
      loss_scale: the initial loss scale; default `NoOpLossScale()`, a plain skip of non-finite steps.
      axis_name: mesh axes over which the skip is agreed: see `all_finite`.

    Returns:
      A transformation with state `LossScaleState`, whose
      `update(updates, state, params=None, *, value=None, **extra_args)` takes gradients of any dtype
      (`inner` sees float32 for narrower ones) and returns updates of the dtypes of `params`, if given.
      `value` is the true loss, a scalar: when it is not finite the step is skipped and S is left alone,
      since no S changes the forward pass. It is passed on to `inner` with the other extra arguments,
      which must be of the true loss as well (`value_fn`, `grad`). `inner` never sees a non-finite
      gradient or value.

    Raises:
      TypeError: `inner` is no gradient transformation, or `loss_scale` no loss scale.
      ValueError: `value` is no scalar (from `update`, while tracing).

    Example:
      >>> import jax.numpy as jnp, jmp_scale, optax
      >>> tx = jmp_scale.with_loss_scale(optax.sgd(0.5), jmp_scale.DynamicLossScale(2.0**15))
      >>> params = jnp.float32(1.0)
      >>> state = tx.init(params)
      >>> for g in (1.0, jnp.inf):
      ...     updates, state = tx.update(jnp.float32(g), state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(float(params), float(state.loss_scale.loss_scale), int(state.skipped))
      0.5 32768.0 0
      0.5 16384.0 1
    """
    if loss_scale is None:
        loss_scale = NoOpLossScale()
    if not isinstance(loss_scale, LossScale):
        raise TypeError(f"with_loss_scale: expected a loss scale, got {loss_scale!r}")
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"with_loss_scale: expected an optax.GradientTransformation (of an "
            f"optax.MultiSteps, its gradient_transformation()), got {inner!r}"
        )
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> Any:
        return LossScaleState(
            loss_scale=jax.tree.map(jnp.copy, loss_scale),
            inner_state=fresh_buffers(inner.init(params), params),
            grads_finite=jnp.array(True),
            applied=jnp.array(True),
            skipped=jnp.zeros([], jnp.int32),
            skipped_in_a_row=jnp.zeros([], jnp.int32),
            nonfinite_losses=jnp.zeros([], jnp.int32),
            spikes=jnp.zeros([], jnp.int32),
            guard=None,
        )

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        value: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        if value is not None and [jnp.shape(x) for x in jax.tree.leaves(value)] != [()]:
            raise ValueError(
                f"with_loss_scale: expected value to be the scalar loss, got {value!r}"
            )
        loss_finite = True if value is None else all_finite(value, axis_name)
        grads_finite = all_finite(updates, axis_name)
        finite = grads_finite & loss_finite

        # No NaN may reach `inner`, though all that it makes of one is dropped: a line search would
        # loop on it, and jax_debug_nans would raise.
        grads = _zero_unless(finite, widen(updates))
        if value is not None:
            extra_args["value"] = _zero_unless(finite, value)
        if "grad" in extra_args:
            extra_args["grad"] = _zero_unless(finite, widen(extra_args["grad"]))
        if "value_fn" in extra_args:
            extra_args["value_fn"] = _zero_fn_unless(finite, extra_args["value_fn"])

        def inner_update() -> tuple[Any, Any]:
            new_updates, new_state = inner.update(
                grads, state.inner_state, params, **extra_args
            )
            if params is not None:
                new_updates = _cast_like(new_updates, params)
            return new_updates, _cast_like(new_state, state.inner_state)

        new_updates, inner_state = update_or_keep(
            finite, inner_update, state.inner_state
        )
        no_updates = jax.tree.map(_negative_zeros, new_updates)
        return select_tree(finite, new_updates, no_updates), LossScaleState(
            loss_scale=state.loss_scale.adjust(grads_finite, loss_finite=loss_finite),
            inner_state=inner_state,
            grads_finite=finite,
            applied=finite,
            skipped=jnp.where(finite, state.skipped, state.skipped + 1),
            skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
            nonfinite_losses=state.nonfinite_losses + jnp.logical_not(loss_finite),
            spikes=state.spikes,
            guard=state.guard,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def fresh_buffers(state: Any, params: Any = ()) -> Any:
    """Strongly typed arrays that share no buffer with the parameters or each other, for donation."""
    taken = {id(leaf) for leaf in jax.tree.leaves(params)}

    def fresh_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, (jax.Array, bool, int, float, complex)):
            return leaf
        array = jnp.asarray(leaf)
        if getattr(array, "weak_type", False):  # typed keys have no such attribute
            array = jnp.asarray(array, array.dtype)
        array = jnp.copy(array) if id(array) in taken else array
        taken.add(id(array))
        return array

    return jax.tree.map(fresh_leaf, state)


def _zero_unless(finite: jax.Array, tree: Any) -> Any:
    def zero_leaf(x: Any) -> Any:
        return jnp.where(finite, x, jnp.zeros_like(x)) if is_inexact(x) else x

    return jax.tree.map(zero_leaf, tree)


def _zero_fn_unless(finite: jax.Array, fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, with values and gradients of zero unless `finite`."""

    def constant_unless(x: Any) -> Any:
        # Without this the gradient would be 0 times that of `fun`, so NaN where that is not finite.
        return jnp.where(finite, x, jax.lax.stop_gradient(x)) if is_inexact(x) else x

    def zero_fn(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(constant_unless, (args, kwargs))
        return _zero_unless(finite, fun(*args, **kwargs))

    return zero_fn


def _negative_zeros(update: Any) -> Any:
    # x + -0.0 is x in every bit (unless XLA flushes it as subnormal); 0.0 would turn -0.0 into 0.0.
    return -jnp.zeros_like(update) if is_inexact(update) else jnp.zeros_like(update)


def _cast_like(tree: Any, like: Any) -> Any:
    def cast_leaf(x: Any, y: Any) -> Any:
        castable = is_inexact(x) and is_inexact(y)
        return jnp.asarray(x).astype(jnp.result_type(y)) if castable else x

    return jax.tree.map(cast_leaf, tree, like, is_leaf=lambda x: x is None)
