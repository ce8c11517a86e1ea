"""Runs of `health_validation.py`: what is trained, what is done to it, what is kept."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _models import cast
from _stability_tasks import tasks

import jmp_scale
from jmp_scale import diagnostics

CHECK = 50  # steps between two looks at the health of a run


class Setting(NamedTuple):
    """What is done to a run, as numbers, so that many runs are one compilation."""

    learning_rate: float = 1e-3  # constant
    growth: float = 0.0  # doublings of the loss in each step after the first fifth
    swelling: float = 0.0  # of the parameters, likewise: a decay of the wrong sign


class Optimizer(NamedTuple):
    """What is compiled into a run."""

    name: str = "adam"
    parameters: str = "float32"


class Run(NamedTuple):
    """All losses and gradient norms of a run, and what health said at each check."""

    setting: Setting
    loss: np.ndarray
    norm: np.ndarray
    said: list[tuple[int, frozenset[str]]]

    def first(self, kind):
        """The check at which a finding was first made, or None."""
        return next((step for step, kinds in self.said if kind in kinds), None)


def train(task, optimizer, settings, seed, steps):
    """One `Run` for each setting, all with the same start and the same batches."""
    stacked = Setting(*(jnp.asarray(column) for column in zip(*settings, strict=True)))
    run = _compiled(task, optimizer, steps)
    losses, norms, states, histories = jax.device_get(run(stacked, seed))
    runs = []
    for i, setting in enumerate(settings):
        log, said = diagnostics.HealthLog(), []
        for check in range(steps // CHECK):
            pick = functools.partial(jax.tree.map, lambda x: x[i, check])  # noqa: B023
            log(pick(states), pick(histories))
            said.append(((check + 1) * CHECK, log.kinds))
        loss, norm = losses[i].ravel(), norms[i].ravel()
        runs.append(Run(setting, loss, norm, said))
    return runs


@functools.cache
def _compiled(name, optimizer, steps):
    task = tasks()[name]

    def one(setting, seed):
        adam, rate = optimizer.name == "adam", setting.learning_rate
        inner = optax.adam(rate) if adam else optax.sgd(rate, momentum=0.9)
        tx = jmp_scale.with_loss_scale(inner)
        params = task.init(jax.random.key(seed))
        opt_state = tx.init(params)
        params = cast(params, optimizer.parameters)
        history = diagnostics.LossScaleHistory.create(steps)

        def step(carry, k):
            params, old, history = carry
            loss, grads = _loss_and_grads(task, params, setting, seed, k, steps)
            updates, new = tx.update(grads, old, params, value=loss)
            norm = diagnostics.metrics(new, grads)["grad_norm"]
            known = {"loss": loss, "grads": grads, "params": params, "updates": updates}
            history = history.push(old, new, **known)
            params = optax.apply_updates(params, updates)
            swelling = jnp.where(k > steps // 5, 1 + setting.swelling, 1)
            params = jax.tree.map(lambda p: p * swelling.astype(p.dtype), params)
            return (params, new, history), (loss, norm)

        def chunk(carry, steps_of_chunk):
            carry, (loss, norm) = jax.lax.scan(step, carry, steps_of_chunk)
            _, opt_state, history = carry
            return carry, (loss, norm, opt_state, history)

        chunks = jnp.arange(steps).reshape(-1, CHECK)
        return jax.lax.scan(chunk, (params, opt_state, history), chunks)[1]

    return jax.jit(jax.vmap(one, (0, None)))


def _loss_and_grads(task, params, setting, seed, k, steps):
    draw, _ = jax.random.split(jax.random.key(1000 + seed))
    inputs, targets = task.examples(jax.random.fold_in(draw, k), task.batch)
    weight = jnp.exp2(setting.growth * jnp.maximum(k - steps // 5, 0))

    def loss_fn(params):
        return weight * jnp.mean(task.losses(cast(params, "float32"), inputs, targets))

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return loss, cast(grads, "float32")
