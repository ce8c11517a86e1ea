"""Detects steps that are far outside of what a run has shown so far."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from .. import _pytree
from .._validation import Arguments

# Least spreads. Without them a run of equal losses or norms makes any other a spike.
_NORM_FLOOR = 0.25  # bits, a factor of 1.19
_LOSS_FLOOR = 0.02  # a share of the mean

# How far a norm may leap beside an ordinary loss: 16 deviations at a threshold of 6, up
# to 4 bits. Clean runs of 10,000 steps have norms of 14 (benchmarks/spike-rules.md).
_LONE_NORM, _LARGEST_LONE_NORM = 8 / 3, 2 / 3

_FEWEST_STEPS = 20  # that a mean and a deviation need
_LARGEST_COUNT = 2**30  # so that no count of accepted steps overflows int32


@_pytree.register
@dataclasses.dataclass(frozen=True, repr=False)
class SpikeGuard(_pytree.Pytree):
    """Detects spikes: steps whose loss or gradient norm is extraordinary.

    `with_loss_scale(tx, guard=SpikeGuard())` skips a spike as it skips an overflow,
    except that the loss scale stays: a bad batch harms neither parameters nor moments.

    Two numbers x are watched: the loss, where it is given as `value`, and log2 of the
    global norm of the unscaled gradients, where they are finite and not all zero. Of
    several devices the largest counts, so that all of them skip.

    ```text
    leaps:     x > mean + threshold * max(deviation, floor), for one of the two
    spike:     leaps, and in_a_row < max_in_a_row
    accepted:  finite, and not a spike; every x enters its mean and deviation
    start:     mean and deviation start again with an accepted leap
    ```

    | x | floor |
    | --- | --- |
    | log2 of the norm | 0.25 bits |
    | that beside an ordinary loss | `max(0.25, min(8/3 * norm_deviation, 2/3))` bits |
    | the loss | `0.02 * abs(loss_mean)`, times `irregular` |

    An ordinary loss is less than halfway from its mean to its limit. `irregular` is
    `max(1, norm_deviation / 0.25)`, and the deviation of the loss is multiplied by it
    too: where norms vary (small batches, a loss near 0), losses have long tails.

    Mean and deviation are exponential with `decay`, unbiased from the first step on.
    Nothing leaps before `warmup` accepted steps, in which a leap enters up to the
    threshold, and a leap down starts the statistics again: one huge step does not blind
    the guard. A step that is not finite is a spike only if its loss is finite and
    leaps, and never changes the statistics.

    A frozen dataclass and a pytree, whose leaves are the statistics, f32[], and counts,
    i32[]: accepted steps whose loss or norm entered, `accepted` steps since the start
    or the last new level, spikes `in_a_row`. All start at 0.

    Source: OLMo-core's `SkipStepOptimizer` and MaxText's `skip_step_on_spikes`, here
    with exponential windows, one-sided, and of accepted steps only.

    Args:
      threshold: deviations above the mean from which a step is a spike, > 0; 6.
      decay: of mean and deviation, per step, in (0, 1); 0.99 remembers about 100.
      warmup: accepted steps that are never spikes, while the statistics form; 100.
      max_in_a_row: spikes in a row after which the next step is accepted; 10.

    Raises:
      TypeError: an argument that is not a number.
      ValueError: an argument out of its range; the message says what is allowed.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale, optax
      >>> guard = jmp_scale.SpikeGuard(warmup=20)
      >>> tx = jmp_scale.with_loss_scale(optax.sgd(0.1), guard=guard)
      >>> state = tx.init(jnp.float32(0.0))
      >>> for step in range(30):
      ...     g = 1e4 if step == 25 else 1.0
      ...     _, state = tx.update(jnp.float32(g), state, value=jnp.float32(0.5))
      >>> int(state.spikes), int(state.skipped)
      (1, 1)
    """

    threshold: float = 6.0
    decay: float = 0.99
    warmup: int = 100
    max_in_a_row: int = 10
    _: dataclasses.KW_ONLY
    loss_mean: _pytree.Leaf = None
    loss_deviation: _pytree.Leaf = None
    loss_steps: _pytree.Leaf = None
    norm_mean: _pytree.Leaf = None
    norm_deviation: _pytree.Leaf = None
    norm_steps: _pytree.Leaf = None
    accepted: _pytree.Leaf = None
    in_a_row: _pytree.Leaf = None

    def __post_init__(self) -> None:
        arguments, values = Arguments("SpikeGuard"), dict(vars(self))
        for name, end, allowed in (
            ("threshold", math.inf, "a finite number > 0"),
            ("decay", 1, "a number in (0, 1)"),
        ):
            value = values[name] = arguments.number(name, values[name])
            arguments.require(0 < value < end, name, value, allowed)
        for name, least in {"warmup": 0, "max_in_a_row": 1}.items():
            values[name] = arguments.integer(name, values[name], least)
        for name in self._leaf_names:
            if values[name] is None:
                is_float = name.endswith(("mean", "deviation"))
                values[name] = jnp.zeros([], jnp.float32 if is_float else jnp.int32)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _starts(self) -> dict[str, Any]:
        return dict.fromkeys(self._leaf_names, 0)

    @property
    def loss_limit(self) -> jax.Array:
        """f32[], the loss above which the next step is a spike; infinite in warm-up."""
        return jnp.where(self._is_warm(self.loss_steps), self._loss_limit, jnp.inf)

    @property
    def norm_limit(self) -> jax.Array:
        """f32[], the same for the gradient norm, itself, beside an ordinary loss."""
        limit = jnp.exp2(self._log2_norm_limit(jnp.array(True)))
        return jnp.where(self._is_warm(self.norm_steps), limit, jnp.inf)

    def judge(
        self, loss: jax.Array | None, norm: jax.Array, finite: jax.Array
    ) -> tuple[jax.Array, "SpikeGuard"]:
        """Whether a step is a spike, and the guard after it.

        Equal on all devices: `loss`, f32[], unscaled (NaN: not finite; None: unknown),
        `norm`, f32[], of the unscaled gradients, `finite`, bool[], whether both are.
        """
        has_norm = finite & (norm > 0)  # log2 of 0 would blind the guard
        log2_norm = jnp.log2(jnp.where(has_norm, norm, 1.0))
        loss_leaps = is_ordinary = jnp.array(False)
        if loss is not None:
            # Known also where the gradients overflow: a spike may do both.
            known = jnp.isfinite(loss)
            loss, limit = jnp.where(known, loss, 0), self._loss_limit
            loss_leaps = known & self._is_warm(self.loss_steps) & (loss > limit)
            is_ordinary = loss <= self.loss_mean / 2 + limit / 2
        norm_leaps = log2_norm > self._log2_norm_limit(is_ordinary)
        leaps = loss_leaps | (has_norm & self._is_warm(self.norm_steps) & norm_leaps)
        spike = leaps & (self.in_a_row < self.max_in_a_row)
        accepted = finite & ~spike

        enters, limit = accepted & has_norm, self._log2_norm_limit(jnp.array(False))
        leaves = self._learned("norm", log2_norm, limit, leaps, enters)
        if loss is not None:
            # Of a margin loss, mostly 0, each other value would be a spike.
            enters = accepted & (has_norm | (finite & (self.norm_steps == 0)))
            leaves |= self._learned("loss", loss, self._loss_limit, leaps, enters)
        in_a_row = jnp.where(spike, self.in_a_row + 1, self.in_a_row)
        leaves["in_a_row"] = jnp.where(accepted, 0, in_a_row)
        count = jnp.minimum(jnp.where(leaps, 0, self.accepted) + 1, _LARGEST_COUNT)
        leaves["accepted"] = jnp.where(accepted, count, self.accepted)
        return spike, _pytree.with_fields(self, **leaves)

    @property
    def _loss_limit(self) -> jax.Array:
        # The logarithm tames the tails of the norm, but a loss may be negative. How far
        # the norm's logarithm varies tells how long the loss's tails are.
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
        # The second holds for a loss that is given later than the gradients, too.
        enough = steps >= max(min(self.warmup, _FEWEST_STEPS), 1)
        return (self.accepted >= self.warmup) & enough

    def _learned(
        self, name: str, x: Any, limit: Any, leaps: Any, enters: Any
    ) -> dict[str, jax.Array]:
        """The leaves of the loss or the norm (`name`) after x."""
        statistics = ("mean", "deviation", "steps")
        mean, deviation, steps = (getattr(self, f"{name}_{s}") for s in statistics)
        warming = ~self._is_warm(steps)
        # An accepted leap begins a new level, and a drop in the warm-up means that the
        # earlier steps were huge: as if nothing had been seen.
        first = leaps | (steps == 0) | (warming & (x < 2 * mean - limit))
        steps = jnp.where(first, 0, steps)
        # A leap up enters up to the limit: a huge deviation would hide all others.
        x = jnp.where(warming & ~first, jnp.minimum(x, limit), x)
        # (1 - decay) / (1 - decay^n): the weight of the n-th step in an unbiased mean.
        # expm1, because 1 - decay^n has no digits left for a decay near 1.
        bias = -jnp.expm1((steps + 1).astype(jnp.float32) * math.log(self.decay))
        weight = (1 - self.decay) / bias
        difference = x - mean
        # Deviations rather than variances, and hypot: the square of a difference of
        # 1e20 is infinite, and would stay so.
        spread = jnp.hypot(deviation, jnp.sqrt(weight) * difference)
        rest = jnp.maximum(1 - weight, 0)  # rounding may leave -1e-8
        new = {
            f"{name}_mean": jnp.where(first, x, mean + weight * difference),
            f"{name}_deviation": jnp.where(first, 0, jnp.sqrt(rest) * spread),
            f"{name}_steps": jnp.minimum(steps + 1, _LARGEST_COUNT),
        }
        return {k: jnp.where(enters, v, getattr(self, k)) for k, v in new.items()}
