"""What others do against spikes, written from their descriptions, around Adam.

Every rule takes a learning-rate schedule and returns an Optax transformation whose
`update` takes the loss as `value`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jmp_scale

WINDOW, SIGMAS = 128, 6.0  # the defaults of both MaxText and OLMo-core


class Window(NamedTuple):
    """The last `WINDOW` losses and gradient norms, and how many there have been."""

    seen: jax.Array  # f32[2, WINDOW]
    steps: jax.Array  # i32[]


class WindowState(NamedTuple):
    window: Window
    inner_state: Any


class StepFactorState(NamedTuple):
    window: Window
    calls: jax.Array
    adam: optax.ScaleByAdamState


def guard(schedule, axis_name=None):
    return jmp_scale.with_loss_scale(
        optax.adam(schedule), axis_name=axis_name, guard=jmp_scale.SpikeGuard()
    )


def nothing(schedule):
    return optax.with_extra_args_support(optax.adam(schedule))


def clipping(schedule):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    return optax.with_extra_args_support(tx)


def apply_if_finite(schedule):
    return optax.with_extra_args_support(
        optax.apply_if_finite(optax.adam(schedule), max_consecutive_errors=5)
    )


def skip_large_updates(schedule, largest_norm=10.0):
    def should_skip(updates, step, params):
        return optax.skip_large_updates(updates, step, params, largest_norm**2)

    tx = optax.MultiSteps(optax.adam(schedule), 1, should_skip_update_fn=should_skip)
    return optax.with_extra_args_support(tx.gradient_transformation())


def maxtext(schedule):
    """Leaves out a step whose loss or norm exceeds mean + 6 deviations of the window.

    Every loss and norm enters the window, those of skipped steps too. The first 63
    steps are always taken.
    """
    inner = optax.adam(schedule)

    def init(params):
        return WindowState(_empty_window(), inner.init(params))

    def update(updates, state, params=None, *, value):
        within, window = _judged(state.window, value, optax.tree.norm(updates))
        updates, inner_state = jax.lax.cond(
            within,
            lambda: inner.update(updates, state.inner_state, params),
            lambda: (jax.tree.map(jnp.zeros_like, updates), state.inner_state),
        )
        return updates, WindowState(window, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def olmo_core(schedule, b1=0.9, b2=0.999, eps=1e-8):
    """The same window, and an Adam each of whose changes is multiplied by 0 or 1.

    So nothing waits for the host; but 0 times NaN is NaN.
    """

    def init(params):
        adam = optax.scale_by_adam().init(params)
        return StepFactorState(_empty_window(), jnp.zeros([], jnp.int32), adam)

    def update(updates, state, params=None, *, value):
        del params
        within, window = _judged(state.window, value, optax.tree.norm(updates))
        factor, old = within.astype(jnp.float32), state.adam
        count = old.count + within
        n = jnp.maximum(count, 1).astype(jnp.float32)
        mu = jax.tree.map(lambda m, g: m + factor * (1 - b1) * (g - m), old.mu, updates)
        squares = jax.tree.map(lambda v, g: v - g * g, old.nu, updates)
        nu = jax.tree.map(lambda v, d: v - factor * (1 - b2) * d, old.nu, squares)
        rate = -factor * schedule(state.calls) / (1 - b1**n)
        root = jnp.sqrt(1 - b2**n)
        new = jax.tree.map(lambda m, v: rate * m / (jnp.sqrt(v) / root + eps), mu, nu)
        adam = optax.ScaleByAdamState(count, mu, nu)
        return new, StepFactorState(window, state.calls + 1, adam)

    return optax.GradientTransformationExtraArgs(init, update)


def skips_of_window(losses, norms):
    """Whether the rule of the window leaves out each step of a run, bool[steps]."""

    def step(window, seen):
        within, window = _judged(window, *seen)
        return window, ~within

    return jax.lax.scan(step, _empty_window(), (losses, norms))[1]


def skips_of_guard(losses, norms):
    """Whether `SpikeGuard` does."""

    def step(guard, seen):
        spike, guard = guard.judge(*seen, finite=jnp.array(True))
        return guard, spike

    return jax.lax.scan(step, jmp_scale.SpikeGuard(), (losses, norms))[1]


def _empty_window():
    return Window(jnp.zeros([2, WINDOW]), jnp.zeros([], jnp.int32))


def _judged(window, loss, norm):
    """(whether a step is taken, the window with it); a NaN is within no limit."""
    x = jnp.stack([loss, norm])
    known = (jnp.arange(WINDOW) < window.steps)[None]
    n = jnp.clip(window.steps, 1, WINDOW)
    mean = jnp.sum(jnp.where(known, window.seen, 0), axis=1) / n
    squares = jnp.where(known, (window.seen - mean[:, None]) ** 2, 0)
    deviation = jnp.sqrt(jnp.sum(squares, axis=1) / jnp.maximum(n - 1, 1))
    within = jnp.all(x - mean <= SIGMAS * deviation)
    seen = window.seen.at[:, window.steps % WINDOW].set(x)
    is_warmup = window.steps + 1 < WINDOW // 2
    return within | is_warmup, Window(seen, window.steps + 1)


RULES = {
    "nothing": nothing,
    "clip_by_global_norm(1)": clipping,
    "optax.apply_if_finite": apply_if_finite,
    "optax.skip_large_updates": skip_large_updates,
    "MaxText's rule": maxtext,
    "OLMo-core's rule": olmo_core,
    "SpikeGuard": guard,
}
