"""How each kind of machine reads many arrays once, for the finite check.

The three variants give the same answers. Which of them becomes part of a program is
decided when the program is lowered for a machine, so a program that is exported or
compiled on another machine is the one that the machine itself would make.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _mesh

Arrays = Sequence[jax.Array]

# A GPU starts a kernel for each reduction, a TPU spends about 1,800 cycles on the
# smallest: arrays of one shape share one. With more than four XLA no longer fuses all
# of them with the reductions of `optax.clip_by_global_norm` on a GPU, and reads
# gradients twice (test_clipping_reads_the_gradients_once).
GPU_GROUP = 4
TPU_GROUP = 8
# Entries from which a TPU takes a matrix product instead of a reduction.
TPU_PRODUCT_SIZE = 2**17
# Most entries that a CPU sums one after the other.
LONGEST_ROW = 4096


def all_finite_here(arrays: Arrays) -> jax.Array:
    """Whether all entries of the arrays are finite, bool[].

    Under `jit` on several devices the answer is of the whole arrays, inside `shard_map`
    and `pmap` of those of the current device.
    """
    if all(array.ndim == 0 for array in arrays):
        return jnp.isfinite(jnp.stack(arrays)).all() if arrays else jnp.array(True)
    return lax.platform_dependent(
        *arrays, cpu=_finite_on_cpu, tpu=_finite_on_tpu, default=_finite_on_gpu
    )


def sums_in_one_pass(arrays: Arrays, lanes: int = 1) -> Arrays:
    """Sums of arrays of one shape for a CPU, as `_flag_in_one_pass` reduces flags.

    In rows: a float32 to which one square after the other is added stops growing at
    2**24 equal ones (test_the_norm_of_many_entries_is_right). Of a row there are
    `lanes` sums, since a processor adds to one of them only every fourth cycle; a
    single array needs two of them, or XLA splits its reduction.
    """
    size = arrays[0].size
    longest = LONGEST_ROW // lanes
    fits = [n for n in range(1, longest + 1) if size % (n * lanes) == 0]
    # The sums of rows of less than 64 would be a part of the array that counts, and
    # there are no others for a prime number of entries.
    width = fits[-1] if fits and fits[-1] >= 64 else longest
    rest = size % (width * lanes)
    flat = [x.ravel() for x in arrays]
    rows = [x[: size - rest].reshape(-1, lanes, width) for x in flat]
    parts = [x[:, lane] for x in rows for lane in range(lanes)]
    sums = jnp.stack([x.sum() for x in _reduce(lax.add, parts, 0, axes=(1,))])
    sums = list(sums.reshape(-1, lanes).sum(1))
    if rest:
        ends = _reduce(lax.add, [x[size - rest :] for x in flat], 0)
        sums = [x + y for x, y in zip(sums, ends, strict=True)]
    return sums


def _finite_on_cpu(*arrays: jax.Array) -> jax.Array:
    def all_of(flags: Sequence[jax.Array]) -> jax.Array:
        # Without the barrier XLA:CPU computes this reduction again in each kernel of
        # the update, and compile time is quadratic in the number of leaves. GPUs and
        # TPUs do not need it, and it would cost them the scalar all-reduce on Auto mesh
        # axes.
        return jnp.all(lax.optimization_barrier(jnp.stack(flags)))

    def whole(*arrays: jax.Array) -> jax.Array:
        return all_of([flag for array in arrays for flag in _flag_in_one_pass(array)])

    def sharded(*arrays: jax.Array) -> jax.Array:
        return all_of([jnp.isfinite(array).all() for array in arrays])

    return _mesh.if_whole(whole, sharded, *arrays)


def _finite_on_gpu(*arrays: jax.Array) -> jax.Array:
    def whole(*arrays: jax.Array) -> jax.Array:
        return jnp.stack(_flags_in_groups(arrays, GPU_GROUP)).all()

    return _mesh.if_whole(whole, _finite_each, *arrays)


def _finite_on_tpu(*arrays: jax.Array) -> jax.Array:
    def whole(*arrays: jax.Array) -> jax.Array:
        large = [array for array in arrays if is_for_product(array)]
        small = [array for array in arrays if not is_for_product(array)]
        flags = _flags_in_groups(small, TPU_GROUP)
        return jnp.stack(flags + [_flag_by_product(array) for array in large]).all()

    return _mesh.if_whole(whole, _finite_each, *arrays)


def _finite_each(*arrays: jax.Array) -> jax.Array:
    """Reduces each array on its own, which is what XLA can partition.

    Of a reduction of several operands it would gather the results of each device.
    """
    flags = [jnp.isfinite(array).all() for array in arrays]
    return joined(jnp.logical_and, True, flags, arrays)


def joined(
    combine: Callable[[Any, Any], Any], neutral: Any, results: Arrays, arrays: Arrays
) -> jax.Array:
    """The results of the arrays, one scalar of each, combined to one.

    XLA makes one all-reduce of those of neighbors, up to the first that is of an array
    that is not sharded. So first come the arrays that the number of devices divides
    (test_replicated_leaves_leave_the_all_reduce_a_scalar), and before those that take
    less memory those that take more, arrays of one shape together: they are sharded
    alike.
    """
    alike: dict[Any, list[jax.Array]] = {}
    for result, array in zip(results, arrays, strict=True):
        alike.setdefault(array.shape, []).append(result)
    sharded, whole = [], []
    # Of a result that does not belong to one of the two parts XLA leaves nothing.
    for shape in sorted(alike, key=lambda shape: -math.prod(shape) * len(alike[shape])):
        result = functools.reduce(combine, alike[shape])
        is_whole = _mesh.no_dimension_divides(shape)
        sharded.append(jnp.where(is_whole, neutral, result))
        whole.append(jnp.where(is_whole, result, neutral))
    return functools.reduce(combine, sharded + whole)


def _flag_in_one_pass(array: jax.Array) -> Sequence[jax.Array]:
    """`jnp.isfinite(array).all()`, twice, for a CPU.

    XLA:CPU (of jax 0.10) writes a boolean for each entry to memory and splits their
    reduction. A reduction of two operands it leaves whole, and computes `isfinite`
    within it, if both results are used: test_there_are_hardly_any_temporaries. Over one
    axis, since it is slow over several short ones.
    """
    finite = jnp.isfinite(array).ravel()
    return _reduce(lax.bitwise_and, (finite, finite), True)


def _flags_in_groups(arrays: Arrays, size: int) -> list[jax.Array]:
    finite = [jnp.isfinite(array) for array in arrays]
    return list(reduced_in_groups(lax.bitwise_and, finite, True, size).values())


def is_for_product(array: jax.Array) -> bool:
    # Rows are merged below, which moves data unless the tiles of 16 rows stay whole.
    return (
        array.size >= TPU_PRODUCT_SIZE
        and array.real.dtype != np.float64
        and array.ndim >= 2
        and (array.ndim == 2 or array.shape[-2] % 16 == 0)
    )


def _flag_by_product(array: jax.Array) -> jax.Array:
    """`jnp.isfinite(array).all()` by a matrix product, for a TPU.

    The matrix unit counts, for each column, the entries that are not finite. XLA:TPU
    estimates a seventh of a reduction's cycles (v5e, an array in on-chip memory). Sums
    of zeros and ones are zero if all summands are, and at least one otherwise, so the
    answer is exact in bfloat16. Eight equal rows, since the unit has no fewer.
    """
    bad = (~jnp.isfinite(array)).astype(jnp.bfloat16).reshape(-1, array.shape[-1])
    counts = jnp.ones((8, bad.shape[0]), jnp.bfloat16) @ bad
    return counts.max() == 0


def reduced_in_groups(
    combine: Callable[[Any, Any], Any], arrays: Arrays, initial: Any, size: int
) -> dict[int, jax.Array]:
    """Each array reduced, by its position; `size` of one shape share a reduction."""
    results: dict[int, jax.Array] = {}
    for group in _of_one_shape(arrays, size):
        reduced = _reduce(combine, [arrays[i] for i in group], initial)
        results |= dict(zip(group, reduced, strict=True))
    return results


def _reduce(
    combine: Callable[[Any, Any], Any],
    arrays: Arrays,
    initial: Any,
    axes: Sequence[int] | None = None,
) -> Sequence[jax.Array]:
    """Each array reduced over `axes` (default all), all in one reduction."""
    if arrays[0].ndim == 0:
        return arrays
    return lax.reduce(
        tuple(arrays),
        tuple(np.asarray(initial, array.dtype) for array in arrays),
        lambda x, y: tuple(map(combine, x, y)),
        tuple(range(arrays[0].ndim) if axes is None else axes),
    )


def _of_one_shape(arrays: Arrays, size: int) -> list[list[int]]:
    """Positions of the arrays, in groups of at most `size` for one reduction each."""
    alike: dict[Any, list[int]] = {}
    for position, array in enumerate(arrays):
        # All operands of a reduction have one type: float64 squares stay apart.
        key = array.shape, array.dtype == np.float64, _mesh.varying_axes(array)
        alike.setdefault(key, []).append(position)
    return [
        group[start : start + size]
        for group in alike.values()
        for start in range(0, len(group), size)
    ]
