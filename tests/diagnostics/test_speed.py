"""`compare_speed` times a loss in half precision beside float32, and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import compilations

import jmp_scale
from jmp_scale import diagnostics

pytestmark = pytest.mark.usefixtures("few_calls")


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


ARGS = jax.random.normal(jax.random.key(0), (2, 16, 16))


def expected_error(half_loss):
    half, full = (np.asarray(jax.jit(jax.grad(f))(*ARGS)) for f in (half_loss, loss))
    return np.linalg.norm(half - full) / np.linalg.norm(full)


def test_both_are_timed_with_their_memory_and_the_error_of_the_gradient():
    half_loss = jmp_scale.autocast(loss, "bfloat16")
    found = diagnostics.compare_speed(half_loss, loss, *ARGS)
    assert found.gain_range[0] <= found.gain <= found.gain_range[1]
    assert min(*found.milliseconds, *found.mebibytes) > 0
    assert found.believable >= 1
    assert found.error == pytest.approx(expected_error(half_loss), rel=1e-3)
    assert found.loss_scale == 1  # bfloat16 needs none
    text = str(found)
    assert "and its gradient is off by" in text
    assert "| half precision" in text
    assert "float32 beside itself differs by as much" in text


@pytest.mark.parametrize("size", [1.0, 1e3])
def test_a_float16_gradient_is_scaled_by_an_s_at_which_it_is_finite(size):
    def large(w, x):
        return size * loss(w, x)

    half_loss = jmp_scale.autocast(large, "float16")
    found = diagnostics.compare_speed(half_loss, large, *ARGS)
    assert (found.loss_scale < 2**15) == (size > 1)
    assert found.error < 0.01
    assert "at loss scale 2^" in found.summary()


def test_an_error_of_the_loss_comes_out():
    def raises(*_):
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        diagnostics.compare_speed(loss, raises, *ARGS)


VERDICTS = [
    (2.0, 2.0, 2.0, "Half precision is 2.00 times as fast (2.00 to 2.00)"),
    (0.5, 0.5, 0.5, "Half precision is slower: 0.50 times as fast (0.50 to 0.50)"),
    (0.83, 0.86, 0.98, "Half precision is slower: 0.86 times as fast (0.83 to 0.98)"),
    (0.9, 0.98, 1.01, "No gain can be told from noise: 0.98 times as fast (0.90 to"),
    (1.02, 1.04, 1.2, "No gain can be told from noise: 1.04 times as fast (1.02 to"),
]


@pytest.mark.parametrize(("low", "gain", "high", "expected"), VERDICTS)
def test_the_verdict_is_of_gains_that_the_control_does_not_show(
    low, gain, high, expected
):
    found = diagnostics.SpeedComparison(
        *((1.0, 1.0), gain, (low, high), 1.1, (2.0, 1.0), 0.01, 1.0), table="| ms |"
    )
    assert found.summary().startswith(expected)
    assert "), in 50 % of the memory, and its" in found.summary()
    assert str(found) == found.summary()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_each_form_is_compiled_once(dtype):
    half_loss = jmp_scale.autocast(lambda w, x: 1e3 * loss(w, x), dtype)
    compiled = compilations()
    diagnostics.compare_speed(half_loss, loss, *ARGS)
    assert compiled.count("jit(run)") == 2, compiled
