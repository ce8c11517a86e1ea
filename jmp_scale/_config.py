"""Policies and loss scales from configuration files and flags."""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _sections
from ._dynamic import DynamicLossScale
from ._loss_scale import LossScale, NoOpLossScale, StaticLossScale
from ._policy import Policy, dtype_to_names, half_dtype
from ._validation import Arguments, static_loss_scale

_NAME_TO_DTYPE = {
    name: dtype for dtype, names in dtype_to_names.items() for name in names
}
_POLICY_FIELDS = {"p": "param", "params": "param", "c": "compute", "compute": "compute",
                  "o": "output", "output": "output"}  # fmt: skip
_KNOWN = (
    '"none"; "dynamic" or "dynamic:2**16"; a number, "1024" or "static:2**10"; a dtype '
    'or its name ("half", "fp16", "bf16", "fp32", ...); a section of DeepSpeed\'s or '
    "Cerebras' configuration; a loss scale"
)
_POWER = re.compile(r"\s*(\d+)(?:\.0*)?\s*\*\*\s*(-?\d+)(?:\.0*)?\s*")


def get_policy(policy_name: str) -> Policy:
    """Reads a policy from a configuration string.

    `"float16"` is that dtype throughout; `"p=f32,c=f16,o=f32"` names each (also
    `params`, `compute`, `output`). What is not named: `params` is f32, `compute`
    follows `params`, `output` follows `compute`.

    Args:
      policy_name: dtypes are `full`/`f32`/`float32`/`fp32`, `half` (the backend's half
        type), `f16`/`float16`/`fp16`, `bf16`/`bfloat16`, `f64`/`float64`.

    Raises:
      ValueError: an unknown key or dtype.

    Examples:
      >>> import jmp_scale
      >>> print(jmp_scale.get_policy("c=f16,o=full"))
      p=full,c=f16,o=full
    """
    if "=" not in policy_name:
        dtype = _parse_dtype(policy_name)
        return Policy(dtype, dtype, dtype)
    dtypes = {}
    for part in policy_name.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in _POLICY_FIELDS:
            raise ValueError(
                f"Unknown key '{key}' in '{policy_name}' should be 'params', 'compute' "
                "or 'output' (or 'p', 'c', 'o')"
            )
        dtypes[_POLICY_FIELDS[key]] = _parse_dtype(value)
    param = dtypes.get("param", jnp.float32)
    compute = dtypes.get("compute", param)
    return Policy(param, compute, dtypes.get("output", compute))


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
    | a section of Cerebras' YAML | `presets.cerebras(...)`, or static, or none |
    | a loss scale | itself |

    Numbers and strings mean the same, since a flag is always a string and a
    configuration file has both. A dtype is given as such or by a name that `get_policy`
    knows, so that `get_loss_scale(policy.compute_dtype)` fits a policy. Case and blanks
    do not matter. For the rule of another framework call the function of that name in
    `jmp_scale.presets`.

    A section is a mapping, recognized by its keys. If `enabled` is missing, or
    Cerebras' `loss_scaling_factor`, the section counts as enabled and dynamic: the
    frameworks' own defaults would silently turn loss scaling off. Numbers may be
    strings, which is how YAML reads 2e15.

    Args:
      spec: a string, a number, a dtype, a mapping or a loss scale.

    Raises:
      TypeError: an array with axes.
      ValueError: an unknown spec or an unknown key of a section (the message lists what
        is known), or a number that the loss scale does not allow.

    Examples:
      >>> import jmp_scale
      >>> float(jmp_scale.get_loss_scale("dynamic:2**16").loss_scale)
      65536.0
      >>> jmp_scale.get_loss_scale(1024)
      StaticLossScale(loss_scale=1024.0)
      >>> fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 12}
      >>> float(jmp_scale.get_loss_scale(fp16).loss_scale)
      4096.0
    """
    if isinstance(spec, LossScale):
        return spec
    if isinstance(spec, str):
        return _from_string(spec)
    # An empty mapping is of no framework, and unknown.
    if isinstance(spec, Mapping) and spec:
        return _sections.loss_scale_of({k: _as_number(v) for k, v in spec.items()})
    numbers = (int, float, np.generic, np.ndarray, jax.Array)
    if isinstance(spec, numbers) and not isinstance(spec, bool):
        return _static(spec)
    return _from_dtype(spec, spec)


def _from_string(spec: str) -> LossScale:
    kind, colon, argument = (word.strip() for word in spec.lower().partition(":"))
    if kind == "none" and not colon:
        return NoOpLossScale()
    if kind == "dynamic":
        if not colon:
            return DynamicLossScale()
        return DynamicLossScale(_parse_number(argument, spec))
    if kind == "static" and colon:
        return _static(_parse_number(argument, spec))
    if kind == "half" and not colon:
        return _from_dtype(half_dtype(), spec)
    if kind in _NAME_TO_DTYPE and not colon:
        return _from_dtype(_NAME_TO_DTYPE[kind], spec)
    return _static(_parse_number(spec, spec))


def _from_dtype(dtype: Any, spec: Any) -> LossScale:
    try:
        # NumPy takes None for float64.
        known = dtype is not None and jnp.dtype(dtype) in map(jnp.dtype, dtype_to_names)
    except TypeError as error:
        raise _unknown(spec) from error
    if not known:
        raise _unknown(spec)
    return DynamicLossScale() if jnp.dtype(dtype) == jnp.float16 else NoOpLossScale()


def _static(value: Any) -> StaticLossScale:
    return StaticLossScale(static_loss_scale(Arguments("get_loss_scale"), value))


def _parse_number(text: str, spec: str) -> float:
    """A decimal number, or a power such as `2**15`."""
    power = _POWER.fullmatch(text)
    try:
        # math.pow, since `9**999999999` as an integer would take all memory.
        return math.pow(int(power[1]), int(power[2])) if power else float(text)
    except (ValueError, OverflowError) as error:
        raise _unknown(spec) from error


def _as_number(value: Any) -> Any:
    """A number that is written as a string; anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return _parse_number(value, value)
    except ValueError:
        return value


def _unknown(spec: Any) -> ValueError:
    return ValueError(
        f"get_loss_scale: unknown loss scale {spec!r}; known are {_KNOWN}"
    )


def _parse_dtype(name: str) -> Any:
    if name == "half":
        return half_dtype()
    if name not in _NAME_TO_DTYPE:
        known = ", ".join(_NAME_TO_DTYPE)
        raise ValueError(f"Unknown dtype '{name}' must be one of half, {known}")
    return _NAME_TO_DTYPE[name]
