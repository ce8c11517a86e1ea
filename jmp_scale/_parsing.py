"""Loss scales from configuration files and flags."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._loss_scale import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from ._policy import dtype_to_names, half_dtype

_KNOWN = (
    '"none"; "dynamic" or "dynamic:2**16"; a number, "1024" or "static:2**10"; a dtype or its name '
    '("half", "f16", "bf16", "f32", ...); a loss scale'
)
_POWER = re.compile(r"\s*(\d+)(?:\.0*)?\s*\*\*\s*(-?\d+)(?:\.0*)?\s*")


def get_loss_scale(spec: Any) -> LossScale:
    """Reads a loss scale from a configuration value, as `get_policy` reads a policy.

    ============================  ==============================================================
    `"none"`                      `NoOpLossScale()`
    `"dynamic"`                   `DynamicLossScale()`
    `"dynamic:2**16"`             `DynamicLossScale(2.0**16)`, with the other defaults
    `1024`, `"2**10"`, `"1e3"`    `StaticLossScale` of that number
    `"static:1024"`               the same
    float16 (`"f16"`, `"half"`)   `DynamicLossScale()`: float16 needs one
    bfloat16, float32, float64    `NoOpLossScale()`: their range is that of float32 at least
    a loss scale                  itself
    ============================  ==============================================================

    A dtype is given as such or by a name that `get_policy` knows, so that
    `get_loss_scale(policy.compute_dtype)` fits a policy. Case and blanks do not matter. For another
    framework's rule call the function of that name in `jmp_scale.presets`.

    Args:
      spec: a string, a number, a dtype or a loss scale.

    Raises:
      TypeError: an array with axes.
      ValueError: an unknown spec (the message lists what is known), or a number that the loss scale
        does not allow.

    Example:
      >>> import jmp_scale
      >>> float(jmp_scale.get_loss_scale("dynamic:2**16").loss_scale)
      65536.0
      >>> jmp_scale.get_loss_scale(1024)
      StaticLossScale(loss_scale=1024.0)
    """
    if isinstance(spec, LossScale):
        return spec
    if isinstance(spec, str):
        return _from_string(spec)
    if isinstance(
        spec, (int, float, np.generic, np.ndarray, jax.Array)
    ) and not isinstance(spec, bool):
        return StaticLossScale(spec)  # pyright: ignore[reportArgumentType]
    return _from_dtype(spec, spec)


def _from_string(spec: str) -> LossScale:
    kind, colon, argument = (word.strip() for word in spec.lower().partition(":"))
    if kind == "none" and not colon:
        return NoOpLossScale()
    if kind == "dynamic":
        return (
            DynamicLossScale(_parse_number(argument, spec))
            if colon
            else DynamicLossScale()
        )
    if kind == "static" and colon:
        return StaticLossScale(_parse_number(argument, spec))
    if kind == "half" and not colon:
        return _from_dtype(half_dtype(), spec)
    for dtype, names in dtype_to_names.items():
        if kind in names and not colon:
            return _from_dtype(dtype, spec)
    return StaticLossScale(_parse_number(spec, spec))


def _from_dtype(dtype: Any, spec: Any) -> LossScale:
    try:
        known = dtype is not None and jnp.dtype(dtype) in map(jnp.dtype, dtype_to_names)
    except TypeError as error:
        raise _unknown(spec) from error
    if not known:
        raise _unknown(spec)
    return DynamicLossScale() if jnp.dtype(dtype) == jnp.float16 else NoOpLossScale()


def _parse_number(text: str, spec: str) -> float:
    """A decimal number, or a power such as `2**15`."""
    power = _POWER.fullmatch(text)
    try:
        return math.pow(int(power[1]), int(power[2])) if power else float(text)
    except (ValueError, OverflowError) as error:
        raise _unknown(spec) from error


def _unknown(spec: Any) -> ValueError:
    return ValueError(
        f"get_loss_scale: unknown loss scale {spec!r}; known are {_KNOWN}"
    )
