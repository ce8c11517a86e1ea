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


# A dtype, a factor of the loss, and the first S tried at which its gradient is finite.
CASES = [("bfloat16", 1.0, 1), ("float16", 1.0, 2.0**15), ("float16", 1e3, 2.0**12)]


@pytest.mark.parametrize(("dtype", "factor", "s"), CASES)
def test_both_are_compiled_once_and_timed_with_memory_and_error(dtype, factor, s):
    def full_loss(w, x):
        return factor * loss(w, x)

    half_loss = jmp_scale.autocast(full_loss, dtype)
    half, full = (np.asarray(jax.grad(f)(*ARGS)) for f in (half_loss, full_loss))
    compiled = compilations()
    found = diagnostics.compare_speed(half_loss, full_loss, *ARGS)
    assert compiled.count("jit(run)") == 2, compiled
    assert found.gain_range[0] <= found.gain <= found.gain_range[1]
    assert min(*found.milliseconds, *found.mebibytes) > 0
    assert found.believable >= 1
    assert found.loss_scale == s
    error = np.linalg.norm(half - full) / np.linalg.norm(full)
    assert found.error == pytest.approx(error, rel=0.5)  # of roundings
    text = str(found)
    assert "and its gradient is off by" in text
    assert ("at loss scale 2^" in text) == (dtype == "float16")
    assert "| half precision" in text
    assert "float32 beside itself differs by as much" in text


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


def test_a_program_that_the_compiler_has_no_memory_for_is_told(monkeypatch):
    def refuse(lowered):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    with pytest.raises(
        RuntimeError, match=r"got refused: JaxRuntimeError; pass a smaller"
    ):
        diagnostics.compare_speed(loss, loss, *ARGS)
