"""Equinox and Haiku through the plain interface, which knows neither."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from helpers import GOOD, OVERFLOWS, TX, assert_bitwise_equal, count_traces, data

import jmp_scale


def equinox_loss(model, x):
    model = jax.tree.map(
        lambda p: p.astype(jnp.float16) if eqx.is_inexact_array(p) else p, model
    )
    y = jax.vmap(model)(x.astype(jnp.float16))
    return jnp.mean((y.astype(jnp.float32) - 1.0) ** 2)


def equinox_step(model, opt_state, x):
    transform = eqx.filter_value_and_grad
    fun = jmp_scale.value_and_grad(
        equinox_loss, opt_state.loss_scale, transform=transform
    )
    _, grads = fun(model, x)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = TX.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state


def test_an_equinox_step_is_skipped_and_trains_on_in_one_compilation():
    model = eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0))  # its activation is a leaf
    opt_state = TX.init(eqx.filter(model, eqx.is_inexact_array))
    step, traces = count_traces(equinox_step)
    step = eqx.filter_jit(step)
    trained, opt_state = step(model, opt_state, data(GOOD))
    skipped, opt_state = step(trained, opt_state, data(OVERFLOWS))
    assert_bitwise_equal(*(eqx.filter(m, eqx.is_array) for m in (skipped, trained)))
    assert float(opt_state.loss_scale.loss_scale) == 2.0**9
    _, opt_state = step(skipped, opt_state, data(GOOD))
    assert int(opt_state.skipped) == 1
    assert len(traces) == 1


def haiku_net(x):
    h = hk.Linear(8)(x)
    h = hk.BatchNorm(True, True, decay_rate=0.5)(h, is_training=True)
    return hk.Linear(1)(jax.nn.relu(h))


haiku_model = hk.transform_with_state(haiku_net)


def haiku_loss(params, state, x):
    half = jmp_scale.get_policy("params=float32,compute=float16,output=float32")
    params, x = half.cast_to_compute((params, x))
    y, state = haiku_model.apply(params, state, None, x)
    return jnp.mean((half.cast_to_output(y) - 1.0) ** 2), half.cast_to_param(state)


@jax.jit
def haiku_step(params, state, opt_state, x):
    fun = jmp_scale.value_and_grad(haiku_loss, opt_state.loss_scale, has_aux=True)
    (_, new_state), grads = fun(params, state, x)
    updates, opt_state = TX.update(grads, opt_state, params)
    state = jmp_scale.select_tree(opt_state.applied, new_state, state)
    return optax.apply_updates(params, updates), state, opt_state


# hk.BatchNorm's own state is an integer counter and float32 averages.
def test_a_skipped_haiku_step_leaves_parameters_and_batch_norm_state_bit_identical():
    params, start = haiku_model.init(jax.random.key(0), data(GOOD))
    params, state, opt_state = haiku_step(params, start, TX.init(params), data(GOOD))
    leaves = zip(jax.tree.leaves(state), jax.tree.leaves(start), strict=True)
    assert all((a != b).any() for a, b in leaves)
    after = haiku_step(params, state, opt_state, data(OVERFLOWS))
    assert_bitwise_equal(after[:2], (params, state))
    assert_bitwise_equal(after[2].inner_state, opt_state.inner_state)
    assert int(after[2].skipped) == 1
