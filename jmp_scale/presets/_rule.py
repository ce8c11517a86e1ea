"""A framework's arguments as a `DynamicLossScale`, with errors in its own words."""

import dataclasses
import math
from typing import Any

from .. import _validation
from .._dynamic import DynamicLossScale
from .._validation import LARGEST, SMALLEST, Arguments

_DEFAULTS = {
    field.name: field.default for field in dataclasses.fields(DynamicLossScale)
}


def dynamic(
    arguments: Arguments,
    initial: Any,
    *,
    floor: Any = 0.0,
    cap: Any = math.inf,
    at_max: str = "hold",
    clamps_initial: bool = False,
    **rule: Any,
) -> DynamicLossScale:
    """A loss scale whose initial S, floor and cap are clipped to [2^-126, 2^126].

    Args:
      arguments: the preset's name, and its own names for the fields.
      initial: initial S.
      floor: floor of S; 0 for none.
      cap: cap of S; infinite for none.
      at_max: as in `DynamicLossScale`.
      clamps_initial: whether an initial S beyond floor or cap becomes that end, as in
        frameworks that clamp it; otherwise it is an error.
      **rule: other fields of `DynamicLossScale`.
    """
    s = arguments.number("loss_scale", initial)
    floor = arguments.number("min_loss_scale", floor)
    cap = arguments.number("max_loss_scale", cap)
    if cap > LARGEST:
        cap, at_max = LARGEST, "hold"
    if clamps_initial and s > 0:
        s = min(max(s, floor), cap)
    allowed = "a finite number > 0"
    arguments.require(0 < s < math.inf, "loss_scale", initial, allowed)
    s = min(max(s, SMALLEST), LARGEST)
    rule |= {"min_loss_scale": floor, "max_loss_scale": cap, "at_max": at_max}
    # Checked here already, where errors use the framework's own names.
    rule = _validation.rule(arguments, _DEFAULTS | rule | {"loss_scale": s})
    low, high = rule["min_loss_scale"], rule["max_loss_scale"]
    _validation.float32_leaf(arguments, s, low, high)
    return DynamicLossScale(s, **rule)


def one_late(arguments: Arguments, argument: str, interval: Any) -> int:
    """The period of a framework that grows S one step late.

    It compares its counter with the interval before it increments the counter.
    """
    return arguments.integer(argument, interval, 0) + 1


def require_no_tolerance(arguments: Arguments, argument: str, tolerance: Any) -> None:
    """Raises a `ValueError` for a tolerated share of overflows, with the reason."""
    if arguments.number(argument, tolerance) != 0:
        message = arguments.message(argument, "0", tolerance)
        raise ValueError(
            f"{message}; a tolerated share of overflows depends on how many steps have "
            "passed since S last changed, which this rule does not count: to absorb "
            "single overflows use hysteresis (presets.megatron, presets.deepspeed)"
        )
