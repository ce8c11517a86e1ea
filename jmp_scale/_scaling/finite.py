"""Checks that gradients are finite, and computes their norm, alike on all devices.

Both are computed in one pass over the arrays.
"""

import functools
import itertools
from collections.abc import Callable, Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _mesh
from .._tree import is_inexact, promote_to_float32
from .._types import Arrays, Flag, Function, Mesh, PyTree, Scalar
from .._validation import described

# So many arrays of one type share a trace, and on a GPU a kernel. With more, XLA does
# not fuse all of them with the reductions of `optax.clip_by_global_norm`.
GROUP = 4


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
      axis_name: mesh axes over which the answer must agree, a name or a tuple of names
        (`vmap(axis_name=)` needs it). None (default) finds every manual axis (`pmap`,
        `shard_map`) on which it may differ; `()` opts out.
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
    try:
        leaf_specs = jax.tree.leaves(jax.tree.broadcast(specs, tree))
    except ValueError as error:
        raise ValueError(
            "all_finite: expected a PartitionSpec for each leaf, PartitionSpec() for "
            f"one that is whole, got specs={specs!r}"
        ) from error
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

    The norm, f32[], is infinite if the flag is False. A norm above 1.8e19, whose square
    overflows, comes out as the largest float32, and one below 1e-19 may come out as 0.
    Inside `pmap` and `shard_map` it is the largest norm of a device. Neither result has
    a derivative. Callers refuse `unreduced` leaves: the norm of parts is another.
    """
    leaves = [lax.stop_gradient(x) for x in _inexact_arrays(tree)]
    agree = agree or _mesh.agreement()
    finite, norm = _finite_and_norm(leaves, _mesh.sharding_specs(leaves))
    return agree(lax.pmin, finite), agree(lax.pmax, norm)


# Under `jit`, because the choice by the number of devices is a branch, which JAX would
# retrace and recompile at each eager call.
_jit = functools.partial(jax.jit, inline=True)


@functools.partial(_jit, static_argnums=(1, 2))
def _all_finite(leaves: Arrays, specs: _mesh.Specs, mesh: Mesh | None) -> Flag:
    def finite(shards: Arrays, axes: tuple[str, ...]) -> Flag:
        (flag,) = _reduce(_FLAG, shards)
        return lax.pmin(flag, axes) if axes else flag

    if not leaves:
        return jnp.array(True)
    return _mesh.on_shards(finite, leaves, specs, mesh)


@functools.partial(_jit, static_argnums=1)
def _finite_and_norm(leaves: Arrays, specs: _mesh.Specs) -> tuple[Flag, Scalar]:
    def squares(shards: Arrays, axes: tuple[str, ...]) -> jax.Array:
        # The sum over the axes counts a leaf once per copy, so it is divided by these.
        by_copies: dict[int, list[jax.Array]] = {}
        for shard, spec in zip(shards, specs, strict=True):
            copies = lax.psum(1, tuple(set(axes) - _mesh.named_axes(spec)))
            by_copies.setdefault(copies, []).append(shard)
        total = jnp.zeros(2, jnp.float32)
        for copies, group in by_copies.items():
            total = total + jnp.stack(_reduce(_SQUARES, group)) / copies
        return lax.psum(total, axes) if axes else total

    bad, total = _mesh.on_shards(squares, leaves, specs)
    # Infinity, or NaN where `_two_sums` adds to infinity.
    norm = jnp.where(total < jnp.inf, jnp.sqrt(total), np.finfo(np.float32).max)
    return bad == 0, jnp.where(bad == 0, norm, jnp.inf)


def _inexact_arrays(tree: PyTree) -> list[jax.Array]:
    with np.errstate(over="ignore"):  # without 64-bit types 1e300 becomes infinite
        return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]


class _Reduction(NamedTuple):
    """Maps each element of an array to parts, and combines those of two elements."""

    parts: Callable[[jax.Array], Arrays]
    combine: Callable[[Arrays, Arrays], Arrays]
    initial: bool | int  # neutral element of each part
    results: int  # so many parts are the result; the rest only serve to combine


def _reduce(reduction: _Reduction, arrays: Arrays) -> Arrays:
    """Reduces arrays to parts of shape []; in `shard_map` and `pmap`, each device's."""
    alike: dict[Hashable, list[jax.Array]] = {}
    for array in arrays:
        alike.setdefault(jax.typeof(array), []).append(array)
    groups: list[Arrays] = [
        group[start : start + GROUP]
        for group in alike.values()
        for start in range(0, len(group), GROUP)
    ]

    on_any = functools.partial(_combined, reduction, _all_in_one)
    sharded = functools.partial(_combined, reduction, _one_by_one)

    def on_cpu(groups: list[Arrays]) -> Arrays:
        rule = _SQUARES_ON_CPU if reduction is _SQUARES else reduction
        # Without the barrier XLA:CPU repeats what follows in each kernel of the update,
        # and compile time is quadratic in the number of leaves.
        parts = lax.optimization_barrier(_combined(rule, _all_in_one, groups))
        return parts[: rule.results]

    def alone(groups: list[Arrays]) -> Arrays:
        # A TPU fuses the reduction of an array by itself with what computes the array.
        return lax.platform_dependent(groups, cpu=on_cpu, tpu=sharded, default=on_any)

    if all(array.ndim == 0 for array in arrays):
        return sharded(groups)
    return _mesh.if_on_one_device(alone, sharded, groups)


def _combined(rule: _Reduction, reduce: Function, groups: list[Arrays]) -> Arrays:
    return functools.reduce(rule.combine, [reduce(rule, group) for group in groups])


# Tracing a step spends most of its time here. Under `jit`, these functions are traced
# once for all arrays of a type.
@functools.partial(jax.jit, static_argnums=0)
def _all_in_one(reduction: _Reduction, arrays: Arrays) -> Arrays:
    """Reduces arrays of one type in one kernel.

    XLA:CPU (of jax 0.10) writes the operand of a reduction to memory, unless the
    reduction has several operands and all its results are used.
    """
    blocks = [reduction.parts(array) for array in arrays]
    count = len(blocks[0])
    if len(blocks) == count == 1:
        blocks = blocks * 2
    operands = tuple(part for block in blocks for part in block)
    initial = tuple(np.asarray(reduction.initial, part.dtype) for part in operands)

    def in_blocks(parts: Arrays) -> list[Arrays]:
        return [list(parts[at : at + count]) for at in range(0, len(parts), count)]

    def combine(x: Arrays, y: Arrays) -> Arrays:
        combined = map(reduction.combine, in_blocks(x), in_blocks(y))
        return tuple(itertools.chain.from_iterable(combined))

    axes = tuple(range(operands[0].ndim))
    reduced = lax.reduce(operands, initial, combine, axes) if axes else operands
    return functools.reduce(reduction.combine, in_blocks(reduced))


@functools.partial(jax.jit, static_argnums=0)
def _one_by_one(reduction: _Reduction, arrays: Arrays) -> Arrays:
    """Reduces each part of each array separately, because XLA can partition that.

    For a reduction of several operands it would gather the results of the devices.
    """
    blocks = [
        [part.all() if part.dtype == bool else part.sum() for part in parts]
        for parts in map(reduction.parts, arrays)
    ]
    return functools.reduce(reduction.combine, blocks)


def _both(x: Arrays, y: Arrays) -> Arrays:
    return [a & b for a, b in zip(x, y, strict=True)]


def _squares(array: jax.Array) -> Arrays:
    """Returns 1 for elements that are not finite, and the squares of the others."""
    size = jnp.abs(promote_to_float32(array)).astype(jnp.float32)
    bad = ~jnp.isfinite(array)
    return [bad.astype(jnp.float32), jnp.where(bad, 0, size * size)]


def _sums(x: Arrays, y: Arrays) -> Arrays:
    return [a + b for a, b in zip(x, y, strict=True)]


def _squares_and_rest(array: jax.Array) -> Arrays:
    bad, squares = _squares(array)
    return [bad, squares, jnp.zeros_like(squares)]


def _two_sums(x: Arrays, y: Arrays) -> Arrays:
    """Adds, and carries what the last addition rounded off, to add it to the next one.

    A CPU adds one square after the other. The plain sum of equal squares would stop
    growing after 2**24 of them. Source: Kahan, "Further remarks on reducing truncation
    errors", 1965.
    """
    (bad, a, rest), (other_bad, b, other_rest) = x, y
    b = b + (rest + other_rest)
    total = a + b
    return [bad + other_bad, total, b - (total - a)]


_FLAG = _Reduction(lambda array: [jnp.isfinite(array)], _both, True, results=1)
_SQUARES = _Reduction(_squares, _sums, 0, results=2)
_SQUARES_ON_CPU = _Reduction(_squares_and_rest, _two_sums, 0, results=2)
