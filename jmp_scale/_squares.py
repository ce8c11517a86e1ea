"""Sums of squares, from which the norm and the finite flag are read in one pass.

In a variant for each kind of machine, as `_reductions` has them of the finite check.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _mesh, _reductions
from ._reductions import (
    Arrays,
    is_for_product,
    joined,
    reduced_in_groups,
    sums_in_one_pass,
)
from ._tree import widen

# Columns that a TPU computes side by side.
TPU_LANES = 128
# The square of any float32 over this is far below the largest float32, and that of an
# entry that matters in a norm of 2**64, where the plain squares overflow, is not lost.
HUGE = 2.0**96
# Not infinity, so that no machine's matrix unit is relied on to carry one. Sums of the
# squares over HUGE are below its 2**17th part for all trees of up to 2**46 entries.
NONFINITE = 2.0**127
# Sums of 2**46 such squares are less than `NONFINITE`.
LARGEST_ON_TPU = 2.0**40


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
        return _total(_rows(_squares_in_groups(arrays, _reductions.GPU_GROUP)), copies)

    return _mesh.if_whole(whole, _squares_in_parts(copies), *arrays)


def _squares_on_tpu(copies: Sequence[int], *arrays: jax.Array) -> jax.Array:
    def whole(*arrays: jax.Array) -> jax.Array:
        squares = dict(enumerate(map(_bounded_squares, arrays)))
        large = {i: x for i, x in squares.items() if is_for_product(arrays[i])}
        small = {i: x for i, x in squares.items() if i not in large}
        reduced = reduced_in_groups(
            lax.add, list(small.values()), 0, _reductions.TPU_GROUP
        )
        sums = _sums_by_product(large)
        sums |= {i: reduced[k] for k, i in enumerate(small)}
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
            [joined(jnp.add, 0, sums, arrays) for sums in zip(*shares, strict=True)]
        )

    return sharded


def _squares_each(arrays: Arrays) -> list[Arrays]:
    return [[x.sum() for x in _squares(array)] for array in arrays]


def _squares_in_groups(arrays: Arrays, size: int) -> list[Arrays]:
    squares = [x for array in arrays for x in _squares(array)]
    sums = reduced_in_groups(lax.add, squares, 0, 2 * size)
    return [[sums[i], sums[i + 1]] for i in range(0, len(squares), 2)]


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
    plain, over_huge = [], []
    for part in _real_parts(array):
        # Without the minimum, which changes no finite float32, XLA multiplies the
        # squares by 1 / HUGE**2, which is 0: NaN where they overflow
        # (test_the_norm_is_right_for_every_size_of_gradients).
        reduced = jnp.minimum(jnp.abs(part) / HUGE, 2.0**32)
        over_huge.append(jnp.where(jnp.isfinite(part), reduced * reduced, NONFINITE))
        if not shared:  # a minimum that changes nothing, so that the squares differ
            part = jnp.minimum(jnp.abs(part), np.finfo(part.dtype).max)
        plain.append(part * part)
    return [sum(plain[1:], plain[0]), sum(over_huge[1:], over_huge[0])]


def _bounded_squares(array: jax.Array) -> jax.Array:
    """The squares of an array's entries, for a TPU; `NONFINITE` if not finite.

    One array instead of the two of `_squares`: gradients are read for the norm as they
    are for the finite check (test_a_guard_reads_what_the_finite_check_reads). An entry
    over `LARGEST_ON_TPU` counts as that.
    """
    squares = []
    for part in _real_parts(array):
        bounded = jnp.minimum(jnp.abs(part), LARGEST_ON_TPU)
        squares.append(jnp.where(jnp.isfinite(part), bounded * bounded, NONFINITE))
    return sum(squares[1:], squares[0])


def _real_parts(array: jax.Array) -> Arrays:
    parts = [array.real, array.imag] if jnp.iscomplexobj(array) else [array]
    return [widen(part) for part in parts]


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
