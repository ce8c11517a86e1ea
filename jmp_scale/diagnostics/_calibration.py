"""Which loss scales work: the real backward pass at each of a sweep."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._finite import all_finite
from .._gradients import value_and_grad
from .._tree import named_inexact_leaves
from ._backward import any_loss_scale, split_arrays
from ._report import MARGIN_BITS

# Share of a leaf's entries that may be lost in a loss scale that works: far below what changes a training
# run, and above what single entries at the edge of the range make of it.
_TOLERATED = 2.0**-8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Calibration:
    """What `calibrate_loss_scale` found: a pytree of arrays, for K loss scales and L inexact leaves.

    Attributes:
      log2_scales: i32[K], the loss scales that were tried.
      zero_fraction: f32[K, L], share of the entries of each gradient that are zero.
      finite: bool[K], whether the loss and all gradients are finite.
      log2_low: f32[], the least loss scale that works: gradients are finite, and of the entries of each leaf
        that are not zero at the best of the finite scales at most 2^-8 are zero. NaN if none is finite.
      log2_high: f32[], the largest loss scale that works. NaN if none is finite.
      recommended_log2_scale: f32[], `margin_bits` below `log2_high`, but not below `log2_low`.
      needs_scaling: bool[], whether S = 1 is outside the window; True if none is finite.
      paths: names of the L leaves, as `jax.tree_util.keystr` writes them. Static.
    """

    log2_scales: jax.Array
    zero_fraction: jax.Array
    finite: jax.Array
    log2_low: jax.Array
    log2_high: jax.Array
    recommended_log2_scale: jax.Array
    needs_scaling: jax.Array
    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def summary(self) -> str:
        """One sentence for people."""
        low, high, best = (
            float(x)
            for x in (self.log2_low, self.log2_high, self.recommended_log2_scale)
        )
        if np.isnan(low):
            return "No loss scale of the sweep gives finite gradients: run diagnose_nonfinite."
        window = f"Loss scales from 2^{low:g} to 2^{high:g} work"
        if not bool(self.needs_scaling):
            return f"{window}, 1 among them: loss scaling is not needed here."
        return f"{window}: start from 2^{best:g}."


def calibrate_loss_scale(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    log2_scales: Sequence[int] = range(-4, 33, 2),
    margin_bits: float = MARGIN_BITS,
) -> Calibration:
    """Runs the real low-precision backward pass at each loss scale of a sweep, in one compiled call.

    Only this tells what a loss scale saves. Casting a float32 gradient afterwards misses what was flushed
    on the way: the gradients of activations, which are smaller, and with them all that stands before.

    Compatible with `jit`, `vmap` and `lax.scan`. The loss scales are tried one after another, so it needs no
    more memory than one step.

    Args:
      fun: the whole loss in low precision, as for `value_and_grad`.
      *args: its arguments: parameters, a typical batch. What is no array is static.
      argnums: positions of the differentiated arguments, as in JAX.
      has_aux: whether `fun` returns `(loss, aux)`.
      log2_scales: increasing whole numbers in [-126, 126], with 0 among them if `needs_scaling` shall be
        told; default -4, -2, ..., 32.
      margin_bits: doublings that the recommendation stays below the first overflow, since gradients are
        larger on some batches; 2.

    Returns:
      A `Calibration`. It holds for these parameters and this batch; gradients shrink while training goes on.

    Raises:
      TypeError: the loss is no scalar (while tracing).
      ValueError: `log2_scales` is empty, not increasing, of other numbers, or out of range; or nothing is
        differentiated.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_scale import diagnostics
      >>> def loss(w):
      ...     half = (w.astype(jnp.float16) * jnp.float16(2**-10)).astype(jnp.float32)
      ...     return half.sum() * 2.0**-20  # the gradient 2^-30 is zero in float16
      >>> print(diagnostics.calibrate_loss_scale(loss, jnp.ones(3)).summary())
      Loss scales from 2^6 to 2^32 work: start from 2^30.
    """
    scales = _checked_log2_scales(log2_scales)
    arrays, rejoin = split_arrays(args)
    paths: tuple[str, ...] = ()

    def backward(
        log2_scale: jax.Array, arrays: list[Any]
    ) -> tuple[jax.Array, jax.Array]:
        nonlocal paths
        loss_scale = any_loss_scale(jnp.exp2(log2_scale.astype(jnp.float32)))
        value, grads = value_and_grad(fun, loss_scale, argnums, has_aux)(
            *rejoin(arrays)
        )
        paths, leaves = named_inexact_leaves(grads)
        if not leaves:
            raise ValueError(
                "calibrate_loss_scale: the gradients have no floating-point leaf to look at"
            )
        zeros = [jnp.sum(leaf == 0, dtype=jnp.uint32) for leaf in leaves]
        sizes = np.array([max(leaf.size, 1) for leaf in leaves], np.float32)
        return jnp.stack(zeros).astype(jnp.float32) / sizes, all_finite(
            (value[0] if has_aux else value, grads)
        )

    @jax.jit
    def sweep(arrays: list[Any]) -> tuple[jax.Array, jax.Array]:
        return lax.map(
            lambda log2_scale: backward(log2_scale, arrays), jnp.asarray(scales)
        )

    zero_fraction, finite = sweep(arrays)
    low, high = _window(scales.astype(np.float32), zero_fraction, finite)
    return Calibration(
        log2_scales=jnp.asarray(scales),
        zero_fraction=zero_fraction,
        finite=finite,
        log2_low=low,
        log2_high=high,
        recommended_log2_scale=jnp.maximum(high - margin_bits, low),
        needs_scaling=~((low <= 0) & (high >= 0)),
        paths=paths,
    )


def _window(
    scales: np.ndarray, zero_fraction: jax.Array, finite: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(log2_low, log2_high) of `Calibration`."""
    unavoidable = jnp.min(
        jnp.where(finite[:, None], zero_fraction, 1), axis=0, keepdims=True
    )
    lost = (zero_fraction - unavoidable) / jnp.maximum(
        1 - unavoidable, jnp.finfo(jnp.float32).tiny
    )
    works = finite & (jnp.max(lost, axis=1) <= _TOLERATED)
    low = jnp.min(jnp.where(works, scales, jnp.inf))
    high = jnp.max(jnp.where(works, scales, -jnp.inf))
    return jnp.where(works.any(), low, jnp.nan), jnp.where(works.any(), high, jnp.nan)


def _checked_log2_scales(log2_scales: Sequence[int]) -> np.ndarray:
    scales = np.asarray(log2_scales)
    if (
        scales.ndim != 1
        or scales.size == 0
        or not np.array_equal(scales, np.round(scales))
    ):
        allowed = "a non-empty sequence of whole numbers"
    elif np.any(np.diff(scales) <= 0) or scales[0] < -126 or scales[-1] > 126:
        allowed = "increasing whole numbers in [-126, 126]"
    else:
        return scales.astype(np.int32)
    raise ValueError(
        f"calibrate_loss_scale: log2_scales must be {allowed}, got {log2_scales!r}"
    )
