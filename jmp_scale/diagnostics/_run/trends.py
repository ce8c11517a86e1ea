"""Checks recorded losses and gradient norms for runs that go wrong with finite numbers.

The checks were tuned on runs that go wrong and runs that do not, and measured on other
runs: `benchmarks/health_validation.py` prints how often each check is right.
"""

from typing import Any, NamedTuple

import numpy as np

from .history import LossScaleHistory

_LEAST_STEPS = 40  # with fewer, an early bump looks like a run that goes wrong
_LEAST_CHANGES = 6  # of S; with fewer, a noisy loss may follow S by chance
_RECENT = 100  # steps that the check of updates covers

Columns = dict[str, np.ndarray]  # of the applied steps, as f64[steps]
Values = dict[str, Any] | None  # for the sentence of a finding; None without one
KindAndValues = tuple[str, dict[str, Any]]


class Level(NamedTuple):
    """The first loss, and medians of the loss over blocks of steps: last and best."""

    first: float
    current: float
    best: float
    best_step: int
    scatter: float  # within the blocks


def trend_findings(history: LossScaleHistory) -> list[KindAndValues]:
    """Returns kinds of findings, and the values in their sentences."""
    arrays = history.to_dict()
    keep = arrays["applied"]
    columns = {name: x[keep].astype(np.float64) for name, x in arrays.items()}
    first_norm = float(history.first_norm)
    finite = {name: x[np.isfinite(x)] for name, x in columns.items()}
    found = {"wrongly scaled": wrongly_scaled(arrays)}
    found["lost updates"] = loses_updates(finite, first_norm)
    level = loss_level(columns, float(history.first_loss))
    if level is not None:
        found["loss diverges"] = diverges(level)
        found["loss blew up"] = blew_up(columns, level)
        found["gradients vanished"] = vanished(finite, first_norm, level)
    return [(kind, values) for kind, values in found.items() if values]


def wrongly_scaled(arrays: Columns) -> Values:
    """Whether the loss or the gradient norm changes whenever S does, by its factor."""
    for name, exponent, what in (
        ("loss", 1, "loss grows and falls with the loss scale: it is scaled twice"),
        ("grad_norm", 1, "gradient norm grows and falls with the loss scale: the "
         "gradients are scaled twice, or never unscaled"),
        ("grad_norm", -1, "gradient norm falls where the loss scale grows: the "
         "gradients are unscaled twice"),
    ):  # fmt: skip
        is_positive = np.isfinite(arrays[name]) & (arrays[name] > 0)
        changes = np.diff(np.log2(arrays[name][is_positive]))
        of_s = np.diff(arrays["log2_scale"][is_positive])
        ratios = changes[of_s != 0] / of_s[of_s != 0]
        if len(ratios) >= _LEAST_CHANGES and np.median(abs(ratios - exponent)) < 0.25:
            return {"what": what}
    return None


def loss_level(columns: Columns, first: float) -> Level | None:
    """Returns the present and the best level of the loss; None for too few steps."""
    is_finite = np.isfinite(columns["loss"])
    count = int(is_finite.sum())
    if count < _LEAST_STEPS:
        return None
    block = max(3, min(20, count // 10))  # steps of a median
    pair = columns["loss"], columns["step"]
    loss, step = (x[is_finite][count % block :].reshape(-1, block) for x in pair)
    medians = np.median(loss, 1)
    spreads = np.median(np.abs(loss - medians[:, None]), 1)
    # The lower of the last two blocks, so that a single burst does not count.
    current, earlier = float(medians[-2:].min()), medians[:-2]
    return Level(
        first=first,
        current=current,
        best=float(min(earlier.min(), first)),
        best_step=int(step[np.argmin(earlier), -1]),
        scatter=float(1.4826 * np.median(spreads)),  # a standard deviation, if normal
    )


def diverges(level: Level) -> Values:
    """Whether the loss has lost a quarter of what training had gained."""
    gained = level.first - level.best
    # In a fresh history of a trained model nothing has been gained. The limit is then
    # a quarter of the loss or, if the loss is near zero, six deviations of its scatter.
    limit = max(0.25 * gained, 0.25 * abs(level.best), 6 * level.scatter)
    return None if level.current - level.best <= limit else level._asdict()


def blew_up(columns: Columns, level: Level) -> Values:
    """Whether the loss rose to a multiple of its start, and then stayed near it."""
    loss = np.where(np.isfinite(columns["loss"]), columns["loss"], -np.inf)
    peak, first = int(np.argmax(loss)), level.first
    rose = loss[peak] > first + 2 * abs(first)
    stuck = first - level.current < 0.25 * abs(first)
    if not (rose and stuck and len(loss) - peak > 100):  # it could have recovered
        return None
    step = int(columns["step"][peak])
    return {"peak": loss[peak], "step": step, **level._asdict()}


def vanished(finite: Columns, first_norm: float, level: Level) -> Values:
    """Whether the gradients have vanished while the loss is still near its start."""
    norms = finite["grad_norm"]
    if len(norms) < _LEAST_STEPS or level.current <= 0.5 * level.first:
        return None
    norm = float(np.median(norms[-_LEAST_STEPS:]))
    # The first norm is nonzero, or NaN.
    if norm == 0:
        change = f"has been zero for {_LEAST_STEPS} steps"
    elif norm < 2.0**-13 * first_norm:
        change = f"fell from {first_norm:.3g} to {norm:.3g}"
    else:
        return None
    return {"change": change, **level._asdict()}


def loses_updates(finite: Columns, first_norm: float) -> Values:
    """Whether most of the recent updates were rounded away while they were needed."""
    magnitude = finite["lost_magnitude"][-_RECENT:]
    if len(magnitude) < _LEAST_STEPS:
        return None
    share = float(np.median(magnitude))
    norms = finite["grad_norm"][-_RECENT:]
    # Near a minimum small updates are lost too, but not needed.
    is_steep = len(norms) == 0 or np.median(norms) > 0.2 * first_norm
    if share <= 0.7 or not is_steep:
        return None
    entries = float(np.median(finite["lost_entries"][-_RECENT:]))
    return {"entries": entries, "magnitude": share, "steps": len(magnitude)}
