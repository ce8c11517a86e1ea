"""Half-precision parameters whose float32 values are those of plain Optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bitwise_equal
from jax import lax
from optimizers import GOOD, OPTIMIZERS, PARAMS, by_name, stepper

from jmp_scale import (
    full_parameters,
    with_half_parameters,
)

# Those that differ most in what they do; all others are slow tests.
TYPICAL = {"adamw", "lion", "masked", "multi_steps", "muon", "partition", "sam"}
TYPICAL |= {"momentum", "schedule_free", "set_to_zero"}
HALF = (jnp.bfloat16, jnp.float16)
STEPS = [jax.tree.map(lambda g, s=s: g * s, GOOD) for s in (1.0, -0.3, 1e-3, 7.0)]


def half(tree, dtype=jnp.bfloat16):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def rounded(x, dtype):
    """The nearest number of the dtype, ties up for bfloat16; an integer of 16 bits."""
    if dtype == jnp.float16:
        finite = np.clip(x, -65504, 65504)
        return np.where(np.isinf(x), x, finite).astype(np.float16).view(np.uint16)
    return ((np.asarray(x).view(np.uint32) + 2**15) >> 16).astype(np.uint16)


@functools.cache
def run(name, dtype):
    """(plain float32 parameters, half ones, float32 values) after some steps."""
    inner = OPTIMIZERS[name]
    tx = with_half_parameters(inner)
    plain, params = PARAMS, half(PARAMS, dtype)
    plain_state, state = inner.init(plain), tx.init(params)
    with jax.disable_jit():
        plain_step, step = stepper(inner), stepper(tx, full_parameters)
        for grads in STEPS:
            plain, plain_state = plain_step(plain, plain_state, grads)
            params, state = step(params, state, grads)
    return plain, params, full_parameters(params, state)


@pytest.mark.parametrize("dtype", HALF)
@by_name(TYPICAL, OPTIMIZERS)
def test_the_float32_values_are_those_of_the_plain_optimizer_in_every_bit(name, dtype):
    plain, params, values = run(name, dtype)
    assert_bitwise_equal(values, plain)
    for key in plain:
        actual = np.asarray(params[key]).view(np.uint16)
        np.testing.assert_array_equal(actual, rounded(np.asarray(plain[key]), dtype))


def every_size(dtype):
    """Parameters, and updates of each: some to its size, and some of any other."""
    largest, tiny = float(jnp.finfo(dtype).max), float(jnp.finfo(dtype).tiny)
    some = np.random.RandomState(0).randint(0, 2**16, 100).astype(np.uint16)
    named = [0, -0.0, 1, 2, np.inf, np.nan, largest, -largest, tiny, -tiny, 2.0**-24]
    params = lax.bitcast_convert_type(jnp.array(some), dtype)
    params = jnp.append(params, jnp.array(named, dtype))
    moves = [0, -0.0, 1e-3, -2, 3e38, -3e38, 65504, -7e4, 1e-30, -(2.0**-25)]
    moves = jnp.float32([*moves, np.inf, np.nan])
    factors = jnp.float32([1e-3, -1, -1.9, 1e-6])
    relative = jnp.outer(factors, params.astype(jnp.float32))
    updates = jnp.outer(moves, jnp.ones(params.size)), relative
    return jnp.tile(params, (16, 1)), jnp.concatenate(updates)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", HALF)
def test_values_of_every_size_are_kept_in_every_bit(dtype, jit):
    params, updates = every_size(dtype)
    tx = with_half_parameters(optax.identity())
    state, plain = tx.init(params), params.astype(jnp.float32)
    step = jit(lambda p, s, u: tx.update(u, s, p))
    for factor in (1, 0.4):
        changes, state = step(params, state, factor * updates)
        old, params = params, optax.apply_updates(params, changes)
        plain = plain + factor * updates
        # From there a parameter can go no nearer to zero.
        near = jnp.abs(plain) >= 2.0**-15 * jnp.abs(old.astype(jnp.float32))
        near = np.asarray(near & (plain != 0))
        actual, expected = (
            np.asarray(x).view(np.uint32)
            for x in (full_parameters(params, state), plain)
        )
        assert near.sum() > 1000
        np.testing.assert_array_equal(actual[near], expected[near])
        nearest = rounded(np.asarray(plain)[near], dtype)
        got = np.asarray(params).view(np.uint16)[near]
        nonzero = (nearest & 0x7FFF) != 0
        np.testing.assert_array_equal(got[nonzero], nearest[nonzero])
        assert (jnp.isnan(params) == jnp.isnan(plain)).all()


def test_parameters_set_to_zero_meet_an_old_remainder_that_makes_no_nan():
    params = jnp.full(1000, 1.0, jnp.bfloat16)
    tx = with_half_parameters(optax.sgd(1.0))
    grads = jnp.linspace(-1e-2, 1e-2, 1000)
    _, state = tx.update(grads, tx.init(params), params)
    values = full_parameters(jnp.zeros_like(params), state)
    assert (jnp.abs(values) < 1e-30).all()
