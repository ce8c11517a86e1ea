"""The window of loss scales at which a float16 gradient is precise."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from .._tables import power, printed

TRIED = tuple(2.0**k for k in range(-4, 25, 2))  # up to a `DynamicLossScale`'s cap
_LEAST, _MOST = 1.0, 2.0**24  # range of S of a `DynamicLossScale` by default
_ROOM = 4  # overflows lie at least this factor above a recommended S
_EXACT = 2.0**-8  # errors of a leaf that differ by less are those of rounding


@printed
class Window(NamedTuple):
    """Loss scales that work, of those that were tried.

    At each of them the error is bearable, no leaf is lost, and the loss and all
    gradients are finite. S = 1 is among them only if each leaf is as exact at 1 as at
    its best S: within 2^-8 of its norm.

    Attributes:
      lowest: the lowest S of the window.
      highest: the highest S of the window.
      start: S to start from: a quarter of `highest`, but in the window and, if
        possible, in the range of a `DynamicLossScale()`.
    """

    lowest: float
    highest: float
    start: float

    def summary(self) -> str:
        """Returns the window in a sentence."""
        text = f"Loss scales from {power(self.lowest)} to {power(self.highest)} work"
        if self.lowest <= 1 <= self.highest:
            return f"{text}, including 1: loss scaling is not needed here."
        return f"{text}: start from {power(self.start)}."


def window_of(
    scales: Sequence[float], works: Sequence[bool], errors: Sequence[Sequence[float]]
) -> Window | None:
    """Returns the longest run of neighbors that work, the lower of two; None if none.

    Args:
      scales: increasing loss scales.
      works: whether each of them works.
      errors: for each of them the errors of the leaves that are not noise.
    """
    found = [i for i, works_here in enumerate(works) if works_here]
    # The members of a run of neighbors have one difference to their position.
    runs = itertools.groupby(enumerate(found), lambda pair: pair[1] - pair[0])
    run = max(([i for _, i in run] for _, run in runs), key=len, default=[])
    run = _without_inexact_one(run, scales, errors)
    if not run:
        return None
    lowest, highest = scales[run[0]], scales[run[-1]]
    start = min(max(highest / _ROOM, lowest, _LEAST), highest)
    return Window(lowest, highest, max(min(start, _MOST), lowest))


def _without_inexact_one(
    run: list[int], scales: Sequence[float], errors: Sequence[Sequence[float]]
) -> list[int]:
    """Drops S = 1, and what is below or above it, if another S is more exact."""
    ones = [i for i in run if scales[i] == 1]
    if not ones:
        return run
    (one,) = ones
    for leaf in range(len(errors[one])):
        best = min(reversed(run), key=lambda i: errors[i][leaf])
        if errors[one][leaf] - errors[best][leaf] > _EXACT:
            return [i for i in run if (i - one) * (best - one) > 0]
    return run
