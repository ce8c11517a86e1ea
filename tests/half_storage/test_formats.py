"""Half-precision formats: their roundings are one of two neighbors, found by NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import one_of
from jax import lax

from jmp_scale._half_storage.formats import FORMATS

both = pytest.mark.parametrize("half", FORMATS.values(), ids=FORMATS)
LARGEST = {name: float(jnp.finfo(name).max) for name in FORMATS}
# NaNs: of JAX, of GPUs, and one whose upper half is infinite.
NANS = np.uint32([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001]).view(np.float32)


def values():
    """float32 numbers of every magnitude that both formats have, and of both signs."""
    random = np.random.RandomState(0)
    mantissas = random.uniform(1, 2, 4000) * np.where(random.rand(4000) < 0.5, -1, 1)
    return np.float32(mantissas * 2.0 ** random.randint(-24, 15, 4000))


def neighbors(x, dtype):
    """The numbers of a format below and above float32 ones."""
    if dtype == jnp.bfloat16:
        cut = x.view(np.uint32) & np.uint32(0xFFFF0000)
        far = np.where(cut == x.view(np.uint32), cut, cut + np.uint32(2**16))
        pair = np.stack([cut.view(np.float32), far.view(np.float32)])
        return np.sort(pair, axis=0)
    near = x.astype(np.float16)
    low = np.where(near <= x, near, np.nextafter(near, np.float16(-np.inf)))
    high = np.where(near >= x, near, np.nextafter(near, np.float16(np.inf)))
    return low.astype(np.float32), high.astype(np.float32)


@both
@pytest.mark.parametrize("part", one_of(2, [0, 0.3, 0.5, 0.8, 1]))
def test_noise_chooses_a_neighbor_by_the_share_of_the_way_to_it(half, part):
    x = values()
    noise = min(int(part * 2**half.noise_bits), 2**half.noise_bits - 1)
    made = np.asarray(half.rounded(jnp.asarray(x), jnp.int32(noise)), np.float64)
    low, high = (np.float64(n) for n in neighbors(x, half.dtype))
    share = (x - low) / np.where(low == high, 1, high - low)
    # That of a bfloat16 is added to the magnitude.
    up = share + part > 1
    if half.dtype == jnp.bfloat16:
        up = np.where(x > 0, up, share > part)
    clear = np.minimum(np.abs(share + part - 1), np.abs(share - part)) > 2.0**-9
    expected = np.where(up, high, low)
    np.testing.assert_array_equal(made[clear], expected[clear])
    assert clear.mean() > 0.9
    assert ((made == low) | (made == high)).all()


@both
@pytest.mark.parametrize("noise", [None, 0, -1])
def test_what_is_not_finite_and_zeros_stay_as_they_are(half, noise):
    noise = noise if noise is None else jnp.int32(noise % 2**half.noise_bits)
    x = jnp.float32([0.0, -0.0, np.inf, -np.inf])
    made = half.rounded(x, noise)
    np.testing.assert_array_equal(made, x)
    np.testing.assert_array_equal(np.signbit(made), np.signbit(x))
    assert np.isnan(half.rounded(jnp.asarray(NANS), noise)).all()


@pytest.mark.parametrize("noise", [None, 0, 4095])
def test_a_finite_value_beyond_float16_becomes_its_largest_number(noise):
    x = np.float32([65504, 65519, 65520, 7e4, 3e38])
    noise = noise if noise is None else jnp.int32(noise)
    for sign in (1, -1):
        made = FORMATS["float16"].rounded(jnp.asarray(sign * x), noise)
        np.testing.assert_array_equal(made, np.full(5, sign * 65504.0))


@both
def test_a_number_and_its_remainder_are_the_value(half):
    x = np.append(values(), np.float32([0.0, -0.0, 65519, -65504, 1e-30]))
    made = half.rounded(jnp.asarray(x)).astype(half.dtype)
    remainder = half.remainder(jnp.asarray(x), made)
    assert remainder.dtype == half.remainder_dtype
    joined = half.joined(made.astype(jnp.float32), remainder)
    np.testing.assert_array_equal(np.asarray(joined).view(np.uint32), x.view(np.uint32))


def test_a_value_far_from_a_bfloat16_leaves_the_remainder_that_is_nearest():
    # As after an update that `optax.apply_updates` rounded more coarsely.
    made = jnp.full(2, 1.0, jnp.bfloat16)
    remainder = FORMATS["bfloat16"].remainder(jnp.float32([1.25, 0.75]), made)
    assert remainder.tolist() == [2**15 - 1, -(2**15)]


def test_a_float16_remainder_is_right_where_a_compiler_leaves_the_cast_out():
    # XLA:GPU may read the float32 value in place of its cast: x - x would be lost.
    half, x = FORMATS["float16"], jnp.asarray(values())
    made = half.rounded(x).astype(jnp.float16)
    expected = half.remainder(x, made)
    assert (expected != 0).mean() > 0.9
    np.testing.assert_array_equal(half.remainder(x, x), expected)


def test_a_bfloat16_zero_with_an_old_remainder_is_no_nan():
    zeros = jnp.float32([0.0, -0.0])
    joined = FORMATS["bfloat16"].joined(zeros, jnp.full(2, -1, jnp.int16))
    np.testing.assert_array_equal(joined, zeros)
    assert np.signbit(joined).tolist() == [False, True]
    assert lax.bitcast_convert_type(joined, jnp.int32).tolist() == [0, -(2**31)]
