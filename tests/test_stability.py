"""The benchmark of spikes: the guard keeps its goals, no rule does not."""

import functools

import _stability_rules as rules
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stability
from _stability_tasks import Task

STEPS, SEEDS = 400, 2
FAULTS = stability.faults(STEPS)
HARMFUL = [name for name, (_, bad) in FAULTS.items() if bad.any()]


def examples(key, n):
    places, noise = jax.random.split(key)
    x = jax.random.normal(places, [n, 4])
    return x, x @ jnp.arange(4.0) + 0.1 * jax.random.normal(noise, [n])


# A line through noise: its loss ends near 0.01, which is that of the noise.
LINE = Task(
    init=lambda key: jax.random.normal(key, [4]),
    examples=examples,
    losses=lambda w, x, y: (x @ w - y) ** 2,
    learning_rate=0.05,
)


@functools.cache
def outcome(rule, fault):
    """(final losses, skips) of the seeds."""
    weights, bad = FAULTS[fault]
    return stability.run(LINE, rule, weights, bad, SEEDS)


def ratio(rule, fault):
    clean = outcome(rules.nothing, stability.CLEAN)[0]
    return stability.worst_ratio(outcome(rule, fault)[0], clean)


@pytest.mark.parametrize("fault", HARMFUL)
def test_the_guard_skips_exactly_the_bad_batches(fault):
    skips, bad = outcome(rules.guard, fault)[1], FAULTS[fault][1]
    np.testing.assert_array_equal(skips, np.stack([bad] * SEEDS))


@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in HARMFUL])
def test_the_guard_gives_way_where_there_is_no_bad_batch(fault):
    skips = outcome(rules.guard, fault)[1]
    assert skips.sum(axis=1).max() <= (10 if fault == "level shift" else 0)


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != stability.CLEAN])
def test_a_guarded_run_ends_within_15_percent_of_the_clean_one(fault):
    assert ratio(rules.guard, fault) <= stability.GOAL


@pytest.mark.parametrize("fault", ["one spike", "NaN later"])
def test_a_run_without_a_rule_does_not(fault):
    assert ratio(rules.nothing, fault) > stability.GOAL
