"""Whether all gradients are finite, and their norm, with one answer on all devices."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from . import _mesh
from ._reductions import all_finite_here
from ._squares import HUGE, NONFINITE, sums_of_squares_here
from ._tree import is_inexact


def all_finite(
    tree: Any, axis_name: _mesh.AxisName = None, *, specs: Any = None, mesh: Any = None
) -> jax.Array:
    """Whether all entries of all leaves are finite, with one answer for all replicas.

    Only inexact leaves (real or complex floating point) are looked at. NumPy arrays and
    Python numbers are judged as they are, before JAX converts them: 1e300 is finite.

    Args:
      tree: any pytree.
      axis_name: mesh axes over which the answer must agree. None (default) finds every
        manual axis (`pmap`, `shard_map`) on which it may differ, so that replicas
        cannot diverge; a name or a tuple of names is used as it is
        (`vmap(axis_name=)` needs it); `()` opts out.
      specs: a `PartitionSpec` for each leaf of `tree` (or for a prefix of it), for
        auto-sharded `jit`: each device then looks at its own shards, and exactly one
        scalar all-reduce joins the answers. Without specs this holds on TPUs and GPUs
        if all leaves are sharded that the devices divide, or those that take most
        memory; otherwise there may be one boolean per shape of leaves, combined into
        one all-reduce. On CPUs there is one per leaf. Not needed on Explicit mesh axes,
        where an array's type holds its spec.
      mesh: the mesh of `specs`; default that of the leaves, then that of
        `jax.set_mesh`.

    Returns:
      bool[], True for a tree without inexact leaves.

    Raises:
      TypeError: `axis_name` is not a name or a tuple of names, or a leaf of `specs` is
        not a `PartitionSpec`.
      ValueError: `mesh` without `specs`, `specs` that do not fit `tree`, that do not
        divide a leaf into shards of equal size, or that name an axis that the mesh does
        not have, or no mesh is found.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale
      >>> bool(jmp_scale.all_finite({"w": jnp.array([1.0, jnp.inf]), "step": 3}))
      False
    """
    axis_name = _mesh.checked_axis_name("all_finite", axis_name)
    if specs is None and mesh is not None:
        raise ValueError(
            "all_finite: expected specs, the PartitionSpecs of the leaves, with mesh; "
            "got mesh alone"
        )
    leaves = _inexact_arrays(tree)
    if specs is None:
        leaf_specs = _mesh.sharding_specs(leaves)
    else:
        looked_at = [is_inexact(leaf) for leaf in jax.tree.leaves(tree)]
        leaf_specs = list(itertools.compress(_spec_leaves(specs, tree), looked_at))
        mesh = _mesh.checked_mesh(leaves, leaf_specs, mesh)
    agreed = _compiled_if_eager(_all_finite_agreed, leaves)
    return agreed(leaves, tuple(leaf_specs), mesh, axis_name)


def finite_and_norm(
    tree: Any, axis_name: _mesh.AxisName = None
) -> tuple[jax.Array, jax.Array]:
    """`all_finite` and the global norm of the inexact leaves, in one pass over them.

    The norm is right to float32's rounding, also where the squares overflow float32,
    such as that of 1e30. On a TPU it is right to 1 in 1,000, and an entry over 2^40
    counts as 2^40.

    Where the leaves are sharded under `jit` (Auto or Explicit mesh axes) the norm is
    that of the whole arrays. Inside `pmap` and `shard_map` it is the largest of the
    devices' own norms: the global norm where all devices hold the same gradients, as
    after an average, and otherwise a number that one bad device is enough to raise.
    Both results are equal on all devices.

    Args:
      tree: any pytree.
      axis_name: mesh axes over which the results must agree, as for `all_finite`.

    Returns:
      (bool[], f32[]): the flag, and the square root of the sum of all squares (of real
      and imaginary parts). The norm is at most the largest float32, and infinity where
      the flag is False.
    """
    leaves = _inexact_arrays(tree)
    specs = tuple(_mesh.sharding_specs(leaves))
    agreed = _compiled_if_eager(_finite_and_norm_agreed, leaves)
    return agreed(leaves, specs, None, axis_name)


def _all_finite_agreed(
    leaves: Sequence[jax.Array],
    specs: Sequence[PartitionSpec],
    mesh: Any,
    axis_name: _mesh.AxisName,
) -> jax.Array:
    def joined(shards: Sequence[jax.Array], axes: tuple[Any, ...]) -> jax.Array:
        return _mesh.agree(all_finite_here(shards), axes)

    # Twice: over the axes that shard a leaf, and over the manual axes around this call
    # (test_specs_are_joined_whatever_the_axis_name).
    return _mesh.agree(_mesh.on_shards(joined, leaves, specs, mesh), axis_name)


def _finite_and_norm_agreed(
    leaves: Sequence[jax.Array],
    specs: Sequence[PartitionSpec],
    mesh: Any,
    axis_name: _mesh.AxisName,
) -> tuple[jax.Array, jax.Array]:
    def joined(shards: Sequence[jax.Array], axes: tuple[Any, ...]) -> Any:
        # A leaf that is not sharded over one of the axes is counted once per copy.
        copies = [
            lax.psum(1, tuple(set(axes) - _mesh.named_axes(spec))) for spec in specs
        ]
        sums = sums_of_squares_here(shards, copies)
        return lax.psum(sums, axes) if axes else sums

    total, total_of_huge = _mesh.on_shards(joined, leaves, specs, mesh)
    finite = total_of_huge < NONFINITE / 2**17
    # The plain squares overflow from 2**64 on, those over HUGE vanish below: each sum
    # is right where the other is not
    # (test_the_norm_is_right_for_every_size_of_gradients).
    norm = jnp.where(
        jnp.isfinite(total), jnp.sqrt(total), jnp.sqrt(total_of_huge) * HUGE
    )
    # An infinite norm would say that a gradient is not finite
    # (test_a_norm_beyond_float32_is_its_largest_number).
    norm = jnp.minimum(norm, float(np.finfo(np.float32).max)).astype(jnp.float32)
    norm = jnp.where(finite, norm, jnp.inf)
    return _mesh.agree(finite, axis_name), _mesh.largest(norm, axis_name)


def _compiled_if_eager(fun: Any, leaves: Sequence[jax.Array]) -> Any:
    """`fun`, compiled once per types of the leaves where nothing else compiles it.

    The choices between machines are branches, which JAX would trace and compile anew at
    each eager call.
    """
    is_traced = any(isinstance(leaf, Tracer) for leaf in leaves)
    return fun if is_traced else _compiled(fun)


@functools.cache
def _compiled(fun: Any) -> Any:
    return jax.jit(fun, static_argnames=("specs", "mesh", "axis_name"))


def _inexact_arrays(tree: Any) -> list[jax.Array]:
    return [_as_array(leaf) for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]


def _as_array(leaf: Any) -> jax.Array:
    """An array of JAX's that is finite where `leaf` is.

    Without 64-bit types JAX turns a host's finite 1e300 into infinity: it is clipped to
    the range of the dtype that JAX gives it.
    """
    if isinstance(leaf, jax.Array):
        return leaf
    host: Any = np.asarray(leaf)
    dtype = jax.dtypes.canonicalize_dtype(host.dtype)
    if dtype == host.dtype:
        return jnp.asarray(host)
    largest = np.finfo(dtype).max

    def narrowed(part: Any) -> Any:
        return np.where(np.isfinite(part), np.clip(part, -largest, largest), part)

    array: Any = np.empty(host.shape, dtype)
    array.real = narrowed(host.real)
    if np.iscomplexobj(host):
        array.imag = narrowed(host.imag)
    return jnp.asarray(array)


def _spec_leaves(specs: Any, tree: Any) -> list[PartitionSpec]:
    def is_spec(x: Any) -> bool:
        return isinstance(x, PartitionSpec) or x is None

    try:
        broadcast = jax.tree.broadcast(specs, tree, is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(
            "all_finite: expected specs of the structure of tree or of a prefix of it, "
            f"got {specs!r}: {error}"
        ) from None
    leaves = jax.tree.leaves(broadcast, is_leaf=is_spec)
    wrong = [leaf for leaf in leaves if not isinstance(leaf, PartitionSpec)]
    if wrong:
        raise TypeError(
            "all_finite: expected a PartitionSpec for each leaf in specs, got "
            f"{wrong[0]!r}; write PartitionSpec() for a leaf that is not sharded"
        )
    return leaves
