"""`SpikeGuard`: detects steps far outside the usual range of a run."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from .. import _pytree, _validation
from .._types import Flag, Scalar

# Smallest deviations. Without them, any change after equal losses would be a spike.
_NORM_FLOOR = 0.25  # bits, a factor of 1.19
_LOSS_FLOOR = 0.02  # a fraction of the mean

# A norm may exceed its mean further if the loss is ordinary: 16 deviations at a
# threshold of 6, but at most 4 bits (benchmarks/spike-rules.md).
_LONE_NORM, _LARGEST_LONE_NORM = 8 / 3, 2 / 3

_FEWEST_STEPS = 20  # until mean and deviation are known well enough
_LARGEST_COUNT = 2**30  # so that no count of accepted steps overflows int32


@_pytree.register
@dataclasses.dataclass(frozen=True, repr=False)
class SpikeGuard(_pytree.Pytree):
    """Detects spikes: steps whose loss or gradient norm is an extreme outlier.

    Use it for long runs, in which one bad batch can spoil the parameters or the moments
    of Adam: `with_loss_scale(tx, guard=SpikeGuard())` skips a spike like an overflow,
    except that the loss scale stays.

    It watches two numbers x, the largest of all devices: the loss, if it is passed as
    `value`, and log2 of the global norm of the unscaled gradients. A norm above 1.8e19,
    whose square overflows, counts as the largest float32.

    ```text
    outlier:   x > mean + threshold * max(deviation, floor), for one of the two
    spike:     an outlier, and in_a_row < max_in_a_row
    accepted:  finite, and not a spike; every x enters its mean and deviation
    restart:   an accepted outlier restarts mean and deviation
    ```

    The floor of log2 of the norm is 0.25 bits. With a loss that is less than halfway
    from its mean to its limit it is `max(0.25, min(8/3 * norm_deviation, 2/3))` bits.
    That of the loss is `0.02 * abs(loss_mean)`. Floor and deviation of the loss are
    multiplied by `max(1, norm_deviation / 0.25)`, because losses have long tails where
    norms vary.

    Mean and deviation are exponential averages, unbiased from the first step on. There
    are no spikes before `warmup` accepted steps. In the warm-up an outlier enters the
    statistics clipped to its limit, and a large drop restarts them, so that one huge
    step does not blind the guard. A step that is not finite is a spike only if its loss
    is finite and an outlier; it never changes the statistics.

    The guard is a frozen dataclass and a pytree. Its leaves are the statistics, f32[],
    and counts, i32[]: `loss_steps` and `norm_steps` entered the statistics; `accepted`
    since the start or the last restart; `in_a_row`, consecutive spikes.

    Source: OLMo-core's `SkipStepOptimizer` and MaxText's `skip_step_on_spikes`, here
    with exponential averages, one-sided, and over accepted steps only.

    Args:
      threshold: deviations above the mean from which a step is a spike, > 0; 6.
      decay: of mean and deviation, per step, in (0, 1); 0.99 averages about 100 steps.
      warmup: accepted steps until a step can be a spike; 100.
      max_in_a_row: spikes in a row after which the next step is accepted; 10.

    Raises:
      TypeError: an argument that is not a number.
      ValueError: an argument out of its range; the message names the range.
    """

    _may_round: ClassVar[bool] = True

    threshold: float = 6.0
    decay: float = 0.99
    warmup: int = 100
    max_in_a_row: int = 10
    _: dataclasses.KW_ONLY
    loss_mean: _pytree.LeafField = None
    loss_deviation: _pytree.LeafField = None
    loss_steps: _pytree.LeafField = None
    norm_mean: _pytree.LeafField = None
    norm_deviation: _pytree.LeafField = None
    norm_steps: _pytree.LeafField = None
    accepted: _pytree.LeafField = None
    in_a_row: _pytree.LeafField = None

    def __post_init__(self) -> None:
        values = _validation.numbers(_validation.Arguments("SpikeGuard"), vars(self))
        for name in self._leaf_names:
            if getattr(self, name) is None:
                is_float = name.endswith(("mean", "deviation"))
                values[name] = jnp.zeros([], jnp.float32 if is_float else jnp.int32)
        vars(self).update(values)

    def _starts(self) -> dict[str, int]:
        return dict.fromkeys(self._leaf_names, 0)

    def judge(
        self, loss: Scalar | None, norm: Scalar, finite: Flag
    ) -> tuple[Flag, "SpikeGuard"]:
        """Returns whether a step is a spike, bool[], and the guard after it.

        Arguments are equal on all devices. A loss is NaN if it is not finite.
        """
        # log2 of 0 would make the deviation infinite, and so blind the guard.
        has_norm = finite & (norm > 0)
        log2_norm = jnp.log2(jnp.where(has_norm, norm, 1.0))
        loss_is_outlier = is_ordinary = jnp.array(False)
        if loss is not None:
            # A spike may also overflow the gradients, so the loss alone is checked.
            known = jnp.isfinite(loss)
            loss, limit = jnp.where(known, loss, 0), self._loss_limit
            loss_is_outlier = known & self._is_warm(self.loss_steps) & (loss > limit)
            is_ordinary = loss <= self.loss_mean / 2 + limit / 2
        norm_is_outlier = log2_norm > self._log2_norm_limit(is_ordinary)
        is_outlier = loss_is_outlier | (
            has_norm & self._is_warm(self.norm_steps) & norm_is_outlier
        )
        spike = is_outlier & (self.in_a_row < self.max_in_a_row)
        accepted = finite & ~spike

        enters, limit = accepted & has_norm, self._log2_norm_limit(jnp.array(False))
        leaves = self._learned("norm", log2_norm, limit, is_outlier, enters)
        if loss is not None:
            # Otherwise each nonzero value of a margin loss, which is mostly 0, would be
            # a spike.
            enters = accepted & (has_norm | (finite & (self.norm_steps == 0)))
            leaves |= self._learned("loss", loss, self._loss_limit, is_outlier, enters)
        in_a_row = jnp.where(spike, self.in_a_row + 1, self.in_a_row)
        leaves["in_a_row"] = jnp.where(accepted, 0, in_a_row)
        count = jnp.minimum(jnp.where(is_outlier, 0, self.accepted) + 1, _LARGEST_COUNT)
        leaves["accepted"] = jnp.where(accepted, count, self.accepted)
        return spike, _pytree.with_fields(self, **leaves)

    @property
    def _loss_limit(self) -> jax.Array:
        # The norm's logarithm shortens its tails, and tells how long those of the loss
        # are, which may be negative and so has no logarithm.
        irregular = jnp.maximum(1, self.norm_deviation / _NORM_FLOOR)
        floor = _LOSS_FLOOR * jnp.abs(self.loss_mean)
        spread = irregular * jnp.maximum(self.loss_deviation, floor)
        return self.loss_mean + self.threshold * spread

    def _log2_norm_limit(self, is_beside_ordinary_loss: jax.Array) -> jax.Array:
        is_lone = is_beside_ordinary_loss & self._is_warm(self.loss_steps)
        lone = jnp.minimum(_LONE_NORM * self.norm_deviation, _LARGEST_LONE_NORM)
        floor = jnp.where(is_lone, jnp.maximum(lone, _NORM_FLOOR), _NORM_FLOOR)
        spread = jnp.maximum(self.norm_deviation, floor)
        return self.norm_mean + self.threshold * spread

    def _is_warm(self, steps: jax.Array) -> jax.Array:
        # `steps` differs from `accepted` if the loss is passed only from some step on.
        enough = steps >= max(min(self.warmup, _FEWEST_STEPS), 1)
        return (self.accepted >= self.warmup) & enough

    def _learned(
        self, name: str, x: Scalar, limit: Scalar, is_outlier: Flag, enters: Flag
    ) -> dict[str, jax.Array]:
        """Returns the leaves of the loss or the norm (`name`) after `x`."""
        statistics = ("mean", "deviation", "steps")
        mean, deviation, steps = (getattr(self, f"{name}_{s}") for s in statistics)
        warming = ~self._is_warm(steps)
        # The statistics restart at an accepted outlier, which begins a new level, and
        # at a drop in the warm-up, which means that the earlier steps were huge.
        first = is_outlier | (steps == 0) | (warming & (x < 2 * mean - limit))
        steps = jnp.where(first, 0, steps)
        # An outlier is clipped: a huge deviation would hide all other spikes.
        x = jnp.where(warming & ~first, jnp.minimum(x, limit), x)
        # The n-th step has the weight (1 - decay) / (1 - decay^n) in an unbiased mean.
        # For a decay near 1, 1 - decay^n cancels; expm1 does not.
        bias = -jnp.expm1((steps + 1).astype(jnp.float32) * math.log(self.decay))
        weight = (1 - self.decay) / bias
        difference = x - mean
        # Deviations and hypot in place of variances: the square of a difference of 1e20
        # is infinite, and would stay infinite.
        spread = jnp.hypot(deviation, jnp.sqrt(weight) * difference)
        rest = jnp.maximum(1 - weight, 0)  # rounding may leave -1e-8
        new = {
            f"{name}_mean": jnp.where(first, x, mean + weight * difference),
            f"{name}_deviation": jnp.where(first, 0, jnp.sqrt(rest) * spread),
            f"{name}_steps": jnp.minimum(steps + 1, _LARGEST_COUNT),
        }
        return {k: jnp.where(enters, v, getattr(self, k)) for k, v in new.items()}
