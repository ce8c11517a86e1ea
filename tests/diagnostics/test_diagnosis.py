"""The cause of a step that is not finite, for losses whose cause is known."""

import jax
import jax.numpy as jnp
import pytest
from helpers import count_traces
from losses import forgetful

import jmp_scale
from jmp_scale import diagnostics

pytestmark = pytest.mark.strict_promotion


def test_a_finite_step_is_diagnosed_as_such():
    diagnosis = diagnostics.diagnose_nonfinite(
        forgetful, 2.0**15, jnp.ones(3), jnp.ones(3)
    )
    assert diagnosis == diagnostics.Diagnosis("none")


@pytest.mark.parametrize("start", [2.0**36, 2.0**40, 1e12])
def test_an_overflow_is_finite_from_the_largest_smaller_scale_on(start):
    diagnosis = diagnostics.diagnose_nonfinite(
        forgetful, start, jnp.ones(3), jnp.ones(3)
    )
    assert (diagnosis.cause, diagnosis.finite_at_log2) == ("overflow", 35)
    assert "2^35" in diagnosis.summary()


def out_of_range(w):
    """At S = 1 the gradient is 240000, beyond float16: finite from S = 2^-2 on."""
    return (w.astype(jnp.float16) * jnp.float16(60000)).astype(jnp.float32) * 4


def test_an_overflow_that_persists_at_one_is_searched_further_down():
    assert (
        diagnostics.diagnose_nonfinite(out_of_range, 8, jnp.float32(1)).finite_at_log2
        == -2
    )
    assert (
        "below 1"
        in diagnostics.diagnose_nonfinite(out_of_range, 8, jnp.float32(1)).summary()
    )
    assert (
        diagnostics.diagnose_nonfinite(
            out_of_range, 8, jnp.float32(1), log2_min=-1
        ).cause
        == "nan"
    )
    assert (
        diagnostics.diagnose_nonfinite(
            out_of_range, 8, jnp.float32(1), log2_min=-2
        ).cause
        == "overflow"
    )


def test_the_leaf_that_overflows_first_as_the_scale_grows_is_named():
    def loss(params):
        return forgetful(params["a"], jnp.ones(3)) + 2.0**4 * forgetful(
            params["b"], jnp.ones(3)
        )

    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    diagnosis = diagnostics.diagnose_nonfinite(loss, 2.0**60, params)
    assert (diagnosis.path, diagnosis.finite_at_log2) == ("['b']", 31)
    assert diagnosis.nonfinite_paths == ("['b']",)


def test_a_loss_that_is_not_finite_is_a_matter_of_the_forward_pass():
    def loss(params, batch):
        return (params["w"] * batch["x"]).sum(), None

    batch = {"y": jnp.ones(2), "x": jnp.array([1.0, jnp.nan])}
    diagnosis = diagnostics.diagnose_nonfinite(
        loss, 2.0**15, {"w": jnp.ones(2)}, batch, has_aux=True
    )
    assert (diagnosis.cause, diagnosis.path) == ("forward", "['w']")
    assert diagnosis.nonfinite_argument == "args[1]['x']"
    assert "args[1]['x']" in diagnosis.summary()
    exploded = diagnostics.diagnose_nonfinite(
        lambda w: jnp.exp(w).sum(), 2.0**15, jnp.full(2, 1e3)
    )
    assert (exploded.cause, exploded.nonfinite_argument) == ("forward", None)


def test_a_nan_that_no_scale_cures_is_found():
    params = {"a": jnp.ones(2), "b": jnp.zeros(2)}
    diagnosis = diagnostics.diagnose_nonfinite(
        lambda p: (p["a"] + jnp.where(p["b"] > 0, jnp.sqrt(p["b"]), 0)).sum(),
        jmp_scale.DynamicLossScale(),
        params,
    )
    assert (diagnosis.cause, diagnosis.path, diagnosis.finite_at_log2) == (
        "nan",
        "['b']",
        None,
    )
    assert "debug_nans" in diagnosis.summary()


def test_a_diagnosis_compiles_the_loss_once_however_many_scales_it_tries():
    counted, traces = count_traces(out_of_range)
    diagnostics.diagnose_nonfinite(counted, 2.0**15, jnp.float32(1))
    assert len(traces) == 1


def test_a_diagnosis_refuses_a_bad_search_range():
    with pytest.raises(
        ValueError, match="diagnose_nonfinite: expected log2_min to be in"
    ):
        diagnostics.diagnose_nonfinite(out_of_range, 8, jnp.float32(1), log2_min=-127)


@pytest.mark.parametrize("s", [jnp.nan, jnp.inf, 0.0, -8.0])
def test_a_diagnosis_refuses_a_loss_scale_that_is_not_positive_and_finite(s):
    broken = jmp_scale.StaticLossScale(8)
    object.__setattr__(broken, "loss_scale", jnp.float32(s))
    with pytest.raises(ValueError, match="expected a positive finite loss scale"):
        diagnostics.diagnose_nonfinite(out_of_range, broken, jnp.float32(1))


def test_debug_nans_finds_a_planted_nan_at_a_loss_scale_of_one():
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jmp_scale.grad(lambda w: jnp.log(w).sum(), jmp_scale.NoOpLossScale())(
            -jnp.ones(2)
        )
