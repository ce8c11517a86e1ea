"""Loss scales from configuration files and flags."""

import contextlib
import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import presets
from ._loss_scale import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from ._policy import dtype_to_names, half_dtype, name_to_dtype
from ._validation import Arguments, static_loss_scale

_POWER = re.compile(r"\s*(\d+)(?:\.0*)?\s*\*\*\s*(-?\d+)(?:\.0*)?\s*")


# Keys of DeepSpeed's `fp16` section that are no argument of its preset.
_OTHER_KEYS = ("enabled", "loss_scale", "auto_cast", "fp16_master_weights_and_grads")
_ARGUMENTS = Arguments("get_loss_scale")


def get_loss_scale(spec: Any) -> LossScale:
    """Reads a loss scale from a configuration value, as `get_policy` reads a policy.

    | `spec` | loss scale |
    |---|---|
    | `"none"` | `NoOpLossScale()` |
    | `"dynamic"` | `DynamicLossScale()` |
    | `"dynamic:2**16"` | `DynamicLossScale(2.0**16)`, with the other defaults |
    | `1024`, `"2**10"`, `"static:1024"` | `StaticLossScale` of that number |
    | float16: `"fp16"`, `"f16"`, `"half"` | `DynamicLossScale()`: float16 needs one |
    | `"bf16"`, `"fp32"`, float64 | `NoOpLossScale()`: at least the range of float32 |
    | DeepSpeed's `fp16` section | `presets.deepspeed(...)`, or static, or none |
    | a loss scale | itself |

    Dtypes are named as for `get_policy`; case and blanks do not matter. A section is
    enabled unless it says otherwise. Other frameworks have functions in `presets`.

    Args:
      spec: a string, a number, a dtype, a mapping or a loss scale.

    Raises:
      TypeError: an array with axes.
      ValueError: an unknown spec or key of a section (the message lists those that are
        known), or a number that the loss scale does not allow.

    Examples:
      >>> import jmp_scale
      >>> float(jmp_scale.get_loss_scale("dynamic:2**16").loss_scale)
      65536.0
      >>> fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 12}
      >>> float(jmp_scale.get_loss_scale(fp16).loss_scale)
      4096.0
    """
    if isinstance(spec, LossScale):
        return spec
    if isinstance(spec, str):
        return _from_string(spec)
    if isinstance(spec, Mapping) and spec:  # an empty one is unknown
        return _from_section(spec)
    numbers = (int, float, np.generic, np.ndarray, jax.Array)
    if isinstance(spec, numbers) and not isinstance(spec, bool):
        return _static(spec)
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
    return DynamicLossScale(number) if kind == "dynamic" else _static(number)


def _from_dtype(dtype: Any, spec: Any) -> LossScale:
    for known in dtype_to_names:
        with contextlib.suppress(TypeError):  # not a dtype
            if dtype is not None and jnp.dtype(dtype) == known:  # None means float64
                return DynamicLossScale() if known == jnp.float16 else NoOpLossScale()
    raise _unknown(spec)


def _static(value: Any) -> StaticLossScale:
    return StaticLossScale(static_loss_scale(_ARGUMENTS, value))


def _number(text: str) -> float | None:
    power = _POWER.fullmatch(text)
    try:
        # math.pow, because `9**999999999` as an integer would take all memory.
        return math.pow(int(power[1]), int(power[2])) if power else float(text)
    except (ValueError, OverflowError):
        return None


def _unknown(spec: Any) -> ValueError:
    return ValueError(
        f'get_loss_scale: unknown loss scale {spec!r}; known are "none"; "dynamic" or '
        '"dynamic:2**16"; a number, "1024" or "static:2**10"; a dtype or its name '
        '("half", "fp16", "bf16", "fp32", ...); DeepSpeed\'s fp16 section; a loss scale'
    )


def _from_section(section: Mapping[str, Any]) -> LossScale:
    """The loss scale of an `fp16` section, in which keys of None count as missing."""
    given = {key: value for key, value in section.items() if value is not None}
    known = (*_OTHER_KEYS, *inspect.signature(presets.deepspeed).parameters)
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ValueError(
            f"get_loss_scale: expected keys of DeepSpeed's fp16 section, got {unknown};"
            f" known are {', '.join(known)}"
        )
    enabled, constant = given.get("enabled", True), given.get("loss_scale", 0)
    if not isinstance(enabled, bool):
        raise ValueError(_ARGUMENTS.message("enabled", "True or False", enabled))
    if not enabled:
        return NoOpLossScale()
    if constant != 0:
        return _static(constant)
    return presets.deepspeed(**{k: x for k, x in given.items() if k not in _OTHER_KEYS})
