"""How each kind of machine reads many arrays once: finite flags and sums of squares.

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
from ._tree import widen

Arrays = Sequence[jax.Array]

# A GPU starts a kernel for each reduction, a TPU spends about 1,800 cycles on the
# smallest: arrays of one shape share one. With more than four XLA no longer fuses all
# of them with the reductions of `optax.clip_by_global_norm` on a GPU, and reads
# gradients twice (test_clipping_reads_the_gradients_once).
GPU_GROUP = 4
TPU_GROUP = 8
# Entries from which a TPU takes a matrix product instead of a reduction.
TPU_PRODUCT_SIZE = 2**17
# Columns that a TPU computes side by side.
TPU_LANES = 128
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


def sums_of_squares_here(arrays: Arrays, copies: Sequence[int]) -> jax.Array:
    """Sums of squares over all entries, from which norm and finite flag are read.

    Args:
      arrays: real or complex arrays.
      copies: by what each array's squares are divided.

    Returns:
      f32[2] or f64[2]: the sum of the squares, and that of the squares of the entries
      over `HUGE`, to which an entry that is not finite adds `NONFINITE`.
    """
    if not arrays:
        return jnp.zeros(2, np.float32)
    if all(array.ndim == 0 for array in arrays):
        return _total(_rows(_squares_each(arrays)), copies)
    return lax.platform_dependent(
        *arrays,
        cpu=functools.partial(_squares_on_cpu, copies),
        tpu=functools.partial(_squares_on_tpu, copies),
        default=functools.partial(_squares_on_gpu, copies),
    )


# The square of any float32 over this is far below the largest float32, and that of an
# entry that matters in a norm of 2**64, where the plain squares overflow, is not lost.
HUGE = 2.0**96
# Not infinity, so that no machine's matrix unit is relied on to carry one. Sums of the
# squares over HUGE are below its 2**17th part for all trees of up to 2**46 entries.
NONFINITE = 2.0**127
# Sums of 2**46 such squares are less than `NONFINITE`.
LARGEST_ON_TPU = 2.0**40


def _squares_on_cpu(copies: Sequence[int], *arrays: jax.Array) -> jax.Array:
    # The barriers are that of _finite_on_cpu.
    def whole(*arrays: jax.Array) -> jax.Array:
        sums = [sums_in_one_pass(_squares(array, shared=False)) for array in arrays]
        return _total(lax.optimization_barrier(_rows(sums)), copies)

    def sharded(*arrays: jax.Array) -> jax.Array:
        rows = _rows(_squares_each(arrays))
        return _total(lax.optimization_barrier(rows), copies)

    return _mesh.if_whole(whole, sharded, *arrays)


def _squares_on_gpu(copies: Sequence[int], *arrays: jax.Array) -> jax.Array:
    def whole(*arrays: jax.Array) -> jax.Array:
        return _total(_rows(_squares_in_groups(arrays, GPU_GROUP)), copies)

    return _mesh.if_whole(whole, _squares_in_parts(copies), *arrays)


def _squares_on_tpu(copies: Sequence[int], *arrays: jax.Array) -> jax.Array:
    def whole(*arrays: jax.Array) -> jax.Array:
        squares = dict(enumerate(map(_bounded_squares, arrays)))
        large = {i: x for i, x in squares.items() if _is_for_product(arrays[i])}
        small = {i: x for i, x in squares.items() if i not in large}
        sums = _sums_by_product(large) | _sums_in_groups(small, TPU_GROUP)
        dtype = np.result_type(*(x.dtype for x in sums.values()))
        plain = jnp.stack([sums[i].astype(dtype) for i in squares])
        over_huge = jnp.where(plain < NONFINITE / 2, jnp.zeros_like(plain), NONFINITE)
        return _total(jnp.stack([plain, over_huge], 1), copies)

    return _mesh.if_whole(whole, _squares_in_parts(copies), *arrays)


def _squares_in_parts(copies: Sequence[int]) -> Callable[..., jax.Array]:
    """Sums of the devices' parts, of which XLA makes a single all-reduce.

    It finds that a sum of all-reduces is one of sums, but not through a stack.
    """

    def sharded(*arrays: jax.Array) -> jax.Array:
        shares = [
            [x / count for x in pair]
            for pair, count in zip(_squares_each(arrays), copies, strict=True)
        ]
        return jnp.stack(
            [_joined(jnp.add, 0, sums, arrays) for sums in zip(*shares, strict=True)]
        )

    return sharded


def _squares_each(arrays: Arrays) -> list[Arrays]:
    return [[x.sum() for x in _squares(array)] for array in arrays]


def _squares_in_groups(arrays: Arrays, size: int) -> list[Arrays]:
    sums: dict[int, Arrays] = {}
    for group in _of_one_shape(arrays, size):
        reduced = _reduce(lax.add, [x for i in group for x in _squares(arrays[i])], 0)
        sums |= {i: reduced[2 * k : 2 * k + 2] for k, i in enumerate(group)}
    return [sums[i] for i in range(len(arrays))]


def _rows(sums: Sequence[Arrays]) -> jax.Array:
    """f32[n, 2], or f64[n, 2] if one of the pairs is float64."""
    dtype = np.result_type(*(x.dtype for pair in sums for x in pair))
    return jnp.stack([x.astype(dtype) for pair in sums for x in pair]).reshape(-1, 2)


def _total(rows: jax.Array, copies: Sequence[int]) -> jax.Array:
    return (rows / np.asarray(copies, rows.dtype)[:, None]).sum(0)


def _squares(array: jax.Array, *, shared: bool = True) -> Arrays:
    """The squares of an array's entries, and those of the entries over `HUGE`.

    With `shared` the compiler may compute the first together with the squares of a norm
    that clips the same gradients: a GPU then reads them once. XLA:CPU would write them
    to memory (test_a_guard_reads_what_the_finite_check_reads).
    """
    parts = [array.real, array.imag] if jnp.iscomplexobj(array) else [array]
    plain, over_huge = [], []
    for part in map(widen, parts):
        # Without the minimum, which changes no finite float32, XLA multiplies the
        # squares by 1 / HUGE**2, which is 0: NaN where they overflow
        # (test_the_norm_is_right_for_every_size_of_gradients).
        reduced = jnp.minimum(jnp.abs(part) / HUGE, 2.0**32)
        over_huge.append(jnp.where(jnp.isfinite(part), reduced * reduced, NONFINITE))
        if not shared:  # a minimum that changes nothing, so that the squares differ
            part = jnp.minimum(jnp.abs(part), np.finfo(part.dtype).max)
        plain.append(part * part)
    return [sum(plain[1:], plain[0]), sum(over_huge[1:], over_huge[0])]


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


def _bounded_squares(array: jax.Array) -> jax.Array:
    """The squares of an array's entries, for a TPU; `NONFINITE` if not finite.

    One array instead of the two of `_squares`: gradients are read for the norm as they
    are for the finite check (test_a_guard_reads_what_the_finite_check_reads). An entry
    over `LARGEST_ON_TPU` counts as that.
    """
    parts = [array.real, array.imag] if jnp.iscomplexobj(array) else [array]
    squares = []
    for part in map(widen, parts):
        bounded = jnp.minimum(jnp.abs(part), LARGEST_ON_TPU)
        squares.append(jnp.where(jnp.isfinite(part), bounded * bounded, NONFINITE))
    return sum(squares[1:], squares[0])


def _sums_by_product(arrays: dict[int, jax.Array]) -> dict[int, jax.Array]:
    """Sums of arrays for a TPU, as `_flag_by_product` counts.

    The matrix unit rounds each entry to bfloat16, so a sum is right to 1 in 500.
    """
    columns: dict[tuple[int, int | None], dict[int, jax.Array]] = {}
    for i, array in arrays.items():
        rows = array.reshape(-1, array.shape[-1])
        ones = jnp.ones((8, rows.shape[0]), rows.dtype)
        products = jnp.dot(ones, rows, precision=lax.Precision.DEFAULT)
        # Columns that fill all lanes are added in the kernel of the product, those of
        # other arrays in one reduction. Otherwise XLA:TPU keeps fewer gradients on the
        # chip (test_a_guard_needs_full_lanes_to_be_added_within_the_product).
        alone = None if array.shape[-1] % TPU_LANES else i
        columns.setdefault((array.shape[-1], alone), {})[i] = products[0]
    sums = {}
    for group in columns.values():
        added = jnp.stack(list(group.values())).sum(1)
        sums |= dict(zip(group, added, strict=True))
    return sums


def _sums_in_groups(arrays: dict[int, jax.Array], size: int) -> dict[int, jax.Array]:
    sums = {}
    for group in _of_one_shape(list(arrays.values()), size):
        keys = [list(arrays)[i] for i in group]
        reduced = _reduce(lax.add, [arrays[key] for key in keys], 0)
        sums |= dict(zip(keys, reduced, strict=True))
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
        large = [array for array in arrays if _is_for_product(array)]
        small = [array for array in arrays if not _is_for_product(array)]
        flags = _flags_in_groups(small, TPU_GROUP)
        return jnp.stack(flags + [_flag_by_product(array) for array in large]).all()

    return _mesh.if_whole(whole, _finite_each, *arrays)


def _finite_each(*arrays: jax.Array) -> jax.Array:
    """Reduces each array on its own, which is what XLA can partition.

    Of a reduction of several operands it would gather the results of each device.
    """
    flags = [jnp.isfinite(array).all() for array in arrays]
    return _joined(jnp.logical_and, True, flags, arrays)


def _joined(
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
    """`jnp.isfinite(array).all()` of all, in one reduction for arrays of one shape."""
    flags = []
    for group in _of_one_shape(arrays, size):
        finite = [jnp.isfinite(arrays[i]) for i in group]
        flags += _reduce(lax.bitwise_and, finite, True)
    return flags


def _is_for_product(array: jax.Array) -> bool:
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
        is_wide = array.dtype in (np.float64, np.complex128)
        key = array.shape, is_wide, _mesh.varying_axes(array)
        alike.setdefault(key, []).append(position)
    return [
        group[start : start + size]
        for group in alike.values()
        for start in range(0, len(group), size)
    ]
