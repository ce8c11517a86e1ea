"""Flax Linen: a `TrainState` with a loss scale."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

from . import _flax  # isort: skip  (before Flax: it names the extra when Flax is missing)

import jax.numpy as jnp
import optax
from flax import core, struct
from flax.training import train_state
from jax.typing import ArrayLike

from ._scaling.finite import all_finite
from ._scaling.gradients import value_and_grad
from ._scaling.spike_guard import SpikeGuard
from ._scaling.transform import LossScaleTransformation, fresh_buffers
from ._state import LossScale, LossScaleState
from ._tree import OVERWRITE_WITH_GRADIENT, map_inexact, select_tree
from ._types import Function, PyTree


class TrainState(train_state.TrainState):
    """Flax's `TrainState` with a loss scale, which can skip a step.

    Use `state.value_and_grad` to compute gradients, and pass everything else that the
    step computed (`batch_stats=`) to `apply_gradients`. `step` counts all calls, as in
    Flax, so `state.step - state.opt_state.skipped` counts the applied steps. A step is
    skipped too if new values of Flax's float8 collection are NaN or infinite.
    """

    apply_fn: Function = struct.field(pytree_node=False)
    # Narrower than Flax's type, so that `state.opt_state.skipped` is typed.
    opt_state: LossScaleState = struct.field(pytree_node=True)  # pyright: ignore

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Function | None,
        params: PyTree,
        tx: optax.GradientTransformation,
        loss_scale: LossScale | None = None,
        guard: SpikeGuard | None = None,
        **kwargs: Any,
    ) -> Self:
        """Creates a state at step 0, with `tx` wrapped in `with_loss_scale`.

        Args:
          apply_fn: usually `model.apply`.
          params: the parameters, float32 master values.
          tx: any Optax optimizer; not wrapped again if it is `with_loss_scale(...)`.
          loss_scale: initial, as in `with_loss_scale`.
          guard: a `SpikeGuard`, as in `with_loss_scale`.
          **kwargs: fields of a subclass; a buffer that occurs twice is copied.

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
        loss_fn: Function,
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        **kwargs: Any,
    ) -> Callable[..., tuple[PyTree, PyTree]]:
        """Returns `jmp_scale.value_and_grad` with this state's loss scale."""
        return value_and_grad(loss_fn, self.loss_scale, argnums, has_aux, **kwargs)

    def apply_gradients(
        self, *, grads: PyTree, value: ArrayLike | None = None, **changes: Any
    ) -> Self:
        """Applies the gradients and new field values, unless the step is skipped.

        A skipped step changes only `step`, the loss scale's state (S, flags, counters,
        guard) and static fields (`struct.field(pytree_node=False)`).

        Args:
          grads: unscaled gradients, as `value_and_grad` returns them.
          value: the unscaled loss, as in `with_loss_scale`.
          **changes: new values of other fields (`batch_stats`, an EMA, ...), of the
            structure, shapes and dtypes of the old ones.

        Raises:
          TypeError: a name in `changes` is not a field.
          ValueError: a change differs from its field in structure, shape or dtype.
        """
        if "loss" in changes and not hasattr(self, "loss"):
            raise TypeError(
                "apply_gradients: expected the loss as value=, got loss=; write "
                "apply_gradients(grads=grads, value=loss)"
            )
        tx = cast(LossScaleTransformation, self.tx)
        params, old = _without_float8(self.params)
        grads, new = _without_float8(grads)
        if new is not None:
            # Flax may have saved an infinite maximum, which must not skip every step.
            was_finite = map_inexact(lambda x: jnp.isfinite(x).all(), old)
            seen = map_inexact(lambda x, was: jnp.where(was, x, 0), new, was_finite)
            finite = all_finite(seen)
            grads = map_inexact(lambda g: jnp.where(finite, g, jnp.nan), grads)
        updates, opt_state = tx.update(grads, self.opt_state, params, value=value)
        params = optax.apply_updates(params, updates)
        if new is not None:
            new = select_tree(opt_state.applied, new, old)
            replaced = {"params": params, OVERWRITE_WITH_GRADIENT: new}
            # Flax's own step turns a FrozenDict into a dict, which lax.scan refuses.
            params = core.copy(self.params, replaced)
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        nodes = {f.name for f in fields if f.metadata.get("pytree_node", True)}
        # Names that are not fields are refused by `replace`.
        changed = {name: x for name, x in changes.items() if name in nodes}
        kept = {name: getattr(self, name) for name in changed}
        changes |= select_tree(opt_state.applied, changed, kept)
        return self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, **changes
        )


def _without_float8(tree: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the parameters of the optimizer, and the float8 collection or None."""
    if isinstance(tree, Mapping) and OVERWRITE_WITH_GRADIENT in tree:
        return tree["params"], core.unfreeze(tree[OVERWRITE_WITH_GRADIENT])
    return tree, None
