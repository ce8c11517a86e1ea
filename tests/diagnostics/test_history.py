"""What a history keeps of each step, and what its summary counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise_equal
from runs import history_of, recorded

import jmp_scale
from jmp_scale import diagnostics

pytestmark = pytest.mark.strict_promotion


def test_a_history_counts_skips_growths_and_backoffs():
    history, _ = recorded([0, 0, 1, 1, 1, 1, 0, 1])
    assert history.to_dict()["log2_scale"].tolist() == [15, 14, 13, 13, 13, 14, 14, 13]
    summary = history.summary()
    assert (summary.steps, summary.skip_rate, summary.longest_run) == (8, 3 / 8, 2)
    assert (summary.growths, summary.backoffs, summary.loss_nonfinite) == (1, 3, 0)


@pytest.mark.parametrize("steps", [3, 4, 5, 11])
def test_a_full_history_keeps_the_last_steps_in_order(steps):
    flags = [i % 3 > 0 for i in range(steps)]
    history = recorded(flags, capacity=4)[0].to_dict()
    assert history["step"].tolist() == list(range(steps))[-4:]
    assert history["grads_finite"].tolist() == flags[-4:]
    assert (
        history["log2_scale"].tolist()
        == recorded(flags)[0].to_dict()["log2_scale"].tolist()[-4:]
    )


def test_an_empty_history_has_a_summary():
    summary = diagnostics.LossScaleHistory.create(3).summary()
    assert (summary.steps, summary.skip_rate, summary.longest_run) == (0, 0.0, 0)


def test_a_history_refuses_a_bad_capacity_and_batches():
    for capacity in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="expected capacity to be an integer"):
            diagnostics.LossScaleHistory.create(capacity)
    with pytest.raises(
        ValueError, match=r"push: expected grads_finite to be a scalar, .*\(2,\)"
    ):
        diagnostics.LossScaleHistory.create(3).push(1.0, jnp.ones(2, bool))


def test_what_is_not_passed_is_unknown_and_flags_are_those_of_the_gradients():
    history = recorded([1, 0, 1])[0].to_dict()
    assert history["applied"].tolist() == [True, False, True]
    for name in ("loss", "grad_norm", "lost_entries", "lost_magnitude", "norm_limit"):
        assert np.isnan(history[name]).all()


def test_each_step_is_recorded_with_its_loss_norm_and_causes():
    flags = {
        "grads_finite": [True, True, False, False],
        "applied": [True, False, False, False],
        "loss": jnp.float32([2.0, 8.0, 3.0, jnp.nan]),
        "grad_norm": jnp.float32([0.5, 9.0, jnp.inf, jnp.nan]),
    }
    flags = {name: jnp.asarray(value) for name, value in flags.items()}
    history = history_of(**flags)
    arrays = history.to_dict()
    np.testing.assert_array_equal(arrays["loss"], flags["loss"])
    np.testing.assert_array_equal(arrays["grad_norm"], flags["grad_norm"])
    # Taken from the loss, which was given.
    assert arrays["loss_finite"].tolist() == [True, True, True, False]
    summary = history.summary()
    assert (summary.spikes, summary.overflows, summary.loss_nonfinite) == (1, 1, 1)
    assert (summary.skip_rate, summary.longest_run) == (3 / 4, 3)


def test_a_loss_that_is_passed_does_not_override_the_flag_of_it():
    history = diagnostics.LossScaleHistory.create(2)
    history = history.push(1.0, True, loss=jnp.float32(2), loss_finite=False)
    assert history.to_dict()["loss_finite"].tolist() == [False]


def test_the_first_usable_loss_and_norm_stay():
    nan, inf = float("nan"), float("inf")
    loss = jnp.float32([nan, -inf, 0.0, 5.0, 6.0, 7.0])
    norm = jnp.float32([inf, 0.0, nan, 0.0, 3.0, 4.0])
    history = history_of(capacity=2, loss=loss, grad_norm=norm)
    assert (float(history.first_loss), float(history.first_norm)) == (0, 3)
    empty = diagnostics.LossScaleHistory.create(2)
    assert np.isnan([empty.first_loss, empty.first_norm]).all()


def test_the_limits_of_a_guard_are_recorded():
    guard = jmp_scale.SpikeGuard(
        warmup=1,
        loss_mean=jnp.float32(2),
        loss_deviation=jnp.float32(0.5),
        loss_steps=jnp.int32(9),
        norm_mean=jnp.float32(3),
        norm_deviation=jnp.float32(1),
        norm_steps=jnp.int32(9),
        accepted=jnp.int32(9),
    )
    history = diagnostics.LossScaleHistory.create(2).push(1.0, True, guard=guard)
    arrays = history.to_dict()
    assert arrays["loss_limit"].tolist() == [float(guard.loss_limit)]
    assert arrays["norm_limit"].tolist() == [float(guard.norm_limit)]


def test_a_history_keeps_its_types_and_buffers_through_a_donated_scan():
    lost = diagnostics.LostUpdates(jnp.float16(0.5), jnp.float32(0.25))

    def step(history, loss):
        flags = {"applied": loss > 0, "loss": loss, "grad_norm": 2 * loss}
        return history.push(1.0, loss > 0, **flags, lost_updates=lost), None

    start = diagnostics.LossScaleHistory.create(4)
    run = jax.jit(lambda h, x: jax.lax.scan(step, h, x)[0], donate_argnums=0)
    losses = jnp.arange(6, dtype=jnp.float32)
    expected = jax.lax.scan(step, start, losses)[0]
    assert_bitwise_equal(run(start, losses), expected)


def test_a_push_refuses_numbers_for_several_steps():
    history = diagnostics.LossScaleHistory.create(3)
    with pytest.raises(
        ValueError, match=r"push: expected loss to be a scalar, .*\(2,\)"
    ):
        history.push(1.0, True, loss=jnp.ones(2))
