"""`exponent_histogram`: counts elements by power of two."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ... import _mesh
from ..._tree import named_inexact_leaves
from ..._types import Leaf, PyTree
from .._tables import leaf_name, percent, printed, table
from . import casts

_EXPONENTS = range(-149, 128)  # of float32


@printed
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExponentHistogram:
    """The result of `exponent_histogram`; L is the number of inexact leaves.

    Attributes:
      counts: u32[L, 277], elements with magnitude in [2^e, 2^(e+1)), e = -149 to 127.
      powers_of_two: u32[L, 277], elements that are exactly 2^e, where casts have ties.
      paths: names of the leaves, as `jax.tree_util.keystr` writes them. Static.
    """

    counts: jax.Array
    powers_of_two: jax.Array
    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    @property
    def exponents(self) -> np.ndarray:
        """The e of each column, i32[277]."""
        return np.array(_EXPONENTS, np.int32)

    def flushed_share(
        self, log2_scale: ArrayLike, dtype: DTypeLike = "float16"
    ) -> jax.Array:
        """Returns the share of elements that S = 2^log2_scale and a cast flush to zero.

        Only finite nonzero elements count.

        Args:
          log2_scale: integers of any shape.
          dtype: a dtype of `grad_report`, or bfloat16.

        Returns:
          f32[*log2_scale.shape, L], 0 for a leaf without such elements.

        Raises:
          TypeError: `log2_scale` does not have an integer dtype.
          ValueError: another dtype.
        """
        log2_scale = jnp.asarray(log2_scale)
        if not jnp.issubdtype(log2_scale.dtype, jnp.integer):
            raise TypeError(
                "flushed_share: expected log2_scale of whole numbers, got "
                f"{log2_scale.dtype}"
            )
        limit = casts.limits("flushed_share", dtype).zero_up_to
        # Columns are from 2^-150, where nothing is, to 2^128. A power of two at the
        # limit is a tie, which a cast rounds to zero.
        below = jnp.pad(jnp.cumsum(self.counts, 1, jnp.uint32), ((0, 0), (2, 0)))
        up_to = below + jnp.pad(self.powers_of_two, ((0, 0), (1, 1)))
        column = int(np.log2(limit)) + 150 - log2_scale.astype(jnp.int32)
        found = up_to.T[jnp.clip(column, 0, up_to.shape[1] - 1)]
        total = jnp.maximum(below[:, -1], np.uint32(1))
        return found / jnp.broadcast_to(total, found.shape)

    def summary(self) -> str:
        """Returns each leaf's range and the share flushed at S = 1, a table (host)."""
        counts, flushed = np.asarray(self.counts), np.asarray(self.flushed_share(0))
        head = ("leaf", "non-zero", "smallest", "largest", "flushed")
        rows: list[tuple[str, ...]] = [head]
        for path, row, share in zip(self.paths, counts, flushed, strict=True):
            exponents = self.exponents[row > 0]
            ends = [f"2^{e}" for e in exponents[[0, -1]]] if exponents.size else "--"
            rows.append((leaf_name(path), f"{row.sum():,}", *ends, percent(share)))
        title = "non-zero entries by power of two, flushed by float16 at loss scale 1"
        return "\n".join([f"{title}:", *table(rows)])


def exponent_histogram(tree: PyTree) -> ExponentHistogram:
    """Counts elements by power of two.

    Use it to see what share of gradients any loss scale and dtype would flush to zero:
    `flushed_share` of the result. Compatible with `jit`, `vmap` and `lax.scan`; costs
    several times `grad_report`.

    Args:
      tree: pytree, typically of unscaled gradients. Leaves that are not floating point
        are ignored; a complex element counts as two.
    """
    paths, leaves = named_inexact_leaves(tree)
    columns = len(_EXPONENTS)
    rows = [_mesh.replicated(_counts, jnp.asarray(leaf)) for leaf in leaves]
    counts = jnp.stack(rows or [_counts(jnp.zeros(0))])[: len(leaves)]
    powers_of_two, others = counts[:, :columns], counts[:, columns:]
    return ExponentHistogram(powers_of_two + others, powers_of_two, paths)


@jax.jit
def _counts(leaf: Leaf) -> jax.Array:
    """Counts powers of two, and other numbers, by exponent: u32[554]."""
    bits = casts.magnitude_bits(leaf).ravel()
    counted = (bits > 0) & (bits < casts.INFINITY)
    # A subnormal has no implicit leading one. Shifting its first one to bit 23 turns it
    # into a normal number, whose exponent is too large by the shift.
    shift = jnp.maximum(lax.clz(bits) - 8, 0)
    bits = bits << shift
    column = (bits >> 23) - 127 - shift - _EXPONENTS[0]
    n = len(_EXPONENTS)
    column += jnp.where(bits & 0x7FFFFF == 0, 0, n)
    return jnp.zeros(2 * n, jnp.uint32).at[column].add(counted.astype(jnp.uint32))
