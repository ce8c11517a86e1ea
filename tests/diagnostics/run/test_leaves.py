"""What `health` says about the dtypes of parameters and moments."""

import jax.numpy as jnp
import optax
import pytest
from runs import state

import jmp_scale
from jmp_scale import diagnostics


def adam_state(dtype, b2=0.999, **changes):
    """The state of Adam on parameters of a dtype, after one step."""
    tx = jmp_scale.with_loss_scale(optax.adam(1e-3, b2=b2, **changes))
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
    """Nothing is known of b2, so the sentence says for which it holds."""
    (sentence,) = diagnostics.health(adam_state(jnp.bfloat16))
    assert ".nu['b'] is bfloat16 (and 1 more): with a b2 above" in sentence


@pytest.mark.parametrize(("b2", "is_said"), [(0.999, True), (0.99, False)])
def test_a_decay_that_the_state_holds_decides(b2, is_said):
    tx = optax.inject_hyperparams(optax.adam)(1e-3, b2=b2)
    opt_state = jmp_scale.with_loss_scale(tx).init(jnp.ones(2, jnp.bfloat16))
    found = diagnostics.health(opt_state)
    assert [s.endswith("[bfloat16 moments]") for s in found] == [True] * is_said
