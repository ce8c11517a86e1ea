"""`get_loss_scale`: reads loss scales from configuration files and flags."""

import contextlib
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._policy import dtype_to_names, half_dtype, name_to_dtype
from .._state import LossScale
from .loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale

_POWER = re.compile(r"\s*(\d+)(?:\.0*)?\s*\*\*\s*(-?\d+)(?:\.0*)?\s*")


def get_loss_scale(spec: LossScale | ArrayLike | DTypeLike) -> LossScale:
    """Reads a loss scale from a configuration value, as `get_policy` reads a policy.

    | `spec` | loss scale |
    |---|---|
    | `"none"` | `NoOpLossScale()` |
    | `"dynamic"` | `DynamicLossScale()` |
    | `"dynamic:2**16"` | `DynamicLossScale(2.0**16)`, with the other defaults |
    | `1024`, `"2**10"`, `"static:1024"` | `StaticLossScale` of that number |
    | float16: `"fp16"`, `"f16"`, `"half"` | `DynamicLossScale()`: float16 needs one |
    | `"bf16"`, `"fp32"`, float64 | `NoOpLossScale()`: at least the range of float32 |
    | a loss scale | itself |

    Dtypes have the names of `get_policy`; case and blanks do not matter.

    Raises:
      TypeError: an array with axes.
      ValueError: an unknown spec (the message lists the known ones), or a number out of
        the range of the loss scale.

    Examples:
      >>> import jmp_scale
      >>> float(jmp_scale.get_loss_scale("dynamic:2**16").loss_scale)
      65536.0
    """
    if isinstance(spec, LossScale):
        return spec
    if isinstance(spec, str):
        return _from_string(spec)
    numbers = (int, float, np.generic, np.ndarray, jax.Array)
    if isinstance(spec, numbers) and not isinstance(spec, bool):
        return StaticLossScale(spec)  # pyright: ignore[reportArgumentType]
    return _from_dtype(spec, spec)


def _from_string(spec: str) -> LossScale:
    kind, colon, argument = (word.strip() for word in spec.lower().partition(":"))
    if not colon and kind in ("none", "dynamic"):
        return NoOpLossScale() if kind == "none" else DynamicLossScale()
    if not colon and kind in ("half", *name_to_dtype):
        return _from_dtype(name_to_dtype.get(kind) or half_dtype(), spec)
    number = _number(argument if kind in ("dynamic", "static") else spec)
    if number is None:
        raise _unknown(spec)
    return DynamicLossScale(number) if kind == "dynamic" else StaticLossScale(number)


def _from_dtype(dtype: Any, spec: object) -> LossScale:
    for known in dtype_to_names:
        with contextlib.suppress(TypeError, ValueError):  # not a dtype
            if dtype is not None and jnp.dtype(dtype) == known:  # None means float64
                return DynamicLossScale() if known == jnp.float16 else NoOpLossScale()
    raise _unknown(spec)


def _number(text: str) -> float | None:
    power = _POWER.fullmatch(text)
    try:
        # math.pow, because the integer 9**999999999 would take all memory.
        return math.pow(int(power[1]), int(power[2])) if power else float(text)
    except (ValueError, OverflowError):
        return None


def _unknown(spec: object) -> ValueError:
    return ValueError(
        f'get_loss_scale: unknown loss scale {spec!r}; known are "none"; "dynamic" or '
        '"dynamic:2**16"; a number, "1024" or "static:2**10"; a dtype or its name '
        '("half", "fp16", "bf16", "fp32", ...); a loss scale. A framework\'s own '
        "configuration is for its function in jmp_scale.presets"
    )
