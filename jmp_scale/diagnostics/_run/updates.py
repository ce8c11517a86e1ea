"""`lost_updates`: how much of an update is rounded away in low-precision parameters."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._tree import is_inexact
from ..._types import Leaf, PyTree
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
        """Returns both shares in one sentence (host)."""
        entries, magnitude = (percent(float(share)) for share in self)
        return f"{entries} of the updates, {magnitude} of their size, lost in rounding."


def lost_updates(params: PyTree, updates: PyTree) -> LostUpdates:
    """Returns the share of the updates that leave their parameter unchanged.

    Use it if parameters are stored in half precision, or if a float32 run stagnates
    with tiny updates. An update is lost if the float32 sum of it and its parameter, as
    `optax.apply_updates` rounds it, is the parameter: below about 2^-9 of the parameter
    in bfloat16, 2^-12 in float16, 2^-25 in float32.
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
    sums = [jnp.zeros((2, 2))]

    def add(param: Leaf, update: Leaf) -> None:
        if is_inexact(param) and not jnp.iscomplexobj(param):
            if jnp.shape(param) != jnp.shape(update):
                raise ValueError(
                    "lost_updates: expected updates of the shapes of params, got "
                    f"{jnp.shape(update)} for {jnp.shape(param)}"
                )
            sums.append(_sums(jnp.asarray(param), jnp.asarray(update)))

    jax.tree.map(add, params, updates)
    lost, total = jnp.sum(jnp.stack(sums), 0)
    return LostUpdates(*jnp.where(total > 0, lost / total, 0))


def _sums(param: jax.Array, update: jax.Array) -> jax.Array:
    wide = jnp.float64 if param.dtype.itemsize == 8 else jnp.float32
    moved = (param.astype(wide) + update.astype(wide)).astype(param.dtype)
    # Bits are compared, because XLA may remove a cast and a cast back.
    integer = f"uint{8 * param.dtype.itemsize}"
    before, after = (lax.bitcast_convert_type(x, integer) for x in (param, moved))
    moves = update != 0
    lost = moves & ((after == before) | ((after | before) << 1 == 0))  # 0 and -0
    rows = []
    for chosen in (lost, moves):
        size = jnp.sum(jnp.where(chosen, jnp.abs(update).astype(jnp.float32), 0))
        # Integers are counted first: a float32 count stops at 2^24.
        count = jnp.sum(chosen, dtype=jnp.uint32).astype(jnp.float32)
        rows.append(jnp.stack([count, size]))
    return jnp.stack(rows)
