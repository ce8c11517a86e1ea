"""Flax Linen: a `TrainState` that skips a step as a whole."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from . import _flax  # isort: skip  (before Flax: it names the extra when Flax is missing)

import optax
from flax import struct
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state
from jax.typing import ArrayLike

from ._gradients import value_and_grad
from ._loss_scale import LossScale
from ._transform import fresh_buffers
from ._tree import select_tree


class TrainState(train_state.TrainState):
    """Flax's `TrainState` with a loss scale: a step that overflows changes nothing of what it keeps.

    A train step is that of Flax's examples with two lines changed: gradients come from
    `state.value_and_grad`, and whatever the step computed besides them is given to
    `apply_gradients`, which drops all of it when the step is skipped::

        (loss, updates), grads = state.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, value=loss, batch_stats=updates["batch_stats"])

    `step` counts calls of `apply_gradients`, skipped or not, as Flax documents, so that dropout keys
    folded from it differ; `state.step - state.opt_state.skipped` counts the applied steps. Schedules
    in `tx` count only these.

    All other fields are Flax's; subclass it for more of them (`batch_stats: Any`).

    Example:
      >>> import jax.numpy as jnp, jmp_scale, optax
      >>> from jmp_scale.linen import TrainState
      >>> state = TrainState.create(apply_fn=None, params={"w": jnp.float32(3.0)}, tx=optax.sgd(0.5),
      ...                           loss_scale=jmp_scale.DynamicLossScale(2.0**15))
      >>> loss, grads = state.value_and_grad(lambda params: params["w"] ** 2)(state.params)
      >>> state = state.apply_gradients(grads=grads, value=loss)
      >>> float(state.params["w"]), int(state.step), float(state.loss_scale.loss_scale)
      (0.0, 1, 32768.0)
    """

    opt_state: Any = struct.field(pytree_node=True)  # a LossScaleState

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any] | None,
        params: Any,
        tx: optax.GradientTransformation,
        loss_scale: LossScale | None = None,
        **kwargs: Any,
    ) -> Self:
        """A state at step 0 with `tx` wrapped in `with_loss_scale`.

        Args:
          apply_fn: usually `model.apply`.
          params: the parameters, float32 masters.
          tx: any Optax optimizer; taken as it is if it already is `with_loss_scale(...)`.
          loss_scale: the initial loss scale; default `NoOpLossScale()`.
          **kwargs: the subclass's own fields. A buffer that stands in two fields (an EMA that starts as
            `params`) is copied, so that the whole state can be donated.

        Raises:
          ValueError: `loss_scale` is given, and `tx` has one already.
        """
        tx = _flax.wrap_once(
            "TrainState.create",
            tx,
            loss_scale,
            params["params"] if _has_overwritten(params) else params,
        )
        return fresh_buffers(
            super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)
        )

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
    ) -> Callable[..., Any]:
        """`jmp_scale.value_and_grad` with this state's loss scale: true loss, true f32 gradients."""
        return value_and_grad(loss_fn, self.loss_scale, argnums, has_aux, **kwargs)

    def apply_gradients(
        self, *, grads: Any, value: ArrayLike | None = None, **changes: Any
    ) -> Self:
        """Updates parameters, optimizer state and fields, or none of them if the step is skipped.

        Args:
          grads: true gradients, as `value_and_grad` gives them.
          value: the true loss, a scalar; a non-finite one skips the step too, and leaves S alone.
          **changes: new values of other fields (`batch_stats`, an EMA, ...), of the old ones' structure,
            shapes and dtypes. On a skipped step every one keeps its old value.

        Returns:
          The next state: `step` is one more, the loss scale adjusted.

        Raises:
          TypeError: a name in `changes` is no field.
          ValueError: a change differs from its field in structure, shape or dtype.
        """
        tx: Any = self.tx
        bound = optax.GradientTransformation(
            tx.init, functools.partial(tx.update, value=value)
        )
        state: Any = train_state.TrainState.apply_gradients(
            self.replace(tx=bound), grads=grads, **changes
        )
        if _has_overwritten(self.params):  # Flax replaces these without asking tx
            changes["params"] = state.params
        kept = {name: getattr(self, name) for name in changes}
        return state.replace(
            tx=tx, **select_tree(state.opt_state.grads_finite, changes, kept)
        )


def _has_overwritten(tree: Any) -> bool:
    """Whether a tree has Flax's float8 collection, whose "gradient" is its next value."""
    return isinstance(tree, Mapping) and OVERWRITE_WITH_GRADIENT in tree
