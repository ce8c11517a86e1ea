"""How much of an optimizer's update is rounded away in its parameters."""

import jax
import jax.numpy as jnp
from jax import lax

from ..._tree import is_inexact
from ..._types import Leaf, PyTree


def lost_updates(
    function: str, params: PyTree, updates: PyTree
) -> tuple[jax.Array, jax.Array]:
    """Returns shares of the updates that rounding loses, as `metrics` documents them.

    They are 0 if all updates are zero. `function` is the public one, for errors.
    """
    if params is None or updates is None:
        raise ValueError(f"{function}: expected params and updates, got only one")
    # Rows: lost updates, all updates. Columns: number, sum of magnitudes.
    sums = [jnp.zeros((2, 2))]

    def add(param: Leaf, update: Leaf) -> None:
        if is_inexact(param) and not jnp.iscomplexobj(param):
            if jnp.shape(param) != jnp.shape(update):
                raise ValueError(
                    f"{function}: expected updates of the shapes of params, got "
                    f"{jnp.shape(update)} for {jnp.shape(param)}"
                )
            sums.append(_sums(jnp.asarray(param), jnp.asarray(update)))

    jax.tree.map(add, params, updates)
    lost, total = jnp.sum(jnp.stack(sums), 0)
    entries, magnitude = jnp.where(total > 0, lost / total, 0)
    return entries, magnitude


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
