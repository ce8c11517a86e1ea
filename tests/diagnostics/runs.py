"""Loss-scale states and histories of runs given as lists of flags or numbers."""

import jax
import jax.numpy as jnp
import numpy as np

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


def history_of(capacity=1000, **columns):
    """A history of steps whose arguments of `push` are given as columns."""
    columns = jax.tree.map(jnp.asarray, columns)
    steps = len(jax.tree.leaves(columns)[0])
    columns.setdefault("grads_finite", jnp.ones(steps, bool))

    def step(history, row):
        return history.push(1.0, row.pop("grads_finite"), **row), None

    history = diagnostics.LossScaleHistory.create(capacity)
    return jax.lax.scan(step, history, columns)[0]


def state(loss_scale=None, skipped=0, in_a_row=0, inner=None, **fields):
    """A state after a run of `in_a_row` overflows, unless `fields` say otherwise."""
    zero = jnp.array(0, jnp.int32)
    defaults = {
        "loss_scale": loss_scale or jmp_scale.DynamicLossScale(),
        "inner_state": inner,
        "grads_finite": in_a_row == 0,
        "applied": in_a_row == 0,
        "skipped": np.int32(skipped),
        "skipped_in_a_row": np.int32(in_a_row),
        "nonfinite_losses": zero,
        "spikes": zero,
        "guard": None,
    }
    fields = {
        name: jnp.asarray(value) if isinstance(value, (bool, np.int32)) else value
        for name, value in (defaults | fields).items()
    }
    return jmp_scale.LossScaleState(**fields)
