"""What `HealthLog` says about losses and norms that go wrong with finite numbers."""

import numpy as np
import pytest
from runs import history_of, state

from jmp_scale import diagnostics


def noise(steps, spread=0.1, seed=0):
    """Factors around 1."""
    return np.exp(spread * np.random.RandomState(seed).randn(steps))


def falling(steps, start=4.0, end=1.0):
    """A loss as of a run that trains: it falls as 1 / t, with noise."""
    t = np.arange(steps) / (steps / 20)
    return (end + (start - end) / (1 + t)) * noise(steps, 0.05)


def then(*parts):
    return np.concatenate(parts)


STEP = np.arange(500)
SHRINKING = np.where(STEP[:200] < 50, 1.0, 0.1)
BLOWN_UP = [2.4, 3.0, 1e4, 50.0]
RISEN = then(np.linspace(10, 1, 300), np.full(300, 1.0), np.full(60, 2.0))
RISEN *= noise(660, 0.02)


def fall_and_rise(back, offset=0):
    """From 8 down to 0, and then up again by a share of that."""
    up = then(np.linspace(0, 8 * back, 60), np.full(60, 8 * back))
    return then(np.linspace(8, 0, 200), up) + offset


def lost(share):
    return {"lost_entries": np.full(200, 0.9), "lost_magnitude": np.full(200, share)}


LONG = np.arange(800)
SINE, RAMP, FALLS = np.sin(LONG / 5), LONG / 800, falling(800) / noise(800, 0.04)
LEVEL = 2.3 * noise(800, 0.02)
# Columns of a history, or a loss; the rule, and words of its text.
RUNS = {
    # A run that falls, with the symptoms of instability on top of it.
    "swings": (FALLS * (1 + 0.6 * SINE), "loss oscillates", "down, every 31 steps"),
    "swings a little": (FALLS * (1 + 0.2 * SINE),),
    "leaps": (
        FALLS * np.where(LONG % 25, 1, 5),
        "bursts",
        "times in 800 steps, typically every 25 steps",
    ),
    "leaps three times": (FALLS * np.where(np.isin(LONG, [9, 80, 400]), 5, 1),),
    "the norm explodes": (
        {"loss": FALLS, "grad_norm": 10 ** (5 * RAMP)},
        "growing norm",
        "grown from 1 to 7",
    ),
    "the norm has grown, and stays": (
        {"loss": FALLS, "grad_norm": np.where(RAMP < 0.1, 1.0, 200.0)},
    ),
    "no progress": (LEVEL, "no progress", "2.3 after 2.3"),
    "slow progress": (LEVEL * (1 - 0.05 * RAMP),),
    "no progress of a trained model": ({"capacity": 400, "loss": LEVEL},),
    "a trained model, heavy tails": ({"capacity": 400, "loss": 1e-6 * noise(800, 1)},),
    "flat": (noise(299),),
    "a burst": (np.where(STEP // 30 == 10, 3.0, 1.0) * falling(500),),
    "short": (falling(39),),
    # -8 is itself of the size of the gain: a quarter of the larger of the two.
    "a fifth is lost, below zero": (fall_and_rise(0.2, -8),),
    "a third is lost, below zero": (fall_and_rise(0.3, -8), "loss diverges"),
    "the sentence names its levels": (
        then(np.linspace(4, 1, 300), np.linspace(1, 3, 100)),
        "loss diverges",
        "around step 299 and 4 at the start",
    ),
    "the start has left the buffer": ({"capacity": 200, "loss": RISEN},),
    "a trained model": ({"capacity": 200, "loss": RISEN[400:]}, "loss diverges"),
    "blew up": (then(BLOWN_UP, np.full(200, 2.3)), "no progress", "1e+04 at step 2)"),
    "blew up and recovered": (then(BLOWN_UP, np.full(200, 0.5)),),
    "most updates are lost": (
        lost(0.72),
        "lost updates",
        "90% of the updates, and 72%",
    ),
    "lost near a minimum": ({"grad_norm": SHRINKING, **lost(0.9)},),
    # Only applied steps make a trend.
    "spikes are the guard's": (
        {"loss": np.where(STEP % 4, falling(500), 1e6), "applied": STEP % 4 > 0},
        "frequent skips",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_finding_that_its_losses_and_norms_deserve(name):
    columns, *expected = RUNS[name]
    if not isinstance(columns, dict):
        norm = 0.3 * noise(len(columns), 0.3, 2)
        columns = {"loss": columns, "grad_norm": norm}
    log = diagnostics.HealthLog()
    said = log(state(), history_of(**columns))
    assert [*log.rules] == expected[:1]
    assert all(words in said[0].text for words in expected[1:])
