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

# The share of what training has gained, from the first loss down to the best.
_DIVERGED = 0.25

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
        "lost updates": loses_updates(recorded),
    }
    return [(kind, values) for kind, values in found.items() if values]


def recorded_of(history: LossScaleHistory) -> Recorded:
    """The loss and the gradient norm of the steps that were applied."""
    arrays = history.to_dict()
    keep = arrays["applied"]
    names = ("loss", "grad_norm", "lost_entries", "lost_magnitude")
    columns = (arrays[name][keep].astype(np.float64) for name in names)
    first_loss, first_norm = float(history.first_loss), float(history.first_norm)
    loss, norm, entries, magnitude = columns
    step = arrays["step"][keep]
    return Recorded(step, loss, norm, entries, magnitude, first_loss, first_norm)


def loss_level(recorded: Recorded) -> Level | None:
    """The present level of the loss and its best, or None for too few steps."""
    known = np.isfinite(recorded.loss)
    loss, step = recorded.loss[known], recorded.step[known]
    if len(loss) < _LEAST_STEPS:
        return None
    block = max(3, min(_BLOCK, len(loss) // 10))
    left_over = len(loss) % block
    blocks = loss[left_over:].reshape(-1, block)
    medians = np.median(blocks, 1)
    spreads = np.median(np.abs(blocks - medians[:, None]), 1)
    # The lower of two blocks, so that no single burst makes a level.
    current, earlier = float(medians[-2:].min()), medians[:-2]
    last_steps = step[left_over:].reshape(-1, block)[:, -1]
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
    return {"first": recorded.first_loss, **level._asdict()}


def blew_up(recorded: Recorded, level: Level) -> dict[str, Any] | None:
    """Whether the loss rose to a multiple of its start, and is stuck near its start."""
    loss = np.where(np.isfinite(recorded.loss), recorded.loss, -np.inf)
    peak, first = int(np.argmax(loss)), recorded.first_loss
    rose = loss[peak] > first + 2 * abs(first)
    stuck = first - level.current < 0.25 * abs(first)
    if not (rose and stuck and len(loss) - peak > _RECOVERY):
        return None
    values = {"first": first, "current": level.current, "peak": loss[peak]}
    return {**values, "step": recorded.step[peak]}


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
        change = f"fell from {recorded.first_norm:.3g} to {norm:.3g}"
    first, current = recorded.first_loss, level.current
    return {"first": first, "current": current, "change": change}


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
