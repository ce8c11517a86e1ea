"""`calibrate_loss_scale`: runs the backward pass at each loss scale of a sweep."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._jaxpr import dtype_name, equations
from ..._scaling.finite import all_finite
from ..._tree import split_arrays
from ..._types import Flag, Function, PyTree, Scalar
from .._backward import Backward, Loss
from .._tables import printed

_MARGIN_BITS = 2  # doublings from the recommended S to the end of the window
_LOWEST, _HIGHEST = 0, 24  # range of log2 S of a `DynamicLossScale` by default


@printed
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Calibration:
    """The result of `calibrate_loss_scale` for K loss scales and L inexact leaves.

    A loss scale *works* if the loss and all gradients are finite, and if at most 2^-8
    of the elements of each leaf that are nonzero at that leaf's best finite loss scale
    are zero. The window is the longest run of neighbors that work; of two equally long
    runs, the lower one.

    Attributes:
      log2_scales: i32[K], the loss scales that were tried.
      zero_fraction: f32[K, L], share of the elements of each gradient that are zero.
      finite: bool[K], whether the loss and all gradients are finite.
      log2_low: f32[], the lowest loss scale of the window, or NaN.
      log2_high: f32[], the highest loss scale of the window, or NaN.
      recommended_log2_scale: f32[], 2 below `log2_high`, but in the window and in
        [0, 24], the range of a `DynamicLossScale()`; or NaN.
      has_half_precision: whether the loss computes anything narrower than 32 bits.
        Static.
      paths: names of the leaves, as `jax.tree_util.keystr` writes them. Static.
    """

    log2_scales: jax.Array
    zero_fraction: jax.Array
    finite: jax.Array
    log2_low: jax.Array
    log2_high: jax.Array
    recommended_log2_scale: jax.Array
    has_half_precision: bool = dataclasses.field(metadata={"static": True})
    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def summary(self) -> str:
        """Returns the result as one sentence (host)."""
        low, high = float(self.log2_low), float(self.log2_high)
        none = "No loss scale of the sweep"
        if not np.asarray(self.finite).any():
            return f"{none} gives finite gradients: run diagnose_nonfinite."
        if not self.has_half_precision:
            return "Nothing in this loss is half precision: cast inside it first."
        if np.isnan(low):
            return f"{none} works for all leaves: try others."
        window = f"Loss scales from 2^{low:g} to 2^{high:g} work"
        if low == high:
            window = f"Of the loss scales tried, only 2^{low:g} works"
        if low <= 0 <= high:
            return f"{window}, including 1: loss scaling is not needed here."
        best = float(self.recommended_log2_scale)
        if not np.isnan(best):
            return f"{window}: start from 2^{best:g}."
        limit = "min_loss_scale" if high < _LOWEST else "max_loss_scale"
        return f"{window}, which a DynamicLossScale takes only with another {limit}."


def calibrate_loss_scale(
    fun: Function,
    *args: PyTree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    transform: Function = jax.value_and_grad,
    log2_scales: Sequence[int] = range(-4, 25, 2),
) -> Calibration:
    """Runs the real low-precision backward pass at each loss scale of a sweep.

    Use it to find out whether a loss needs a loss scale, and from which S to start.
    Compatible with `jit`, `vmap` and `lax.scan`. It needs the memory of one step. The
    result holds for these parameters and this batch.

    Args:
      fun: the whole loss with its casts to low precision. Its arguments, `argnums`,
        `has_aux` and `transform` are those of `precision_report`.
      log2_scales: increasing integers in [-126, 126]; default -4, -2, ..., 24, up to
        the cap of `DynamicLossScale`.

    Raises:
      TypeError: as `precision_report`.
      ValueError: also if `log2_scales` is empty, not increasing or not whole.
    """
    loss = Loss("calibrate_loss_scale", fun, args, argnums, has_aux, transform)
    log2 = _checked_log2_scales(log2_scales)
    # Computed on the host, because exp2 on a device is inexact for most powers.
    scales = np.ldexp(np.float32(1), log2)
    arrays, rejoin = split_arrays(args)

    @jax.jit
    def sweep(arrays: list[jax.Array]) -> tuple[Backward, jax.Array]:
        def at(s: Scalar) -> tuple[Backward, Flag]:
            found = loss.run(s, rejoin(arrays))
            zeros = [
                jnp.sum(leaf == 0, dtype=jnp.uint32) / np.uint32(max(leaf.size, 1))
                for leaf in found.leaves
            ]
            finite = all_finite(found)
            return dataclasses.replace(found, loss=None, leaves=zeros), finite

        # vmap would keep the activations of all S in memory at once.
        return lax.map(at, jnp.asarray(scales))

    results = (v for eqn in equations(sweep.trace(arrays).jaxpr) for v in eqn.outvars)
    narrow = ("float16", "bfloat16", "float8")
    has_half = any(dtype_name(v).startswith(narrow) for v in results)
    found, finite = sweep(arrays)
    zero_fraction = jnp.stack(found.leaves, axis=1)
    low, high = _window(log2.astype(np.float32), zero_fraction, finite)
    # As near to the margin as the window and a DynamicLossScale allow.
    least, most = jnp.maximum(low, _LOWEST), jnp.minimum(high, _HIGHEST)
    best = jnp.where(least <= most, jnp.clip(high - _MARGIN_BITS, least, most), jnp.nan)
    return Calibration(
        log2_scales=jnp.asarray(log2),
        zero_fraction=zero_fraction,
        finite=finite,
        log2_low=low,
        log2_high=high,
        recommended_log2_scale=best,
        has_half_precision=has_half,
        paths=found.paths,
    )


def _window(
    log2: np.ndarray, zero_fraction: jax.Array, finite: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns (log2_low, log2_high) of `Calibration`."""
    # Elements that are zero at every finite S are not lost: dead units, padding.
    unavoidable = jnp.where(finite[:, None], zero_fraction, 1).min(0, keepdims=True)
    lost = zero_fraction - unavoidable
    # A share of 2^-8 changes no training run, and is more than a few single elements.
    works = finite & (lost <= 2.0**-8 * (1 - unavoidable)).all(1)
    # run[i] is the length of the run of working loss scales that ends at i.
    places = jnp.arange(len(log2), dtype=jnp.int32)
    run = places - lax.cummax(jnp.where(works, np.int32(-1), places))
    end = jnp.argmax(run).astype(jnp.int32)  # the first of several
    start = jnp.maximum(end - run[end] + 1, 0)
    window = jnp.asarray(log2)[jnp.stack([start, end])]
    low, high = jnp.where(works.any(), window, jnp.nan)
    return low, high


def _checked_log2_scales(log2_scales: Sequence[int]) -> np.ndarray:
    scales = np.asarray(log2_scales)
    valid = np.intersect1d(scales, np.arange(-126, 127))  # in increasing order
    if valid.size == 0 or not np.array_equal(scales, valid):
        raise ValueError(
            "calibrate_loss_scale: expected log2_scales to be increasing whole numbers "
            f"in [-126, 126], at least one, got {log2_scales!r}"
        )
    return scales.astype(np.int32)
