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
from ._loss_scale import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from ._policy import dtype_to_names, half_dtype, name_to_dtype
from ._validation import Arguments, require_no_tolerance, static_loss_scale

_POWER = re.compile(r"\s*(\d+)(?:\.0*)?\s*\*\*\s*(-?\d+)(?:\.0*)?\s*")


def _keys(unused: str, same: str = "", **renamed: str) -> dict[str, str]:
    """Keys of a section, and the argument of its preset that each gives, or ""."""
    return dict.fromkeys(unused.split(), "") | {k: k for k in same.split()} | renamed


# A section is of the first framework, and preset, that has all of its keys.
_FRAMEWORKS = {
    "DeepSpeed": _keys(
        "enabled auto_cast fp16_master_weights_and_grads",
        "loss_scale initial_scale_power loss_scale_window hysteresis "
        "consecutive_hysteresis min_loss_scale",
    ),
    "Cerebras": _keys(
        "enabled fp16_type precision_opt_level log_loss_scale overflow_tolerance",
        "loss_scale initial_loss_scale steps_per_increase min_loss_scale "
        "max_loss_scale",
        loss_scaling_factor="loss_scale",
        init_scale="initial_loss_scale",
    ),
    "PyTorch": _keys(
        "enabled device", "init_scale growth_factor backoff_factor growth_interval"
    ),
    "Megatron": _keys(
        "fp16 bf16",
        "loss_scale hysteresis",
        initial_loss_scale="initial_scale",
        min_loss_scale="min_scale",
        loss_scale_window="growth_interval",
    ),
}
_CLIPS = {"max_gradient_norm": "clip_by_global_norm", "max_gradient_value": "clip"}
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
    | arguments of PyTorch's `GradScaler` | `presets.pytorch(...)`, or none |
    | arguments of Megatron-LM | `presets.megatron(...)`, or static, or none |
    | a loss scale | itself |

    Numbers may be strings: YAML reads 2e15 as one. Dtypes are named as for
    `get_policy`; case and blanks do not matter. A section is of the first framework
    above that has all of its keys. It is enabled and dynamic unless it says otherwise:
    the frameworks' own defaults would silently turn loss scaling off.

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
    number = _as_number(argument if kind in ("dynamic", "static") else spec)
    if isinstance(number, str):
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


def _as_number(value: Any) -> Any:
    """A number that is written as a string; anything else unchanged."""
    if not isinstance(value, str):
        return value
    power = _POWER.fullmatch(value)
    try:
        # math.pow, because `9**999999999` as an integer would take all memory.
        return math.pow(int(power[1]), int(power[2])) if power else float(value)
    except (ValueError, OverflowError):
        return value


def _unknown(spec: Any) -> ValueError:
    return ValueError(
        f'get_loss_scale: unknown loss scale {spec!r}; known are "none"; "dynamic" or '
        '"dynamic:2**16"; a number, "1024" or "static:2**10"; a dtype or its name '
        '("half", "fp16", "bf16", "fp32", ...); a section of configuration '
        "of DeepSpeed, Cerebras, PyTorch or Megatron-LM; a loss scale"
    )


def _from_section(section: Mapping[str, Any]) -> LossScale:
    """The loss scale of a section, in which keys that are None count as missing."""
    section = {k: _as_number(x) for k, x in section.items() if x is not None}
    _refuse_unreadable(section)
    framework = _framework_of(section)
    known, given = _FRAMEWORKS[framework], {}
    for key, value in section.items():
        argument = known[key]
        if argument in given:
            keys = " or ".join(other for other in known if known[other] == argument)
            raise ValueError(_ARGUMENTS.message(keys, "given only once", section))
        if argument:
            given[argument] = value
    if not _is_float16(section):
        return NoOpLossScale()
    tolerance = section.get("overflow_tolerance", 0)
    require_no_tolerance(_ARGUMENTS, "overflow_tolerance", tolerance)
    dynamic = "dynamic" if framework == "Cerebras" else 0
    constant = given.pop("loss_scale", dynamic)
    if constant == dynamic:
        if section.get("fp16_type") == "cbfloat16":
            given.setdefault("max_loss_scale", 2.0**31)
        return getattr(presets, framework.lower())(**given)
    allowed, is_word = f"{dynamic!r} or a number", isinstance(constant, str)
    _ARGUMENTS.require(not is_word, "loss_scale", constant, allowed)
    return _static(constant)


def _refuse_unreadable(section: Mapping[str, Any]) -> None:
    cure = None
    if "auto" in section.values():
        cure = (
            'replace "auto" by what your trainer sets (for dynamic "enabled": True, '
            '"loss_scale": 0)'
        )
    elif isinstance(section.get("fp16", section.get("bf16")), Mapping):
        cure = "pass the section config['fp16'], or NoOpLossScale() for bfloat16"
    for key in _CLIPS.keys() & section.keys():
        chain = f"optax.chain(optax.{_CLIPS[key]}({section[key]!r}), tx)"
        cure = f"clip in the optimizer: with_loss_scale({chain}, loss_scale)"
    if cure is not None:
        raise ValueError(f"get_loss_scale: {cure}; got {section!r}")


def _framework_of(section: Mapping[str, Any]) -> str:
    keys = section.keys()
    fitting = [name for name, known in _FRAMEWORKS.items() if keys <= known.keys()]
    if not fitting:
        closest = max(_FRAMEWORKS, key=lambda name: len(keys & _FRAMEWORKS[name]))
        known = _FRAMEWORKS[closest]
        raise ValueError(
            f"get_loss_scale: expected keys of {closest}, got "
            f"{[key for key in keys if key not in known]}; known are {', '.join(known)}"
        )
    if "init_scale" in keys and len(fitting) > 1:
        s = section["init_scale"]
        raise ValueError(
            f"get_loss_scale: for Cerebras use jmp_scale.presets.cerebras({s!r}), for "
            f"a GradScaler write jmp_scale.presets.pytorch({s!r}); got {section!r}"
        )
    # `loss_scale` is a key of several, but a word only for Cerebras.
    is_word = isinstance(section.get("loss_scale"), str)
    return "Cerebras" if is_word and "Cerebras" in fitting else fitting[0]


def _is_float16(section: Mapping[str, Any]) -> bool:
    """Whether a section trains in float16, which alone needs a loss scale."""
    for key in ("enabled", "fp16", "bf16"):
        value = section.get(key, True)
        _ARGUMENTS.require(isinstance(value, bool), key, value, "True or False")
    halves = ("float16", "cbfloat16", "bfloat16")
    half = _ARGUMENTS.word("fp16_type", section.get("fp16_type", "float16"), halves)
    # {"bf16": False} alone means float32. Beside numbers it is one of Megatron's flags.
    is_off = section.get("bf16") or section.keys() == {"bf16"}
    fp16 = section.get("fp16", not is_off)
    return section.get("enabled", True) and fp16 and half != "bfloat16"
