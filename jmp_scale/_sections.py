"""Sections of other frameworks' configuration files as loss scales."""

from collections.abc import Mapping
from typing import Any

from . import presets
from ._loss_scale import LossScale, NoOpLossScale, StaticLossScale
from ._validation import Arguments, static_loss_scale

# Keys of each section, and the argument of the preset that it gives. The preset has no
# argument for those with None.
_DEEPSPEED = {
    "enabled": None,
    "auto_cast": None,
    "fp16_master_weights_and_grads": None,
    "loss_scale": None,
    "initial_scale_power": "initial_scale_power",
    "loss_scale_window": "loss_scale_window",
    "hysteresis": "hysteresis",
    "consecutive_hysteresis": "consecutive_hysteresis",
    "min_loss_scale": "min_loss_scale",
}
_CEREBRAS = {
    "enabled": None,
    "fp16_type": None,
    "precision_opt_level": None,
    "log_loss_scale": None,
    "max_gradient_value": None,
    "loss_scaling_factor": "loss_scale",
    "loss_scale": "loss_scale",
    "initial_loss_scale": "initial_loss_scale",
    "init_scale": "initial_loss_scale",
    "steps_per_increase": "steps_per_increase",
    "min_loss_scale": "min_loss_scale",
    "max_loss_scale": "max_loss_scale",
    "overflow_tolerance": "overflow_tolerance",
    "max_gradient_norm": "max_gradient_norm",
}
_LARGEST_OF = {"float16": 2.0**15, "cbfloat16": 2.0**31}
_ARGUMENTS = Arguments("get_loss_scale")


def loss_scale_of(section: Mapping[str, Any]) -> LossScale:
    """The loss scale of DeepSpeed's `fp16` section, or of a section of Cerebras' YAML.

    Args:
      section: the section; keys that are None count as missing.

    Raises:
      TypeError: a value that is not a number where one is expected.
      ValueError: an unknown key, or a value that the preset does not allow.
    """
    section = {key: value for key, value in section.items() if value is not None}
    if not set(section) & {*_DEEPSPEED, *_CEREBRAS}:
        _require_known("DeepSpeed's or Cerebras'", _DEEPSPEED | _CEREBRAS, section)
    is_cerebras = set(section) & (set(_CEREBRAS) - set(_DEEPSPEED))
    # `loss_scale` is a key of both, but a word only for Cerebras.
    if is_cerebras or isinstance(section.get("loss_scale"), str):
        _require_known("Cerebras'", _CEREBRAS, section)
        return _cerebras(section)
    _require_known("DeepSpeed's fp16", _DEEPSPEED, section)
    return _deepspeed(section)


def _deepspeed(section: Mapping[str, Any]) -> LossScale:
    if not _is_enabled(section):
        return NoOpLossScale()
    constant = section.get("loss_scale", 0)
    if _ARGUMENTS.number("loss_scale", constant) != 0:  # 0 means dynamic
        return StaticLossScale(static_loss_scale(_ARGUMENTS, constant))
    return presets.deepspeed(**_given(section, _DEEPSPEED))


def _cerebras(section: Mapping[str, Any]) -> LossScale:
    half = section.get("fp16_type", "float16")
    _ARGUMENTS.word("fp16_type", half, (*_LARGEST_OF, "bfloat16"))
    if "max_gradient_value" in section:
        value = section["max_gradient_value"]
        message = _ARGUMENTS.message("max_gradient_value", "missing", value)
        cure = f"with_loss_scale(optax.chain(optax.clip({value!r}), tx), loss_scale)"
        raise ValueError(f"{message}; clip in the optimizer: {cure}")
    if not _is_enabled(section) or half == "bfloat16":
        return NoOpLossScale()
    given = {"max_loss_scale": _LARGEST_OF[half], **_given(section, _CEREBRAS)}
    constant = given.get("loss_scale", "dynamic")
    if isinstance(constant, str):
        return presets.cerebras(**given)
    return StaticLossScale(static_loss_scale(_ARGUMENTS, constant))


def _given(section: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """What a section gives as arguments of its preset."""
    given: dict[str, Any] = {}
    for key, value in section.items():
        argument = known[key]
        if argument in given:
            keys = [other for other in known if known[other] == argument]
            allowed = "given only once"
            raise ValueError(_ARGUMENTS.message(" or ".join(keys), allowed, section))
        if argument is not None:
            given[argument] = value
    return given


def _is_enabled(section: Mapping[str, Any]) -> bool:
    enabled = section.get("enabled", True)
    if not isinstance(enabled, bool):
        message = _ARGUMENTS.message("enabled", "True or False", enabled)
        raise ValueError(f'{message}; replace "auto" by what your trainer makes of it')
    return enabled


def _require_known(
    framework: str, known: Mapping[str, Any], section: Mapping[str, Any]
) -> None:
    unknown = [key for key in section if key not in known]
    if unknown:
        inner = [k for k in unknown if isinstance(section[k], Mapping)]
        cure = f"; pass the section, config[{inner[0]!r}]" if inner else ""
        raise ValueError(
            f"get_loss_scale: expected a section of {framework} configuration, got the "
            f"unknown key {unknown[0]!r}; known are {', '.join(known)}{cure}"
        )
