"""Loss-scale states and histories of runs that are given as a list of flags."""

import jax
import jax.numpy as jnp

import jmp_scale
from jmp_scale import diagnostics


def recorded(flags, capacity=100, loss_finite=None, loss_scale=None):
    """A history of steps with these flags, in which S follows its rule."""
    loss_scale = loss_scale or jmp_scale.DynamicLossScale(2.0**15, period=3)
    loss_finite = [True] * len(flags) if loss_finite is None else loss_finite

    def step(carry, flag):
        history, loss_scale = carry
        finite, loss_is_finite = flag
        history = history.push(loss_scale, finite, loss_finite=loss_is_finite, amax=2.0)
        return (history, loss_scale.adjust(finite, loss_finite=loss_is_finite)), None

    flags = jnp.array(flags, bool), jnp.array(loss_finite, bool)
    history = diagnostics.LossScaleHistory.create(capacity)
    return jax.lax.scan(step, (history, loss_scale), flags)[0]


def state(loss_scale=None, skipped=0, in_a_row=0, inner=None):
    loss_scale = jmp_scale.DynamicLossScale() if loss_scale is None else loss_scale
    applied, zero = jnp.array(in_a_row == 0), jnp.array(0, jnp.int32)
    counts = jnp.array(skipped, jnp.int32), jnp.array(in_a_row, jnp.int32)
    return jmp_scale.LossScaleState(
        loss_scale, inner, applied, applied, *counts, zero, zero, None
    )
