"""Whether all gradients are finite, and their norm, with one answer on all devices.

Both are read in one pass over the arrays, by reductions that are chosen when a program
is lowered: one that is compiled elsewhere is what the machine itself would make.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from .. import _mesh
from .._tree import is_inexact, promote_to_float32

Arrays = Sequence[jax.Array]

# Arrays of one type that share one trace, and on a GPU one kernel. With more, XLA does
# not fuse all of them with the reductions of `optax.clip_by_global_norm`.
GPU_GROUP = 4
# Entries from which a TPU takes a matrix product instead of a reduction.
TPU_PRODUCT_SIZE = 2**17
# Entries that a CPU adds one after the other.
LONGEST_ROW = 4096
# The plain squares of gradients are right for norms between 2**-1 and 2**64. Those of
# gradients times `TINY` are right below, where the plain ones vanish, and those of
# gradients over `HUGE` above, where the plain ones overflow.
TINY = 2.0**64
HUGE = 2.0**96
# For an entry that is not finite; infinity would trip `jax_debug_infs`. Sums of the
# squares over HUGE are below its 2**17th part for trees of up to 2**46 entries.
NONFINITE = 2.0**127


def all_finite(
    tree: Any, axis_name: _mesh.AxisName = None, *, specs: Any = None, mesh: Any = None
) -> jax.Array:
    """Whether all entries of all leaves are finite, with one answer for all replicas.

    Only inexact leaves (real or complex) are looked at, as arrays of JAX.

    Args:
      tree: any pytree.
      axis_name: mesh axes over which the answer must agree. None (default) finds every
        manual axis (`pmap`, `shard_map`) on which it may differ, so that replicas
        cannot diverge; a name or a tuple of names is used as it is
        (`vmap(axis_name=)` needs it); `()` opts out.
      specs: a `PartitionSpec` for each leaf of `tree` (or for a prefix of it), for
        auto-sharded `jit`: each device then looks at its own shards, and exactly one
        scalar all-reduce joins the answers. Not needed on Explicit mesh axes, where an
        array's type holds its spec. Of an `unreduced` array each part is looked at: a
        sum of finite parts is infinite only beyond the largest float32.
      mesh: the mesh of `specs`; default the leaves' own, then that of `jax.set_mesh`.

    Returns:
      bool[], True for a tree without inexact leaves.

    Raises:
      TypeError: `axis_name` or a leaf of `specs` is of another type.
      ValueError: `mesh` without `specs`, no mesh, or `specs` that do not fit `tree` or
        the mesh, or do not divide a leaf equally.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale
      >>> bool(jmp_scale.all_finite({"w": jnp.array([1.0, jnp.inf]), "step": 3}))
      False
    """
    agree = _mesh.agreement("all_finite", axis_name)
    try:
        return finite(tree, agree, specs, mesh)
    except ValueError as error:
        if specs is None:
            raise
        raise ValueError(
            "all_finite: expected specs of the structure of tree, whose axes divide "
            "each leaf equally on mesh= or the mesh of jax.set_mesh, got "
            f"{specs!r}: {error}"
        ) from None


def finite(
    tree: Any, agree: _mesh.Agreement, specs: Any = None, mesh: Any = None
) -> jax.Array:
    """`all_finite` over the axes of an agreement."""
    leaves = _inexact_arrays(tree)
    leaf_specs = _checked_specs(tree, leaves, specs, mesh)
    # Twice: over the axes that shard a leaf, and over the manual axes around this call.
    return agree(lax.pmin, _all_finite(leaves, leaf_specs, mesh))


def _checked_specs(
    tree: Any, leaves: Sequence[Any], specs: Any, mesh: Any
) -> _mesh.Specs:
    """The specs of `all_finite`'s inexact leaves."""
    if specs is None:
        if mesh is None:
            return _mesh.sharding_specs(leaves)
        raise ValueError(
            "all_finite: expected specs, the PartitionSpecs of the leaves, with mesh; "
            "got mesh alone"
        )

    def is_spec(x: Any) -> bool:
        return isinstance(x, PartitionSpec) or x is None

    broadcast = jax.tree.broadcast(specs, tree, is_leaf=is_spec)
    spec_leaves = jax.tree.leaves(broadcast, is_leaf=is_spec)
    for spec in spec_leaves:
        parts = _mesh.dimensions(spec) if isinstance(spec, PartitionSpec) else None
        if parts is None or PartitionSpec.UNCONSTRAINED in parts:
            raise TypeError(
                "all_finite: expected a PartitionSpec for each leaf in specs, got "
                f"{spec!r}; write PartitionSpec() for a leaf that is not sharded"
            )
    is_read = map(is_inexact, jax.tree.leaves(tree))
    return tuple(itertools.compress(spec_leaves, is_read))


def finite_and_norm(
    tree: Any, agree: _mesh.Agreement | None = None
) -> tuple[jax.Array, jax.Array]:
    """`all_finite` and the global norm of the inexact leaves, f32[], in one pass.

    The norm is right to float32's rounding, also where squares overflow or vanish; at
    most the largest float32, and infinity where the flag is False. Inside `pmap` and
    `shard_map` it is the largest of the devices' own: one bad device raises it.
    """
    _mesh.refuse_unreduced("global norm", tree)  # that of the parts is another
    leaves, agree = _inexact_arrays(tree), agree or _mesh.agreement()
    finite, norm = _finite_and_norm(leaves, _mesh.sharding_specs(leaves))
    return agree(lax.pmin, finite), agree(lax.pmax, norm)


# Compiled where nothing around it is: the choices between machines are branches, which
# JAX would trace and compile anew at each eager call.
_jit = functools.partial(jax.jit, inline=True)


@functools.partial(_jit, static_argnums=(1, 2))
def _all_finite(leaves: Arrays, specs: _mesh.Specs, mesh: Any) -> jax.Array:
    def finite(shards: Arrays, axes: tuple[Any, ...]) -> jax.Array:
        flag = _read(_FLAG, shards)
        return lax.pmin(flag, axes) if axes else flag

    if not leaves:
        return jnp.array(True)
    return _mesh.on_shards(finite, leaves, specs, mesh)


@functools.partial(_jit, static_argnums=1)
def _finite_and_norm(leaves: Arrays, specs: _mesh.Specs) -> tuple[jax.Array, jax.Array]:
    def sums(shards: Arrays, axes: tuple[Any, ...]) -> jax.Array:
        # A leaf that is not sharded over one of the axes is counted once per copy.
        by_copies: dict[Any, list[jax.Array]] = {}
        for shard, spec in zip(shards, specs, strict=True):
            copies = lax.psum(1, tuple(set(axes) - _mesh.named_axes(spec)))
            by_copies.setdefault(copies, []).append(shard)
        each = [_read(_SQUARES, group) / n for n, group in by_copies.items()]
        total = functools.reduce(operator.add, each, jnp.zeros(3, jnp.float32))
        return lax.psum(total, axes) if axes else total

    tiny, plain, huge = _mesh.on_shards(sums, leaves, specs)
    finite = huge < NONFINITE / 2**17
    # Each sum is right where the others are not.
    is_tiny, is_huge = tiny < 2.0**126, ~jnp.isfinite(plain)
    total = jnp.where(is_tiny, tiny, jnp.where(is_huge, huge, plain))
    unit = jnp.where(is_tiny, 1 / TINY, jnp.where(is_huge, HUGE, 1.0))
    # The root has an infinite derivative at 0.
    is_zero = total == 0
    root = jnp.sqrt(jnp.where(is_zero, 1.0, total))
    # An infinite norm would say that a gradient is not finite.
    norm = jnp.minimum(root * unit, float(np.finfo(np.float32).max))
    return finite, jnp.where(finite, jnp.where(is_zero, 0.0, norm), jnp.inf)


def _inexact_arrays(tree: Any) -> list[jax.Array]:
    with np.errstate(over="ignore"):  # without 64-bit types 1e300 is infinite
        return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]


class _Reading(NamedTuple):
    parts: Callable[[jax.Array], Arrays]  # of an array, those that are reduced
    combine: Callable[[Any, Any], Any]  # two entries
    initial: Any  # the entry that changes no other
    joined: Callable[[jax.Array], jax.Array]  # reduced parts to the result


def _read(reading: _Reading, arrays: Arrays) -> jax.Array:
    """The parts of all entries, reduced: of a device's, in `shard_map` and `pmap`."""
    groups = _groups_of_one_type(arrays)
    sharded = functools.partial(_read_sharded, reading)
    # What is divided into rows or groups by its size needs to have one.
    has_sizes = all(isinstance(n, int) for array in arrays for n in array.shape)
    if not has_sizes or all(array.ndim == 0 for array in arrays):
        return sharded(groups)
    alone = functools.partial(_read_alone, reading)
    return _mesh.if_on_one_device(alone, sharded, groups)


def _groups_of_one_type(arrays: Arrays) -> list[Arrays]:
    alike: dict[Any, list[jax.Array]] = {}
    for array in arrays:
        alike.setdefault(jax.typeof(array), []).append(array)
    return [
        group[start : start + GPU_GROUP]
        for group in alike.values()
        for start in range(0, len(group), GPU_GROUP)
    ]


def _read_alone(reading: _Reading, groups: list[Arrays]) -> jax.Array:
    def on_cpu(groups: list[Arrays]) -> jax.Array:
        rows = [row for group in groups for row in _in_rows(reading, group)]
        # Without the barrier XLA:CPU computes the last reduction again in each kernel
        # of the update, and compile time is quadratic in the number of leaves.
        return reading.joined(lax.optimization_barrier(lax.concatenate(rows, 0)))

    def on_gpu(groups: list[Arrays], reading: _Reading = reading) -> jax.Array:
        parts = [part for group in groups for part in _together(reading, group)]
        return reading.joined(jnp.stack(parts))

    def on_tpu(groups: list[Arrays]) -> jax.Array:
        return on_gpu(groups, _FLAG_ON_TPU if reading is _FLAG else reading)

    return lax.platform_dependent(groups, cpu=on_cpu, tpu=on_tpu, default=on_gpu)


def _read_sharded(reading: _Reading, groups: list[Arrays]) -> jax.Array:
    """Reduces each array on its own, which is what XLA can partition.

    Of a reduction of several operands it would gather the results of each device.
    """
    # XLA finds that a sum of all-reduces is one of sums, but not through a stack.
    blocks = [_combined(reading, group) for group in groups]
    combined = [
        functools.reduce(reading.combine, parts) for parts in zip(*blocks, strict=True)
    ]
    return reading.joined(jnp.stack(combined))


# Compiled functions are traced once for all arrays of a type: most of a step's cost.
@functools.partial(jax.jit, static_argnums=0)
def _in_rows(reading: _Reading, arrays: Arrays) -> Arrays:
    """Reduced rows of each array, [rows, k], for a CPU.

    XLA:CPU (of jax 0.10) writes what it reduces to memory, except the operands of one
    reduction of several, if all results are used. In rows, because a float32 to which
    one square after the other is added stops growing at 2**24 equal ones.
    """
    reduced = []
    for array in arrays:
        longest = min(max(array.size, 1), LONGEST_ROW)
        widths = range(longest, 63, -1)  # shorter rows would be many, a pad is slow
        width = next((n for n in widths if array.size % n == 0), longest)
        pad, fill = (0, -array.size % width), reading.initial
        parts = reading.parts(array)
        parts = parts if len(parts) > 1 else [*parts, *parts]
        flat = [jnp.pad(part.ravel(), pad, constant_values=fill) for part in parts]
        rows = [part.reshape(-1, width) for part in flat]
        reduced.append(jnp.stack(_reduced(reading, rows, axes=(1,)), axis=1))
    return reduced


@functools.partial(jax.jit, static_argnums=0)
def _together(reading: _Reading, arrays: Arrays) -> Arrays:
    return _reduced(reading, [part for x in arrays for part in reading.parts(x)])


@functools.partial(jax.jit, static_argnums=0)
def _combined(reading: _Reading, arrays: Arrays) -> Arrays:
    return [
        functools.reduce(reading.combine, [_reduced(reading, [x])[0] for x in parts])
        for parts in zip(*map(reading.parts, arrays), strict=True)
    ]


def _reduced(reading: _Reading, parts: Arrays, axes: Sequence[int] = ()) -> Arrays:
    """Each part reduced over `axes` (default all), all in one reduction."""
    if parts[0].ndim == 0:
        return parts
    return lax.reduce(
        tuple(parts),
        tuple(np.asarray(reading.initial, part.dtype) for part in parts),
        lambda x, y: tuple(map(reading.combine, x, y)),
        tuple(axes or range(parts[0].ndim)),
    )


def _flag_on_tpu(array: jax.Array) -> Arrays:
    """The flag of a large array, by a matrix product.

    The matrix unit counts, for each column, the entries that are not finite. XLA:TPU
    estimates a seventh of a reduction's cycles (v5e, an array in on-chip memory). Exact
    in bfloat16, where no sum of ones is 0. Eight equal rows: the unit has no fewer.
    """
    finite = jnp.isfinite(array)
    # Rows are merged, which moves data unless the tiles of 16 rows stay whole.
    has_whole_tiles = array.ndim == 2 or (array.ndim > 2 and array.shape[-2] % 16 == 0)
    if array.size < TPU_PRODUCT_SIZE or not has_whole_tiles:
        return [finite]
    bad = (~finite).astype(jnp.bfloat16).reshape(-1, finite.shape[-1])
    counts = jnp.ones((8, bad.shape[0]), jnp.bfloat16) @ bad
    return [counts.max() == 0]


def _squares(array: jax.Array) -> Arrays:
    """Squares of entries times `TINY`, plain, and over `HUGE`, as float32."""
    # Without a minimum, which changes no sum that is used, XLA multiplies the squares
    # by TINY**2 or 1 / HUGE**2, which are infinity and 0.
    size = jnp.abs(promote_to_float32(array))
    tiny = jnp.minimum(size * TINY, 2.0**63)
    huge = jnp.minimum(size / HUGE, 2.0**32)
    huge = jnp.where(jnp.isfinite(array), huge * huge, NONFINITE)
    return [x.astype(jnp.float32) for x in (tiny * tiny, size * size, huge)]


_FLAG = _Reading(lambda x: [jnp.isfinite(x)], lax.bitwise_and, True, jnp.all)
_FLAG_ON_TPU = _FLAG._replace(parts=_flag_on_tpu)
_SQUARES = _Reading(_squares, lax.add, 0, lambda x: x.reshape(-1, 3).sum(axis=0))
