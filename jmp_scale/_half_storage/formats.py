"""The half-precision formats beside float32: rounding, remainders, and both joined."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._types import Leaf

_bits = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
_float = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.float32)


class Format(NamedTuple):
    """A half-precision dtype, and how its numbers stand beside float32 values."""

    dtype: jnp.dtype
    remainder_dtype: jnp.dtype
    noise_bits: int  # random bits that decide between two neighbors
    # Rounds f32 to the format, as f32, by noise (i32, or None for the nearest).
    rounded: Callable[..., jax.Array]
    # Returns the remainder of an f32 value and its rounding.
    remainder: Callable[[jax.Array, jax.Array], jax.Array]
    # Returns the f32 value of a rounding, as f32, and its remainder.
    joined: Callable[[jax.Array, jax.Array], jax.Array]

    def noise(self, words: jax.Array) -> jax.Array:
        """Returns i32 in [0, 2^noise_bits) of random unsigned integers."""
        return (words & (2**self.noise_bits - 1)).astype(jnp.int32)


def format_of(x: Leaf) -> Format:
    """Returns the format of a half-precision array."""
    return FORMATS[str(x.dtype)]


def misfits(remainder: jax.Array, p: jax.Array | None) -> jax.Array:
    """Whether (bool[]) a float16 parameter `p` (None: unknown) lacks more than it can.

    The largest float16 may lack anything, as finite values stop there.
    """
    size = jnp.abs(remainder)
    if p is None:  # those of a bfloat16 are integers, cast to float32
        return (size > 16).any() & (size == jnp.floor(size)).all()
    largest = jnp.abs(p.astype(jnp.float32))
    half_digit = jnp.maximum(largest * 2.0**-11, 2.0**-25)
    return ((size > half_digit) & (largest < 65504)).any()


def _rounded_to_bfloat16(x: jax.Array, noise: jax.Array | None = None) -> jax.Array:
    """Rounds to the nearest bfloat16, ties up, or at random.

    At random it is right in the mean to 2^-16 of the last digit.
    """
    added = 2**15 if noise is None else noise
    return jnp.where(jnp.isnan(x), x, _float((_bits(x) + added) & -(2**16)))


def _remainder_of_bfloat16(x: jax.Array, made: jax.Array) -> jax.Array:
    # As bits, because XLA may leave out a cast to half precision and back.
    upper = lax.bitcast_convert_type(made, jnp.int16).astype(jnp.int32)
    return jnp.clip(_bits(x) - (upper << 16), -(2**15), 2**15 - 1).astype(jnp.int16)


def _joined_bfloat16(x: jax.Array, remainder: jax.Array) -> jax.Array:
    # A parameter that was set to 0, as by pruning, with an old negative remainder would
    # step below the bit pattern of 0, into the NaNs.
    lowest = -(_bits(x) & 0x7FFFFFFF)
    return _float(_bits(x) + jnp.maximum(remainder.astype(jnp.int32), lowest))


def _rounded_to_float16(x: jax.Array, noise: jax.Array | None = None) -> jax.Array:
    """Rounds to the nearest float16, ties to even, or at random.

    At random it is right in the mean to 2^-13 of the last digit. Finite values beyond
    the largest float16 become that.
    """
    # The last digit is 2^-10 of x's power of two, or 2^-24 of the subnormal numbers,
    # which lax.reduce_precision would make zero.
    inside = jnp.clip(x, -65504.0, 65504.0)
    last = jnp.maximum(_float(_bits(inside) & 0x7F800000), 2.0**-14) * 2.0**-10
    if noise is not None:
        # Less than half a digit, in so few bits that the sum with a float16 is exact.
        inside += ((noise + 0.5) * 2.0**-12 - 0.5) * last
    large = last * (1.5 * 2**23)
    rounded = jnp.copysign((inside + large) - large, x)
    return jnp.where(jnp.isfinite(x), rounded, x)


def _remainder_of_float16(x: jax.Array, made: jax.Array) -> jax.Array:
    # Rounded a second time, because XLA may leave out a cast and a cast back.
    rounded = _rounded_to_float16(made.astype(jnp.float32))
    return jnp.where(jnp.isfinite(rounded), x - rounded, 0)


def _joined_float16(x: jax.Array, remainder: jax.Array) -> jax.Array:
    return jnp.where(remainder == 0, x, x + remainder)  # -0.0 + 0.0 would be 0.0


BFLOAT16 = Format(
    jnp.dtype(jnp.bfloat16),
    remainder_dtype=jnp.dtype(jnp.int16),
    noise_bits=16,
    rounded=_rounded_to_bfloat16,
    remainder=_remainder_of_bfloat16,
    joined=_joined_bfloat16,
)
FLOAT16 = Format(
    jnp.dtype(jnp.float16),
    remainder_dtype=jnp.dtype(jnp.float32),
    noise_bits=12,
    rounded=_rounded_to_float16,
    remainder=_remainder_of_float16,
    joined=_joined_float16,
)
FORMATS = {"bfloat16": BFLOAT16, "float16": FLOAT16}
