"""Which float32 numbers a cast to fewer bits flushes, coarsens or makes infinite.

All of it is integer arithmetic on bit patterns: the bits of non-negative floats are
ordered as the floats are. Three simpler ways would each miscount. XLA may leave out a
cast and a cast back; `lax.reduce_precision` flushes float16 subnormals; and a float32
comparison takes a subnormal for zero.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

INFINITY = 0x7F800000  # the bits of float32 infinity; those of a NaN are larger
LEAST_EXPONENT = -149  # of float32 subnormals


class Limits(NamedTuple):
    """The magnitudes at which the result of a cast changes.

    A cast to a dtype without infinities gives NaN for magnitudes that are too large.
    """

    zero_up_to: float
    subnormal_below: float
    overflow_from: float
    largest: float


# Ties go to the even neighbor: to zero, and to infinity except in float8_e4m3fn, where
# 464 becomes 448.
_LIMITS = {
    "float16": Limits(2.0**-25, 2.0**-14, 65520.0, 65504.0),
    "bfloat16": Limits(
        2.0**-134, 2.0**-126, (2 - 2.0**-8) * 2.0**127, (2 - 2.0**-7) * 2.0**127
    ),
    "float8_e5m2": Limits(2.0**-17, 2.0**-14, 61440.0, 57344.0),
    "float8_e4m3fn": Limits(2.0**-10, 2.0**-6, 464 + 2.0**-15, 448.0),
}


def limits(dtype: DTypeLike, function: str = "grad_report") -> Limits:
    """The limits of a cast from float32 to `dtype`; errors name `function`.

    Raises:
      ValueError: a dtype other than float16, bfloat16, float8_e5m2, float8_e4m3fn.
    """
    name = jnp.dtype(dtype).name
    if name not in _LIMITS:
        known = ", ".join(_LIMITS)
        raise ValueError(f"{function}: expected dtype to be one of {known}, got {name}")
    return _LIMITS[name]


def magnitude_bits(leaf: ArrayLike) -> jax.Array:
    """The float32 bits of |x| of every entry, i32.

    A complex leaf gives both parts, on a new first axis. Entries wider than float32 are
    rounded, but neither to zero nor to infinity.
    """
    x = jnp.asarray(leaf)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    if x.dtype.itemsize <= 4:
        return bits
    # Without the clip 1e300 would be counted as infinite, and 1e-300 as zero
    # (test_float64_entries_beyond_float32_are_neither_zero_nor_infinite).
    return jnp.where(
        jnp.isfinite(x), jnp.clip(bits, (x != 0).astype(jnp.int32), INFINITY - 1), bits
    )


def exponent_and_fraction(bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(e, f) with |x| = 2^e (1 + f 2^-23), i32. Meaningless for zero."""
    # The bits of a subnormal have no implicit leading one: its exponent field is 0 for
    # all magnitudes below 2^-126. Shifting the first one to bit 23 makes it a normal
    # number whose exponent is too large by the shift.
    # (test_entries_are_counted_at_their_exponent)
    shift = jnp.maximum(lax.clz(bits) - 8, 0)
    bits = bits << shift
    return (bits >> 23) - 127 - shift, bits & 0x7FFFFF


def log2_magnitude(bits: jax.Array) -> jax.Array:
    """log2 |x| as f32, exact for powers of two; -inf for zero."""
    # jnp.log2 of x itself would be -inf for subnormals, and is off by a rounding for
    # many powers of two; that of a mantissa in [1, 2) is exactly 0 at 1.
    exponent, fraction = exponent_and_fraction(bits)
    mantissa = lax.bitcast_convert_type(fraction | (127 << 23), jnp.float32)
    log2 = exponent.astype(jnp.float32) + jnp.log2(mantissa)
    return jnp.where(bits == 0, -jnp.inf, log2)


def bounds_at(
    loss_scale: jax.Array, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The least |x| that S and a cast leave non-zero, leave normal, and make infinite.

    As bits, i32[] each. Exact: S times such a number, rounded to float32, reaches the
    cast's limit, and S times the number before does not. (For bfloat16, whose limits
    are float32 subnormals, this holds if S is a power of two >= 1.)
    """
    zero_up_to, subnormal_below, overflow_from, _ = limits(dtype)
    least_nonzero = (np.float32(zero_up_to).view(np.int32) + 1).view(np.float32)
    reach = np.array([least_nonzero, subnormal_below, overflow_from], np.float64)
    mantissas, exponents = np.frexp(reach)

    # Divide the mantissas alone, both in [1/2, 1). The quotient limit / S itself would
    # be infinite or flushed to zero for S far from 1, e.g. at 2^-14 and at 2^40.
    s_exponent, s_fraction = exponent_and_fraction(magnitude_bits(loss_scale))
    s_mantissa = lax.bitcast_convert_type(s_fraction | (126 << 23), jnp.float32)
    mantissas = jnp.asarray(mantissas, jnp.float32)
    quotient = mantissas / s_mantissa

    # The float32 quotient may be a step too large or too small, or more on a device
    # that multiplies by a reciprocal. So take the least of its neighbors whose product
    # reaches the mantissa: start two steps below, and count the products that do not
    # reach it. Without this most S that are not powers of two give a bound that is off
    # by one (test_a_bound_is_the_least_number_whose_product_with_the_loss_scale_...).
    lowest = lax.bitcast_convert_type(quotient, jnp.int32) - 2
    candidates = lowest[None] + jnp.arange(5, dtype=jnp.int32)[:, None]
    products = lax.bitcast_convert_type(candidates, jnp.float32) * s_mantissa
    bits = lowest + jnp.sum(products < mantissas[None], axis=0, dtype=jnp.int32)

    # Put the exponents back as integers. `s_exponent` belongs to a mantissa in [1, 2).
    field = (bits >> 23) + jnp.asarray(exponents, jnp.int32) - (s_exponent + 1)
    fraction = bits & 0x7FFFFF
    normal = jnp.where(field < 255, (field << 23) | fraction, INFINITY)
    # Below 2^-126 the leading one becomes explicit and moves right. Rounded up: the
    # bound is the least number that reaches, and what is shifted out would make it too
    # small.
    shift = jnp.clip(1 - field, 0, 24)
    subnormal = ((fraction | (1 << 23)) + (1 << shift) - 1) >> shift
    nonzero, least_normal, overflow = jnp.where(field > 0, normal, subnormal)
    return nonzero, least_normal, overflow
