"""bfloat16 next to float32: values rounded, what rounding leaves, and both joined.

A bfloat16 is the upper half of a float32, so the lower half keeps the rest exactly:

    bits(x) = bits(rounded) * 2^16 + remainder, remainder in [-2^15, 2^15)
    rounded = (bits(x) + 2^15) >> 16, x to nearest, ties up

Operations on bits have no derivative, so each function gets that of its arithmetic:
the identity, as if nothing were rounded.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

_bits = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
_float = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.float32)


@jax.custom_jvp
def rounded(x: jax.Array, bits: jax.Array | None = None) -> jax.Array:
    """Rounds f32 to a bfloat16, as f32: to the nearest, or stochastically.

    With random bits, u16 or u32, of which the lower 16 count, it is right in the mean
    to 2^-16 of the last digit.
    """
    added = 2**15 if bits is None else (bits & (2**16 - 1)).astype(jnp.int32)
    return jnp.where(jnp.isnan(x), x, _float((_bits(x) + added) & -(2**16)))


def remainder(x: jax.Array, made: jax.Array) -> jax.Array:
    """Returns what a bfloat16 lacks of an f32 value, as i16, or the nearest i16."""
    # As bits, because XLA may leave out a cast to half precision and back.
    upper = lax.bitcast_convert_type(made, jnp.int16).astype(jnp.int32)
    return jnp.clip(_bits(x) - (upper << 16), -(2**15), 2**15 - 1).astype(jnp.int16)


@jax.custom_jvp
def joined(x: jax.Array, remainder: jax.Array) -> jax.Array:
    """Returns the f32 value of a bfloat16, given as f32, and its remainder."""
    # A parameter that was set to 0, as by pruning, with an old negative remainder would
    # step below the bit pattern of 0, into the NaNs.
    lowest = -(_bits(x) & 0x7FFFFFFF)
    return _float(_bits(x) + jnp.maximum(remainder.astype(jnp.int32), lowest))


@jax.custom_jvp
def change(new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns the f32 update by which `optax.apply_updates` moves `old` to `new`."""
    # Two infinite ones differ by NaN. Added to a zero, `new` keeps its sign.
    return jnp.where(jnp.isfinite(new) & (old != 0), new - old, new)


rounded.defjvps(lambda tangent, *_: tangent, None)
joined.defjvps(lambda tangent, *_: tangent, None)
change.defjvps(lambda tangent, *_: tangent, lambda tangent, *_: -tangent)
