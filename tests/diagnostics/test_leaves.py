"""What `health` says about the dtypes of parameters and moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import history_of, state

import jmp_scale
from jmp_scale import diagnostics


def adam_state(dtype, b2=0.999, **changes):
    """The state of Adam on parameters of a dtype, after one step."""
    tx = jmp_scale.with_loss_scale(optax.adam(1e-3, b2=b2, **changes))
    params = {"w": jnp.ones(4, dtype), "b": jnp.ones((), dtype)}
    return tx.update(params, tx.init(params), params)[1]


def kinds(opt_state, history=None):
    log = diagnostics.HealthLog()
    log(opt_state, history)
    return log.kinds


def test_float16_leaves_are_named_and_counted():
    (sentence,) = diagnostics.health({"p": jnp.ones(2, jnp.float16), "s": state()})
    assert "['p'] is float16: keep master parameters" in sentence
    assert "float16, and so are 3 more leaves" in " ".join(
        diagnostics.health(adam_state(jnp.float16))
    )


def test_float32_and_bfloat16_parameters_and_first_moments_are_fine():
    assert kinds(adam_state(jnp.float32)) == frozenset()
    assert kinds(adam_state(jnp.float32, mu_dtype=jnp.bfloat16)) == frozenset()
    params = jnp.ones(2, jnp.bfloat16)
    momentum = jmp_scale.with_loss_scale(optax.sgd(0.1, momentum=0.9)).init(params)
    assert kinds((momentum, params)) == frozenset()


def test_a_bfloat16_second_moment_is_reported():
    """Nothing is known of b2, so the sentence says for which it holds."""
    (sentence,) = diagnostics.health(adam_state(jnp.bfloat16))
    assert ".nu['b'] is bfloat16, and so is 1 more leaf: with a b2 above" in sentence


@pytest.mark.parametrize(("b2", "is_said"), [(0.999, True), (0.99, False)])
def test_a_decay_that_the_state_holds_decides(b2, is_said):
    tx = optax.inject_hyperparams(optax.adam)(1e-3, b2=b2)
    opt_state = jmp_scale.with_loss_scale(tx).init(jnp.ones(2, jnp.bfloat16))
    assert kinds(opt_state) == ({"bfloat16 moments"} if is_said else frozenset())


def trained(b2, dtype, steps=800, spike=100.0):
    """State and history of gradients of 1 after a spike: Adam in an optimizer."""
    tx = jmp_scale.with_loss_scale(optax.adam(1e-3, b2=b2))
    params = jnp.ones(4, dtype)

    def step(carry, k):
        opt_state, history = carry
        grads = jnp.full(4, jnp.where(k == 20, spike, 1.0), dtype)
        _, opt_state = tx.update(grads, opt_state, params)
        norm = jnp.sqrt(jnp.sum(grads.astype(jnp.float32) ** 2))
        return (opt_state, history.push(1.0, True, grad_norm=norm)), None

    start = tx.init(params), diagnostics.LossScaleHistory.create(600)
    return jax.lax.scan(step, start, jnp.arange(steps))[0]


@pytest.mark.parametrize(
    ("b2", "dtype", "spike", "is_said"),
    [
        (0.999, jnp.bfloat16, 300.0, True),  # nu stays at 0.001 300^2 = 90
        (0.999, jnp.bfloat16, 1.0, False),
        (0.99, jnp.bfloat16, 300.0, False),  # decays: 900 e^-7.8
        (0.999, jnp.float32, 300.0, False),  # in float32 whatever it is
    ],
)
def test_recorded_norms_show_whether_it_matters(b2, dtype, spike, is_said):
    opt_state, history = trained(b2, dtype, spike=spike)
    found = kinds(opt_state, history)
    assert found == ({"bfloat16 moments"} if is_said else frozenset())
    if is_said:
        (sentence,) = diagnostics.health(opt_state, history)
        assert "times the mean square of the last 500 gradients" in sentence


def test_a_short_history_is_waited_for():
    history = history_of(grad_norm=np.ones(499, np.float32))
    assert kinds(adam_state(jnp.bfloat16), history) == frozenset()
