"""`grad_report`: counts elements of gradients that a cast would lose."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..._scaling.loss_scale import LossScale, scale_value
from ..._types import Arrays, Leaf, PyTree
from .._tables import leaf_name, percent, power, printed, table
from . import casts

_SHARES = ("zero", "flushed", "subnormal", "overflow", "nonfinite")
_BY_HARM = ("nonfinite", "overflow", "flushed", "subnormal")

Row = dict[str, float]  # a leaf's numbers by name
MARGIN_BITS = 2  # doublings from the largest element to overflow at a recommended S
LOWEST, HIGHEST = 0, 24  # range of log2 S of a `DynamicLossScale` by default


@printed
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradReport:
    """The result of `grad_report`: arrays of length L, the number of inexact leaves.

    Attributes:
      amax: f32[L], the largest finite magnitude of the unscaled elements, or 0.
      size: u32[L], elements; here and below a complex element counts as two.
      zero: u32[L], elements that are zero themselves.
      flushed: u32[L], nonzero elements that become zero by S and the cast.
      subnormal: u32[L], elements that become smaller than the smallest normal number.
      overflow: u32[L], finite elements that become infinite (NaN in float8_e4m3fn).
      nonfinite: u32[L], elements that are NaN or infinite themselves.
      loss_scale: f32[], S.
      recommended_log2_scale: f32[], the largest integer in [0, 24] at which S times
        every `amax` is at most a quarter of the dtype's largest number, or NaN.
      paths: names of the leaves, as `jax.tree_util.keystr` writes them. Static.
      dtype: name of the dtype. Static.
    """

    amax: jax.Array
    size: jax.Array
    zero: jax.Array
    flushed: jax.Array
    subnormal: jax.Array
    overflow: jax.Array
    nonfinite: jax.Array
    loss_scale: jax.Array
    recommended_log2_scale: jax.Array
    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    def to_dict(self) -> dict[str, Any]:
        """Returns Python numbers: scalars by name, and of each leaf by path (host)."""
        names = ("loss_scale", "recommended_log2_scale")
        scalars = {name: float(getattr(self, name)) for name in names}  # of one report
        names = ("amax", "size", *_SHARES)
        columns = {name: np.asarray(getattr(self, name)).tolist() for name in names}
        leaves = {}
        for i, path in enumerate(self.paths):
            leaves[path] = {name: column[i] for name, column in columns.items()}
        return {"dtype": self.dtype, **scalars, "leaves": leaves}

    def worst(self, k: int = 5) -> dict[str, Row]:
        """Returns the k leaves that lose most, worst first, like `to_dict` (host)."""
        rows = self.to_dict()["leaves"]

        def badness(path: str) -> list[float]:
            row = rows[path]
            return [row[name] / max(row["size"], 1) for name in _BY_HARM]

        return {
            path: rows[path] for path in sorted(rows, key=badness, reverse=True)[:k]
        }

    def summary(self, k: int | None = None) -> str:
        """Returns a table of the k worst leaves, or of all in tree order (host)."""
        report = self.to_dict()
        rows = report["leaves"] if k is None else self.worst(k)
        lines: list[tuple[str, ...]] = [("leaf", "entries", *_SHARES, "amax")]
        for path, row in rows.items():
            cells = [percent(row[name] / max(row["size"], 1)) for name in _SHARES]
            size, amax = f"{row['size']:,}", f"{row['amax']:.2e}"
            lines.append((leaf_name(path), size, *cells, amax))
        return "\n".join([_headline(report), *(table(lines) if rows else [])])


def grad_report(
    grads: PyTree, loss_scale: LossScale | ArrayLike, dtype: DTypeLike = "float16"
) -> GradReport:
    """Counts, leaf by leaf, the elements that a loss scale and a cast would lose.

    Use it to find the leaf that overflows or underflows, and to choose a loss scale.
    Compatible with `jit`, `vmap`, `lax.scan`; in `shard_map` shard by shard.

    Args:
      grads: pytree of unscaled gradients; only floating-point leaves are counted.
      loss_scale: a loss scale, or S as a number or f32[].
      dtype: dtype of the backward pass: float16, float8_e5m2 or float8_e4m3fn.

    Raises:
      TypeError: `loss_scale` is not a number.
      ValueError: another dtype, a `loss_scale` of a shape other than (), or a leaf of
        2^32 elements or more.
    """
    name = jnp.dtype(dtype).name
    if name == "bfloat16":  # S x would be a float32 subnormal, which XLA makes 0
        raise ValueError(
            "grad_report: expected dtype to be float16 or float8, got bfloat16, which "
            "has float32's range; for its smallest numbers use exponent_histogram"
        )
    limits = casts.limits("grad_report", name)
    paths, leaves = casts.countable_leaves("grad_report", grads)
    loss_scale = scale_value("grad_report", loss_scale)
    arrays = _report_arrays(leaves, loss_scale, limits)
    return GradReport(**arrays, paths=paths, dtype=name)


@functools.partial(jax.jit, static_argnames="limits")
def _report_arrays(
    leaves: list[Leaf], loss_scale: jax.Array, limits: casts.Limits
) -> dict[str, jax.Array]:
    # An empty leaf is appended, because a tree may have no leaves.
    rows = [_counts(x, loss_scale, limits) for x in [*leaves, jnp.zeros(0)]]
    arrays = jax.tree.map(lambda *column: jnp.stack(column)[:-1], *rows)
    # Doublings up to the limit are computed from bits. A float32 log2 just above a
    # power of two would round down to it, and so recommend one doubling too many.
    largest = jnp.max(arrays["amax"], initial=0)
    doublings = (np.float32(limits.largest).view(np.int32) - largest) >> 23
    most = (doublings - MARGIN_BITS).astype(jnp.float32)
    some = (largest > 0) & (most >= LOWEST)
    arrays["amax"] = lax.bitcast_convert_type(arrays["amax"], jnp.float32)
    recommended = jnp.where(some, most.clip(max=HIGHEST), jnp.nan)
    return arrays | {"loss_scale": loss_scale, "recommended_log2_scale": recommended}


def _counts(
    leaf: Leaf, loss_scale: jax.Array, limits: casts.Limits
) -> dict[str, ArrayLike]:
    """Returns the bits of amax, and counts of elements, by the fields of a report."""
    bits, scaled = casts.magnitude_bits(leaf), casts.magnitude_bits(leaf, loss_scale)
    zero_up_to, normal, overflow = np.array(limits[:3], np.float32).view(np.int32)
    finite = bits < casts.INFINITY
    masks = (
        bits == 0,
        scaled > zero_up_to,
        scaled >= normal,
        scaled >= overflow,
        ~finite,
    )
    operands = [jnp.where(finite, bits, 0), *(x.astype(jnp.uint32) for x in masks)]
    starts = [np.int32(0), *[np.uint32(0)] * len(masks)]

    def join(a: Arrays, b: Arrays) -> tuple[jax.Array, ...]:
        counts = [x + y for x, y in zip(a[1:], b[1:], strict=True)]
        return jnp.maximum(a[0], b[0]), *counts

    # XLA:CPU does not fuse six reductions, which take a hundred times as long.
    axes = tuple(range(bits.ndim))
    amax, zero, nonzero, normal, infinite, nonfinite = lax.reduce(
        operands, starts, join, axes
    )
    size = np.uint32(bits.size)
    # Counts are subtracted, because LLVM makes one float comparison of two of integers,
    # such as bits > 0 and scaled <= zero_up_to, and takes a subnormal for zero.
    return {
        "amax": amax,
        "size": size,
        "zero": zero,
        "flushed": size - zero - nonzero,
        "subnormal": nonzero - normal,
        "overflow": infinite - nonfinite,
        "nonfinite": nonfinite,
    }


def _headline(report: dict[str, Any]) -> str:
    log2, leaves = report["recommended_log2_scale"], report["leaves"]
    start = f"gradients at loss scale {power(report['loss_scale'])}"
    start += f", cast to {report['dtype']}"
    if not leaves:
        return f"{start}: no floating-point leaves"
    finite, advice = "all finite", f"recommended loss scale at most 2^{log2:g}"
    broken = [path for path, row in leaves.items() if row["nonfinite"]]
    if broken:
        finite = f"not finite from {leaf_name(broken[0])} on"
    if math.isnan(log2):
        advice = "no loss scale to recommend: no entry is finite and non-zero"
        if any(row["amax"] for row in leaves.values()):
            advice = "the loss scale must be below 1: give it another min_loss_scale"
    return f"{start}: {finite}; {advice}"
