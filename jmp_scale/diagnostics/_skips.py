"""Why steps were skipped, and whether that is normal: the findings of `health`."""

import math
from typing import Any

import numpy as np

from .._loss_scale import (
    DynamicLossScale,
    LossScaleState,
    NoOpLossScale,
    StaticLossScale,
    number_of,
)
from ._history import LossScaleHistory
from ._text import power

# Of steps. With the default period S itself causes about 0.0005 of overflows.
_NORMAL_OVERFLOW_RATE = 0.05
_NORMAL_SPIKE_RATE = 0.01
_LONG_RUN = 10  # skipped steps in a row that a broken batch does not explain
_LISTED = 5  # steps that a sentence names


def scale_finding(state: LossScaleState) -> tuple[str, dict[str, Any]]:
    """The finding on S itself, or "" and nothing."""
    s = number_of(state.loss_scale)
    if s is None:
        return "", {}
    if not 0 < float(s) < math.inf:
        return "loss scale out of range", {"s": power(float(s))}
    return ("loss scale below 1" if float(s) < 1 else ""), {"s": power(float(s))}


def spike_finding(
    state: LossScaleState, history: LossScaleHistory | None
) -> tuple[str, dict[str, Any]]:
    """The finding on finite steps that a guard skipped, or "" and nothing."""
    if _last_is_spike(state):
        in_a_row, total = int(state.skipped_in_a_row), int(state.spikes)
        limit = getattr(state.guard, "max_in_a_row", None)
        values = {
            "in_a_row": in_a_row,
            "total": total,
            "limit": limit or "max_in_a_row",
        }
        return ("spike" if in_a_row == 1 else "spikes in a row"), values
    if history is None:
        return "", {}
    recorded = history.to_dict()
    spikes = ~recorded["applied"] & recorded["grads_finite"]
    if not spikes.any():
        return "", {}
    kind = "rare spikes" if spikes.mean() <= _NORMAL_SPIKE_RATE else "frequent spikes"
    return kind, {**_share(spikes), "listed": _listed(recorded["step"][spikes])}


def skip_finding(
    state: LossScaleState, history: LossScaleHistory | None
) -> tuple[str, dict[str, Any]]:
    """The finding on steps that were not finite: the present run, or the history's."""
    in_a_row = int(state.skipped_in_a_row)
    if in_a_row == 0 or _last_is_spike(state):
        return _rate(history)
    last = "The last step was skipped"
    if in_a_row > 1:
        last = f"The last {in_a_row} steps were all skipped"
    s = number_of(state.loss_scale)
    values = {"last": last, "s": "its value" if s is None else power(float(s))}
    if _loss_not_finite(state, history):
        return "loss not finite", values
    overflows = int(state.skipped) - int(state.nonfinite_losses) - int(state.spikes)
    return _overflow_run(state, history, {**values, "total": overflows})


def _last_is_spike(state: LossScaleState) -> bool:
    # int, since a Variable of Flax 0.12.0 has no truth value.
    return int(state.grads_finite) == 1 and int(state.applied) == 0


def _loss_not_finite(state: LossScaleState, history: LossScaleHistory | None) -> bool:
    """Whether the present run of skips is all due to losses that were not finite."""
    if history is not None and int(history.pushed):
        loss_finite = history.to_dict()["loss_finite"][-int(state.skipped_in_a_row) :]
        return not loss_finite.any()
    # The state has only totals, which say enough if there is no other cause.
    return int(state.nonfinite_losses) == int(state.skipped)


def _overflow_run(
    state: LossScaleState, history: LossScaleHistory | None, values: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    in_a_row, rule = int(state.skipped_in_a_row), state.loss_scale
    is_long = in_a_row >= _LONG_RUN
    if isinstance(rule, NoOpLossScale | StaticLossScale) or rule is None:
        run = "every step skipped at a fixed loss scale"
        return (run if is_long else "skipped step"), values
    if not isinstance(rule, DynamicLossScale):  # its S, of a mapping without the rule
        return ("every step skipped" if is_long else "occasional overflow"), values
    s, floor = float(rule.loss_scale), float(rule.min_loss_scale)
    more = _most_skips(rule, s, floor)
    values |= {"floor": power(floor), "more": more}
    if s <= floor and in_a_row > 1:
        return "stuck at the floor", values
    # More skips than can have lowered S: it stays, so the loss must be the cause.
    if in_a_row > _most_skips(rule, rule.max_loss_scale, s) + _LONG_RUN:
        return "loss not finite", values
    total = int(state.skipped)
    if in_a_row == total and (history is None or int(history.pushed) in (0, total)):
        return ("warm-up" if more else "warm-up to the floor"), values
    if is_long:
        return "every step skipped", values
    return _rate(history) if history is not None else ("occasional overflow", values)


def _rate(history: LossScaleHistory | None) -> tuple[str, dict[str, Any]]:
    if history is None:
        return "", {}
    recorded = history.to_dict()
    skipped, loss_finite = ~recorded["grads_finite"], recorded["loss_finite"]
    if skipped.size and recorded["step"][0] == 0:
        # Skips before the first applied step were to be expected.
        warm_up = int(np.argmin(skipped))
        skipped, loss_finite = skipped[warm_up:], loss_finite[warm_up:]
    if not skipped.any():
        return "", {}
    if loss_finite[skipped].mean() < 0.5:
        return "broken batches", _share(skipped)
    normal = skipped.mean() <= _NORMAL_OVERFLOW_RATE
    kind = "normal rate of overflow" if normal else "frequent overflow"
    return kind, _share(skipped)


def _share(flags: np.ndarray) -> dict[str, Any]:
    count = int(flags.sum())
    return {
        "skips": count,
        "steps": flags.size,
        "rate": count / flags.size,
        "were": "was" if count == 1 else "were",
        "spikes": "a spike" if count == 1 else "spikes",
        "those": "that batch" if count == 1 else "those batches",
    }


def _listed(steps: np.ndarray) -> str:
    """The last few of these step numbers, as in "steps ..., 12, 15"."""
    more = "..., " if len(steps) > _LISTED else ""
    numbers = ", ".join(str(step) for step in steps[-_LISTED:])
    return f"step{'s' if len(steps) > 1 else ''} {more}{numbers}"


def _most_skips(rule: Any, start: float, end: float) -> int:
    """Overflows that bring S from `start` down to `end`, if each counts."""
    if not 0 < end < start < math.inf:
        return 0
    backoff = rule.backoff_factor or 1 / rule.factor
    return math.ceil(math.log(start / end) / -math.log(backoff)) * rule.hysteresis
