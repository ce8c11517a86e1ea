"""The last steps of a loss scale, kept on the device."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._loss_scale import scale_value
from ._casts import log2_magnitude, magnitude_bits


class HistorySummary(NamedTuple):
    """What `LossScaleHistory.summary` counts over the recorded steps, in Python numbers.

    Attributes:
      steps: recorded steps, at most the capacity.
      skip_rate: share of them that was skipped, 0 without steps.
      longest_run: most skipped steps in a row.
      growths: steps before which S grew.
      backoffs: steps before which S backed off.
      loss_nonfinite: steps whose loss was not finite, which no S changes.
      log2_scale_min: log2 of the smallest S, NaN without steps.
      log2_scale_median: log2 of the median S, NaN without steps.
      log2_scale_last: log2 of the last S, NaN without steps.
    """

    steps: int
    skip_rate: float
    longest_run: int
    growths: int
    backoffs: int
    loss_nonfinite: int
    log2_scale_min: float
    log2_scale_median: float
    log2_scale_last: float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScaleHistory:
    """A ring buffer of the last N steps: a pytree to carry beside the optimizer state, in `lax.scan` too.

    Make it with `create(N)`, and record each step with `push`, which changes nothing but returns the next.

    Attributes:
      log2_scale: f32[N], log2 of the S that scaled the loss of the step.
      amax: f32[N], the largest unscaled gradient magnitude, NaN where it was not given.
      grads_finite: bool[N], whether the step was applied.
      loss_finite: bool[N], whether its loss was finite.
      pushed: i32[], steps recorded in total; step i stands at index i modulo N.

    Example:
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
    pushed: jax.Array

    @classmethod
    def create(cls, capacity: int = 1000) -> "LossScaleHistory":
        """An empty history of the last `capacity` steps; 1000 take 10 kB.

        Raises:
          ValueError: a capacity that is no whole number >= 1.
        """
        if (
            isinstance(capacity, bool)
            or not isinstance(capacity, (int, np.integer))
            or capacity < 1
        ):
            raise ValueError(
                f"LossScaleHistory.create: capacity must be an integer >= 1, got {capacity!r}"
            )
        return cls(
            log2_scale=jnp.zeros(capacity, jnp.float32),
            amax=jnp.full(capacity, jnp.nan, jnp.float32),
            grads_finite=jnp.ones(capacity, jnp.bool_),
            loss_finite=jnp.ones(capacity, jnp.bool_),
            pushed=jnp.zeros([], jnp.int32),
        )

    def push(
        self,
        loss_scale: Any,
        grads_finite: ArrayLike,
        *,
        loss_finite: ArrayLike = True,
        amax: ArrayLike = float("nan"),
    ) -> "LossScaleHistory":
        """The history with one more step, which replaces the oldest once it is full.

        Args:
          loss_scale: the loss scale that scaled the loss of this step, so the one before `adjust`.
          grads_finite: bool[], whether the step is applied: `LossScaleState.grads_finite` after the update.
          loss_finite: bool[], whether the true loss is finite.
          amax: f32[], the largest magnitude of the true gradients: `grad_report(...).amax.max()`.

        Returns:
          A history of the same structure, shapes and dtypes.

        Raises:
          ValueError: a loss scale or an argument of a shape other than ().
        """
        s = scale_value("LossScaleHistory.push", loss_scale)
        values = {
            "grads_finite": grads_finite,
            "loss_finite": loss_finite,
            "amax": amax,
        }
        for name, value in values.items():
            if jnp.shape(value) != ():
                raise ValueError(
                    f"LossScaleHistory.push: {name} must be a scalar, got {jnp.shape(value)}"
                )
        values = {"log2_scale": log2_magnitude(magnitude_bits(s)), **values}
        index = self.pushed % self.pushed.dtype.type(self.log2_scale.shape[0])
        arrays = {name: getattr(self, name) for name in values}
        arrays = {
            n: a.at[index].set(jnp.asarray(values[n]).astype(a.dtype))
            for n, a in arrays.items()
        }
        return dataclasses.replace(self, **arrays, pushed=self.pushed + 1)

    def to_dict(self) -> dict[str, np.ndarray]:
        """The recorded steps, of the host, oldest first: the four arrays, and "step", counted from 0."""
        pushed, capacity = int(self.pushed), self.log2_scale.shape[0]
        steps = np.arange(max(pushed - capacity, 0), pushed)
        names = ("log2_scale", "amax", "grads_finite", "loss_finite")
        return {
            "step": steps,
            **{
                name: np.asarray(getattr(self, name))[steps % capacity]
                for name in names
            },
        }

    def summary(self) -> HistorySummary:
        """Rates and counts over the recorded steps, of the host."""
        recorded = self.to_dict()
        log2_scale, skipped = recorded["log2_scale"], ~recorded["grads_finite"]
        steps, changes = len(skipped), np.diff(log2_scale)
        applied = np.flatnonzero(np.concatenate([[True], ~skipped, [True]]))
        return HistorySummary(
            steps=steps,
            skip_rate=float(skipped.mean()) if steps else 0.0,
            longest_run=int(np.diff(applied).max()) - 1,
            growths=int((changes > 0).sum()),
            backoffs=int((changes < 0).sum()),
            loss_nonfinite=int((~recorded["loss_finite"]).sum()),
            log2_scale_min=float(log2_scale.min()) if steps else float("nan"),
            log2_scale_median=float(np.median(log2_scale)) if steps else float("nan"),
            log2_scale_last=float(log2_scale[-1]) if steps else float("nan"),
        )
