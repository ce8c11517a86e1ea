"""Any Optax optimizer, with steps that overflowed skipped as a whole."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from . import _mesh
from ._finite import all_finite, finite_and_norm
from ._loss_scale import (
    LossScale,
    LossScaleState,
    NoOpLossScale,
    checked_loss_scale,
    find_loss_scale_states,
)
from ._optimizer import guarded, runner
from ._skip import select_step
from ._spike_guard import SpikeGuard


class _Update(Protocol):
    def __call__(
        self,
        updates: Any,
        state: LossScaleState,
        params: Any = None,
        *,
        value: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[Any, LossScaleState]: ...


class LossScaleTransformation(optax.GradientTransformationExtraArgs):
    """What `with_loss_scale` returns: an Optax transformation whose state is typed."""

    init: Callable[[Any], LossScaleState]  # pyright: ignore
    update: _Update  # pyright: ignore


def with_loss_scale(
    inner: optax.GradientTransformation,
    loss_scale: LossScale | None = None,
    *,
    axis_name: _mesh.AxisName = None,
    guard: SpikeGuard | None = None,
) -> LossScaleTransformation:
    """Wraps an Optax optimizer: skips a step that overflowed, and adjusts S.

    It takes unscaled gradients, as `value_and_grad` returns them. When all are finite,
    `inner` runs. When not, the updates are -0.0 (added to the parameters they change no
    bit, not even of -0.0) and `inner`'s whole state stays as it was: moments, step
    counts, schedules, keys. Both are selects in one compiled program, without a branch.
    The loss scale is adjusted in either case.

    Make it the outermost wrapper. Clipping, `zero_nans`, `MultiSteps` and schedules
    belong inside, where they see unscaled finite gradients and do not advance on a
    skipped step. It checks the gradients that it is given, so nothing may hide an
    overflow before it. With `MultiSteps` inside, a skip drops one micro-batch from the
    window, and S is adjusted at each.

    What is checked are the gradients, the loss, and with `grad_fn` what `inner` makes
    of its gradients. An update that `inner` itself makes NaN out of finite gradients,
    such as that of an infinite learning rate, is applied as Optax applies it: another
    look at every update would cost another pass over the parameters.

    On a skipped step `inner` sees gradients of zero if it has loops, branches,
    callbacks or runtime checks, and otherwise the gradients as they came, since nothing
    that it computes from them is kept. The derivatives of a step (for meta-learning)
    are those of a branch: a skipped step is the identity. If the derivative of the loss
    is itself infinite, so is a derivative through it.

    Args:
      inner: any Optax optimizer or chain.
      loss_scale: the initial loss scale; default `NoOpLossScale()`, a plain skip of
        non-finite steps.
      axis_name: mesh axes over which the skip is agreed: see `all_finite`.
      guard: a `SpikeGuard` also skips finite steps whose loss or gradient norm leaps
        out of the ordinary; default None.

    Returns:
      A transformation with state `LossScaleState`, whose
      `update(updates, state, params=None, *, value=None, **extra_args)` takes unscaled
      gradients of any dtype and returns updates of the dtypes of `params`, if given.
      `inner` sees float32 in place of narrower gradients; an optimizer that cannot take
      them beside half-precision parameters sees the dtypes of the parameters.

      `value` is the unscaled loss, a scalar. When it is not finite the step is skipped
      and S is left alone, since no S changes the forward pass. It is passed on to an
      `inner` that takes it. The other extra arguments must be of the unscaled loss too
      (`value_fn`, `obj_fn`, `grad_fn`, `grad`).

    Raises:
      TypeError: `inner` is not a gradient transformation, `loss_scale` not a loss
        scale, `guard` not a `SpikeGuard`, or `axis_name` not a name or several.
      ValueError: `inner` contains another `with_loss_scale` (from `init`); `value` is
        not a scalar, or `inner` changes the structure, shape or dtype of its state
        (from `update`, while tracing).

    Examples:
      >>> import jax.numpy as jnp, jmp_scale, optax
      >>> loss_scale = jmp_scale.DynamicLossScale(2.0**15)
      >>> tx = jmp_scale.with_loss_scale(optax.sgd(0.5), loss_scale)
      >>> params = jnp.float32(1.0)
      >>> state = tx.init(params)
      >>> for g in (1.0, jnp.inf):
      ...     updates, state = tx.update(jnp.float32(g), state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     s = state.loss_scale.loss_scale
      ...     print(float(params), float(s), int(state.skipped))
      0.5 32768.0 0
      0.5 16384.0 1
    """
    if loss_scale is None:
        loss_scale = NoOpLossScale()
    loss_scale = checked_loss_scale("with_loss_scale", loss_scale)
    axis_name = _mesh.checked_axis_name("with_loss_scale", axis_name)
    if guard is not None and not isinstance(guard, SpikeGuard):
        raise TypeError(
            f"with_loss_scale: expected guard to be a SpikeGuard, got {guard!r}"
        )
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            "with_loss_scale: expected an optax.GradientTransformation (of an "
            f"optax.MultiSteps, its gradient_transformation()), got {inner!r}"
        )
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> LossScaleState:
        inner_state = inner.init(params)
        _refuse_nesting(inner_state)
        zero = jnp.zeros([], jnp.int32)
        return fresh_buffers(
            LossScaleState(
                loss_scale=jax.tree.map(jnp.copy, loss_scale),
                inner_state=inner_state,
                grads_finite=jnp.array(True),
                applied=jnp.array(True),
                skipped=zero,
                skipped_in_a_row=zero,
                nonfinite_losses=zero,
                spikes=zero,
                guard=jax.tree.map(jnp.copy, guard),
            ),
            params,
        )

    def update(
        updates: optax.Updates,
        state: LossScaleState,
        params: optax.Params | None = None,
        *,
        value: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[Any, LossScaleState]:
        seen = _look_at(updates, value, state.guard, axis_name)
        inputs, extra_args = guarded(seen.applied, updates, value, extra_args)
        run = runner(inner, params, extra_args)
        # The overflow of a gradient that the optimizer asks for shows in its updates.
        looks_again = "grad_fn" in extra_args
        is_good = functools.partial(all_finite, axis_name=axis_name)
        applied, new_updates, inner_state = select_step(
            seen.applied,
            run,
            inputs,
            state.inner_state,
            context=(params, extra_args),
            is_good=is_good if looks_again else None,
        )
        return new_updates, _next_state(state, seen, applied, inner_state)

    return LossScaleTransformation(init, update)  # pyright: ignore


class _Seen(NamedTuple):
    """What is known of a step before the optimizer runs: booleans of shape []."""

    loss_finite: Any
    grads_finite: Any
    spike: Any
    applied: Any
    guard: SpikeGuard | None


def _look_at(
    updates: Any, value: Any, guard: SpikeGuard | None, axis_name: _mesh.AxisName
) -> _Seen:
    if value is not None and [jnp.shape(x) for x in jax.tree.leaves(value)] != [()]:
        raise ValueError(
            f"with_loss_scale: expected value to be the scalar loss, got {value!r}"
        )
    loss_finite = True if value is None else all_finite(value, axis_name)
    if guard is None:
        grads_finite = all_finite(updates, axis_name)
        applied = grads_finite & loss_finite
        return _Seen(loss_finite, grads_finite, False, applied, None)
    grads_finite, norm = finite_and_norm(updates, axis_name)
    finite = grads_finite & loss_finite
    # The largest loss of all devices, so that they judge alike: a replica that skips
    # alone has other parameters from then on
    # (test_one_bad_shard_skips_the_step_on_every_device).
    loss = None
    if value is not None:
        loss = _mesh.largest(jnp.asarray(value).astype(jnp.float32), axis_name)
    spike, guard = guard.judge(loss, norm, finite)
    return _Seen(loss_finite, grads_finite, spike, finite & ~spike, guard)


def _next_state(
    state: LossScaleState, seen: _Seen, applied: jax.Array, inner_state: Any
) -> LossScaleState:
    # Gradients that turned out to be bad within the optimizer are an overflow too.
    bad_within = seen.applied & ~applied
    grads_finite = seen.grads_finite & ~bad_within
    loss_scale = state.loss_scale.adjust(
        grads_finite,
        # No S makes a spike smaller: for S it is like a loss that is not finite
        # (test_a_spike_is_skipped_as_a_whole_and_the_loss_scale_stays).
        loss_finite=jnp.logical_and(seen.loss_finite, ~jnp.asarray(seen.spike)),
    )
    return LossScaleState(
        loss_scale=loss_scale,
        inner_state=inner_state,
        grads_finite=grads_finite & seen.loss_finite,
        applied=applied,
        skipped=jnp.where(applied, state.skipped, state.skipped + 1),
        skipped_in_a_row=jnp.where(applied, 0, state.skipped_in_a_row + 1),
        nonfinite_losses=jnp.where(
            seen.loss_finite, state.nonfinite_losses, state.nonfinite_losses + 1
        ),
        spikes=jnp.where(seen.spike, state.spikes + 1, state.spikes),
        guard=seen.guard,
    )


def _refuse_nesting(inner_state: Any) -> None:
    nested = find_loss_scale_states(inner_state)
    if nested:
        where = jax.tree_util.keystr(nested[0][0])
        raise ValueError(
            "with_loss_scale: expected an optimizer without a loss scale, got one with "
            f"with_loss_scale within, at inner_state{where}; its loss scale "
            "would never be used: wrap once, outermost"
        )


def fresh_buffers(state: Any, params: Any = ()) -> Any:
    """Strongly typed arrays for donation: no two of them share a buffer.

    Nor does one share a buffer with the parameters.
    """
    # Optimizers that start from the parameters (an average of them) return the very
    # arrays, and a buffer that is donated twice is an error
    # (test_a_state_that_starts_as_the_parameters_has_its_own_buffers).
    taken = {id(leaf) for leaf in jax.tree.leaves(params)}

    def fresh_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, (jax.Array, bool, int, float, complex)):
            return leaf
        array = jnp.asarray(leaf)
        # A weak type becomes a strong one in the first step: another compilation.
        if getattr(array, "weak_type", False):  # typed keys have no such attribute
            array = jnp.asarray(array, array.dtype)
        array = jnp.copy(array) if id(array) in taken else array
        taken.add(id(array))
        return array

    return jax.tree.map(fresh_leaf, state)
