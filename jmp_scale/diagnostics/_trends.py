"""What recorded losses and gradient norms say about a run whose numbers are all finite.

Every rule here was tuned on runs that go wrong and runs that do not, and measured on
others: `benchmarks/health_validation.py` prints how often each is right. They run on
the host, on NumPy arrays.
"""

from typing import Any, NamedTuple

import numpy as np

from ._history import LossScaleHistory

_LEAST_STEPS = 40  # below, an early bump cannot be told from a run that goes wrong
_BLOCK = 20  # steps of a median, fewer in a short history

# Shares of what training has gained, from the first loss down to the best.
_DIVERGED = 0.25
_SLIPPED = 0.2

# Doublings of the gradient norm that make a trend: if the loss slips too, if the loss
# is not known, and whatever the loss does. While a network leaves a plateau the norm
# grows eightfold and the loss falls.
_DOUBLINGS, _DOUBLINGS_ALONE, _DOUBLINGS_ANYWAY = 2.0, 4.0, 6.0
_LEAST_FIT = 0.85  # share of the variance that a line through log2 of the norm explains
_POINTS = 10  # of such a line

_RECENT = 100  # steps that a finding on updates looks back
_RECOVERY = 100  # steps after which a run that blew up could have recovered
_VANISHED = 2.0**-13

_LOST = 0.7  # share of the updates' size
_STILL_STEEP = 0.2  # share of the first gradient norm


class Recorded(NamedTuple):
    """The applied steps of a history with a finite loss or norm, oldest first."""

    step: np.ndarray
    loss: np.ndarray
    norm: np.ndarray
    lost_entries: np.ndarray
    lost_magnitude: np.ndarray
    first_loss: float
    first_norm: float


class Level(NamedTuple):
    """Medians of the loss over blocks of steps: now and at best, and their scatter."""

    current: float
    best: float
    best_step: int
    scatter: float


def trend_findings(history: LossScaleHistory) -> list[tuple[str, dict[str, Any]]]:
    """The findings on a run whose numbers are finite, of the names in `health`."""
    recorded = recorded_of(history)
    level = loss_level(recorded)
    found = {
        "loss diverges": level and diverges(recorded, level),
        "loss blew up": level and blew_up(recorded, level),
        "gradients vanished": level and vanished(recorded, level),
        "gradient norm grows": grows(recorded, level),
        "lost updates": loses_updates(recorded),
    }
    return [(kind, values) for kind, values in found.items() if values]


def recorded_of(history: LossScaleHistory) -> Recorded:
    """The loss and the gradient norm of the steps that were applied."""
    arrays = history.to_dict()
    keep = arrays["applied"]
    names = ("loss", "grad_norm", "lost_entries", "lost_magnitude")
    return Recorded(
        arrays["step"][keep],
        *(arrays[name][keep].astype(np.float64) for name in names),
        first_loss=float(history.first_loss),
        first_norm=float(history.first_norm),
    )


def loss_level(recorded: Recorded) -> Level | None:
    """The present level of the loss and its best, or None for too few steps."""
    known = np.isfinite(recorded.loss)
    loss, step = recorded.loss[known], recorded.step[known]
    if len(loss) < _LEAST_STEPS:
        return None
    block = max(3, min(_BLOCK, len(loss) // 10))
    blocks = _blocks(loss, len(loss) // block, block)
    medians = np.median(blocks, 1)
    spreads = np.median(np.abs(blocks - medians[:, None]), 1)
    # The lower of two blocks, so that no single burst makes a level.
    current, earlier = float(medians[-2:].min()), medians[:-2]
    last_steps = _blocks(step, len(loss) // block, block)[:, -1]
    return Level(
        current=current,
        best=float(min(earlier.min(), recorded.first_loss)),
        best_step=int(last_steps[np.argmin(earlier)]),
        scatter=float(1.4826 * np.median(spreads)),  # a standard deviation, if normal
    )


def diverges(recorded: Recorded, level: Level) -> dict[str, Any] | None:
    """Whether the loss has lost a quarter of what training had gained."""
    gained = recorded.first_loss - level.best
    # In a fresh history of a trained model nothing has been gained: then a quarter of
    # the loss itself, and where that is near zero, six deviations of its scatter.
    limit = max(_DIVERGED * gained, _DIVERGED * abs(level.best), 6 * level.scatter)
    if level.current - level.best <= limit:
        return None
    return {**_values(recorded, level), "step": level.best_step}


def blew_up(recorded: Recorded, level: Level) -> dict[str, Any] | None:
    """Whether the loss rose to a multiple of its start, and is stuck near its start."""
    loss = np.where(np.isfinite(recorded.loss), recorded.loss, -np.inf)
    peak, first = int(np.argmax(loss)), recorded.first_loss
    rose = loss[peak] > first + 2 * abs(first)
    stuck = first - level.current < 0.25 * abs(first)
    if not (rose and stuck and len(loss) - peak > _RECOVERY):
        return None
    peak_values = {"peak": _number(loss[peak]), "step": int(recorded.step[peak])}
    return {**_values(recorded, level), **peak_values}


def vanished(recorded: Recorded, level: Level) -> dict[str, Any] | None:
    """Whether the gradients have vanished while the loss is still near its start."""
    norms = recorded.norm[np.isfinite(recorded.norm)]
    if len(norms) < _LEAST_STEPS or level.current <= 0.5 * recorded.first_loss:
        return None
    norm = float(np.median(norms[-_LEAST_STEPS:]))
    # The first norm is that of the first gradients that were not zero, or NaN.
    if norm > 0 and not norm < _VANISHED * recorded.first_norm:
        return None
    change = f"has been zero for {_LEAST_STEPS} steps"
    if norm > 0:
        change = f"fell from {_number(recorded.first_norm)} to {_number(norm)}"
    return {**_values(recorded, level), "change": change}


def grows(recorded: Recorded, level: Level | None) -> dict[str, Any] | None:
    """Whether the gradient norm doubles again and again, and every how many steps."""
    known = np.isfinite(recorded.norm) & (recorded.norm > 0)
    log2_norm, step = np.log2(recorded.norm[known]), recorded.step[known]
    doublings = _doublings_that_matter(recorded, level)
    best = None
    # Of all the windows that end now, the one that a line fits best.
    for length in _windows(len(log2_norm)):
        y = np.median(_blocks(log2_norm, _POINTS, length // _POINTS), 1)
        x = np.median(_blocks(step, _POINTS, length // _POINTS), 1)
        slope, start = np.polyfit(x, y, 1)
        residuals = y - start - slope * x
        fit = 1 - (residuals**2).mean() / max(y.var(), 1e-12)
        # Short windows of a noisy norm show a trend now and then.
        least = doublings + (length < 10 * _POINTS)
        rises = y[:3].mean() < y[3:7].mean() < y[7:].mean()
        trends = rises and fit >= _LEAST_FIT and slope * (x[-1] - x[0]) >= least
        if trends and (best is None or fit > best[0]):
            begin, end = _number(2 ** y[0]), _number(2 ** y[-1])
            best = fit, {"begin": begin, "end": end, "steps": length, "rate": 1 / slope}
    if best is None:
        return None
    return {**best[1], "rate": f"{best[1]['rate']:.3g}"}


def loses_updates(recorded: Recorded) -> dict[str, Any] | None:
    """Whether most of the recent updates were rounded away while they were needed."""
    known = np.isfinite(recorded.lost_magnitude)
    magnitude, entries = recorded.lost_magnitude[known], recorded.lost_entries[known]
    if len(magnitude) < _LEAST_STEPS:
        return None
    share = float(np.median(magnitude[-_RECENT:]))
    norms = recorded.norm[np.isfinite(recorded.norm)][-_RECENT:]
    # Near a minimum small updates are lost too, and are not missed.
    is_steep = len(norms) == 0 or np.median(norms) > _STILL_STEEP * recorded.first_norm
    if share <= _LOST or not is_steep:
        return None
    steps = len(magnitude[-_RECENT:])
    entries = float(np.median(entries[-_RECENT:]))
    return {"entries": entries, "magnitude": share, "steps": steps}


def _doublings_that_matter(recorded: Recorded, level: Level | None) -> float:
    if level is None:
        return _DOUBLINGS_ALONE
    gained, lost = recorded.first_loss - level.best, level.current - level.best
    is_flat = gained <= 4 * level.scatter
    slips = lost >= _SLIPPED * gained
    return _DOUBLINGS if is_flat or slips else _DOUBLINGS_ANYWAY


def _windows(steps: int) -> list[int]:
    lengths = {}
    while steps >= _LEAST_STEPS:
        for length in (steps, 3 * steps // 4):
            if length >= _LEAST_STEPS:
                lengths[length // _POINTS * _POINTS] = None
        steps //= 2
    return list(lengths)


def _blocks(x: np.ndarray, count: int, length: int) -> np.ndarray:
    """The last `count * length` entries, in rows of `length`."""
    return x[len(x) - count * length :].reshape(count, length)


def _values(recorded: Recorded, level: Level) -> dict[str, Any]:
    numbers = {"first": recorded.first_loss, **level._asdict()}
    return {name: _number(numbers[name]) for name in ("first", "best", "current")}


def _number(x: float) -> str:
    return f"{x:.3g}"
