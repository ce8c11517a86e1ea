"""Limits of casts from float32, and magnitudes that are compared with them.

Magnitudes are compared by their bits, which have the same order. Simpler ways miscount:
XLA may remove a cast and a cast back, `lax.reduce_precision` flushes float16
subnormals, and a float32 comparison treats a subnormal as zero.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

INFINITY = 0x7F800000  # the bits of float32 infinity; the bits of a NaN are larger


class Limits(NamedTuple):
    """The magnitudes at which the result of a cast changes."""

    zero_up_to: float
    subnormal_below: float
    overflow_from: float
    largest: float


# Ties round to the even neighbor: to zero, to the least normal number, to infinity, and
# 464 to 448 in float8_e4m3fn.
_LIMITS = {
    "float16": Limits(2.0**-25, 2.0**-14 - 2.0**-25, 65520.0, 65504.0),
    "bfloat16": Limits(
        zero_up_to=2.0**-134,
        subnormal_below=2.0**-126 - 2.0**-134,
        overflow_from=511 * 2.0**119,
        largest=255 * 2.0**120,
    ),
    "float8_e5m2": Limits(2.0**-17, 2.0**-14 - 2.0**-17, 61440.0, 57344.0),
    "float8_e4m3fn": Limits(2.0**-10, 2.0**-6 - 2.0**-10, 464 + 2.0**-15, 448.0),
}


def limits(function: str, dtype: DTypeLike) -> Limits:
    """Returns the limits of a cast from float32 to `dtype`; errors name `function`."""
    name = jnp.dtype(dtype).name
    if name not in _LIMITS:
        names = ", ".join(_LIMITS)
        raise ValueError(f"{function}: expected dtype to be one of {names}, got {name}")
    return _LIMITS[name]


def magnitude_bits(leaf: ArrayLike, loss_scale: ArrayLike | None = None) -> jax.Array:
    """Returns the float32 bits of |x|, or of |S x|, as i32.

    A complex leaf counts as two real ones.
    """
    x = jnp.asarray(leaf)
    x = jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x
    x = x.astype(jnp.float32)
    if loss_scale is not None:
        x = x * jnp.asarray(loss_scale, jnp.float32)
    return lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
