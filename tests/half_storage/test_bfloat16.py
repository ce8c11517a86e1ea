"""bfloat16 values: their roundings are one of two neighbors, found by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_scale._half_storage import bfloat16

# NaNs: of JAX, of GPUs, and one whose upper half is infinite.
NANS = np.uint32([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001]).view(np.float32)


def values():
    """float32 numbers of many magnitudes, and of both signs."""
    random = np.random.RandomState(0)
    mantissas = random.uniform(1, 2, 4000) * np.where(random.rand(4000) < 0.5, -1, 1)
    return np.float32(mantissas * 2.0 ** random.randint(-120, 120, 4000))


@pytest.mark.parametrize("part", [0, 0.3, 1])
def test_noise_chooses_a_neighbor_by_the_share_of_the_way_to_it(part):
    x = values()
    near = x.view(np.uint32) & np.uint32(0xFFFF0000)
    far = (near + np.uint32(2**16)).view(np.float32)
    near = near.view(np.float32)
    noise = min(int(part * 2**16), 2**16 - 1)
    made = np.asarray(bfloat16.rounded(jnp.asarray(x), jnp.uint16(noise)))
    share = (np.float64(x) - near) / (np.float64(far) - near)
    clear = np.abs(share + part - 1) > 2.0**-15
    expected = np.where(share + part > 1, far, near)
    np.testing.assert_array_equal(made[clear], expected[clear])
    assert clear.mean() > 0.9
    assert ((made == near) | (made == far)).all()


@pytest.mark.parametrize("noise", [None, 0, 2**16 - 1])
def test_zeros_and_values_that_are_not_finite_stay_as_they_are(noise):
    noise = noise if noise is None else jnp.uint16(noise)
    x = jnp.float32([0.0, -0.0, np.inf, -np.inf])
    made = bfloat16.rounded(x, noise)
    np.testing.assert_array_equal(made, x)
    np.testing.assert_array_equal(np.signbit(made), np.signbit(x))
    assert np.isnan(bfloat16.rounded(jnp.asarray(NANS), noise)).all()


def test_a_value_far_from_a_bfloat16_leaves_the_remainder_that_is_nearest():
    # As after an update that `optax.apply_updates` rounded more coarsely.
    made = jnp.full(2, 1.0, jnp.bfloat16)
    remainder = bfloat16.remainder(jnp.float32([1.25, 0.75]), made)
    assert remainder.tolist() == [2**15 - 1, -(2**15)]


def test_a_zero_with_an_old_remainder_is_not_nan():
    zeros = jnp.float32([0.0, -0.0])
    joined = bfloat16.joined(zeros, jnp.full(2, -1, jnp.int16))
    np.testing.assert_array_equal(joined, zeros)
    assert np.signbit(joined).tolist() == [False, True]
    assert lax.bitcast_convert_type(joined, jnp.int32).tolist() == [0, -(2**31)]


def test_the_derivatives_are_those_of_exact_values():
    one, two = jnp.float32(1.001), jnp.float32(0.0)
    noise, rest = jnp.uint16(3), jnp.int16(5)
    assert jax.grad(bfloat16.rounded)(one, noise) == 1
    assert jax.grad(bfloat16.joined)(one, rest) == 1
    assert jax.grad(bfloat16.change, (0, 1))(one, two) == (1, -1)
