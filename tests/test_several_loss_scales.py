"""Several optimizers: one loss scale for all (PyTorch), or one for each."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import reference_rule

import jmp_scale
from jmp_scale import DynamicLossScale

FLAGS = np.random.RandomState(0).rand(40, 2) > 0.3


def test_one_s_for_two_optimizers_skips_each_alone_and_is_adjusted_once_by_both():
    tx = jmp_scale.with_loss_scale(optax.sgd(1.0))

    @jax.jit
    def train_step(params, states, loss_scale, finite):
        grads = [jnp.where(is_finite, 1.0, jnp.inf) for is_finite in finite]
        updates, states = zip(*map(tx.update, grads, states, params), strict=True)
        params = [*map(optax.apply_updates, params, updates)]
        both_finite = states[0].grads_finite & states[1].grads_finite
        return params, states, loss_scale.adjust(both_finite)

    params = [jnp.float32(0.0), jnp.float32(0.0)]
    states = tuple(map(tx.init, params))
    loss_scale = DynamicLossScale(2.0**10, period=2)
    history = []
    for finite in FLAGS:
        params, states, loss_scale = train_step(params, states, loss_scale, finite)
        history.append(float(loss_scale.loss_scale))
    rule = reference_rule(FLAGS.all(axis=1), 2.0**10, period=2)
    assert history == [s for s, *_ in rule]
    # Each applied step subtracts a gradient of 1.
    assert [-int(p) for p in params] == FLAGS.sum(axis=0).tolist()
    assert [int(s.skipped) for s in states] == (~FLAGS).sum(axis=0).tolist()


def test_several_loss_scales_are_found_by_metrics_and_not_by_a_bare_name():
    tx = jmp_scale.with_loss_scale(optax.sgd(1.0), DynamicLossScale(2.0**10))
    params = jnp.ones(2)
    states = {"generator": tx.init(params), "discriminator": tx.init(params)}
    with pytest.raises(KeyError, match="multiple values"):
        optax.tree.get(states, "loss_scale")
    metrics = jmp_scale.diagnostics.metrics(states)
    assert float(metrics["['generator'].loss_scale"]) == 2.0**10
    assert float(metrics["['discriminator'].loss_scale"]) == 2.0**10
