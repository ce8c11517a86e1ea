"""What a history keeps of each step, and what its summary counts."""

import jax.numpy as jnp
import numpy as np
import pytest
from runs import recorded

from jmp_scale import diagnostics

pytestmark = pytest.mark.strict_promotion


def test_a_history_counts_skips_growths_and_backoffs():
    history, _ = recorded([0, 0, 1, 1, 1, 1, 0, 1])
    assert history.to_dict()["log2_scale"].tolist() == [15, 14, 13, 13, 13, 14, 14, 13]
    summary = history.summary()
    assert (summary.steps, summary.skip_rate, summary.longest_run) == (8, 3 / 8, 2)
    assert (summary.growths, summary.backoffs, summary.loss_nonfinite) == (1, 3, 0)
    assert (
        summary.log2_scale_min,
        summary.log2_scale_median,
        summary.log2_scale_last,
    ) == (13, 13.5, 13)


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
    assert np.isnan(summary.log2_scale_last)


def test_a_history_refuses_a_bad_capacity_and_batches():
    for capacity in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="capacity must be an integer >= 1"):
            diagnostics.LossScaleHistory.create(capacity)
    with pytest.raises(
        ValueError, match=r"push: grads_finite must be a scalar, got \(2,\)"
    ):
        diagnostics.LossScaleHistory.create(3).push(1.0, jnp.ones(2, bool))
