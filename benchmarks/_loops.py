"""Training with the loss w * x, as each library's documentation writes it.

The gradient of w is x, so that any step can be made to overflow. Every function takes
the x of each step and returns the parameter and the loss scale after it.
"""

from typing import NamedTuple

import _steps
import jax
import jax.numpy as jnp
import optax

import jmp_scale

MAX_CONSECUTIVE_ERRORS = 50  # after which apply_if_finite applies the next one


class Step(NamedTuple):
    """The parameter and the loss scale after a step."""

    w: float
    s: float


def train_jmp(xs, s=8.0, period=2000, min_loss_scale=1.0, tx=None):
    options = {"period": period, "min_loss_scale": jnp.asarray(min_loss_scale)}
    made = _steps.jmp(_loss, tx or optax.sgd(1.0), jnp.float32(1), s, **options)
    return _train(*made, xs, "loss_scale")


def train_mpx(xs, s=8.0, period=2000, min_loss_scale=1.0, tx=None):
    import mpx

    tx = tx or optax.sgd(1.0)
    scaling = mpx.DynamicLossScaling(
        jnp.float32(s), jnp.float32(min_loss_scale), period=period
    )

    def step(carry, x):
        w, state, scaling = carry
        value_and_grad = mpx.filter_value_and_grad(_loss, scaling)
        loss, scaling, finite, grad = value_and_grad(w, x)
        return (*mpx.optimizer_update(w, tx, state, grad, finite), scaling), loss

    w = jnp.float32(1)
    return _train((w, tx.init(w), scaling), step, xs, "loss_scaling")


def train_flax(xs, s=8.0, period=2000, min_loss_scale=None, tx=None):
    options = {} if min_loss_scale is None else {"minimum_scale": min_loss_scale}
    options["growth_interval"] = period
    made = _steps.flax(_loss, tx or optax.sgd(1.0), jnp.float32(1), s, **options)
    return _train(*made, xs, "scale")


def train_optax(xs, tx=None):
    tx = optax.apply_if_finite(tx or optax.sgd(1.0), MAX_CONSECUTIVE_ERRORS)

    def step(carry, x):
        w, state, s = carry
        updates, state = tx.update(x, state, w)
        return (optax.apply_updates(w, updates), state, s), None

    w = jnp.float32(1)
    return _train((w, tx.init(w), w), step, xs, "real")


def train_jmp_scale(xs, s=8.0, period=2000, min_loss_scale=1.0, tx=None):
    loss_scale = jmp_scale.DynamicLossScale(
        s, None, period, 2, min_loss_scale, max_loss_scale=2.0**126
    )
    tx = jmp_scale.with_loss_scale(tx or optax.sgd(1.0), loss_scale)

    def step(carry, x):
        w, state, _ = carry
        loss, grad = jmp_scale.value_and_grad(_loss, state.loss_scale)(w, x)
        updates, state = tx.update(grad, state, w)
        return (optax.apply_updates(w, updates), state, state.loss_scale), loss

    w = jnp.float32(1)
    return _train((w, tx.init(w), loss_scale), step, xs, "loss_scale")


def _loss(w, x):
    return w * x


def _train(carry, step, xs, name):
    """Runs a step of (w, state, scale), whose S has the given name."""
    step, steps = jax.jit(step), []
    for x in xs:
        carry, _ = step(carry, jnp.float32(x))
        w, _, scale = carry
        steps.append(Step(float(w), float(getattr(scale, name))))
    return steps


TRAIN = {
    "jmp": train_jmp,
    "flax": train_flax,
    "mpx": train_mpx,
    "optax": train_optax,
    "jmp_scale": train_jmp_scale,
}
