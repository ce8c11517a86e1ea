"""Measures how this machine computes in half precision, and reads its settings."""

import functools
import importlib.metadata
import os
import platform
from typing import Any

import jax
import jax.numpy as jnp

from .timing import Comparison, Compile, compare, compiling

HALVES = ("bfloat16", "float16")

_PACKAGES = "jax jaxlib libtpu jax-cuda12-plugin jax-cuda13-plugin"
_PACKAGES += " jax-rocm7-plugin optax flax equinox"
_FAST = 1.3  # a smaller gain is not worth a change of dtype

# Settings of JAX by name: the default, and the effect of other values.
_SETTINGS = {
    "jax_enable_x64": (False, "arrays of Python floats are float64 and stay float64"),
    "jax_default_matmul_precision": (
        None,
        "applies to float32 products, not to those in half precision",
    ),
    "jax_numpy_dtype_promotion": ("standard", "optax's optimizers need standard"),
    "jax_debug_nans": (False, "raises at an overflow that would be skipped"),
    "jax_debug_infs": (False, "raises at an overflow that would be skipped"),
    "jax_disable_jit": (False, "runs every operation on its own, slowly"),
}
_VARIABLES = "XLA_FLAGS LIBTPU_INIT_ARGS NVIDIA_TF32_OVERRIDE JAX_PLATFORMS"
_VARIABLES += " XLA_PYTHON_CLIENT_MEM_FRACTION XLA_PYTHON_CLIENT_PREALLOCATE"

# By the dtypes that are fast.
_ADVICE = {
    HALVES: '"bfloat16", which needs no loss scale; "float16" with DynamicLossScale() '
    "where precision matters",
    ("bfloat16",): '"bfloat16", which needs no loss scale; float16 is not faster here',
    ("float16",): '"float16" with DynamicLossScale(); bfloat16 is not faster here',
    (): "neither gains {least:.1f} times in a product of this size, so half precision "
    'saves memory only; if float32 at precision "highest" is slower than float32, the '
    "device already uses fewer digits (TF32)",
}


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
    """Describes the devices of this process, which are assumed to be equal."""
    first = jax.local_devices()[0]
    return {
        "count": jax.device_count(),
        "processes": jax.process_count(),
        "kind": first.device_kind,
        "platform": first.platform,
        "memory_bytes": (first.memory_stats() or {}).get("bytes_limit"),
    }


def settings() -> dict[str, str]:
    """Returns relevant settings that differ from JAX's defaults, with their effects."""
    found = {}
    for name, (default, effect) in _SETTINGS.items():
        value = getattr(jax.config, name, default)
        if value != default:
            found[name] = f"{value} ({effect})"
    variables = {name: os.environ.get(name, "").strip() for name in _VARIABLES.split()}
    return found | {name: value for name, value in variables.items() if value}


def keeps_roundings() -> dict[str, bool]:
    """Tests by dtype whether XLA rounds after each operation of a chain."""
    # In float32, 1 plus a quarter of the last digit is more than 1.
    chain = jax.jit(lambda one, small: (one + small) - one)
    found = {}
    for dtype in HALVES:
        small = jnp.full(8, jnp.finfo(dtype).eps / 4, dtype)
        found[dtype] = not bool(jnp.any(chain(jnp.ones(8, dtype), small)))
    return found


def products(side: int, seconds: float) -> Comparison:
    """Measures a matrix product in float32 and in half precision."""

    def program(dtype: str, precision: str | None = None) -> Compile:
        keys = jax.random.split(jax.random.key(0))
        a, b = (jax.random.normal(key, (side, side)).astype(dtype) for key in keys)
        return compiling(functools.partial(jnp.matmul, precision=precision), a, b)

    programs = {dtype: program(dtype) for dtype in ("float32", *HALVES)}
    programs['float32, precision "highest"'] = program("float32", "highest")
    return compare(f"product of two {side} x {side} matrices", programs, seconds)


def advice(products: Comparison, platform: str) -> str:
    """Recommends a dtype for this machine, and gives the reason."""
    if platform == "cpu":
        return (
            "half precision on a CPU is for tests, not for speed, and says nothing "
            "about an accelerator: run this there"
        )
    gains = {row.program: row.gain.median for row in products.rows if row.gain}
    least = max(_FAST, products.believable)
    fast = tuple(dtype for dtype in HALVES if gains.get(dtype, 0) > least)
    return _ADVICE[fast].format(least=least)
