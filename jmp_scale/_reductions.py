"""How each kind of machine reads many arrays once: finite flags and sums of squares.

The three variants give the same answers. Which of them becomes part of a program is
decided when the program is lowered for a machine, so a program that is exported or
compiled on another machine is the one that the machine itself would make.
"""

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


def finite_and_sums_here(
    arrays: Arrays, copies: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """`all_finite_here`, and sums of squares over all entries of the arrays.

    Args:
      arrays: real or complex arrays.
      copies: by what each array's squares are divided.

    Returns:
      (bool[], f32[2] or f64[2]): the flag; the sum of the squares and that of the
      squares of the entries over `HUGE`.
    """
    finite = jnp.array(True)
    wide = any(array.real.dtype == np.float64 for array in arrays)
    sums = jnp.zeros(2, np.float64 if wide else np.float32)
    for array, count in zip(arrays, copies, strict=True):
        finite &= jnp.isfinite(array).all()
        sums += _sums_of_squares(array).astype(sums.dtype) / count
    return finite, sums


# The square of any float32 over this is far below the largest float32, and that of an
# entry that matters in a norm of 2**64, where the plain squares overflow, is not lost.
HUGE = 2.0**96


def _sums_of_squares(array: jax.Array) -> jax.Array:
    parts = [array.real, array.imag] if jnp.iscomplexobj(array) else [array]
    plain, over_huge = 0.0, 0.0
    for part in map(widen, parts):
        # Without the minimum, which changes no finite number, XLA multiplies the squares
        # by 1 / HUGE**2, which is 0: NaN where they overflow
        # (test_the_norm_is_right_for_every_size_of_gradients).
        reduced = jnp.minimum(jnp.abs(part) / HUGE, 2.0**32)
        plain += jnp.sum(part * part)
        over_huge += jnp.sum(reduced * reduced)
    return jnp.stack([plain, over_huge])


def _finite_on_cpu(*arrays: jax.Array) -> jax.Array:
    def all_of(flags: Sequence[jax.Array]) -> jax.Array:
        # Without the barrier XLA:CPU computes this reduction again in each kernel of the
        # update, and compile time is quadratic in the number of leaves. GPUs and TPUs do
        # not need it, and it would cost them the scalar all-reduce on Auto mesh axes.
        return jnp.all(lax.optimization_barrier(jnp.stack(flags)))

    def whole(*arrays: jax.Array) -> jax.Array:
        return all_of([flag for array in arrays for flag in _flag_in_one_pass(array)])

    def sharded(*arrays: jax.Array) -> jax.Array:
        return all_of([jnp.isfinite(array).all() for array in arrays])

    return _mesh.if_whole(whole, sharded, *arrays)


def _finite_on_gpu(*arrays: jax.Array) -> jax.Array:
    def whole(*arrays: jax.Array) -> jax.Array:
        groups = _of_one_shape(arrays, GPU_GROUP)
        return jnp.stack([flag for group in groups for flag in _flags(group)]).all()

    return _mesh.if_whole(whole, _finite_each, *arrays)


def _finite_on_tpu(*arrays: jax.Array) -> jax.Array:
    def whole(*arrays: jax.Array) -> jax.Array:
        large = [array for array in arrays if _is_for_product(array)]
        small = [array for array in arrays if not _is_for_product(array)]
        groups = _of_one_shape(small, TPU_GROUP)
        flags = [flag for group in groups for flag in _flags(group)]
        return jnp.stack(flags + [_flag_by_product(array) for array in large]).all()

    return _mesh.if_whole(whole, _finite_each, *arrays)


def _finite_each(*arrays: jax.Array) -> jax.Array:
    """Reduces each array on its own, which is what XLA can partition.

    Of a reduction of several operands it would gather the results of each device.
    """
    return jnp.stack([jnp.isfinite(array).all() for array in arrays]).all()


def _flag_in_one_pass(array: jax.Array) -> Sequence[jax.Array]:
    """`jnp.isfinite(array).all()`, twice, for a CPU.

    XLA:CPU (of jax 0.10) writes a boolean for each entry to memory and splits their
    reduction. A reduction of two operands it leaves whole, and computes `isfinite`
    within it, if both results are used: test_there_are_hardly_any_temporaries. Over one
    axis, since it is slow over several short ones.
    """
    finite = jnp.isfinite(array).ravel()
    return _reduce(lax.bitwise_and, (finite, finite), True)


def _flags(arrays: Arrays) -> Sequence[jax.Array]:
    """`jnp.isfinite(array).all()` of arrays of one shape, in one reduction."""
    return _reduce(lax.bitwise_and, [jnp.isfinite(array) for array in arrays], True)


def _is_for_product(array: jax.Array) -> bool:
    # Rows are merged below, which moves data unless the tiles of 16 rows stay whole.
    return (
        array.size >= TPU_PRODUCT_SIZE
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
    combine: Callable[[Any, Any], Any], arrays: Arrays, initial: Any
) -> Sequence[jax.Array]:
    """Each array reduced to a number, all in one reduction of several operands."""
    if arrays[0].ndim == 0:
        return arrays
    start = np.asarray(initial, arrays[0].dtype)
    return lax.reduce(
        tuple(arrays),
        (start,) * len(arrays),
        lambda x, y: tuple(map(combine, x, y)),
        tuple(range(arrays[0].ndim)),
    )


def _of_one_shape(arrays: Arrays, size: int) -> list[list[jax.Array]]:
    """The arrays in groups of at most `size` that one reduction can take."""
    alike: dict[Any, list[jax.Array]] = {}
    for array in arrays:
        key = array.shape, _mesh.varying_axes(array)
        alike.setdefault(key, []).append(array)
    return [
        group[start : start + size]
        for group in alike.values()
        for start in range(0, len(group), size)
    ]
