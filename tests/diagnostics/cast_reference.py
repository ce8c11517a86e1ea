"""Inputs of every size, and the counts of a report by casts with ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from helpers import assert_bitwise_equal

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
COUNTS = ("size", "zero", "flushed", "subnormal", "overflow", "nonfinite")
ALL_F16 = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)


def everywhere(seed=0, n=20_000):
    """Random float32 bit patterns: every exponent, infinities, NaNs, both zeros."""
    bits = np.random.RandomState(seed).randint(0, 2**32, n, dtype=np.uint64)
    special = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45])
    return np.concatenate([bits.astype(np.uint32).view(np.float32), special])


def near_ties(dtype, loss_scale):
    """Three numbers around each threshold of a cast, over a power-of-two loss scale."""
    thresholds = {
        "float16": [2.0**-25, 2.0**-14, 65504, 65520],
        "bfloat16": [2.0**-134, 2.0**-126, 3.3895314e38, 3.3961775e38],
        "float8_e5m2": [2.0**-17, 2.0**-14, 57344, 61440],
        "float8_e4m3fn": [2.0**-10, 2.0**-6, 448, 464],
    }[dtype]
    thresholds.append(thresholds[1] - thresholds[0])  # rounds up to a normal number
    at = np.float32(thresholds) / np.float32(loss_scale)
    around = [np.nextafter(at, np.float32(0)), at, np.nextafter(at, np.float32(np.inf))]
    return np.concatenate([*around, *(-x for x in around)])


@np.errstate(all="ignore")
def reference_counts(x, loss_scale, dtype):
    """The counts of `grad_report`, from a cast."""
    cast = (x * np.float32(loss_scale)).astype(DTYPES[dtype]).astype(np.float32)
    finite, tiny = np.isfinite(x), float(ml_dtypes.finfo(DTYPES[dtype]).tiny)
    masks = {
        "size": np.ones_like(finite),
        "zero": x == 0,
        "flushed": (x != 0) & (cast == 0),
        "subnormal": (cast != 0) & (np.abs(cast) < tiny),
        "overflow": finite & ~np.isfinite(cast),
        "nonfinite": ~finite,
    }
    return {name: int(mask.sum()) for name, mask in masks.items()}


def counts_of(report, i=0):
    return {name: int(getattr(report, name)[i]) for name in COUNTS}


def assert_same_in_vmap_and_scan(tool, *rows, compare=assert_bitwise_equal):
    """`tool` finds the same of each row alone, in `jit` of `vmap`, and in `scan`."""
    one_by_one = [tool(*row) for row in zip(*rows, strict=True)]
    expected = jax.tree.map(lambda *found: jnp.stack(found), *one_by_one)
    compare(jax.jit(jax.vmap(tool))(*rows), expected)
    compare(jax.lax.scan(lambda _, row: (None, tool(*row)), None, rows)[1], expected)
