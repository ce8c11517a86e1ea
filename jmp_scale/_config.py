"""Loss scales from configuration files and flags."""

import contextlib
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import presets
from ._dynamic import DynamicLossScale
from ._loss_scale import LossScale, NoOpLossScale, StaticLossScale
from ._policy import dtype_to_names, half_dtype, name_to_dtype
from ._validation import Arguments, require_no_tolerance, static_loss_scale

_POWER = re.compile(r"\s*(\d+)(?:\.0*)?\s*\*\*\s*(-?\d+)(?:\.0*)?\s*")


def _keys(unused: str, same: str = "", **renamed: str) -> dict[str, str]:
    """Keys of a section, and the argument of its preset that each gives, or ""."""
    return dict.fromkeys(unused.split(), "") | {k: k for k in same.split()} | renamed


_DEEPSPEED = _keys(
    "enabled auto_cast fp16_master_weights_and_grads",
    "loss_scale initial_scale_power loss_scale_window hysteresis "
    "consecutive_hysteresis min_loss_scale",
)
_CEREBRAS = _keys(
    "enabled fp16_type precision_opt_level log_loss_scale max_gradient_norm "
    "max_gradient_value overflow_tolerance",
    "loss_scale initial_loss_scale steps_per_increase min_loss_scale max_loss_scale",
    loss_scaling_factor="loss_scale",
    init_scale="initial_loss_scale",
)
_PYTORCH = _keys(
    "enabled device", "init_scale growth_factor backoff_factor growth_interval"
)
_MEGATRON = _keys(
    "fp16 bf16 loss_scale",
    "hysteresis",
    initial_loss_scale="initial_scale",
    min_loss_scale="min_scale",
    loss_scale_window="growth_interval",
)
_LARGEST_OF = {"float16": 2.0**15, "cbfloat16": 2.0**31}
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
    | a section of Cerebras' YAML | `presets.cerebras(...)`, or static, or none |
    | a loss scale | itself |

    Numbers may be strings everywhere: a flag is one, and YAML reads 2e15 as one. Names
    of dtypes are as for `get_policy`; case and blanks do not matter. A section without
    `enabled`, or Cerebras' `loss_scaling_factor`, counts as enabled and dynamic: the
    frameworks' own defaults would silently turn loss scaling off. For the arguments of
    PyTorch's `GradScaler` and of Megatron-LM the error says which preset to call.

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
      >>> fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 12}
      >>> float(jmp_scale.get_loss_scale(fp16).loss_scale)
      4096.0
    """
    if isinstance(spec, LossScale):
        return spec
    if isinstance(spec, str):
        return _from_string(spec)
    if isinstance(spec, Mapping) and spec:  # an empty one is unknown
        return _from_section({k: _as_number(v) for k, v in spec.items()})
    numbers = (int, float, np.generic, np.ndarray, jax.Array)
    if isinstance(spec, numbers) and not isinstance(spec, bool):
        return _static(spec)
    return _from_dtype(spec, spec)


def _from_string(spec: str) -> LossScale:
    kind, colon, argument = (word.strip() for word in spec.lower().partition(":"))
    if kind in ("dynamic", "static") and colon:
        number = _parse_number(argument, spec)
        return DynamicLossScale(number) if kind == "dynamic" else _static(number)
    if not colon and kind in ("none", "dynamic"):
        return NoOpLossScale() if kind == "none" else DynamicLossScale()
    if not colon and kind in ("half", *name_to_dtype):
        return _from_dtype(name_to_dtype.get(kind) or half_dtype(), spec)
    return _static(_parse_number(spec, spec))


def _from_dtype(dtype: Any, spec: Any) -> LossScale:
    for known in dtype_to_names:
        with contextlib.suppress(TypeError):  # not a dtype
            if dtype is not None and jnp.dtype(dtype) == known:  # None means float64
                return DynamicLossScale() if known == jnp.float16 else NoOpLossScale()
    raise _unknown(spec)


def _static(value: Any) -> StaticLossScale:
    return StaticLossScale(static_loss_scale(_ARGUMENTS, value))


def _parse_number(text: str, spec: str) -> float:
    power = _POWER.fullmatch(text)
    try:
        # math.pow, because `9**999999999` as an integer would take all memory.
        return math.pow(int(power[1]), int(power[2])) if power else float(text)
    except (ValueError, OverflowError) as error:
        raise _unknown(spec) from error


def _as_number(value: Any) -> Any:
    """A number that is written as a string; anything else unchanged."""
    with contextlib.suppress(ValueError):
        return _parse_number(value, value) if isinstance(value, str) else value
    return value


def _unknown(spec: Any) -> ValueError:
    return ValueError(
        f'get_loss_scale: unknown loss scale {spec!r}; known are "none"; "dynamic" or '
        '"dynamic:2**16"; a number, "1024" or "static:2**10"; a dtype or its name '
        '("half", "fp16", "bf16", "fp32", ...); a section of DeepSpeed\'s or '
        "Cerebras' configuration; a loss scale"
    )


def _from_section(section: Mapping[str, Any]) -> LossScale:
    """The loss scale of a section, in which keys that are None count as missing."""
    section = {key: value for key, value in section.items() if value is not None}
    _require_readable(section)
    # `loss_scale` is a key of both, but a word only for Cerebras.
    own = section.keys() & (_CEREBRAS.keys() - _DEEPSPEED.keys())
    if own or isinstance(section.get("loss_scale"), str):
        return _from_cerebras(section)
    given = _given(section, "DeepSpeed's fp16", _DEEPSPEED)
    if not section.get("enabled", True):
        return NoOpLossScale()
    constant = given.pop("loss_scale", 0)
    if _ARGUMENTS.number("loss_scale", constant) != 0:  # 0 means dynamic
        return _static(constant)
    return presets.deepspeed(**given)


def _from_cerebras(section: Mapping[str, Any]) -> LossScale:
    given = _given(section, "Cerebras'", _CEREBRAS)
    half = section.get("fp16_type", "float16")
    _ARGUMENTS.word("fp16_type", half, (*_LARGEST_OF, "bfloat16"))
    clips = {"max_gradient_norm": "clip_by_global_norm", "max_gradient_value": "clip"}
    for key in clips.keys() & section.keys():
        message = _ARGUMENTS.message(key, "missing", section[key])
        chain = f"optax.chain(optax.{clips[key]}({section[key]!r}), tx)"
        cure = f"clip in the optimizer: with_loss_scale({chain}, loss_scale)"
        raise ValueError(f"{message}; {cure}")
    if not section.get("enabled", True) or half == "bfloat16":
        return NoOpLossScale()
    tolerance = section.get("overflow_tolerance", 0)
    require_no_tolerance(_ARGUMENTS, "overflow_tolerance", tolerance)
    constant = given.pop("loss_scale", "dynamic")
    if constant == "dynamic":
        given.setdefault("max_loss_scale", _LARGEST_OF[half])
        return presets.cerebras(**given)
    allowed = '"dynamic" or the number of a constant loss scale, such as 1024'
    key = "loss_scale" if "loss_scale" in section else "loss_scaling_factor"
    _ARGUMENTS.require(not isinstance(constant, str), key, constant, allowed)
    return _static(constant)


def _require_readable(section: Mapping[str, Any]) -> None:
    """Raises for sections that are not read, and says first what to write instead."""
    keys, cure = section.keys(), None
    enabled, not_deepspeed = section.get("enabled", True), keys - _DEEPSPEED.keys()
    if "auto" in [value for value in section.values() if isinstance(value, str)]:
        cure = (
            'replace "auto" by what your trainer sets (for dynamic "enabled": True, '
            '"loss_scale": 0)'
        )
    elif isinstance(section.get("fp16"), Mapping):
        cure = "pass the section config['fp16']"
    elif isinstance(section.get("bf16"), Mapping):
        cure = "bfloat16 needs no loss scale: write jmp_scale.NoOpLossScale()"
    elif keys <= _PYTORCH.keys() and not_deepspeed:
        cure = f"for a GradScaler write {_call('pytorch', section, _PYTORCH, enabled)}"
        if keys <= _CEREBRAS.keys():  # `init_scale` alone
            call = _call("cerebras", section, _CEREBRAS, enabled)
            cure = f"for Cerebras use {call}, {cure}"
    elif keys <= _MEGATRON.keys() and not_deepspeed and keys - _CEREBRAS.keys():
        fp16 = section.get("fp16", not section.get("bf16"))
        cure = f"for Megatron write {_call('megatron', section, _MEGATRON, fp16)}"
    if cure is not None:
        raise ValueError(f"get_loss_scale: {cure}; got {section!r}")
    _ARGUMENTS.require(isinstance(enabled, bool), "enabled", enabled, "True or False")


def _call(preset: str, section: Any, known: Mapping[str, str], enabled: Any) -> str:
    """The code that makes the loss scale of a section."""
    if not enabled:
        return "jmp_scale.NoOpLossScale()"
    if section.get("loss_scale"):
        return f"jmp_scale.StaticLossScale({section['loss_scale']!r})"
    given = _given(section, preset, known).items()
    return f"jmp_scale.presets.{preset}({', '.join(f'{k}={x!r}' for k, x in given)})"


def _given(section: Any, framework: str, known: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of its preset that a section gives."""
    given: dict[str, Any] = {}
    for key, value in section.items():
        if key not in known:
            raise ValueError(
                f"get_loss_scale: expected a section of {framework} configuration, got "
                f"the unknown key {key!r}; known are {', '.join(known)}"
            )
        if known[key] in given:
            keys = " or ".join(other for other in known if known[other] == known[key])
            raise ValueError(_ARGUMENTS.message(keys, "given only once", section))
        if known[key]:
            given[known[key]] = value
    return given
