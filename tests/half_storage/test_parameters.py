"""`full_parameters` finds remainders at any depth, and knows whose they are."""

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import assert_bitwise_equal
from optimizers import PARAMS, half

from jmp_scale import checkpoints, full_parameters, with_half_storage

HALF = half(PARAMS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (  # two optimizers whose parameters have the same names, as a GAN's
            lambda p, s: (p, [s, s]),
            "expected one remainder of each parameter, .*that updates these",
        ),
        (lambda p, s: ({"params": p}, s), r"params has \['params/b', 'params/w'\]; p"),
        (lambda p, s: (p | {"b": p["b"][:1]}, s), r"parameter b to be bfloat16\[2\]"),
        (lambda p, s: (PARAMS, s), "apply updates by optax.apply_updates"),
    ],
)
def test_parameters_and_a_state_that_do_not_belong_together_are_refused(given, message):
    state = with_half_storage(optax.adam(0.1)).init(HALF)
    for fun in (full_parameters, checkpoints.without_half_storage):
        with pytest.raises(ValueError, match=f"full_parameters: .*{message}"):
            fun(*given(HALF, state))


def test_without_remainders_parameters_are_cast():
    for state in ({}, with_half_storage(optax.adam(0.1)).init(HALF)):
        assert_bitwise_equal(full_parameters(HALF, state), half(HALF, jnp.float32))
    assert full_parameters(jnp.float16(2), ()).dtype == jnp.float32


def test_parameters_whose_paths_read_alike_are_two():
    params = {"a/b": jnp.ones(2, "bfloat16"), "a": {"b": jnp.zeros(3, "bfloat16")}}
    tx = with_half_storage(optax.sgd(2.0**-12))
    updates, state = tx.update(params, tx.init(params), params)
    found = full_parameters(optax.apply_updates(params, updates), state)
    assert_bitwise_equal(found["a/b"], jnp.full(2, 1 - 2.0**-12))
    saved = jax.tree.map(jnp.asarray, (params, state))
    assert_bitwise_equal(checkpoints.restore(lambda _: saved, (params, state)), saved)


def test_equinox_models_keep_their_functions():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(2, 2, 4, 0, dtype=jnp.bfloat16, key=jax.random.key(0))
    tx = with_half_storage(optax.sgd(2.0**-12))
    old, static = eqx.partition(model, eqx.is_array)
    updates, state = jax.jit(tx.update)(old, tx.init(old), old)
    new = optax.apply_updates(old, updates)
    values = full_parameters(eqx.combine(new, static), state)
    expected = jax.tree.map(lambda p: jnp.float32(p) * (1 - 2.0**-12), old)
    assert_bitwise_equal(eqx.filter(values, eqx.is_array), expected)
    assert values.activation is model.activation
    with pytest.raises(ValueError, match=r"equinox\.apply_updates does not"):
        tx.update(old, state, eqx.apply_updates(old, updates))
