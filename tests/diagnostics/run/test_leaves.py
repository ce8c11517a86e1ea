"""What `health` says about the dtypes of parameters and moments."""

import jax.numpy as jnp
import optax
from runs import state

import jmp_scale
from jmp_scale import diagnostics


def adam_state(dtype, **changes):
    """The state of Adam on parameters of a dtype, after one step."""
    tx = jmp_scale.with_loss_scale(optax.adam(1e-3, **changes))
    params = {"w": jnp.ones(4, dtype), "b": jnp.ones((), dtype)}
    return tx.update(params, tx.init(params), params)[1]


def test_float16_leaves_are_named_and_counted():
    (sentence,) = diagnostics.health({"p": jnp.ones(2, jnp.float16), "s": state()})
    assert "['p'] is float16: keep master parameters" in sentence
    said = " ".join(diagnostics.health(adam_state(jnp.float16)))
    assert "float16 (and 3 more)" in said


def test_float32_and_bfloat16_parameters_and_first_moments_are_fine():
    assert diagnostics.health(adam_state(jnp.float32)) == []
    assert diagnostics.health(adam_state(jnp.float32, mu_dtype=jnp.bfloat16)) == []
    params = jnp.ones(2, jnp.bfloat16)
    momentum = jmp_scale.with_loss_scale(optax.sgd(0.1, momentum=0.9)).init(params)
    assert diagnostics.health((momentum, params)) == []


def test_a_bfloat16_second_moment_is_reported():
    (sentence,) = diagnostics.health(adam_state(jnp.bfloat16))
    assert ".nu['b'] is bfloat16 (and 1 more): with a b2 above" in sentence
