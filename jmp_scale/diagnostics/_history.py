"""The last steps of a run, kept on the device."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._loss_scale import scale_value
from ._casts import log2_magnitude, magnitude_bits
from ._states import plain
from ._updates import LostUpdates


class HistorySummary(NamedTuple):
    """What `LossScaleHistory.summary` counts over the recorded steps.

    Python numbers.

    Attributes:
      steps: recorded steps, at most the capacity.
      skip_rate: share of them that was skipped, 0 without steps.
      longest_run: most skipped steps in a row.
      growths: steps before which S grew.
      backoffs: steps before which S backed off.
      loss_nonfinite: steps whose loss was not finite, which no S changes.
      spikes: steps that were skipped although their loss and gradients were finite.
      overflows: steps whose gradients were not finite, although their loss was.
    """

    steps: int
    skip_rate: float
    longest_run: int
    growths: int
    backoffs: int
    loss_nonfinite: int
    spikes: int
    overflows: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScaleHistory:
    """A ring buffer of the last N steps.

    A pytree to carry beside the optimizer state, also through `lax.scan`. Make it with
    `create(N)`, and record each step with `push`, which returns the next history.
    `push` works under `jit`; `to_dict` and `summary` run on the host. Numbers that were
    not passed to `push` are NaN, flags True.

    Attributes:
      log2_scale: f32[N], log2 of the S that scaled the loss of the step.
      amax: f32[N], the largest unscaled gradient magnitude.
      grads_finite: bool[N], whether gradients and loss were finite.
      loss_finite: bool[N], whether the loss was finite.
      applied: bool[N], whether the step was applied: `grads_finite`, and not a spike.
      loss: f32[N], the unscaled loss.
      grad_norm: f32[N], the global norm of the unscaled gradients.
      lost_entries: f32[N], the share of the updates that was lost in rounding, and
      lost_magnitude: f32[N], of their size: see `lost_updates`.
      loss_limit: f32[N], the loss above which the step was a spike.
      norm_limit: f32[N], the gradient norm above which the step was a spike.
      first_loss: f32[], the first finite loss of all, which stays when it has left the
        buffer: what there was to gain.
      first_norm: f32[], the first finite gradient norm that was not zero.
      pushed: i32[], steps recorded in total; step i is at index i modulo N.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale
      >>> from jmp_scale import diagnostics
      >>> loss_scale = jmp_scale.DynamicLossScale(2.0**15, period=2)
      >>> history = diagnostics.LossScaleHistory.create(100)
      >>> for finite in (False, True, True, True):
      ...     history = history.push(loss_scale, jnp.array(finite))
      ...     loss_scale = loss_scale.adjust(jnp.array(finite))
      >>> summary = history.summary()
      >>> summary.skip_rate, summary.longest_run, summary.growths, summary.backoffs
      (0.25, 1, 1, 1)
    """

    log2_scale: jax.Array
    amax: jax.Array
    grads_finite: jax.Array
    loss_finite: jax.Array
    applied: jax.Array
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
        """An empty history of the last `capacity` steps; 1000 take 35 kB.

        Raises:
          ValueError: a capacity that is not an integer >= 1.
        """
        is_integer = isinstance(capacity, (int, np.integer))
        if isinstance(capacity, bool) or not is_integer or capacity < 1:
            raise ValueError(
                "LossScaleHistory.create: expected capacity to be an integer >= 1, got "
                f"{capacity!r}"
            )
        flags = {name: jnp.ones(capacity, jnp.bool_) for name in _FLAGS}
        numbers = {name: jnp.full(capacity, jnp.nan, jnp.float32) for name in _NUMBERS}
        # Copied below: two leaves of one buffer cannot be donated
        # (test_a_history_keeps_its_types_and_buffers_through_a_donated_scan).
        nan = jnp.full([], jnp.nan, jnp.float32)
        zero = jnp.zeros([], jnp.int32)
        return cls(
            **flags, **numbers, first_loss=nan, first_norm=jnp.copy(nan), pushed=zero
        )

    def push(
        self,
        loss_scale: Any,
        grads_finite: ArrayLike,
        *,
        loss_finite: ArrayLike | None = None,
        amax: ArrayLike = float("nan"),
        applied: ArrayLike | None = None,
        loss: ArrayLike | None = None,
        grad_norm: ArrayLike | None = None,
        lost_updates: LostUpdates | None = None,
        guard: Any = None,
    ) -> "LossScaleHistory":
        """The history with one more step, which replaces the oldest once it is full.

        `health` needs `loss` and `grad_norm` to see a run that goes wrong with finite
        numbers, and `lost_updates` to see one that has stalled.

        Args:
          loss_scale: the loss scale that scaled the loss of this step, so the one
            before the update.
          grads_finite: bool[], `LossScaleState.grads_finite` after the update.
          loss_finite: bool[], whether the unscaled loss is finite; default None takes
            it from `loss`, and True without one.
          amax: f32[], the largest magnitude of the unscaled gradients:
            `grad_report(...).amax.max()`.
          applied: bool[], `LossScaleState.applied` after the update; default None takes
            `grads_finite`.
          loss: f32[], the unscaled loss.
          grad_norm: f32[], the norm of the unscaled gradients, before any clipping:
            `metrics(opt_state, grads)["grad_norm"]` or `optax.global_norm(grads)`.
          lost_updates: what `lost_updates(params, updates)` returns.
          guard: `LossScaleState.guard` before the update, whose limits are recorded.

        Returns:
          A history of the same structure, shapes and dtypes.

        Raises:
          ValueError: a loss scale or an argument of a shape other than ().
        """
        s = scale_value("LossScaleHistory.push", loss_scale)
        guard, nan = plain(guard), float("nan")
        lost = (nan, nan) if lost_updates is None else lost_updates
        if loss_finite is None:
            loss_finite = True if loss is None else jnp.isfinite(loss)
        values = {
            # Exact for powers of two, which a device's own log2 need not be: `summary`
            # counts every change of S as a growth or a backoff.
            "log2_scale": log2_magnitude(magnitude_bits(s)),
            "loss": nan if loss is None else loss,
            "grads_finite": grads_finite,
            "loss_finite": loss_finite,
            "amax": amax,
            "applied": grads_finite if applied is None else applied,
            "grad_norm": nan if grad_norm is None else grad_norm,
            "lost_entries": lost[0],
            "lost_magnitude": lost[1],
            "loss_limit": nan if guard is None else guard.loss_limit,
            "norm_limit": nan if guard is None else guard.norm_limit,
        }
        for name, value in values.items():
            if jnp.shape(value) != ():
                raise ValueError(
                    f"LossScaleHistory.push: expected {name} to be a scalar, got shape "
                    f"{jnp.shape(value)}; reduce it, or vmap push"
                )
        return self._with_step(values)

    def _with_step(self, values: dict[str, Any]) -> "LossScaleHistory":
        index = self.pushed % self.pushed.dtype.type(self.log2_scale.shape[0])
        arrays = {}
        for name, value in values.items():
            buffer = getattr(self, name)
            # The buffer's dtype, not that of a bfloat16 loss: a carry keeps its types
            # (test_a_history_keeps_its_types_and_buffers_through_a_donated_scan).
            value = jnp.asarray(value).astype(buffer.dtype)
            arrays[name] = buffer.at[index].set(value)
            if name in ("loss", "grad_norm"):
                first_name = "first_loss" if name == "loss" else "first_norm"
                first = getattr(self, first_name)
                # A first norm of 0 would make every later one a growth without bound
                # (test_the_first_usable_loss_and_norm_stay).
                usable = jnp.isfinite(value) & ((value != 0) | (name == "loss"))
                is_first = jnp.isnan(first) & usable
                arrays[first_name] = jnp.where(is_first, value, first)
        return dataclasses.replace(self, **arrays, pushed=self.pushed + 1)

    def to_dict(self) -> dict[str, np.ndarray]:
        """The recorded steps, oldest first, as NumPy arrays (host).

        Returns:
          The arrays over the steps by name, and "step", counted from 0.
        """
        pushed, capacity = int(self.pushed), self.log2_scale.shape[0]
        steps = np.arange(max(pushed - capacity, 0), pushed)
        arrays = {
            name: np.asarray(getattr(self, name))[steps % capacity]
            for name in (*_NUMBERS, *_FLAGS)
        }
        return {"step": steps, **arrays}

    def summary(self) -> HistorySummary:
        """Rates and counts over the recorded steps (host)."""
        recorded = self.to_dict()
        log2_scale, skipped = recorded["log2_scale"], ~recorded["applied"]
        loss_nonfinite = ~recorded["loss_finite"]
        steps, changes = len(skipped), np.diff(log2_scale)
        # With an applied step before the first and after the last, each run of skips is
        # the gap between two neighbors
        # (test_a_history_counts_skips_growths_and_backoffs).
        applied = np.flatnonzero(np.concatenate([[True], ~skipped, [True]]))
        return HistorySummary(
            steps=steps,
            skip_rate=float(skipped.mean()) if steps else 0.0,
            longest_run=int(np.diff(applied).max()) - 1,
            growths=int((changes > 0).sum()),
            backoffs=int((changes < 0).sum()),
            loss_nonfinite=int(loss_nonfinite.sum()),
            spikes=int((skipped & recorded["grads_finite"]).sum()),
            # A loss that is not finite makes its gradients so: one step, counted once.
            overflows=int((~recorded["grads_finite"] & ~loss_nonfinite).sum()),
        )


_FLAGS = ("grads_finite", "loss_finite", "applied")
_NUMBERS = (
    "log2_scale",
    "amax",
    "loss",
    "grad_norm",
    "lost_entries",
    "lost_magnitude",
    "loss_limit",
    "norm_limit",
)
