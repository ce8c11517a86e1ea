"""Checks recorded losses and gradient norms for runs that go wrong with finite numbers.

The checks were tuned on runs that go wrong and runs that do not, and measured on other
runs: `benchmarks/health_validation.py` prints how often each check is right.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from .history import LossScaleHistory

_LEAST_STEPS = 40  # with fewer, an early bump looks like a run that goes wrong
_RECENT = 100  # steps that the checks of updates and of norms cover
_WIDE = 101  # steps of a running median: longer than an oscillation or a burst

Columns = dict[str, np.ndarray]  # of the applied steps, as f64[steps]
KindAndValues = tuple[str, dict[str, Any]]  # a finding, and what its sentence names


def trend_findings(history: LossScaleHistory) -> Iterator[KindAndValues]:
    """Yields kinds of findings, and the values in their sentences."""
    arrays = history.to_dict()
    keep = arrays["applied"]
    columns = {name: x[keep].astype(np.float64) for name, x in arrays.items()}
    norms = columns["grad_norm"][np.isfinite(columns["grad_norm"])]
    yield from _lost_updates(columns, norms, float(history.first_norm))
    yield from _growing_norm(norms, float(history.first_norm))
    keep = np.isfinite(columns["loss"])
    if keep.sum() >= _LEAST_STEPS:
        loss, step = columns["loss"][keep], columns["step"][keep].astype(int)
        yield from _loss_findings(loss, step, float(history.first_loss))
        yield from _unsteady(loss, step, float(history.first_loss))


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


def _growing_norm(norms: np.ndarray, first_norm: float) -> Iterator[KindAndValues]:
    """Whether the gradient norm has grown a hundredfold, and is still growing."""
    if len(norms) < 2 * _RECENT:
        return
    now, before = np.median(norms[-_LEAST_STEPS:]), np.median(norms[:-_RECENT])
    if now > 100 * first_norm and now > 10 * before:
        yield "growing norm", {"first": first_norm, "norm": now}


def _loss_findings(
    loss: np.ndarray, step: np.ndarray, first: float
) -> Iterator[KindAndValues]:
    """Findings on finite losses, by their medians over blocks of steps."""
    block = max(3, min(20, len(loss) // 10))  # steps of a median
    blocks = loss[len(loss) % block :].reshape(-1, block)
    medians = np.median(blocks, 1)
    # The lower of the last two blocks, so that a single burst does not count.
    current = float(medians[-2:].min())
    best, best_block = float(min(medians[:-2].min(), first)), np.argmin(medians[:-2])
    best_step = int(step[len(loss) % block :][best_block * block + block - 1])
    values = {"first": first, "current": current, "steps": len(loss), "more": ""}

    # The loss has lost a quarter of what training had gained. In a fresh history of a
    # trained model nothing has been gained. The limit is then a quarter of the loss or,
    # if the loss is near zero, six standard deviations within the blocks.
    scatter = np.median([_scatter(x) for x in blocks])
    if current - best > max(0.25 * (first - best), 0.25 * abs(best), 6 * scatter):
        yield "loss diverges", {"best": best, "best_step": best_step, **values}

    # The loss rose to a multiple of its start, and stayed near it for 150 steps.
    peak = int(np.argmax(loss))
    rose = loss[peak] > first + 2 * abs(first) and len(loss) - peak > 150
    if rose and first - current < 0.25 * abs(first):
        more = f", and {loss[peak]:.3g} at step {step[peak]}"
        yield "no progress", {**values, "more": more}

    start, now = np.median(loss[:20]), np.median(loss[-_RECENT:])
    if step[0] == 0 and len(loss) >= 3 * _WIDE and start - now < 0.02 * abs(start):
        yield "no progress", values


def _unsteady(
    loss: np.ndarray, step: np.ndarray, first: float
) -> Iterator[KindAndValues]:
    """Findings on a loss that swings or leaps."""
    if len(loss) < 3 * _WIDE:
        return
    ends = np.pad(loss, _WIDE // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(ends, _WIDE)
    level = np.median(windows, 1)
    # What training has gained counts, so that noise near a loss of zero does not.
    size = np.maximum(np.abs(level), 0.25 * (first - level))
    leaps = np.divide(loss - level, size, out=np.zeros_like(loss), where=size > 0)

    # A swing is one line of the spectrum. Noise has no line, and bursts have many.
    power = np.abs(np.fft.rfft(np.clip(leaps, -2, 2))) ** 2
    lines = power[1:-1] + power[:-2] + power[2:]
    line = int(np.argmax(lines[4:])) + 5
    amplitude = 2 * np.sqrt(lines[line - 1]) / len(loss)
    if amplitude > 0.3 and lines[line - 1] > 0.35 * power[1:].sum():
        yield "loss oscillates", {"swing": amplitude, "period": len(loss) / line}

    burst = leaps > max(1, 10 * _scatter(leaps))
    if loss.min() > 0:  # the losses of many batches spread like exp of noise
        ratio = np.log(loss / level)
        burst &= ratio > 5 * _scatter(ratio)
    starts = step[1:][burst[1:] & ~burst[:-1]]
    if len(starts) >= max(5, 0.015 * len(loss)):
        values = {"bursts": len(starts), "every": int(np.median(np.diff(starts)))}
        yield "bursts", {"steps": len(loss), **values}


def _scatter(x: np.ndarray) -> float:
    """Returns the standard deviation, as that of most entries."""
    return 1.4826 * float(np.median(np.abs(x - np.median(x))))
