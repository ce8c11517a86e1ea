"""Checks that gradients are finite, and computes their norm, alike on all devices.

Both are computed in one pass over the arrays. No reduction is fast on all machines, so
there are three, and one more for large arrays on a TPU. The choice is made in lowering,
for the machine that a program is compiled for.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _mesh
from .._tree import is_inexact, promote_to_float32
from .._types import Arrays, Flag, Mesh, PyTree, Scalar
from .._validation import described

# So many arrays of one type share a trace, and on a GPU a kernel. With more, XLA does
# not fuse all of them with the reductions of `optax.clip_by_global_norm`.
GPU_GROUP = 4
# From this size on, a TPU uses a matrix product instead of a reduction.
TPU_PRODUCT_SIZE = 2**17
# A CPU adds at most so many elements one after the other.
LONGEST_ROW = 4096
# Plain squares are right for norms between 2**-1 and 2**64. Before they are squared,
# smaller gradients are multiplied by `TINY`, and larger ones divided by `HUGE`.
TINY = 2.0**64
HUGE = 2.0**96
# Stands for the square of an element that is not finite; infinity would trip
# `jax_debug_infs`. For trees of up to 2**46 elements, the sum of the squares over HUGE
# stays below NONFINITE / 2**17 if all elements are finite.
NONFINITE = 2.0**127


def all_finite(
    tree: PyTree,
    axis_name: _mesh.AxisName = None,
    *,
    specs: PyTree = None,
    mesh: Mesh | None = None,
) -> Flag:
    """Returns whether all elements of all leaves are finite, alike on all replicas.

    Use it in a training loop without `with_loss_scale`: pass the result to `adjust`,
    and to `select_tree` to skip the step.

    Args:
      tree: any pytree; only real and complex floating-point leaves are checked, and of
        an `unreduced` array each part.
      axis_name: mesh axes over which the answer must agree. None (default) finds every
        manual axis (`pmap`, `shard_map`) on which it may differ, so that replicas
        cannot diverge; a name or a tuple of names is used as it is
        (`vmap(axis_name=)` needs it); `()` opts out.
      specs: a `PartitionSpec` for each leaf of `tree` (or for a prefix of it), for
        auto-sharded `jit`: each device then checks its own shards, and exactly one
        scalar all-reduce combines the answers. Explicit mesh axes do not need it.
      mesh: the mesh of `specs`; default the leaves' own, then that of `jax.set_mesh`.

    Returns:
      bool[], True for a tree without inexact leaves.

    Raises:
      TypeError: `tree` is a function or text, or `axis_name` is of another type.
      ValueError: `specs` do not fit `tree` or the mesh, or do not divide a leaf
        equally (errors of `jax.tree.broadcast` and `jax.shard_map`).
    """
    is_leaf = jax.tree_util.all_leaves([tree])
    if is_leaf and (callable(tree) or isinstance(tree, str)):
        raise TypeError(
            f"all_finite: expected arrays, got {described(tree)}; pass what it returns"
        )
    agree = _mesh.agreement("all_finite", axis_name)
    if specs is None:
        return finite(tree, agree)
    leaf_specs = jax.tree.leaves(jax.tree.broadcast(specs, tree))
    is_read = map(is_inexact, jax.tree.leaves(tree))
    leaf_specs = tuple(itertools.compress(leaf_specs, is_read))
    return agree(lax.pmin, _all_finite(_inexact_arrays(tree), leaf_specs, mesh))


def finite(tree: PyTree, agree: _mesh.Agreement) -> Flag:
    """Returns `all_finite` over the axes of an agreement."""
    leaves = _inexact_arrays(tree)
    # The flag is reduced twice: over the axes that shard a leaf (in `_all_finite`),
    # then over the manual axes around this call.
    return agree(lax.pmin, _all_finite(leaves, _mesh.sharding_specs(leaves), None))


def finite_and_norm(
    tree: PyTree, agree: _mesh.Agreement | None = None
) -> tuple[Flag, Scalar]:
    """Returns `all_finite` and the global norm of the inexact leaves, in one pass.

    The norm, f32[], is right even if squares over- or underflow. It is at most the
    largest float32, and infinite if the flag is False. Inside `pmap` and `shard_map` it
    is the largest norm of a device.
    """
    _mesh.refuse_unreduced("global norm", tree)  # that of the parts is another
    leaves, agree = _inexact_arrays(tree), agree or _mesh.agreement()
    finite, norm = _finite_and_norm(leaves, _mesh.sharding_specs(leaves))
    return agree(lax.pmin, finite), agree(lax.pmax, norm)


# Under `jit`, because the choices between machines are branches, which JAX would
# retrace and recompile at each eager call.
_jit = functools.partial(jax.jit, inline=True)


@functools.partial(_jit, static_argnums=(1, 2))
def _all_finite(leaves: Arrays, specs: _mesh.Specs, mesh: Mesh | None) -> Flag:
    def finite(shards: Arrays, axes: tuple[str, ...]) -> Flag:
        flag = _reduce(_FLAG, shards)
        return lax.pmin(flag, axes) if axes else flag

    if not leaves:
        return jnp.array(True)
    return _mesh.on_shards(finite, leaves, specs, mesh)


@functools.partial(_jit, static_argnums=1)
def _finite_and_norm(leaves: Arrays, specs: _mesh.Specs) -> tuple[Flag, Scalar]:
    def sums(shards: Arrays, axes: tuple[str, ...]) -> jax.Array:
        # The sum over the axes counts a leaf once per copy, so it is divided by these.
        by_copies: dict[int, list[jax.Array]] = {}
        for shard, spec in zip(shards, specs, strict=True):
            copies = lax.psum(1, tuple(set(axes) - _mesh.named_axes(spec)))
            by_copies.setdefault(copies, []).append(shard)
        each = [_reduce(_SQUARES, group) / n for n, group in by_copies.items()]
        total = functools.reduce(operator.add, each, jnp.zeros(3, jnp.float32))
        return lax.psum(total, axes) if axes else total

    tiny, plain, huge = _mesh.on_shards(sums, leaves, specs)
    finite = huge < NONFINITE / 2**17
    # Of the three sums, exactly one is used.
    is_tiny, is_huge = tiny < 2.0**126, ~jnp.isfinite(plain)
    total = jnp.where(is_tiny, tiny, jnp.where(is_huge, huge, plain))
    unit = jnp.where(is_tiny, 1 / TINY, jnp.where(is_huge, HUGE, 1.0))
    # The root has an infinite derivative at 0.
    is_zero = total == 0
    root = jnp.sqrt(jnp.where(is_zero, 1.0, total))
    # A norm is infinite only if a gradient is not finite.
    norm = jnp.minimum(root * unit, float(np.finfo(np.float32).max))
    return finite, jnp.where(finite, jnp.where(is_zero, 0.0, norm), jnp.inf)


def _inexact_arrays(tree: PyTree) -> list[jax.Array]:
    with np.errstate(over="ignore"):  # without 64-bit types 1e300 becomes infinite
        return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]


class _Reduction(NamedTuple):
    """A function of all elements of all arrays: `result` of the combined `parts`."""

    parts: Callable[[jax.Array], Arrays]  # maps the elements of an array
    combine: Callable[[jax.Array, jax.Array], jax.Array]  # two elements of a part
    initial: bool | int  # neutral element of `combine`
    result: Callable[[jax.Array], jax.Array]  # from all combined parts


def _reduce(reduction: _Reduction, arrays: Arrays) -> jax.Array:
    """Reduces arrays; in `shard_map` and `pmap`, those of each device by itself."""
    alike: dict[Hashable, list[jax.Array]] = {}
    for array in arrays:
        alike.setdefault(jax.typeof(array), []).append(array)
    groups: list[Arrays] = [
        group[start : start + GPU_GROUP]
        for group in alike.values()
        for start in range(0, len(group), GPU_GROUP)
    ]
    sharded = functools.partial(_reduce_on_many_devices, reduction)
    # Rows and groups need sizes; an exported program may leave them open.
    has_sizes = all(isinstance(n, int) for array in arrays for n in array.shape)
    if not has_sizes or all(array.ndim == 0 for array in arrays):
        return sharded(groups)
    alone = functools.partial(_reduce_on_one_device, reduction)
    return _mesh.if_on_one_device(alone, sharded, groups)


def _reduce_on_one_device(reduction: _Reduction, groups: list[Arrays]) -> jax.Array:
    def on_cpu(groups: list[Arrays]) -> jax.Array:
        rows = [row for group in groups for row in _rows_for_cpu(reduction, group)]
        # Without the barrier XLA:CPU recomputes the last reduction in each kernel of
        # the update, and compile time is quadratic in the number of leaves.
        return reduction.result(lax.optimization_barrier(lax.concatenate(rows, 0)))

    def on_gpu(groups: list[Arrays], reduction: _Reduction = reduction) -> jax.Array:
        parts = [part for group in groups for part in _all_in_one(reduction, group)]
        return reduction.result(jnp.stack(parts))

    def on_tpu(groups: list[Arrays]) -> jax.Array:
        return on_gpu(groups, _FLAG_ON_TPU if reduction is _FLAG else reduction)

    return lax.platform_dependent(groups, cpu=on_cpu, tpu=on_tpu, default=on_gpu)


def _reduce_on_many_devices(reduction: _Reduction, groups: list[Arrays]) -> jax.Array:
    # XLA merges a sum of all-reduces into one all-reduce, but not through a stack.
    blocks = [_one_by_one(reduction, group) for group in groups]
    return reduction.result(jnp.stack(_combined(reduction, blocks)))


# Tracing a step spends most of its time here. Under `jit`, these functions are traced
# once for all arrays of a type.
@functools.partial(jax.jit, static_argnums=0)
def _rows_for_cpu(reduction: _Reduction, arrays: Arrays) -> Arrays:
    """Reduces each array by rows, to [rows, k].

    XLA:CPU (of jax 0.10) writes the operand of a reduction to memory, unless the
    reduction has several operands and all its results are used. Arrays are divided into
    rows because a float32 sum of one square after the other stops growing after 2**24
    equal squares.
    """
    reduced = []
    for array in arrays:
        longest = min(max(array.size, 1), LONGEST_ROW)
        # A pad is slow, and shorter rows would be too many.
        widths = range(longest, 63, -1)
        width = next((n for n in widths if array.size % n == 0), longest)
        pad, fill = (0, -array.size % width), reduction.initial
        parts = reduction.parts(array)
        parts = parts if len(parts) > 1 else [*parts, *parts]
        flat = [jnp.pad(part.ravel(), pad, constant_values=fill) for part in parts]
        rows = [part.reshape(-1, width) for part in flat]
        reduced.append(jnp.stack(_reduced(reduction, rows, axes=(1,)), axis=1))
    return reduced


@functools.partial(jax.jit, static_argnums=0)
def _all_in_one(reduction: _Reduction, arrays: Arrays) -> Arrays:
    """Reduces arrays of one type to a scalar each, in one kernel of a GPU or TPU."""
    return _reduced(reduction, [part for x in arrays for part in reduction.parts(x)])


@functools.partial(jax.jit, static_argnums=0)
def _one_by_one(reduction: _Reduction, arrays: Arrays) -> Arrays:
    """Reduces each array separately, because XLA can partition that.

    For a reduction of several operands it would gather the results of the devices.
    """
    blocks = [reduction.parts(array) for array in arrays]
    return _combined(
        reduction, [[_reduced(reduction, [x])[0] for x in parts] for parts in blocks]
    )


def _combined(reduction: _Reduction, blocks: Sequence[Arrays]) -> Arrays:
    """Combines the same part of all blocks."""
    return [
        functools.reduce(reduction.combine, parts)
        for parts in zip(*blocks, strict=True)
    ]


def _reduced(reduction: _Reduction, parts: Arrays, axes: Sequence[int] = ()) -> Arrays:
    """Reduces each part over `axes` (default all), in one reduction of all parts."""
    if parts[0].ndim == 0:
        return parts
    return lax.reduce(
        tuple(parts),
        tuple(np.asarray(reduction.initial, part.dtype) for part in parts),
        lambda x, y: tuple(map(reduction.combine, x, y)),
        tuple(axes or range(parts[0].ndim)),
    )


def _flag_on_tpu(array: jax.Array) -> Arrays:
    """Computes the flag of a large array by a matrix product.

    The matrix unit counts, for each column, the elements that are not finite. A train
    step of `benchmarks/overhead.py` takes 3 % fewer cycles so (v5e, float32; float16:
    2 %). bfloat16 suffices, because a sum of ones never rounds to 0. The matrix unit
    processes no fewer than eight rows.
    """
    finite = jnp.isfinite(array)
    # Leading axes are merged. This moves data unless the tiles of 16 rows stay whole.
    has_whole_tiles = array.ndim == 2 or (array.ndim > 2 and array.shape[-2] % 16 == 0)
    if array.size < TPU_PRODUCT_SIZE or not has_whole_tiles:
        return [finite]
    bad = (~finite).astype(jnp.bfloat16).reshape(-1, finite.shape[-1])
    counts = jnp.ones((8, bad.shape[0]), jnp.bfloat16) @ bad
    return [counts.max() == 0]


def _squares(array: jax.Array) -> Arrays:
    """Squares elements times `TINY`, plain, and over `HUGE`, as float32."""
    # The minimum changes no sum that is used. Without it XLA folds the factors into
    # TINY**2 = inf and 1 / HUGE**2 = 0.
    size = jnp.abs(promote_to_float32(array))
    tiny = jnp.minimum(size * TINY, 2.0**63)
    huge = jnp.minimum(size / HUGE, 2.0**32)
    huge = jnp.where(jnp.isfinite(array), huge * huge, NONFINITE)
    return [x.astype(jnp.float32) for x in (tiny * tiny, size * size, huge)]


_FLAG = _Reduction(lambda x: [jnp.isfinite(x)], lax.bitwise_and, True, jnp.all)
_FLAG_ON_TPU = _FLAG._replace(parts=_flag_on_tpu)
_SQUARES = _Reduction(_squares, lax.add, 0, lambda x: x.reshape(-1, 3).sum(axis=0))
