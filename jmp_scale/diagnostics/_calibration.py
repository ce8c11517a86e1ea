"""Experiments with the real backward pass: which loss scales work, and why a gradient is not finite."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._gradients import value_and_grad
from .._loss_scale import DynamicLossScale
from .._tree import all_finite
from ._casts import scale_value
from ._report import MARGIN_BITS, named_inexact_leaves

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
        low, high, best = (float(x) for x in (self.log2_low, self.log2_high, self.recommended_log2_scale))
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
    arrays, rejoin = _split_arrays(args)
    paths: tuple[str, ...] = ()

    def backward(log2_scale: jax.Array, arrays: list[Any]) -> tuple[jax.Array, jax.Array]:
        nonlocal paths
        loss_scale = _any_loss_scale(jnp.exp2(log2_scale.astype(jnp.float32)))
        value, grads = value_and_grad(fun, loss_scale, argnums, has_aux)(*rejoin(arrays))
        paths, leaves = named_inexact_leaves(grads)
        if not leaves:
            raise ValueError("calibrate_loss_scale: the gradients have no floating-point leaf to look at")
        zeros = [jnp.sum(leaf == 0, dtype=jnp.uint32) for leaf in leaves]
        sizes = np.array([max(leaf.size, 1) for leaf in leaves], np.float32)
        return jnp.stack(zeros).astype(jnp.float32) / sizes, all_finite(
            (value[0] if has_aux else value, grads)
        )

    @jax.jit
    def sweep(arrays: list[Any]) -> tuple[jax.Array, jax.Array]:
        return lax.map(lambda log2_scale: backward(log2_scale, arrays), jnp.asarray(scales))

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


def _window(scales: np.ndarray, zero_fraction: jax.Array, finite: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(log2_low, log2_high) of `Calibration`."""
    unavoidable = jnp.min(jnp.where(finite[:, None], zero_fraction, 1), axis=0, keepdims=True)
    lost = (zero_fraction - unavoidable) / jnp.maximum(1 - unavoidable, jnp.finfo(jnp.float32).tiny)
    works = finite & (jnp.max(lost, axis=1) <= _TOLERATED)
    low = jnp.min(jnp.where(works, scales, jnp.inf))
    high = jnp.max(jnp.where(works, scales, -jnp.inf))
    return jnp.where(works.any(), low, jnp.nan), jnp.where(works.any(), high, jnp.nan)


def _any_loss_scale(s: Any) -> DynamicLossScale:
    """A loss scale of any S, known only on the device, so that a sweep is one compilation."""
    return DynamicLossScale(jnp.asarray(s, jnp.float32), min_loss_scale=0, max_loss_scale=2.0**126)


def _checked_log2_scales(log2_scales: Sequence[int]) -> np.ndarray:
    scales = np.asarray(log2_scales)
    if scales.ndim != 1 or scales.size == 0 or not np.array_equal(scales, np.round(scales)):
        allowed = "a non-empty sequence of whole numbers"
    elif np.any(np.diff(scales) <= 0) or scales[0] < -126 or scales[-1] > 126:
        allowed = "increasing whole numbers in [-126, 126]"
    else:
        return scales.astype(np.int32)
    raise ValueError(f"calibrate_loss_scale: log2_scales must be {allowed}, got {log2_scales!r}")


def _split_arrays(args: tuple[Any, ...]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays among the leaves of `args`, and the function that puts such arrays in their places."""
    leaves, treedef = jax.tree.flatten(args)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray, np.generic))]

    def rejoin(arrays: list[Any]) -> Any:
        new_leaves = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            new_leaves[place] = array
        return jax.tree.unflatten(treedef, new_leaves)

    return [leaves[place] for place in places], rejoin


class Diagnosis(NamedTuple):
    """What `diagnose_nonfinite` found, in Python values of the host.

    Attributes:
      cause: "none", "forward", "overflow" or "nan".
      path: the gradient leaf where it first shows, named as `jax.tree_util.keystr` does; with "overflow"
        that is the first to overflow as S grows. None if all gradients are finite.
      finite_at_log2: log2 of the largest power of two under S whose gradients are finite, for "overflow".
      nonfinite_paths: all gradient leaves that are not finite there. The backward pass carries a NaN on to
        every layer before the one that made it, so look at the last of them in the order of the model.
      nonfinite_argument: the first leaf of `fun`'s arguments that is itself not finite, as "args[1]['x']":
        a broken batch or broken parameters. None if there is none.
    """

    cause: Literal["none", "forward", "overflow", "nan"]
    path: str | None = None
    finite_at_log2: int | None = None
    nonfinite_paths: tuple[str, ...] = ()
    nonfinite_argument: str | None = None

    def summary(self) -> str:
        """One or two sentences for people: what it is, and what to do."""
        if self.cause == "none":
            return "Loss and gradients are finite."
        if self.cause == "overflow":
            below = "" if (self.finite_at_log2 or 0) >= 0 else ", below 1: a layer is nearly out of range"
            return (
                f"The gradients overflow, first in {self.path}, and are finite at loss scale "
                f"2^{self.finite_at_log2}{below}."
            )
        if self.nonfinite_argument is not None:
            return f"{self.nonfinite_argument} is not finite itself. No loss scale helps: mend the input."
        if self.cause == "forward":
            return "The loss itself is not finite. No loss scale helps: the forward pass is out of range."
        return (
            f"The loss is finite, but the gradient of {self.path} is not at any loss scale: look for the "
            "derivative of sqrt, log or a division at zero, with jax.debug_nans."
        )


def diagnose_nonfinite(
    fun: Callable[..., Any],
    loss_scale: Any,
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    log2_min: int = -14,
) -> Diagnosis:
    """Finds out why a step is not finite, by running it again at smaller and smaller loss scales.

    Runs on the host, one compiled backward pass for each S. Give it the parameters and the batch of the step
    that was skipped. "none": the step is finite. "forward": the loss itself is not, which no S changes.
    "overflow": a smaller S cures it. "nan": none does.

    To see the very operation that makes a NaN, run the step at S = 1 under `jax.debug_nans`, where no
    overflow that the loss scale would have handled can raise first::

        with jax.debug_nans(True):
            jmp_scale.grad(loss_fn, jmp_scale.NoOpLossScale())(params, batch)

    Args:
      fun: the whole loss in low precision, as for `value_and_grad`.
      loss_scale: the loss scale of that step, or its S as a number.
      *args: its arguments: parameters, batch. What is no array is static.
      argnums: positions of the differentiated arguments, as in JAX.
      has_aux: whether `fun` returns `(loss, aux)`.
      log2_min: how far down to search; -14, since some overflows persist at S = 1.

    Returns:
      A `Diagnosis`.

    Raises:
      TypeError: the loss is no scalar, or `log2_min` or `loss_scale` no number.
      ValueError: `log2_min` is outside [-126, 126].

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_scale import diagnostics
      >>> def loss(w):
      ...     return jnp.sqrt(w["a"]).sum() + w["b"].sum()
      >>> diagnosis = diagnostics.diagnose_nonfinite(loss, 2.0**15, {"a": jnp.zeros(2), "b": jnp.ones(2)})
      >>> diagnosis.cause, diagnosis.path
      ('nan', "['a']")
    """
    if operator.index(log2_min) not in range(-126, 127):
        raise ValueError(f"diagnose_nonfinite: log2_min must be in [-126, 126], got {log2_min!r}")
    arrays, rejoin = _split_arrays(args)
    paths: tuple[str, ...] = ()

    @jax.jit
    def flags(s: jax.Array, arrays: list[Any]) -> tuple[jax.Array, list[jax.Array]]:
        nonlocal paths
        value, grads = value_and_grad(fun, _any_loss_scale(s), argnums, has_aux)(*rejoin(arrays))
        paths, leaves = named_inexact_leaves(grads)
        return all_finite(value[0] if has_aux else value), [all_finite(leaf) for leaf in leaves]

    def run(s: Any) -> tuple[bool, tuple[str, ...]]:
        loss_finite, grads_finite = jax.device_get(flags(jnp.asarray(s, jnp.float32), arrays))
        return bool(loss_finite), tuple(
            p for p, finite in zip(paths, grads_finite, strict=True) if not finite
        )

    s = scale_value("diagnose_nonfinite", loss_scale)
    loss_finite, nonfinite = run(s)
    first = nonfinite[0] if nonfinite else None
    if loss_finite and not nonfinite:
        return Diagnosis("none")
    if not loss_finite:
        return Diagnosis("forward", first, None, nonfinite, _nonfinite_argument(args))
    for log2_scale in range(int(np.ceil(np.log2(float(s)))) - 1, log2_min - 1, -1):
        _, smaller = run(2.0**log2_scale)
        if not smaller:
            return Diagnosis("overflow", nonfinite[0], log2_scale, nonfinite)
        nonfinite = smaller
    return Diagnosis("nan", nonfinite[0], None, nonfinite, _nonfinite_argument(args))


def _nonfinite_argument(args: tuple[Any, ...]) -> str | None:
    for path, leaf in zip(*named_inexact_leaves(args), strict=True):
        if not all_finite(leaf):
            return f"args{path}"
    return None
