"""Finds which float32 numbers become zero, subnormal or infinite in a cast.

Magnitudes are compared by their bits, which have the same order. Simpler ways miscount:
XLA may remove a cast and a cast back, `lax.reduce_precision` flushes float16
subnormals, and a float32 comparison treats a subnormal as zero.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..._tree import named_inexact_leaves
from ..._types import Leaf, PyTree

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


def countable_leaves(function: str, tree: PyTree) -> tuple[tuple[str, ...], list[Leaf]]:
    """Returns names and values of inexact leaves, each of fewer than 2^32 numbers."""
    paths, leaves = named_inexact_leaves(tree)
    for path, leaf in zip(paths, leaves, strict=True):
        if np.size(leaf) * (1 + jnp.iscomplexobj(leaf)) >= 2**32:
            raise ValueError(f"{function}: {path} has 2^32 entries or more; split it")
    return paths, leaves


def magnitude_bits(leaf: ArrayLike, loss_scale: ArrayLike | None = None) -> jax.Array:
    """Returns the float32 bits of |x|, or of |S x|, as i32.

    A complex leaf counts as two real ones. Elements wider than float32 are rounded, but
    neither to zero nor to infinity.
    """
    x = jnp.asarray(leaf)
    x = jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x
    if loss_scale is not None:
        wide = x.dtype if x.dtype.itemsize > 4 else jnp.float32
        x = x.astype(wide) * jnp.asarray(loss_scale, wide)
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    if x.dtype.itemsize <= 4:
        return bits
    # Without the clip 1e300 would count as infinite, and 1e-300 as zero.
    clipped = jnp.clip(bits, (x != 0).astype(jnp.int32), INFINITY - 1)
    return jnp.where(jnp.isfinite(x), clipped, bits)


def exponent_and_fraction(bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (e, f), i32, with |x| = 2^e (1 + f 2^-23); undefined for zero."""
    # A subnormal has no implicit leading one. Shifting its first one to bit 23 turns it
    # into a normal number, whose exponent is too large by the shift.
    shift = jnp.maximum(lax.clz(bits) - 8, 0)
    bits = bits << shift
    return (bits >> 23) - 127 - shift, bits & 0x7FFFFF


def log2_magnitude(bits: jax.Array) -> jax.Array:
    """Returns log2 |x|, f32, exact for powers of two; -inf for zero."""
    # jnp.log2 of x itself would be -inf for subnormals, and inexact for many powers of
    # two; for a mantissa in [1, 2) it is exactly 0 at 1.
    exponent, fraction = exponent_and_fraction(bits)
    mantissa = lax.bitcast_convert_type(fraction | (127 << 23), jnp.float32)
    log2 = exponent.astype(jnp.float32) + jnp.log2(mantissa)
    return jnp.where(bits == 0, -jnp.inf, log2)
