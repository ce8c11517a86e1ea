"""Loss-scale states and histories of runs given as lists of flags or numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_scale
from jmp_scale import diagnostics
from jmp_scale._state import START

_SCALE = jmp_scale.DynamicLossScale(2.0**15, period=3)
_TX = jmp_scale.with_loss_scale(optax.identity(), _SCALE)


@jax.jit
def _step(history, before, flag):
    g, loss = (jnp.where(flag > least, 1.0, jnp.inf) for least in (0, -1))
    _, after = _TX.update(g, before, value=loss)
    return history.push(before, after), after


def recorded(flags, capacity=100):
    """A history of steps: 1 for a good one, 0 for an overflow, -1 for a loss of inf."""
    history = diagnostics.LossScaleHistory.create(capacity)
    opt_state = _TX.init(jnp.float32(0))
    for flag in flags:
        history, opt_state = _step(history, opt_state, int(flag))
    return history


def history_of(capacity=1000, **columns):
    """A history with these columns, as `to_dict` names them, made without `push`."""
    columns = {name: np.asarray(column) for name, column in columns.items()}
    steps = len(next(iter(columns.values())))
    columns.setdefault("grads_finite", np.ones(steps, bool))
    columns.setdefault("applied", columns["grads_finite"])
    columns.setdefault("spike", columns["grads_finite"] & ~columns["applied"])
    history, filled = diagnostics.LossScaleHistory.create(capacity), {}
    for name, column in history.columns.items():
        filled[name] = np.array(column)
        given = columns.get(name, filled[name][:0])
        last = np.arange(len(given))[-capacity:]
        filled[name][last % capacity] = given[last]
    for name, first in (("loss", "first_loss"), ("grad_norm", "first_norm")):
        column = columns.get(name, np.full(1, np.nan))
        number = column[np.argmax(np.isfinite(column))].astype(np.float32)
        history = dataclasses.replace(history, **{first: number})
    return dataclasses.replace(history, columns=filled, pushed=np.int32(steps))


def state(loss_scale=None, skipped=0, in_a_row=0, inner=None, guard=None, **fields):
    """A state after a run of `in_a_row` overflows, unless `fields` say otherwise."""
    numbers = START | {
        "grads_finite": in_a_row == 0,
        "applied": in_a_row == 0,
        "skipped": np.int32(skipped),
        "skipped_in_a_row": np.int32(in_a_row),
    }
    return jmp_scale.LossScaleState(
        loss_scale=loss_scale or jmp_scale.DynamicLossScale(),
        inner_state=inner,
        guard=guard,
        **jax.tree.map(jnp.asarray, numbers | fields),
    )
