"""`lost_updates`: how much of an update is rounded away in low-precision parameters."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._tree import is_inexact
from ..._types import PyTree
from .._tables import percent, printed


@printed
class LostUpdates(NamedTuple):
    """The result of `lost_updates`: two shares in [0, 1], f32[] each.

    Attributes:
      entries: share of the non-zero updates that is lost.
      magnitude: share of the sum of their absolute values that is lost.
    """

    entries: jax.Array
    magnitude: jax.Array

    def summary(self) -> str:
        """Both shares in one sentence (host)."""
        entries, magnitude = (percent(float(share)) for share in self)
        return f"{entries} of the updates, {magnitude} of their size, lost in rounding."


def lost_updates(params: PyTree, updates: PyTree) -> LostUpdates:
    """Returns the share of the updates that leave their parameter unchanged.

    Use it if parameters are stored in half precision, or if a float32 run stagnates
    with tiny updates. An update is rounded away if it is below half the distance from
    its parameter to the next number of the dtype: below about 2^-9 of the parameter in
    bfloat16, 2^-12 in float16, 2^-25 in float32. The result is exact, including ties.
    Compatible with `jit`, `vmap`, `lax.scan`.

    Args:
      params: pytree of parameters before the step.
      updates: the optimizer's updates of these, of the same structure and shapes.
        Leaves that are not real floating point are ignored.

    Returns:
      `LostUpdates`; both shares are 0 if all updates are zero, as on a skipped step.

    Raises:
      ValueError: the structures or shapes differ.
    """
    # Rows: lost updates, all updates. Columns: number, sum of magnitudes.
    sums = jnp.zeros((2, 2))
    for param, update in _pairs(params, updates):
        moves = update != 0
        for row, chosen in enumerate((_is_lost(param, update) & moves, moves)):
            size = jnp.sum(jnp.where(chosen, jnp.abs(update).astype(jnp.float32), 0))
            # Integers are counted first: a float32 count stops at 2^24.
            count = jnp.sum(chosen, dtype=jnp.uint32).astype(jnp.float32)
            sums = sums.at[row].add(jnp.stack([count, size]))
    return LostUpdates(*jnp.where(sums[1] > 0, sums[0] / sums[1], 0))


def _pairs(params: PyTree, updates: PyTree) -> list[tuple[jax.Array, jax.Array]]:
    params, structure = jax.tree.flatten(params)
    updates, other = jax.tree.flatten(updates)
    if structure != other:
        raise ValueError(
            "lost_updates: expected updates of the structure of params, got\n"
            f"  params:  {structure}\n  updates: {other}"
        )
    pairs = zip(params, updates, strict=True)
    pairs = [p for p in pairs if is_inexact(p[0]) and not jnp.iscomplexobj(p[0])]
    for param, update in pairs:
        if jnp.shape(param) != jnp.shape(update):
            raise ValueError(
                "lost_updates: expected updates of the shapes of params, got "
                f"{jnp.shape(update)} for {jnp.shape(param)}"
            )
    return [(jnp.asarray(param), jnp.asarray(update)) for param, update in pairs]


def _is_lost(param: jax.Array, update: jax.Array) -> jax.Array:
    integer = np.dtype(f"i{param.dtype.itemsize}").type
    wide = jnp.float64 if param.dtype.itemsize == 8 else jnp.float32
    size = lax.bitcast_convert_type(jnp.abs(param), integer)
    # The neighbor on the side of the update is the next larger magnitude if the signs
    # are equal, else the next smaller one (half as far away below a power of two).
    grows = ((update < 0) == (param < 0)) | (param == 0)
    neighbor = size + jnp.where(grows, integer(1), integer(-1))

    def value(bits: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(bits, param.dtype).astype(wide)

    distance = jnp.abs(value(neighbor) - value(size))
    twice = 2 * jnp.abs(update.astype(wide))
    # A tie between the two rounds to the one whose last bit is zero.
    return (twice < distance) | ((twice == distance) & (size % 2 == 0))
