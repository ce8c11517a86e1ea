"""A framework's arguments as a `DynamicLossScale`, with errors in its own words."""

import dataclasses
import math
from typing import Any

from . import _validation
from ._dynamic import DynamicLossScale
from ._validation import LARGEST, SMALLEST, Arguments

_DEFAULTS = {
    field.name: field.default for field in dataclasses.fields(DynamicLossScale)
}


def dynamic(
    preset: str,
    *,
    at_max: str = "hold",
    clamps_initial: bool = False,
    grows_late: bool = False,
    **fields: Any,
) -> DynamicLossScale:
    """A loss scale whose initial S, floor and cap are clipped to [2^-126, 2^126].

    Args:
      preset: the name of the preset.
      at_max: as in `DynamicLossScale`.
      clamps_initial: whether an initial S beyond floor or cap becomes that end, as in
        frameworks that clamp it; otherwise it is an error.
      grows_late: whether the framework compares its counter with the period before it
        increments the counter, so that S grows one step late.
      **fields: other fields of `DynamicLossScale`. What a user gave is a pair of the
        framework's name for it and the value.
    """
    names = {k: given[0] for k, given in fields.items() if isinstance(given, tuple)}
    given = {k: fields[k][1] if k in names else fields[k] for k in fields}
    arguments = Arguments(f"presets.{preset}", names)
    s = arguments.number("loss_scale", given["loss_scale"])
    # Neither floor nor cap, unless the framework has them.
    floor = arguments.number("min_loss_scale", given.get("min_loss_scale", 0.0))
    cap = arguments.number("max_loss_scale", given.get("max_loss_scale", math.inf))
    if cap > LARGEST:
        cap, at_max = LARGEST, "hold"
    if clamps_initial and s > 0:
        s = min(max(s, floor), cap)
    allowed = "a finite number > 0"
    arguments.require(0 < s < math.inf, "loss_scale", given["loss_scale"], allowed)
    s = min(max(s, SMALLEST), LARGEST)
    if grows_late:
        given["period"] = arguments.integer("period", given["period"], 0) + 1
    given |= {"loss_scale": s, "min_loss_scale": floor, "max_loss_scale": cap}
    # Checked here already, where errors use the framework's own names.
    rule = _validation.rule(arguments, _DEFAULTS | given | {"at_max": at_max})
    ends = rule["min_loss_scale"], rule["max_loss_scale"]
    _validation.float32_leaf(arguments, s, *ends)
    return DynamicLossScale(s, **rule)


def or_none(value: Any, none: float) -> Any:
    """`value`, where None stands for `none`."""
    return none if value is None else value


def require_no_tolerance(arguments: Arguments, argument: str, tolerance: Any) -> None:
    """Raises a `ValueError` for a tolerated share of overflows, with the reason."""
    if arguments.number(argument, tolerance) != 0:
        message = arguments.message(argument, "0", tolerance)
        raise ValueError(
            f"{message}; a tolerated share of overflows depends on how many steps have "
            "passed since S last changed, which this rule does not count: to absorb "
            "single overflows use hysteresis (presets.megatron, presets.deepspeed)"
        )
