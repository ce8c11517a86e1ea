"""Loss-scale states and histories of runs given as lists of flags or numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_scale
from jmp_scale import diagnostics
from jmp_scale._state import START


def recorded(flags, capacity=100, loss_finite=None):
    """A history of steps whose gradients and losses are finite as these flags say."""
    loss_scale = jmp_scale.DynamicLossScale(2.0**15, period=3)
    tx = jmp_scale.with_loss_scale(optax.identity(), loss_scale)
    loss_finite = [True] * len(flags) if loss_finite is None else loss_finite

    def step(carry, flags):
        history, before = carry
        g, loss = jnp.where(jnp.stack(flags), 1.0, jnp.inf)
        _, after = tx.update(g, before, value=loss)
        return (history.push(before, after), after), None

    start = diagnostics.LossScaleHistory.create(capacity), tx.init(jnp.float32(0))
    flags = jnp.array(flags, bool), jnp.array(loss_finite, bool)
    return jax.lax.scan(step, start, flags)[0][0]


def history_of(capacity=1000, lost_updates=None, guard=None, **columns):
    """A history of steps with these columns, as `to_dict` names them."""
    columns = jax.tree.map(jnp.asarray, columns)
    steps = len(jax.tree.leaves((columns, lost_updates))[0])
    columns.setdefault("grads_finite", jnp.ones(steps, bool))
    columns.setdefault("applied", columns["grads_finite"])
    columns.setdefault("spike", columns["grads_finite"] & ~columns["applied"])
    before = state(guard=guard)

    def step(history, row):
        flags = {name: row[name] for name in ("grads_finite", "applied")}
        flags["spikes"] = row["spike"].astype(jnp.int32)
        more = {"loss": row.get("loss"), "grads": row.get("grad_norm")}
        return history.push(before, before._replace(**flags), **more), None

    history = diagnostics.LossScaleHistory.create(capacity)
    history = jax.lax.scan(step, history, columns)[0]
    if lost_updates is not None:
        names = ("lost_entries", "lost_magnitude")
        lost = dict(zip(names, lost_updates, strict=True))
        old = {name: getattr(history, name) for name in names}
        lost = {name: old[name].at[:steps].set(lost[name]) for name in names}
        history = dataclasses.replace(history, **lost)
    return history


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


def guard_of(**means):
    """A guard that is past its warm-up, with these running means."""
    means = {name: jnp.float32(value) for name, value in means.items()}
    steps = dict.fromkeys(("loss_steps", "norm_steps", "accepted"), jnp.int32(9))
    return jmp_scale.SpikeGuard(warmup=1, **means, **steps)
