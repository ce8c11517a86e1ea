"""Measures how this machine computes in half precision."""

import functools
import importlib.metadata
import os
import platform
from typing import Any

import jax
import jax.numpy as jnp

from ..diagnostics._timing import Comparison, Compile, compare, compiling

HALVES = ("bfloat16", "float16")

_PACKAGES = "jax jaxlib libtpu jax-cuda12-plugin jax-cuda13-plugin"
_PACKAGES += " jax-rocm7-plugin optax flax equinox"
_VARIABLES = ("JAX_", "XLA_", "LIBTPU_", "NVIDIA_TF32_")  # how their names begin
_FAST = 1.3  # a smaller gain is not worth a change of dtype

_TAKE = {
    "bfloat16": 'Take "bfloat16", which needs no loss scale.',
    "float16": 'Take "float16" with DynamicLossScale().',
}
_ON_CPU = (
    "This is a CPU: half precision is for tests here, not for speed, and the times say "
    "nothing about an accelerator. Run this there."
)
_TF32 = (
    'half precision saves memory only. If float32 at precision "highest" is slower '
    "than float32, the device already uses fewer digits (TF32)."
)


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that compute."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES.split():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device() -> dict[str, Any]:
    """Describes the devices of all processes, which are assumed to be equal."""
    first = jax.local_devices()[0]
    return {
        "count": jax.device_count(),
        "kind": first.device_kind,
        "platform": first.platform,
        "memory_bytes_each": (first.memory_stats() or {}).get("bytes_limit"),
    }


def environment() -> dict[str, str]:
    """Returns the environment variables that change how programs are compiled."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)}


def products(side: int, seconds: float) -> Comparison:
    """Measures a matrix product in float32 and in half precision."""

    def program(dtype: str, precision: str | None = None) -> Compile:
        keys = jax.random.split(jax.random.key(0))
        a, b = (jax.random.normal(key, (side, side)).astype(dtype) for key in keys)
        return compiling(functools.partial(jnp.matmul, precision=precision), a, b)

    programs = {dtype: program(dtype) for dtype in ("float32", *HALVES)}
    programs['float32, precision "highest"'] = program("float32", "highest")
    title = f"product of two {side} x {side} matrices"
    return compare(title, programs, seconds, flops=2.0 * side**3)


def advice(products: Comparison, platform: str) -> str:
    """Recommends a dtype for this machine from the products that ran."""
    if platform == "cpu":
        return _ON_CPU
    gains = {row.program: row.gain.median for row in products.rows if row.gain}
    measured = [dtype for dtype in HALVES if dtype in gains]
    least = max(_FAST, products.believable or 1)
    for dtype in measured:
        if gains[dtype] > least:
            return _TAKE[dtype]
    if not measured:
        return "No advice: no product in half precision could be compared with float32."
    return (
        f"{' and '.join(measured)}: no gain above {least:.1f} times in a product of "
        f"this size, so {_TF32}"
    )
