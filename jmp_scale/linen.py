"""Flax Linen: a `TrainState` that skips a step as a whole."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from . import _flax  # isort: skip  (before Flax: it names the extra when Flax is missing)

import jax
import jax.numpy as jnp
import optax
from flax import core, struct
from flax.training import train_state
from jax.typing import ArrayLike

from ._scaling.finite import all_finite
from ._scaling.gradients import value_and_grad
from ._scaling.loss_scale import LossScale
from ._scaling.spike_guard import SpikeGuard
from ._scaling.transform import fresh_buffers
from ._state import LossScaleState
from ._tree import OVERWRITE_WITH_GRADIENT, map_inexact, select_tree


class TrainState(train_state.TrainState):
    """Flax's `TrainState` with a loss scale, which can skip a step.

    Gradients come from `state.value_and_grad`, and `apply_gradients` takes whatever
    else the step computed (`batch_stats=`). A skipped step leaves parameters, optimizer
    state and these fields unchanged. `step` counts all calls, as Flax documents, so
    `state.step - state.opt_state.skipped` counts the applied steps.

    Flax's float8 collection `_overwrite_with_gradient` is never unscaled. A step that
    makes it NaN or infinite is skipped.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale, optax
      >>> from jmp_scale.linen import TrainState
      >>> state = TrainState.create(
      ...     apply_fn=None, params={"w": jnp.float32(3.0)}, tx=optax.sgd(0.5),
      ...     loss_scale=jmp_scale.DynamicLossScale(2.0**15))
      >>> loss, grads = state.value_and_grad(lambda p: p["w"] ** 2)(state.params)
      >>> state = state.apply_gradients(grads=grads, value=loss)
      >>> float(state.params["w"]), int(state.step), float(state.loss_scale.loss_scale)
      (0.0, 1, 32768.0)
    """

    apply_fn: Callable[..., Any] = struct.field(pytree_node=False)
    # Narrower than Flax's type, for the sake of `state.opt_state.skipped`.
    opt_state: LossScaleState = struct.field(pytree_node=True)  # pyright: ignore

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any] | None,
        params: Any,
        tx: optax.GradientTransformation,
        loss_scale: LossScale | None = None,
        guard: SpikeGuard | None = None,
        **kwargs: Any,
    ) -> Self:
        """A state at step 0 with `tx` wrapped in `with_loss_scale`.

        Args:
          apply_fn: usually `model.apply`.
          params: the parameters, float32 masters.
          tx: any Optax optimizer; used as it is if it is `with_loss_scale(...)`.
          loss_scale: the initial loss scale; default `NoOpLossScale()`.
          guard: a `SpikeGuard` skips steps whose loss or gradient norm leaps, too.
          **kwargs: the subclass's own fields; a buffer in two of them is copied.

        Raises:
          ValueError: `loss_scale` or `guard` is given twice, or `tx` wraps another.
        """
        tx = _flax.wrap_once("TrainState.create", tx, loss_scale, guard)
        state = super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)
        return fresh_buffers(state)

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale of the next step."""
        return self.opt_state.loss_scale

    def value_and_grad(
        self,
        loss_fn: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        **kwargs: Any,
    ) -> Callable[..., tuple[Any, Any]]:
        """`jmp_scale.value_and_grad` with this state's loss scale."""
        return value_and_grad(loss_fn, self.loss_scale, argnums, has_aux, **kwargs)

    def apply_gradients(
        self, *, grads: Any, value: ArrayLike | None = None, **changes: Any
    ) -> Self:
        """Applies the gradients and new field values, unless the step is skipped.

        A skipped step changes only `step`, the loss scale's state (S, flags, counters,
        guard) and static fields.

        Args:
          grads: unscaled gradients, as `value_and_grad` returns them.
          value: the unscaled loss, as in `with_loss_scale`.
          **changes: new values of other fields (`batch_stats`, an EMA, ...), of the
            structure, shapes and dtypes of the old ones, which they keep on a skipped
            step. Static fields (`struct.field(pytree_node=False)`) are always replaced.

        Returns:
          The next state: `step` is one more, the loss scale adjusted.

        Raises:
          TypeError: a name in `changes` is not a field.
          ValueError: a change differs from its field in structure, shape or dtype.
        """
        tx: Any = self.tx
        params, old = _without_float8(self.params)
        grads, new = _without_float8(grads)
        if new is not None:
            finite = _is_finite(new, old)
            grads = map_inexact(lambda g: jnp.where(finite, g, jnp.nan), grads)
        updates, opt_state = tx.update(grads, self.opt_state, params, value=value)
        params = optax.apply_updates(params, updates)
        if new is not None:
            new = select_tree(opt_state.applied, new, old)
            replaced = {"params": params, OVERWRITE_WITH_GRADIENT: new}
            # A step that turns a FrozenDict into a dict, as Flax's, cannot be scanned.
            params = core.copy(self.params, replaced)
        changes = _selected(opt_state.applied, changes, self)
        return self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, **changes
        )


def _selected(applied: Any, changes: dict[str, Any], state: TrainState) -> Any:
    """The changes if `applied`, else the fields; changes of static fields always."""
    fields = dataclasses.fields(state)  # pyright: ignore[reportArgumentType]
    is_node = {field.name: field.metadata.get("pytree_node", True) for field in fields}
    for name in changes.keys() - is_node.keys():
        raise TypeError(
            "TrainState.apply_gradients: expected the loss as value=, and fields of "
            f"the state ({', '.join(is_node)}), got {name}="
        )
    new = {name: value for name, value in changes.items() if is_node[name]}
    old = {name: getattr(state, name) for name in new}
    return changes | select_tree(applied, new, old)


def _without_float8(tree: Any) -> tuple[Any, Any]:
    """What the optimizer sees, as in Flax, and the float8 collection or None."""
    if isinstance(tree, Mapping) and OVERWRITE_WITH_GRADIENT in tree:
        return tree["params"], core.unfreeze(tree[OVERWRITE_WITH_GRADIENT])
    return tree, None


def _is_finite(new: Any, old: Any) -> jax.Array:
    # A history that Flax saved with an infinite maximum must not skip every step.
    was_finite = map_inexact(lambda x: jnp.isfinite(x).all(), old)
    return all_finite(map_inexact(lambda x, was: jnp.where(was, x, 0), new, was_finite))
