"""`LossScaleHistory`: records the last steps of a run on the device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._scaling.finite import finite_and_norm
from ..._scaling.loss_scale import number_of
from ..._state import LossScaleState, find_loss_scale_states
from ..._tree import is_variable
from ..._types import PyTree
from ..._validation import Arguments
from .._tables import printed
from .metrics import find_states
from .updates import lost_updates


@printed
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScaleHistory:
    """A ring buffer of the last N steps: a pytree, carried next to the optimizer state.

    Use it in the compiled train step, and pass it to `HealthLog` or to
    `jmp_scale.plotting`. Unknown numbers are NaN.

    Attributes:
      log2_scale: f32[N], log2 of the S that scaled the loss of the step.
      grads_finite: bool[N], whether gradients and loss were finite.
      loss_finite: bool[N], whether the loss was finite.
      applied: bool[N], whether the step was applied.
      spike: bool[N], whether a guard skipped it as a spike.
      loss: f32[N], the unscaled loss.
      grad_norm: f32[N], the global norm of the unscaled gradients.
      lost_entries: f32[N], as in `metrics`.
      lost_magnitude: f32[N], as in `metrics`.
      loss_limit: f32[N], the loss above which the step was a spike.
      norm_limit: f32[N], the gradient norm above which the step was a spike.
      first_loss: f32[], the first finite loss of the run.
      first_norm: f32[], the first finite nonzero gradient norm of the run.
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
        """Creates an empty history of the last `capacity` steps; 1000 need 32 kB.

        Raises:
          TypeError, ValueError: a capacity that is not an integer >= 1.
        """
        arguments = Arguments("LossScaleHistory.create")
        capacity = arguments.integer("capacity", capacity, least=1)
        # Each leaf has its own buffer, because a shared one cannot be donated.
        start = {name: True if name in _FLAGS else _NAN for name in _COLUMNS}
        buffers = {name: jnp.full(capacity, value) for name, value in start.items()}
        first_loss, first_norm = jnp.array(_NAN), jnp.array(_NAN)
        zero = jnp.zeros([], jnp.int32)
        return cls(**buffers, first_loss=first_loss, first_norm=first_norm, pushed=zero)

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
          ValueError: `before` or `after` does not contain exactly one state of one
            step, or both are the same; a loss of a shape other than (); only one of
            `params` and `updates`.
        """
        if before is after or _variables(before) & _variables(after):
            raise ValueError(
                "LossScaleHistory.push: expected the states before and after a step, "
                "got one state twice; an nnx.Optimizer changes in place, so take "
                "jax.tree.map(lambda x: x, nnx.state(optimizer)) before the update"
            )
        old, new = _the_state("before", before), _the_state("after", after)
        lost_entries, lost_magnitude = _NAN, _NAN
        if params is not None or updates is not None:
            lost = lost_updates("LossScaleHistory.push", params, updates)
            lost_entries, lost_magnitude = lost
        s = number_of(old.loss_scale)
        counted = new.nonfinite_losses != old.nonfinite_losses
        values = {
            "log2_scale": _NAN if s is None else _log2(s),
            "loss": _NAN if loss is None else loss,
            "loss_finite": ~(counted | (loss is not None and ~jnp.isfinite(loss))),
            "grads_finite": new.grads_finite,
            "applied": new.applied,
            "spike": new.spikes != old.spikes,
            "grad_norm": _NAN if grads is None else finite_and_norm(grads)[1],
            "lost_entries": lost_entries,
            "lost_magnitude": lost_magnitude,
            # A mapping of Flax does not contain the configuration of the guard.
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
            # A bfloat16 loss gets the buffer's dtype, because a carry keeps its types.
            buffer = getattr(self, name)
            arrays[name] = buffer.at[index].set(jnp.asarray(value).astype(buffer.dtype))
        for first_name, name in (("first_loss", "loss"), ("first_norm", "grad_norm")):
            first, value = getattr(self, first_name), arrays[name][index]
            # Later norms are compared with the first one, so it must not be 0.
            usable = jnp.isfinite(value) & ((value != 0) | (name == "loss"))
            arrays[first_name] = jnp.where(jnp.isnan(first) & usable, value, first)
        return dataclasses.replace(self, **arrays, pushed=self.pushed + 1)

    def to_dict(self) -> dict[str, np.ndarray]:
        """Returns arrays over the steps, oldest first, with "step" from 0 (host)."""
        pushed, capacity = int(self.pushed), self.log2_scale.shape[0]
        steps = np.arange(max(pushed - capacity, 0), pushed)
        arrays = {"step": steps}
        for name in _COLUMNS:
            arrays[name] = np.asarray(getattr(self, name))[steps % capacity]
        return arrays

    def summary(self) -> str:
        """Returns how many recorded steps were skipped, by cause, as text (host)."""
        recorded = self.to_dict()
        applied, spike = recorded["applied"], recorded["spike"]
        # If the loss is not finite, gradients are not either. A spike may overflow.
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


def _log2(s: ArrayLike) -> jax.Array:
    # Exact for powers of two, unlike log2 on a device; `HealthLog` compares them.
    mantissa, exponent = jnp.frexp(jnp.asarray(s, jnp.float32))
    return exponent.astype(jnp.float32) - 1 + jnp.log2(2 * mantissa)


def _the_state(name: str, tree: PyTree) -> LossScaleState:
    states = find_states("LossScaleHistory.push", tree, name)
    if len(states) > 1:
        paths = " and ".join(path for path, _ in states[:2])
        raise ValueError(
            f"LossScaleHistory.push: expected one state of with_loss_scale in {name}, "
            f"got {len(states)}, at {paths}; give one, and keep a history for each"
        )
    return states[0][1]


def _variables(tree: PyTree) -> set[int]:
    """Returns the identities of the NNX variables, which change in place."""
    leaves = jax.tree.leaves(find_loss_scale_states(tree), is_leaf=is_variable)
    return {id(x) for x in leaves if is_variable(x)}
