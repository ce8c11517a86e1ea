"""`LossScaleHistory`: records the last steps of a run on the device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._scaling.loss_scale import number_of
from ..._state import LossScaleState, find_loss_scale_states
from ..._tree import is_variable
from ..._types import PyTree
from ..._validation import Arguments
from .metrics import find_states, numbers_of_step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScaleHistory:
    """A ring buffer of the last N steps: a pytree, carried next to the optimizer state.

    Use it in the compiled train step, and pass it to `HealthLog` or to
    `jmp_scale.plotting`.

    Attributes:
      columns: f32[N] or bool[N], as `to_dict` returns them; step i is at index i
        modulo N.
      first_loss: f32[], the first finite loss of the run, or NaN.
      first_norm: f32[], the first finite nonzero gradient norm of the run, or NaN.
      pushed: i32[], steps recorded in total.
    """

    columns: dict[str, jax.Array]
    first_loss: jax.Array
    first_norm: jax.Array
    pushed: jax.Array

    @classmethod
    def create(cls, capacity: int = 1000) -> "LossScaleHistory":
        """Creates an empty history of the last `capacity` steps; 1000 need 24 kB."""
        capacity = Arguments("LossScaleHistory.create").integer("capacity", capacity, 1)
        # Each leaf has its own buffer, because a shared one cannot be donated.
        columns = {name: jnp.ones(capacity, bool) for name in _FLAGS}
        columns |= {name: jnp.full(capacity, jnp.nan, "float32") for name in _NUMBERS}
        first_loss, first_norm = (jnp.array(jnp.nan, jnp.float32) for _ in range(2))
        return cls(columns, first_loss, first_norm, jnp.zeros([], jnp.int32))

    def push(
        self,
        before: PyTree,
        after: PyTree,
        *,
        loss: ArrayLike | None = None,
        grads: PyTree = None,
        params: PyTree = None,
        updates: PyTree = None,
    ) -> "LossScaleHistory":
        """Returns the history with one more step, of the same structure and types.

        Compatible with `jit`, `vmap` and `lax.scan`.

        Args:
          before: the state of `with_loss_scale` before the step, or any pytree with
            exactly one. `nnx.state` changes in place, so take
            `jax.tree.map(lambda x: x, nnx.state(optimizer))` before the update.
          after: the state after the step.
          loss: f32[], the unscaled loss.
          grads: unscaled gradients, before any clipping.
          params: parameters before the step.
          updates: the optimizer's updates of these, as in `metrics`.

        Raises:
          ValueError: `before` or `after` does not contain exactly one state, or both
            are the same.
        """
        if before is after or _variables(before) & _variables(after):
            raise ValueError(
                "LossScaleHistory.push: expected the states before and after a step, "
                "got one state twice; an nnx.Optimizer changes in place, so take "
                "jax.tree.map(lambda x: x, nnx.state(optimizer)) before the update"
            )
        old, new = _the_state("before", before), _the_state("after", after)
        counted = new.nonfinite_losses != old.nonfinite_losses
        known = {
            "loss_scales": number_of(old.loss_scale),
            "grads_finite": new.grads_finite,
            "loss_finite": ~(counted | (loss is not None and ~jnp.isfinite(loss))),
            "applied": new.applied,
            "spike": new.spikes != old.spikes,
            "loss": loss,
            **numbers_of_step(grads, params, updates),
        }
        index = self.pushed % self.pushed.dtype.type(self.columns["loss"].shape[0])
        columns = {}
        for name, column in self.columns.items():
            value = known.get(name)
            # A bfloat16 loss gets the column's dtype, because a carry keeps its types.
            value = jnp.asarray(jnp.nan if value is None else value, column.dtype)
            columns[name] = column.at[index].set(value)
        # Later norms are compared with the first one, so it must not be 0.
        norm = columns["grad_norm"][index]
        first_loss = _first(self.first_loss, columns["loss"][index])
        first_norm = _first(self.first_norm, jnp.where(norm > 0, norm, jnp.nan))
        return LossScaleHistory(columns, first_loss, first_norm, self.pushed + 1)

    def to_dict(self) -> dict[str, np.ndarray]:
        """Returns arrays over the steps, oldest first; unknown numbers are NaN (host).

        - `step`: from 0.
        - `log2_scale`: log2 of the S that scaled the loss of the step.
        - `grads_finite`: whether gradients and loss were finite.
        - `loss_finite`: whether the loss was finite.
        - `applied`: whether the step was applied.
        - `spike`: whether a guard skipped it as a spike.
        - `loss`: the unscaled loss; `grad_norm`: the norm of the unscaled gradients.
        - `lost_entries`, `lost_magnitude`: as in `metrics`.
        """
        pushed, capacity = int(self.pushed), self.columns["loss"].shape[0]
        steps = np.arange(max(pushed - capacity, 0), pushed)
        recorded = jax.device_get(self.columns)
        recorded["log2_scale"] = np.log2(recorded.pop("loss_scales"))
        return {"step": steps} | {k: x[steps % capacity] for k, x in recorded.items()}


_FLAGS = ("grads_finite", "loss_finite", "applied", "spike")
_NUMBERS = ("loss_scales", "loss", "grad_norm", "lost_entries", "lost_magnitude")


def _first(first: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(first) & jnp.isfinite(value), value, first)


def _the_state(name: str, tree: PyTree) -> LossScaleState:
    states = find_states("LossScaleHistory.push", tree, name)
    if len(states) > 1:
        raise ValueError(
            f"LossScaleHistory.push: expected one state of with_loss_scale in {name}, "
            f"got {len(states)}; give one, and keep a history for each"
        )
    return states[0][1]


def _variables(tree: PyTree) -> set[int]:
    """Returns the identities of the NNX variables, which change in place."""
    leaves = jax.tree.leaves(find_loss_scale_states(tree), is_leaf=is_variable)
    return {id(x) for x in leaves if is_variable(x)}
