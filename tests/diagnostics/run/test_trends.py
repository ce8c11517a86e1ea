"""What `health` says about losses and norms that go wrong with finite numbers."""

import jax.numpy as jnp
import numpy as np
import pytest
from runs import history_of, state

from jmp_scale import diagnostics

pytestmark = pytest.mark.strict_promotion


def noise(steps, spread=0.1, seed=0):
    """Factors around 1."""
    return np.exp(spread * np.random.RandomState(seed).randn(steps)).astype(np.float32)


def falling(steps, start=4.0, end=1.0, seed=0):
    """A loss as of a run that trains: it falls as 1 / t, with noise."""
    t = np.arange(steps) / (steps / 20)
    return np.float32(end + (start - end) / (1 + t)) * noise(steps, 0.05, seed)


def kinds(history):
    log = diagnostics.HealthLog()
    log(state(), history)
    return log.kinds


def sentence(history, start):
    (found,) = [s for s in diagnostics.health(state(), history) if start in s]
    return found


RUNS_THAT_TRAIN = {
    "falling": falling(500),
    "flat": noise(500),
    "negative and falling": 2 - falling(500, 4, 1)[::-1],
    "near zero": falling(500, 1.0, 1e-6) * noise(500, 1.0, 1),
    "a burst": np.where(np.arange(500) // 30 == 10, 3.0, 1.0) * falling(500),
    "one huge loss": np.where(np.arange(500) == 480, 1e8, 1.0) * falling(500),
    "short": falling(39),
}


@pytest.mark.parametrize("name", RUNS_THAT_TRAIN)
def test_nothing_is_said_of_a_loss_that_falls_or_stays(name):
    loss = RUNS_THAT_TRAIN[name].astype(np.float32)
    norm = 0.3 * noise(len(loss), 0.3, 2)
    assert kinds(history_of(loss=loss, grad_norm=norm)) == frozenset()


def test_a_loss_and_gradients_that_grow_by_ten_orders_of_magnitude_are_reported():
    growth = np.float32(10.0) ** np.linspace(0, 10, 60, dtype=np.float32)
    history = history_of(loss=growth, grad_norm=0.1 * growth)
    assert kinds(history) == {"loss diverges"}


@pytest.mark.parametrize("sign", [1, -1])
def test_a_loss_that_loses_a_quarter_of_what_it_had_gained_diverges(sign):
    """From 8 down to 0 or from 0 down to -8, and then up by a fifth or a third."""
    offset = 0 if sign > 0 else -8
    down = np.linspace(8, 0, 200)
    for back, expected in ((0.2, frozenset()), (0.3, {"loss diverges"})):
        up = np.linspace(0, 8 * back, 60)
        level = np.full(60, 8 * back)
        loss = np.concatenate([down, up, level]) + offset
        # -8 is itself of the size of the gain: a quarter of the larger of the two.
        assert kinds(history_of(loss=np.float32(loss))) == expected


def test_the_sentence_on_a_divergence_names_its_levels_and_the_best_step():
    loss = np.concatenate([np.linspace(4, 1, 300), np.linspace(1, 3, 100)])
    said = sentence(history_of(loss=np.float32(loss)), "The loss diverges")
    assert "and 4 at the start" in said
    assert "around step 299" in said or "around step 3" in said


def test_what_was_gained_is_known_after_the_start_has_left_the_buffer():
    loss = np.concatenate([np.linspace(10, 1, 300), np.full(300, 1.0)])
    risen = np.concatenate([loss, np.full(60, 2.0)]).astype(np.float32)
    history = history_of(capacity=200, loss=risen * noise(660, 0.02))
    assert float(history.first_loss) == pytest.approx(10, rel=0.1)
    assert kinds(history) == frozenset()
    fresh = history_of(capacity=200, loss=risen[400:] * noise(260, 0.02))
    assert kinds(fresh) == {"loss diverges"}


def test_a_run_that_blew_up_at_its_start_is_reported_when_it_does_not_recover():
    stuck = np.concatenate([[2.4, 3.0, 1e4, 50.0], np.full(200, 2.3)])
    history = history_of(loss=np.float32(stuck))
    assert kinds(history) == {"loss blew up"}
    assert "rose to 1e+04 at step 2" in sentence(history, "The loss rose")
    recovered = np.concatenate([[2.4, 3.0, 1e4, 50.0], np.full(200, 0.5)])
    assert kinds(history_of(loss=np.float32(recovered))) == frozenset()


def test_gradients_that_vanish_beside_a_loss_that_stays_are_reported():
    norm = np.where(np.arange(200) < 20, 0.1, 1e-8).astype(np.float32)
    stuck = 0.18 * noise(200, 0.02)
    assert kinds(history_of(loss=stuck, grad_norm=norm)) == {"gradients vanished"}
    # Beside a loss that has fallen they have converged.
    fallen = falling(200, 1.0, 0.01)
    assert kinds(history_of(loss=fallen, grad_norm=norm)) == frozenset()
    # From the first step on.
    history = history_of(loss=stuck, grad_norm=np.zeros(200, np.float32))
    assert kinds(history) == {"gradients vanished"}
    assert "has been zero for 40 steps" in sentence(history, "gradient")


def lost(share):
    return jnp.full(200, 0.9, jnp.float32), jnp.full(200, share, jnp.float32)


def test_updates_that_are_mostly_lost_are_reported_with_their_share():
    assert kinds(history_of(lost_updates=lost(0.69))) == frozenset()
    history = history_of(lost_updates=lost(0.72))
    assert kinds(history) == {"lost updates"}
    said = sentence(history, "lost in rounding")
    assert "90% of the updates, and 72% of their size" in said


def test_updates_that_are_lost_near_a_minimum_are_not_missed():
    norm = np.where(np.arange(200) < 50, 1.0, 0.1).astype(np.float32)
    columns = {"grad_norm": norm, "lost_updates": lost(0.9)}
    assert kinds(history_of(**columns)) == frozenset()
    columns["grad_norm"] = np.full(200, 0.5, np.float32)
    assert kinds(history_of(**columns)) == {"lost updates"}


def test_only_applied_steps_make_a_trend():
    """Spikes are the guard's, and a NaN loss is another finding."""
    applied = np.arange(200) % 4 > 0
    loss = np.where(applied, falling(200), 1e6).astype(np.float32)
    columns = {"loss": loss, "grad_norm": loss, "applied": applied}
    assert kinds(history_of(**columns)) == {"frequent spikes"}
