"""The share of updates lost in rounding, against sums by NumPy and ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from runs import state

from jmp_scale import diagnostics

pytestmark = pytest.mark.strict_promotion

DTYPES = np.float32, np.float16, ml_dtypes.bfloat16


@jax.jit
def lost_updates(params, updates):
    found = diagnostics.metrics(state(), params=params, updates=updates)
    return found["lost_entries"], found["lost_magnitude"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_update_is_lost_where_the_rounded_sum_is_the_parameter(dtype):
    random = np.random.RandomState(0)
    params = np.exp2(random.uniform(-4, 4, 4000)) * random.choice([-1, 1], 4000)
    params = params.astype(dtype)
    # Around the size at which they begin to be lost, of both signs; every tenth is 0.
    epsilon = float(ml_dtypes.finfo(dtype).eps)
    sizes = epsilon * np.exp2(random.uniform(-4, 2, 4000))
    sizes *= random.choice([-1, 1], 4000)
    updates = (sizes * np.abs(params.astype(np.float64))).astype(np.float32)
    updates[::10] = 0
    sums = params.astype(np.float32) + updates
    lost = (sums.astype(dtype) == params) & (updates != 0)
    assert 0.2 < lost.sum() / (updates != 0).sum() < 0.8
    entries, magnitude = lost_updates(params, updates)
    np.testing.assert_allclose(entries, lost.sum() / (updates != 0).sum(), 1e-6)
    sizes = np.abs(np.float64(updates))
    # A float32 sum of 4,000 numbers.
    np.testing.assert_allclose(magnitude, sizes[lost].sum() / sizes.sum(), 1e-4)


# A bfloat16 parameter, its update, and the share of that which is lost.
EXACT = {
    "a tie goes to the even neighbor": (1, 2.0**-8, 1),
    "and not to the odd one": (1 + 2.0**-7, 2.0**-8, 0),
    "above the tie": (1, 1.01 * 2.0**-8, 0),
    "zero takes every update": (0.0, 1e-30, 0),
    "so does negative zero": (-0.0, -1e-30, 0),
    "what changes the sign counts": (1, -2, 0),
    "half the size is enough towards zero": (1, -1.1 * 2.0**-9, 0),
    "but not away from it": (1, 1.1 * 2.0**-9, 1),
    "of a negative power of two too": (-1, 1.1 * 2.0**-9, 0),
    "and away from it": (-1, -1.1 * 2.0**-9, 1),
}


@pytest.mark.parametrize("case", EXACT)
def test_which_updates_are_lost_near_ties_zeros_and_powers_of_two(case):
    param, update, share = EXACT[case]
    assert lost_updates(jnp.bfloat16(param), jnp.float32(update)) == (share, share)


def test_an_update_that_a_zero_of_half_precision_cannot_take_is_lost():
    zeros, updates = jnp.float16([0.0, 0.0]), jnp.float32([1e-9, -1e-9])
    assert lost_updates(zeros, updates) == (1, 1)


def test_zero_updates_and_leaves_that_are_not_real_numbers_do_not_count():
    z = jnp.ones(2, jnp.complex64)
    params = {"w": jnp.ones(2), "step": jnp.array(3), "z": z}
    updates = {"w": jnp.float32([1e-9, 0.0]), "step": jnp.array(1), "z": 0 * z}
    assert lost_updates(params, updates) == (1, 1)
    assert lost_updates(jnp.ones(3), -jnp.zeros(3)) == (0, 0)
    assert lost_updates({}, {}) == (0, 0)


def test_a_share_of_more_than_two_to_the_24_entries_is_counted_exactly():
    def share():  # never in memory: XLA fuses the constants into the sums
        params = jnp.ones((2**13, 2**12), jnp.bfloat16)
        return lost_updates(params, jnp.full(params.shape, 1e-4))

    assert float(jax.jit(share)()[0]) == 1


MISMATCHES = {
    "structure|key mismatch": ({"a": jnp.ones(2)}, {"b": jnp.ones(2)}),
    r"shapes of params, got \(3,\) for \(2,\)": (jnp.ones(2), jnp.ones(3)),
    "metrics: expected params and updates, got only one": (jnp.ones(2), None),
}


@pytest.mark.parametrize("words", MISMATCHES)
def test_trees_that_do_not_match_are_refused(words):
    with pytest.raises(ValueError, match=words):
        lost_updates(*MISMATCHES[words])
