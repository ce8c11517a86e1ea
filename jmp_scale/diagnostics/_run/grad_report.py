"""What a loss scale and a cast do to every leaf of a gradient, in one pass over it."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ..._loss_scale import scale_value
from .._tables import leaf_name, percent, power, table
from . import casts

_SHARES = ("zero", "flushed", "subnormal", "overflow", "nonfinite")

MARGIN_BITS = 2  # doublings from the largest entry to overflow at a recommended S
LOWEST, HIGHEST = 0, 24  # log2 of S that `DynamicLossScale` takes by default


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradReport:
    """What `grad_report` found: arrays with one entry for each of the L inexact leaves.

    The counts, from `size` to `nonfinite`, are u32[L]; a complex entry counts as two.

    Attributes:
      amax: f32[L], the largest finite magnitude of the unscaled entries, 0 without one.
        Float64 numbers beyond float32's range are taken for the nearest in it.
      size: entries.
      zero: entries that are zero themselves.
      flushed: non-zero entries that become zero when multiplied by S and cast.
      subnormal: entries that S and the cast leave below the least normal number.
      overflow: finite entries that become infinite (NaN in float8_e4m3fn).
      nonfinite: entries that are NaN or infinite themselves.
      headroom_bits: f32[L], log2(M / (S amax)) for the dtype's largest M, or infinite.
      loss_scale: f32[], S.
      all_finite: bool[], whether `nonfinite` is 0 everywhere.
      recommended_log2_scale: f32[], a whole number in [0, 24]: the largest S whose
        `headroom_bits` is at least 2 in every leaf; NaN without one, or without finite
        non-zero entries. Gradients of activations may need a smaller one: see
        `calibrate_loss_scale`.
      paths: names of the L leaves, as `jax.tree_util.keystr` writes them. Static.
      dtype: name of the dtype. Static.
    """

    amax: jax.Array
    size: jax.Array
    zero: jax.Array
    flushed: jax.Array
    subnormal: jax.Array
    overflow: jax.Array
    nonfinite: jax.Array
    headroom_bits: jax.Array
    loss_scale: jax.Array
    all_finite: jax.Array
    recommended_log2_scale: jax.Array
    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def flushed_share(self) -> jax.Array:
        """f32[L], `flushed` over the non-zero entries, 0 if there are none."""
        return self.flushed / jnp.maximum(self.size - self.zero, np.uint32(1))

    def to_dict(self) -> dict[str, Any]:
        """Python numbers (host): scalars by name, "dtype", "leaves": a dictionary each.

        Raises:
          ValueError: several reports, from `vmap` or `lax.scan`.
        """
        names = [f.name for f in dataclasses.fields(self)[:-2]] + ["flushed_share"]
        arrays = {name: np.asarray(getattr(self, name)) for name in names}
        if arrays["amax"].ndim != 1:
            raise ValueError(
                "to_dict: expected one report, got a batch "
                f"{arrays['amax'].shape[:-1]} of them; index one with jax.tree.map"
            )
        totals = {name: x.item() for name, x in arrays.items() if x.ndim == 0}
        columns = {name: x.tolist() for name, x in arrays.items() if x.ndim == 1}
        leaves = {}
        for i, path in enumerate(self.paths):
            leaves[path] = {name: column[i] for name, column in columns.items()}
        return {"dtype": self.dtype, **totals, "leaves": leaves}

    def worst(self, k: int = 5) -> dict[str, dict[str, Any]]:
        """The k leaves of `to_dict()["leaves"]` that lose most, worst first (host).

        By the share of entries not finite, then overflowed, flushed, subnormal.
        """

        def badness(item: tuple[str, dict[str, Any]]) -> tuple[float, ...]:
            row, size = item[1], max(item[1]["size"], 1)
            lost = row["nonfinite"] / size, row["overflow"] / size
            return *lost, row["flushed_share"], row["subnormal"] / size

        rows = self.to_dict()["leaves"].items()
        return dict(sorted(rows, key=badness, reverse=True)[:k])

    def summary(self, k: int | None = None) -> str:
        """A table of the k worst leaves, or of all in the order of the tree (host)."""
        report = self.to_dict()
        rows = report["leaves"] if k is None else self.worst(k)
        lines = [("leaf", "entries", *_SHARES, "amax", "headroom")]
        for path, row in rows.items():
            cells = [percent(row[name] / max(row["size"], 1)) for name in _SHARES]
            # A leaf of zeros, or without finite entries, has no headroom.
            sizes = ["-", "-"]
            if row["amax"]:
                sizes = [f"{row['amax']:.2e}", f"{row['headroom_bits']:z.1f} bits"]
            lines += [(leaf_name(path), f"{row['size']:,}", *cells, *sizes)]
        return "\n".join([_headline(report), *(table(lines) if rows else [])])


def grad_report(
    grads: Any, loss_scale: Any, dtype: DTypeLike = "float16"
) -> GradReport:
    """Counts, leaf by leaf, what a loss scale and a cast lose of a gradient.

    One pass. Compatible with `jit`, `vmap`, `lax.scan`; in `shard_map` shard by shard.

    Args:
      grads: pytree of unscaled gradients, as `value_and_grad` gives them. Leaves that
        are not real or complex floating point are left out.
      loss_scale: a loss scale, or S as a number or f32[].
      dtype: the dtype of the backward pass: float16 (default), float8_e5m2 or
        float8_e4m3fn.

    Returns:
      A `GradReport`. What the backward pass has flushed before shows as `zero`.

    Raises:
      TypeError: `loss_scale` is not a number.
      ValueError: another dtype, a loss scale of a shape other than (), or a leaf of
        2^32 entries or more.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jmp_scale import diagnostics
      >>> grads = {"w": jnp.array([0.0, 1e-8, 1e-6, 1.0])}
      >>> report = diagnostics.grad_report(grads, 2.0**0)
      >>> report.zero.tolist(), report.flushed.tolist(), report.subnormal.tolist()
      ([1], [1], [1])
      >>> float(report.recommended_log2_scale), float(report.headroom_bits[0]) >= 2
      (13.0, True)
    """
    name = jnp.dtype(dtype).name
    if name == "bfloat16":
        raise ValueError(
            "grad_report: expected dtype to be float16 or float8, got bfloat16, which "
            "has float32's range; for its smallest numbers use exponent_histogram"
        )
    limits = casts.limits(name, "grad_report")
    paths, leaves = casts.countable_leaves("grad_report", grads)
    loss_scale = scale_value("grad_report", loss_scale)
    arrays = _report_arrays(leaves, loss_scale, limits)
    return GradReport(**arrays, paths=paths, dtype=name)


@functools.partial(jax.jit, static_argnames="limits")
def _report_arrays(
    leaves: list[Any], loss_scale: jax.Array, limits: casts.Limits
) -> dict[str, jax.Array]:
    # An empty leaf stands at the end, because a tree may have no leaves.
    rows = [_statistics(x, loss_scale, limits) for x in [*leaves, jnp.zeros(0)]]
    columns = (jnp.stack(column)[: len(leaves)] for column in zip(*rows, strict=True))
    amax, size, nonzero, not_flushed, not_subnormal, infinite, nonfinite = columns
    log2_scale = casts.log2_magnitude(casts.magnitude_bits(loss_scale))
    log2_largest = np.float32(np.log2(limits.largest))
    # Doublings up to the limit, from the bits: a float32 log2 just above a power of two
    # rounds down to it, and would recommend one too many.
    largest = jnp.max(amax, initial=0)
    doublings = (np.float32(limits.largest).view(np.int32) - largest) >> 23
    most = (doublings - MARGIN_BITS).astype(jnp.float32)
    some = (largest > 0) & (most >= LOWEST)
    return {
        "amax": lax.bitcast_convert_type(amax, jnp.float32),
        "size": size,
        "zero": size - nonzero,
        "flushed": nonzero - not_flushed,
        "subnormal": not_flushed - not_subnormal,
        "overflow": infinite - nonfinite,
        "nonfinite": nonfinite,
        "headroom_bits": log2_largest - casts.log2_magnitude(amax) - log2_scale,
        "loss_scale": loss_scale,
        "all_finite": ~(nonfinite > 0).any(),
        "recommended_log2_scale": jnp.where(some, most.clip(max=HIGHEST), jnp.nan),
    }


def _statistics(
    leaf: Any, loss_scale: jax.Array, limits: casts.Limits
) -> tuple[Any, ...]:
    """The bits of amax, and six cumulative counts.

    Counted are all entries, those not zero, after the cast not zero, normal, and
    infinite, and those not finite before.
    """
    bits = casts.magnitude_bits(leaf)
    scaled = casts.magnitude_bits(leaf, loss_scale)
    bounds = np.array(limits[:3], np.float32).view(np.int32)
    bounds[0] += 1
    finite, nonzero = bits < casts.INFINITY, bits > 0
    reached = [nonzero, *(scaled >= bound for bound in bounds), ~finite]
    masks = [mask.astype(jnp.uint32) for mask in reached]
    operands = [jnp.where(finite, bits, 0), *masks]
    starts = [np.int32(0), *[np.uint32(0)] * len(masks)]

    def join(a: Any, b: Any) -> Any:
        counts = [x + y for x, y in zip(a[1:], b[1:], strict=True)]
        return jnp.maximum(a[0], b[0]), *counts

    # One reduction of six values. XLA:CPU does not fuse six reductions, and would read
    # the leaf six times (test_the_gradients_are_read_once).
    amax, *counts = lax.reduce(operands, starts, join, tuple(range(bits.ndim)))
    return amax, np.uint32(bits.size), *counts


def _headline(report: dict[str, Any]) -> str:
    log2, leaves = report["recommended_log2_scale"], report["leaves"]
    start = f"gradients at loss scale {power(report['loss_scale'])}"
    start += f", cast to {report['dtype']}"
    if not leaves:
        return f"{start}: no floating-point leaves"
    finite, advice = "all finite", f"recommended loss scale at most 2^{log2:g}"
    if not report["all_finite"]:
        first = next(path for path, row in leaves.items() if row["nonfinite"])
        finite = f"not finite from {leaf_name(first)} on"
    if math.isnan(log2):
        advice = "no loss scale to recommend: no entry is finite and non-zero"
        if any(row["amax"] for row in leaves.values()):
            advice = "the loss scale must be below 1: give it another min_loss_scale"
    return f"{start}: {finite}; {advice}"
