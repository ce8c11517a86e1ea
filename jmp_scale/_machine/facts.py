"""Measures how this machine computes in half precision, and reads its settings."""

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

_TAKE = {
    "bfloat16": '"bfloat16", which needs no loss scale',
    "float16": '"float16" with DynamicLossScale()',
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
    """Describes the devices of this process, which are assumed to be equal."""
    first = jax.local_devices()[0]
    return {
        "count": jax.device_count(),
        "processes": jax.process_count(),
        "kind": first.device_kind,
        "platform": first.platform,
        "memory_bytes_each": (first.memory_stats() or {}).get("bytes_limit"),
    }


def settings() -> dict[str, str]:
    """Returns relevant settings that differ from JAX's defaults, with their effects."""
    found = {}
    for name, (default, effect) in _SETTINGS.items():
        value = getattr(jax.config, name, default)
        if value != default:
            found[name] = f"{value} ({effect})"
    variables = {name: os.environ.get(name, "").strip() for name in _VARIABLES}
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
    title = f"product of two {side} x {side} matrices"
    return compare(title, programs, seconds, flops=2.0 * side**3)


def advice(products: Comparison, platform: str) -> str:
    """Recommends a dtype for this machine from the products that ran, and says why."""
    if platform == "cpu":
        return _ON_CPU
    measured = {row.program: row.gain.median for row in products.rows if row.gain}
    least = max(_FAST, products.believable or 1)
    fast = [dtype for dtype in HALVES if measured.get(dtype, 0) > least]
    slow = [dtype for dtype in HALVES if dtype in measured and dtype not in fast]
    others = [f"{dtype} is not faster here" for dtype in slow]
    others += [f"{dtype} did not run here" for dtype in HALVES if dtype not in measured]
    if len(fast) == 2:
        return f"Take {_TAKE['bfloat16']}; {_TAKE['float16']} where precision matters."
    if fast:
        return f"Take {_TAKE[fast[0]]}; {others[0]}."
    if not slow:
        return "No advice: no product in half precision could be compared with float32."
    gains = " and ".join(f"{dtype} {measured[dtype]:.2f}" for dtype in slow)
    return (
        f"No gain above {least:.1f} times in a product of this size "
        f"({'; '.join([f'{gains} times', *others[len(slow) :]])}), so {_TF32}"
    )
