"""The bounds of a cast at a loss scale, against products computed by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cast_reference import DTYPES

from jmp_scale.diagnostics import _casts

pytestmark = pytest.mark.strict_promotion


def loss_scales(dtype):
    """S of every size, with all bits of the mantissa; powers of two for bfloat16."""
    random = np.random.RandomState(0)
    if dtype == "bfloat16":
        return np.ldexp(np.float32(1), np.arange(127))
    mantissas = 1 + random.rand(300)
    scales = np.ldexp(mantissas, random.randint(-126, 126, 300))
    return np.concatenate([scales, [2.0**-126, 2.0**126]]).astype(np.float32)


@np.errstate(over="ignore", under="ignore", invalid="ignore")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bound_is_the_least_number_whose_product_with_the_loss_scale_reaches(dtype):
    limits = _casts.limits(dtype)
    least_nonzero = np.nextafter(np.float32(limits.zero_up_to), np.float32(1))
    reach = np.float32([least_nonzero, limits.subnormal_below, limits.overflow_from])
    scales = loss_scales(dtype)
    bounds = jax.vmap(lambda s: jnp.stack(_casts.bounds_at(s, dtype)))(scales)
    at = np.asarray(bounds).view(np.float32)
    before = (np.maximum(np.asarray(bounds), 1) - 1).view(np.float32)
    assert (at * scales[:, None] >= reach).all()
    assert (before * scales[:, None] < reach).all()


def test_log2_is_exact_for_powers_of_two_and_close_for_other_numbers():
    exponents = np.arange(-149, 128)
    powers = np.ldexp(np.float64(1), exponents).astype(np.float32)
    log2 = _casts.log2_magnitude(_casts.magnitude_bits(powers))
    assert log2.tolist() == exponents.tolist()
    others = np.float32([3e-45, 1e-40, 1.1754942e-38, 0.7, 3.4028235e38])
    log2 = _casts.log2_magnitude(_casts.magnitude_bits(others))
    # An ulp of the sum at magnitude 149, and one of the logarithm of the mantissa.
    np.testing.assert_allclose(log2, np.log2(np.float64(others)), atol=2e-5, rtol=0)
