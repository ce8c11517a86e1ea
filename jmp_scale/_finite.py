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
from ._tree import is_inexact


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

    Example:
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
    return _mesh.agree(
        _mesh.on_shards(_all_finite_here, leaves, leaf_specs, mesh), axis_name
    )


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
