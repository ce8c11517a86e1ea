"""Measures how this machine computes in half precision, and reads its settings."""

import importlib.metadata
import os
import platform
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .timing import Comparison, Program, compare

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
_VARIABLES = (
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "NVIDIA_TF32_OVERRIDE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "JAX_PLATFORMS",
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
    """Describes the devices of this process, which are assumed to be equal."""
    devices = jax.local_devices()
    memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    return {
        "count": jax.device_count(),
        "processes": jax.process_count(),
        "kind": devices[0].device_kind,
        "platform": devices[0].platform,
        "memory_bytes": memory,
    }


def settings() -> dict[str, str]:
    """Returns relevant settings that differ from JAX's defaults, with their effects."""
    found = {}
    for name, (default, effect) in _SETTINGS.items():
        value = getattr(jax.config, name, default)
        if value != default:
            found[name] = f"{value} ({effect})"
    return found | {
        name: os.environ[name].strip() for name in _VARIABLES if os.environ.get(name)
    }


def keeps_roundings() -> dict[str, bool]:
    """Tests by dtype whether XLA rounds after each operation of a chain.

    XLA may compute the chain in float32. Then 1 plus a quarter of the last digit is
    more than 1.
    """

    @jax.jit
    def chain(one: jax.Array, small: jax.Array) -> jax.Array:
        return (one + small) - one

    found = {}
    for dtype in HALVES:
        one = jnp.ones(8, dtype)
        small = jnp.full(8, jnp.finfo(dtype).eps / 4, dtype)
        found[dtype] = not bool(jnp.any(chain(one, small)))
    return found


def products(side: int, seconds: float) -> Comparison:
    """Measures a matrix product in float32 and in half precision."""

    def program(dtype: str, precision: str | None = None) -> Callable[[], Program]:
        def compile_() -> Program:
            keys = jax.random.split(jax.random.key(0))
            a, b = (jax.random.normal(key, (side, side)).astype(dtype) for key in keys)
            product = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))
            return Program(lambda: product(a, b))

        return compile_

    programs = {"float32": program("float32")}
    programs |= {dtype: program(dtype) for dtype in HALVES}
    programs['float32, precision "highest"'] = program("float32", "highest")
    title = f"product of two {side} x {side} matrices"
    return compare(title, programs, seconds=seconds)


def advice(products: Comparison, platform: str) -> str:
    """Recommends a dtype for this machine, and gives the reason."""
    if platform == "cpu":
        return (
            "half precision on a CPU is for tests, not for speed, and says nothing "
            "about an accelerator: run this there"
        )
    gains = {row.program: row.gain.median for row in products.rows if row.gain}
    least = max(_FAST, products.believable or 1)
    fast = [dtype for dtype in HALVES if gains.get(dtype, 0) > least]
    if fast == [*HALVES]:
        return (
            '"bfloat16", which needs no loss scale; "float16" with DynamicLossScale() '
            "where precision matters"
        )
    if fast == ["bfloat16"]:
        return '"bfloat16", which needs no loss scale; float16 is not faster here'
    if fast == ["float16"]:
        return '"float16" with DynamicLossScale(); bfloat16 is not faster here'
    return (
        f"neither gains {least:.1f} times in a product of this size, so half precision "
        'saves memory only; if float32 at precision "highest" is slower than float32, '
        "the device already uses fewer digits (TF32)"
    )
