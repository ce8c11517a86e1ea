"""Several losses: a loss scale for each (Apex), or one for all optimizers (PyTorch)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import reference_rule

import jmp_scale
from jmp_scale import DynamicLossScale, NoOpLossScale, StaticLossScale

FLAGS = np.random.RandomState(0).rand(40, 2) > 0.3


def map_over(verb, loss_scales, *trees):
    return jax.tree.map(
        verb, loss_scales, *trees, is_leaf=lambda x: isinstance(x, jmp_scale.LossScale)
    )


def gradient(finite):
    """A gradient of 1, or of infinity."""
    return jnp.where(finite, 1.0, jnp.inf)


def test_a_dictionary_scales_each_loss_by_its_own_s_and_unscales_it_exactly():
    loss_scales = [DynamicLossScale(8.0), StaticLossScale(2.0), NoOpLossScale()]
    loss_scales = dict(zip("abc", loss_scales, strict=True))
    losses = {"a": jnp.float16(3.0), "b": jnp.float32(0.1), "c": jnp.float32(5.0)}
    scaled = map_over(jmp_scale.scale, loss_scales, losses)
    assert scaled == {"a": 24, "b": jnp.float32(0.2), "c": 5}
    assert map_over(jmp_scale.unscale, loss_scales, scaled) == losses


def test_one_s_for_two_optimizers_skips_each_alone_and_is_adjusted_once_by_both():
    tx = jmp_scale.with_loss_scale(optax.sgd(1.0))

    @jax.jit
    def train_step(params, states, loss_scale, finite):
        grads = map(gradient, finite)
        updates, states = zip(*map(tx.update, grads, states, params), strict=True)
        params = [*map(optax.apply_updates, params, updates)]
        both_finite = states[0].grads_finite & states[1].grads_finite
        return params, states, loss_scale.adjust(both_finite)

    params = [jnp.float32(0.0), jnp.float32(0.0)]
    states = tuple(map(tx.init, params))
    loss_scale = DynamicLossScale(2.0**10, period=2)
    history = []
    for finite in FLAGS:
        finite = list(finite)
        params, states, loss_scale = train_step(params, states, loss_scale, finite)
        history.append(float(loss_scale.loss_scale))
    rule = reference_rule(FLAGS.all(axis=1), 2.0**10, period=2)
    assert history == [s for s, *_ in rule]
    # Each applied step subtracts a gradient of 1.
    assert [-int(p) for p in params] == FLAGS.sum(axis=0).tolist()
    assert [int(s.skipped) for s in states] == (~FLAGS).sum(axis=0).tolist()
