"""Which float32 numbers a cast to fewer bits flushes, keeps with fewer digits, or turns infinite.

All of it is integer arithmetic on bit patterns: the bits of non-negative floats are ordered as the floats
are. A cast and back, which XLA may elide, `lax.reduce_precision`, which flushes float16 subnormals, and
float32 comparisons, which take a subnormal for zero, would each miscount.
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
    """Magnitudes of what is cast. A cast to a dtype without infinities gives NaN for too large ones."""

    zero_up_to: float
    subnormal_below: float
    overflow_from: float
    largest: float


# Ties go to the even neighbor: to zero, and to infinity except in float8_e4m3fn, where 464 becomes 448.
_LIMITS = {
    "float16": Limits(2.0**-25, 2.0**-14, 65520.0, 65504.0),
    "bfloat16": Limits(
        2.0**-134, 2.0**-126, (2 - 2.0**-8) * 2.0**127, (2 - 2.0**-7) * 2.0**127
    ),
    "float8_e5m2": Limits(2.0**-17, 2.0**-14, 61440.0, 57344.0),
    "float8_e4m3fn": Limits(2.0**-10, 2.0**-6, 464 + 2.0**-15, 448.0),
}


def limits(dtype: DTypeLike) -> Limits:
    """The limits of a cast from float32 to `dtype`.

    Raises:
      ValueError: a dtype other than float16, bfloat16, float8_e5m2, float8_e4m3fn.
    """
    name = jnp.dtype(dtype).name
    if name not in _LIMITS:
        raise ValueError(f"dtype must be one of {', '.join(_LIMITS)}, got {name}")
    return _LIMITS[name]


def magnitude_bits(leaf: ArrayLike) -> jax.Array:
    """The float32 bits of |x| of every entry, i32; of a complex leaf both parts, on a new first axis.

    Wider entries are rounded to float32, but neither to zero nor to infinity.
    """
    x = jnp.asarray(leaf)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    if x.dtype.itemsize <= 4:
        return bits
    return jnp.where(
        jnp.isfinite(x), jnp.clip(bits, (x != 0).astype(jnp.int32), INFINITY - 1), bits
    )


def exponent_and_fraction(bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(e, f) with |x| = 2^e (1 + f 2^-23), i32, for subnormals too. Meaningless for zero."""
    shift = jnp.maximum(lax.clz(bits) - 8, 0)
    bits = bits << shift
    return (bits >> 23) - 127 - shift, bits & 0x7FFFFF


def log2_magnitude(bits: jax.Array) -> jax.Array:
    """log2 |x| as f32, exact for powers of two; -inf for zero."""
    exponent, fraction = exponent_and_fraction(bits)
    mantissa = lax.bitcast_convert_type(fraction | (127 << 23), jnp.float32)
    log2 = exponent.astype(jnp.float32) + jnp.log2(mantissa)
    return jnp.where(bits == 0, -jnp.inf, log2)


def bounds_at(
    loss_scale: jax.Array, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The least |x|, as bits, that S and a cast leave non-zero, leave normal, and turn infinite: i32[] each.

    Exact: S times these, rounded to float32, reaches the cast's limit, and S times the number before does
    not. (For bfloat16, whose limits are float32 subnormals, if S is a power of two >= 1.)
    """
    zero_up_to, subnormal_below, overflow_from, _ = limits(dtype)
    least_nonzero = (np.float32(zero_up_to).view(np.int32) + 1).view(np.float32)
    reach = np.array([least_nonzero, subnormal_below, overflow_from], np.float64)
    mantissas, exponents = np.frexp(reach)

    # The quotient of the mantissas, where nothing under- or overflows, corrected to the least that reaches.
    s_exponent, s_fraction = exponent_and_fraction(magnitude_bits(loss_scale))
    s_mantissa = lax.bitcast_convert_type(s_fraction | (126 << 23), jnp.float32)
    mantissas = jnp.asarray(mantissas, jnp.float32)
    quotient = lax.bitcast_convert_type(mantissas / s_mantissa, jnp.int32) - 2
    candidates = quotient[None] + jnp.arange(5, dtype=jnp.int32)[:, None]
    products = lax.bitcast_convert_type(candidates, jnp.float32) * s_mantissa
    quotient += jnp.sum(products < mantissas[None], axis=0, dtype=jnp.int32)

    field = (quotient >> 23) + jnp.asarray(exponents, jnp.int32) - (s_exponent + 1)
    fraction = quotient & 0x7FFFFF
    normal = jnp.where(field < 255, (field << 23) | fraction, INFINITY)
    shift = jnp.clip(1 - field, 0, 24)
    subnormal = ((fraction | (1 << 23)) + (1 << shift) - 1) >> shift
    nonzero, least_normal, overflow = jnp.where(field > 0, normal, subnormal)
    return nonzero, least_normal, overflow
