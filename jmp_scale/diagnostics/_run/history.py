"""The last steps of a run, kept on the device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._scaling.finite import finite_and_norm
from ..._scaling.loss_scale import number_of
from ..._state import LossScaleState, find_loss_scale_states
from ..._tree import is_variable
from ..._validation import Arguments
from .._tables import printed
from .casts import log2_magnitude, magnitude_bits
from .metrics import find_states
from .updates import lost_updates


@printed
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScaleHistory:
    """A ring buffer of the last N steps, a pytree to carry next to the optimizer state.

    Numbers that are not known are NaN.

    Attributes:
      log2_scale: f32[N], log2 of the S that scaled the loss of the step.
      grads_finite: bool[N], whether gradients and loss were finite.
      loss_finite: bool[N], whether the loss was finite.
      applied: bool[N], whether the step was applied.
      spike: bool[N], whether a guard skipped it as a spike.
      loss: f32[N], the unscaled loss.
      grad_norm: f32[N], the global norm of the unscaled gradients.
      lost_entries: f32[N], as in `lost_updates`.
      lost_magnitude: f32[N], as in `lost_updates`.
      loss_limit: f32[N], the loss above which the step was a spike.
      norm_limit: f32[N], the gradient norm above which it was one.
      first_loss: f32[], the first finite loss of all.
      first_norm: f32[], the first finite gradient norm that was not zero.
      pushed: i32[], steps recorded in total; step i is at index i modulo N.
    """

    log2_scale: jax.Array
    grads_finite: jax.Array
    loss_finite: jax.Array
    applied: jax.Array
    spike: jax.Array
    loss: jax.Array
    grad_norm: jax.Array
    lost_entries: jax.Array
    lost_magnitude: jax.Array
    loss_limit: jax.Array
    norm_limit: jax.Array
    first_loss: jax.Array
    first_norm: jax.Array
    pushed: jax.Array

    @classmethod
    def create(cls, capacity: int = 1000) -> "LossScaleHistory":
        """An empty history of the last `capacity` steps; 1000 take 32 kB.

        Raises:
          TypeError, ValueError: a capacity that is not an integer >= 1.
        """
        arguments = Arguments("LossScaleHistory.create")
        capacity = arguments.integer("capacity", capacity, least=1)
        # A buffer for each, because two leaves of one buffer cannot be donated.
        start = {name: True if name in _FLAGS else _NAN for name in _COLUMNS}
        buffers = {name: jnp.full(capacity, value) for name, value in start.items()}
        first = {name: jnp.array(_NAN) for name in _FIRST}
        return cls(**buffers, **first, pushed=jnp.zeros([], jnp.int32))

    def push(
        self,
        before: Any,
        after: Any,
        *,
        loss: ArrayLike | None = None,
        grads: Any = None,
        params: Any = None,
        updates: Any = None,
    ) -> "LossScaleHistory":
        """The history with one more step, of the same structure, shapes and dtypes.

        Compatible with `jit`, `vmap` and `lax.scan`.

        Args:
          before: the state of `with_loss_scale` before the step, or any pytree with
            exactly one. `nnx.state` changes in place, so take
            `jax.tree.map(lambda x: x, nnx.state(optimizer))` before the update.
          after: the same after the step.
          loss: f32[], the unscaled loss.
          grads: unscaled gradients, before any clipping.
          params: parameters before the step.
          updates: the optimizer's updates of them, as in `lost_updates`.

        Raises:
          ValueError: not exactly one state of one step in `before` or `after`, or the
            same; a loss of a shape other than (); only one of `params` and `updates`.
        """
        if before is after or _share_variables(before, after):
            raise ValueError(
                "LossScaleHistory.push: expected the states before and after a step, "
                "got one state twice; an nnx.Optimizer changes in place, so take "
                "jax.tree.map(lambda x: x, nnx.state(optimizer)) before the update"
            )
        old, new = _the_state("before", before), _the_state("after", after)
        lost_entries, lost_magnitude = _NAN, _NAN
        if params is not None or updates is not None:
            lost_entries, lost_magnitude = lost_updates(params, updates)
        s = number_of(old.loss_scale)
        loss_finite = new.nonfinite_losses == old.nonfinite_losses
        if loss is not None:
            loss_finite &= jnp.isfinite(loss)
        values = {
            # Exact for powers of two, unlike a device's log2: `health` compares.
            "log2_scale": _NAN if s is None else log2_magnitude(magnitude_bits(s)),
            "grads_finite": new.grads_finite,
            "applied": new.applied,
            "spike": new.spikes != old.spikes,
            "loss": _NAN if loss is None else loss,
            "loss_finite": loss_finite,
            "grad_norm": _NAN if grads is None else finite_and_norm(grads)[1],
            "lost_entries": lost_entries,
            "lost_magnitude": lost_magnitude,
            # A mapping made by Flax has no configuration of the guard.
            "loss_limit": getattr(old.guard, "loss_limit", _NAN),
            "norm_limit": getattr(old.guard, "norm_limit", _NAN),
        }
        index = self.pushed % self.pushed.dtype.type(self.log2_scale.shape[0])
        arrays = {}
        for name, value in values.items():
            if jnp.shape(value) != ():
                raise ValueError(
                    f"LossScaleHistory.push: expected one step, got {name} of shape "
                    f"{jnp.shape(value)}; reduce it, or vmap push"
                )
            buffer = getattr(self, name)
            # The buffer's dtype, not that of a bfloat16 loss: a carry keeps its types.
            values[name] = jnp.asarray(value).astype(buffer.dtype)
            arrays[name] = buffer.at[index].set(values[name])
        for first_name, name in _FIRST.items():
            first, value = getattr(self, first_name), values[name]
            # A first norm of 0 would make every later one a growth without bound.
            usable = jnp.isfinite(value) & ((value != 0) | (name == "loss"))
            arrays[first_name] = jnp.where(jnp.isnan(first) & usable, value, first)
        return dataclasses.replace(self, **arrays, pushed=self.pushed + 1)

    def to_dict(self) -> dict[str, np.ndarray]:
        """The arrays over the steps by name, oldest first, and "step" from 0 (host)."""
        pushed, capacity = int(self.pushed), self.log2_scale.shape[0]
        steps = np.arange(max(pushed - capacity, 0), pushed)
        arrays = {"step": steps}
        for name in _COLUMNS:
            arrays[name] = np.asarray(getattr(self, name))[steps % capacity]
        return arrays

    def summary(self) -> str:
        """The number of recorded steps that were skipped, by cause (host)."""
        recorded = self.to_dict()
        applied, spike = recorded["applied"], recorded["spike"]
        # A loss that is not finite makes its gradients so, and a spike may overflow.
        broken = ~(recorded["loss_finite"] | applied)
        overflowed = ~(recorded["grads_finite"] | broken | spike)
        return (
            f"{(~applied).sum()} of {applied.size} steps skipped: "
            f"{overflowed.sum()} by overflow, {broken.sum()} by a broken loss, "
            f"{spike.sum()} by a spike"
        )


_NAN = np.float32(np.nan)
_FLAGS = ("grads_finite", "loss_finite", "applied", "spike")
_COLUMNS = [field.name for field in dataclasses.fields(LossScaleHistory)[:-3]]
_FIRST = {"first_loss": "loss", "first_norm": "grad_norm"}


def _the_state(name: str, tree: Any) -> LossScaleState:
    states = find_states("LossScaleHistory.push", tree, name)
    if len(states) > 1:
        paths = " and ".join(path for path, _ in states[:2])
        raise ValueError(
            f"LossScaleHistory.push: expected one state of with_loss_scale in {name}, "
            f"got {len(states)}, at {paths}; give one, and keep a history for each"
        )
    return states[0][1]


def _share_variables(before: Any, after: Any) -> bool:
    """Whether an NNX variable, which changes in place, is in the states of both."""

    def variables(tree: Any) -> set[int]:
        leaves = jax.tree.leaves(find_loss_scale_states(tree), is_leaf=is_variable)
        return {id(x) for x in leaves if is_variable(x)}

    return not variables(before).isdisjoint(variables(after))
