"""Whether all gradients are finite, with one answer on all devices."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from . import _mesh
from ._tree import is_inexact, widen


def all_finite(
    tree: Any, axis_name: _mesh.AxisName = None, *, specs: Any = None, mesh: Any = None
) -> jax.Array:
    """Whether no entry of any leaf is NaN or infinite, with one answer for all replicas.

    Only inexact leaves (real or complex floating point) are looked at.

    Args:
      tree: any pytree.
      axis_name: mesh axes over which the answer must agree. None (default) finds by itself every
        manual axis (`pmap`, `shard_map`) on which it may differ, so that replicas cannot diverge; a
        name or tuple of names is used as it is (`vmap(axis_name=)` needs it); `()` opts out.
      specs: a `PartitionSpec` for each leaf of `tree` (or for a prefix of it), for auto-sharded `jit`:
        each device then looks at its own shards, and exactly one scalar all-reduce joins the answers.
        Without specs XLA reduces one boolean per leaf, combined into one all-reduce. Not needed on
        Explicit mesh axes, where an array's type holds its spec.
      mesh: the mesh of `specs`; default that of `jax.set_mesh`.

    Returns:
      bool[], True for a tree without inexact leaves.

    Raises:
      TypeError: a leaf of `specs` is no `PartitionSpec`.
      ValueError: `mesh` without `specs`, `specs` that do not fit `tree` or name an axis that the mesh
        does not have, or no mesh to be found.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale
      >>> bool(jmp_scale.all_finite({"w": jnp.array([1.0, jnp.inf]), "step": jnp.array(3)}))
      False
    """
    if specs is None and mesh is not None:
        raise ValueError(
            "all_finite: mesh is given without specs, the PartitionSpecs of the leaves"
        )
    looked_at = [is_inexact(leaf) for leaf in jax.tree.leaves(tree)]
    leaves = [
        jnp.asarray(leaf)
        for leaf in itertools.compress(jax.tree.leaves(tree), looked_at)
    ]
    if specs is None:
        leaf_specs = _mesh.sharding_specs(leaves)
    else:
        leaf_specs = list(itertools.compress(_spec_leaves(specs, tree), looked_at))

    def joined(shards: Sequence[jax.Array], axes: tuple[Any, ...]) -> jax.Array:
        return _mesh.agree(_all_finite_here(shards), axes)

    return _mesh.agree(_mesh.on_shards(joined, leaves, leaf_specs, mesh), axis_name)


def finite_and_norm(
    tree: Any, axis_name: _mesh.AxisName = None
) -> tuple[jax.Array, jax.Array]:
    """`all_finite` and the global norm of the inexact leaves, in one pass over them.

    The norm is exact to float32's rounding also where the squares overflow it, such as
    for an entry of 1e30.

    Where the leaves are sharded under `jit` (Auto or Explicit mesh axes) the norm is
    that of the whole arrays. Inside `pmap` and `shard_map` it is the largest of the
    devices' own norms. That is the global norm where all devices hold the same
    gradients, as after an average, and else a number that one bad device is enough to
    raise. Both results are equal on all devices.

    Args:
      tree: any pytree.
      axis_name: mesh axes over which the results must agree, as for `all_finite`.

    Returns:
      (bool[], f32[]): the flag, and the square root of the sum of all squares (of real
      and imaginary parts). The norm is at most the largest float32, and infinity where
      the flag is False.
    """
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]
    specs = _mesh.sharding_specs(leaves)

    def joined(shards: Sequence[jax.Array], axes: tuple[Any, ...]) -> Any:
        finite = jnp.array(True)
        wide = any(
            leaf.dtype.itemsize > 8 or leaf.dtype == "float64" for leaf in shards
        )
        sums = jnp.zeros(2, "float64" if wide else "float32")
        for shard, spec in zip(shards, specs, strict=True):
            copies = lax.psum(1, tuple(set(axes) - _mesh.named_axes(spec)))
            finite &= jnp.isfinite(shard).all()
            sums += _sums_of_squares(shard).astype(sums.dtype) / copies
        if axes:
            # One all-reduce for the sums and the flag, which is a count here.
            bad = jnp.where(finite, 0, 1).astype(sums.dtype)
            *sums, bad = lax.psum(jnp.stack([*sums, bad]), axes)
            return bad == 0, jnp.stack(sums)
        return finite, sums

    finite, (total, total_of_huge) = _mesh.on_shards(joined, leaves, specs)
    norm = jnp.where(
        jnp.isfinite(total), jnp.sqrt(total), jnp.sqrt(total_of_huge) * _HUGE
    )
    norm = jnp.minimum(norm, float(np.finfo(np.float32).max)).astype(jnp.float32)
    norm = jnp.where(finite, norm, jnp.inf)
    return _mesh.agree(finite, axis_name), _mesh.largest(norm, axis_name)


# The square of any float32 over this is far below the largest float32, and that of an
# entry that matters in a norm of 2**64, where the plain squares overflow, is not lost.
_HUGE = 2.0**96


def _sums_of_squares(leaf: jax.Array) -> jax.Array:
    """Sums of squares of the entries, and of the entries over `_HUGE`: shape (2,)."""
    parts = [leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf]
    plain, over_huge = 0.0, 0.0
    for part in map(widen, parts):
        # Without the minimum, which changes no finite number, XLA multiplies the squares
        # by 1 / _HUGE**2, which is 0: NaN where they overflow
        # (test_the_norm_is_right_for_every_size_of_gradients).
        reduced = jnp.minimum(jnp.abs(part) / _HUGE, 2.0**32)
        plain += jnp.sum(part * part)
        over_huge += jnp.sum(reduced * reduced)
    return jnp.stack([plain, over_huge])


def _all_finite_here(leaves: Sequence[jax.Array]) -> jax.Array:
    if not leaves:
        return jnp.array(True)
    in_one_pass = _mesh.has_whole_arrays() and jax.default_backend() == "cpu"
    flags_of = (
        _flags_in_one_pass if in_one_pass else lambda leaf: [jnp.isfinite(leaf).all()]
    )
    flags = jnp.stack([flag for leaf in leaves for flag in flags_of(leaf)])
    # The barrier keeps XLA from fusing this reduction into each of the update's kernels, which makes
    # compile time quadratic in the number of leaves.
    return jnp.all(lax.optimization_barrier(flags))


def _flags_in_one_pass(leaf: jax.Array) -> Sequence[jax.Array]:
    """`jnp.isfinite(leaf).all()`, twice, for a CPU.

    XLA:CPU (of jax 0.10) writes a boolean for each entry to memory, and splits their reduction in several.
    A reduction of two operands it leaves whole, and computes `isfinite` within it, if both results are
    used: no temporaries (test_there_are_hardly_any_temporaries). Over one axis, since it is slow over
    several short ones. Not for sharded arrays: XLA gathers both results of each leaf.
    """
    finite = jnp.isfinite(leaf).ravel()
    return lax.reduce(
        (finite, finite), (np.bool_(True), np.bool_(True)), _and_pairwise, (0,)
    )


def _and_pairwise(
    x: tuple[jax.Array, jax.Array], y: tuple[jax.Array, jax.Array]
) -> Any:
    return x[0] & y[0], x[1] & y[1]


def _spec_leaves(specs: Any, tree: Any) -> list[PartitionSpec]:
    def is_spec(x: Any) -> bool:
        return isinstance(x, PartitionSpec)

    try:
        leaves = jax.tree.leaves(
            jax.tree.broadcast(specs, tree, is_leaf=is_spec), is_leaf=is_spec
        )
    except ValueError as error:
        message = f"all_finite: expected specs of the structure of tree or of a prefix of it: {error}"
        raise ValueError(message) from None
    wrong = [leaf for leaf in leaves if not is_spec(leaf)]
    if wrong:
        raise TypeError(
            f"all_finite: expected a PartitionSpec for each leaf in specs, got {wrong[0]!r}"
        )
    return leaves
