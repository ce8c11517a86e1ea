"""Checks recorded losses and gradient norms for runs that go wrong with finite numbers.

The checks were tuned on runs that go wrong and runs that do not, and measured on other
runs: `benchmarks/health_validation.py` prints how often each check is right.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from .history import LossScaleHistory

_LEAST_STEPS = 40  # with fewer, an early bump looks like a run that goes wrong
_LEAST_CHANGES = 6  # of S; with fewer, a noisy loss may follow S by chance
_RECENT = 100  # steps that the check of updates covers

Columns = dict[str, np.ndarray]  # of the applied steps, as f64[steps]
KindAndValues = tuple[str, dict[str, Any]]  # a finding, and what its sentence names


def trend_findings(history: LossScaleHistory) -> Iterator[KindAndValues]:
    """Yields kinds of findings, and the values in their sentences."""
    arrays = history.to_dict()
    yield from _wrongly_scaled(arrays)
    keep = arrays["applied"]
    columns = {name: x[keep].astype(np.float64) for name, x in arrays.items()}
    norms = columns["grad_norm"][np.isfinite(columns["grad_norm"])]
    yield from _lost_updates(columns, norms, float(history.first_norm))
    keep = np.isfinite(columns["loss"])
    if keep.sum() >= _LEAST_STEPS:
        loss, step = columns["loss"][keep], columns["step"][keep].astype(int)
        yield from _loss_findings(loss, step, norms, history)


def _wrongly_scaled(arrays: Columns) -> Iterator[KindAndValues]:
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
            yield "wrongly scaled", {"what": what}
            return


def _lost_updates(
    columns: Columns, norms: np.ndarray, first_norm: float
) -> Iterator[KindAndValues]:
    """Whether most of the recent updates were rounded away while they were needed."""
    known = np.isfinite(columns["lost_magnitude"])
    magnitude = columns["lost_magnitude"][known][-_RECENT:]
    entries = columns["lost_entries"][known][-_RECENT:]
    if len(magnitude) < _LEAST_STEPS:
        return
    values = {"entries": np.median(entries), "magnitude": np.median(magnitude)}
    # Near a minimum small updates are lost too, but not needed.
    is_steep = len(norms) == 0 or np.median(norms[-_RECENT:]) > 0.2 * first_norm
    if values["magnitude"] > 0.7 and is_steep:
        yield "lost updates", {"steps": len(magnitude), **values}


def _loss_findings(
    loss: np.ndarray, step: np.ndarray, norms: np.ndarray, history: LossScaleHistory
) -> Iterator[KindAndValues]:
    """Findings on finite losses, by their medians over blocks of steps."""
    block = max(3, min(20, len(loss) // 10))  # steps of a median
    blocks = loss[len(loss) % block :].reshape(-1, block)
    medians = np.median(blocks, 1)
    # The lower of the last two blocks, so that a single burst does not count.
    first, current = float(history.first_loss), float(medians[-2:].min())
    best, best_block = float(min(medians[:-2].min(), first)), np.argmin(medians[:-2])
    best_step = int(step[len(loss) % block :][best_block * block + block - 1])
    values = {"first": first, "current": current, "best": best, "best_step": best_step}

    # The loss has lost a quarter of what training had gained. In a fresh history of a
    # trained model nothing has been gained. The limit is then a quarter of the loss or,
    # if the loss is near zero, six standard deviations within the blocks.
    spreads = np.median(np.abs(blocks - medians[:, None]), 1)
    scatter = 1.4826 * np.median(spreads)
    if current - best > max(0.25 * (first - best), 0.25 * abs(best), 6 * scatter):
        yield "loss diverges", values

    # The loss rose to a multiple of its start, and stayed near it for 100 steps.
    peak = int(np.argmax(loss))
    rose = loss[peak] > first + 2 * abs(first)
    if rose and first - current < 0.25 * abs(first) and len(loss) - peak > 100:
        yield "loss blew up", {"peak": loss[peak], "step": int(step[peak]), **values}

    if len(norms) >= _LEAST_STEPS and current > 0.5 * first:
        norm, first_norm = np.median(norms[-_LEAST_STEPS:]), float(history.first_norm)
        change = f"fell from {first_norm:.3g} to {norm:.3g}"
        if norm == 0:
            change = f"has been zero for {_LEAST_STEPS} steps"
        # The first norm is nonzero, or NaN.
        if norm == 0 or norm < 2.0**-13 * first_norm:
            yield "gradients vanished", {"change": change, **values}
