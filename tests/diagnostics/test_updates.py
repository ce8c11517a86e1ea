"""The share of updates lost in rounding, against sums by NumPy and ml_dtypes."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cast_reference import DTYPES as NARROW

from jmp_scale import diagnostics

pytestmark = pytest.mark.strict_promotion

DTYPES = {"float32": np.float32, **NARROW}


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_update_is_lost_where_the_rounded_sum_is_the_parameter(dtype):
    random = np.random.RandomState(0)
    params = np.exp2(random.uniform(-4, 4, 4000)) * random.choice([-1, 1], 4000)
    params = params.astype(DTYPES[dtype])
    # Around the size at which they begin to be lost, of both signs; every tenth is 0.
    epsilon = float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    sizes = epsilon * np.exp2(random.uniform(-4, 2, 4000))
    sizes *= random.choice([-1, 1], 4000)
    updates = (sizes * np.abs(params.astype(np.float64))).astype(np.float32)
    updates[::10] = 0
    # In float64 the sum of a float32 and a smaller number is exact here.
    sums = params.astype(np.float64) + updates.astype(np.float64)
    lost = (sums.astype(DTYPES[dtype]) == params) & (updates != 0)
    found = diagnostics.lost_updates(params, updates)
    assert 0.2 < lost.sum() / (updates != 0).sum() < 0.8
    np.testing.assert_allclose(found.entries, lost.sum() / (updates != 0).sum(), 1e-6)
    sizes = np.abs(np.float64(updates))
    # A float32 sum of 4,000 numbers.
    np.testing.assert_allclose(found.magnitude, sizes[lost].sum() / sizes.sum(), 1e-4)


def lost(param, update):
    found = diagnostics.lost_updates(jnp.bfloat16(param), jnp.float32(update))
    assert found.entries == found.magnitude
    return float(found.entries)


def test_a_tie_goes_to_the_even_neighbor():
    even, odd = 1.0, 1 + 2.0**-7
    assert lost(even, 2.0**-8) == 1
    assert lost(odd, 2.0**-8) == 0
    assert lost(even, np.nextafter(np.float32(2.0**-8), np.float32(1))) == 0


def test_a_parameter_of_zero_takes_every_update():
    assert lost(0.0, 1e-30) == lost(-0.0, -1e-30) == 0


@pytest.mark.parametrize("sign", [1, -1])
def test_an_update_towards_zero_from_a_power_of_two_needs_half_the_size(sign):
    assert lost(sign * 1.0, -sign * 1.1 * 2.0**-9) == 0
    assert lost(sign * 1.0, sign * 1.1 * 2.0**-9) == 1


def test_zero_updates_and_leaves_that_are_not_real_numbers_do_not_count():
    z = jnp.ones(2, jnp.complex64)
    params = {"w": jnp.ones(2), "step": jnp.array(3), "z": z}
    updates = {"w": jnp.float32([1e-9, 0.0]), "step": jnp.array(1), "z": 0 * z}
    assert diagnostics.lost_updates(params, updates) == (1, 1)
    assert diagnostics.lost_updates(jnp.ones(3), -jnp.zeros(3)) == (0, 0)
    assert diagnostics.lost_updates({}, {}) == (0, 0)


def test_the_shares_are_the_same_in_jit_vmap_and_scan():
    params = jnp.ones((3, 4), jnp.float16)
    updates = jnp.exp2(-jnp.arange(12, dtype=jnp.float32)).reshape(3, 4) * 0.01
    one_by_one = map(diagnostics.lost_updates, params, updates)
    expected = jax.tree.map(lambda *rows: jnp.stack(rows), *one_by_one)
    vmapped = jax.jit(jax.vmap(diagnostics.lost_updates))(params, updates)
    chex.assert_trees_all_close(vmapped, expected, rtol=1e-6)  # sums of four

    def step(_, row):
        return None, diagnostics.lost_updates(*row)

    scanned = jax.lax.scan(step, None, (params, updates))[1]
    chex.assert_trees_all_close(scanned, expected, rtol=1e-6)


def test_a_share_of_more_than_two_to_the_24_entries_is_counted_exactly():
    def share():  # never in memory: XLA fuses the constants into the sums
        params = jnp.ones((2**13, 2**12), jnp.bfloat16)
        return diagnostics.lost_updates(params, jnp.full(params.shape, 1e-4))

    assert float(jax.jit(share)().entries) == 1


def test_trees_that_do_not_match_are_refused():
    ones = jnp.ones(2)
    with pytest.raises(
        ValueError, match="lost_updates: expected updates of the struct"
    ):
        diagnostics.lost_updates({"a": ones}, {"b": ones})
    with pytest.raises(ValueError, match=r"updates: .* shapes .* \(3,\) for \(2,\)"):
        diagnostics.lost_updates(ones, jnp.ones(3))
