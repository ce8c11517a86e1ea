"""Whether entries grow or fall with S, told from exact powers of two.

S is a power of two, and so is the factor between two of them. What is left scaled, or
is unscaled once too often, is a sum of terms of which one has a power of S as a factor,
and no other depends on S. So of three S, each 2^k times the one before, the two
differences have a ratio of 2^k or 2^-k or a power of these, entry by entry, up to
rounding: old moments, decay and clean gradients cancel. In float32 a right step has no
differences. Where numbers underflow it has some, whose ratios are others.
"""

import itertools
from typing import NamedTuple

import numpy as np

# A rounding of each of three entries, and one of their sum with another term.
_ROUNDINGS = 4.0
_CLEAR = 16.0  # times as large as its roundings, a difference has four bits of its own
_POWERS = 1, 2  # a second moment grows with the square of S
# Where much underflows, so many entries agree by chance: 8 of three S, or 4 of all.
_OF_THREE, _OF_ALL = 8, 4


class Row(NamedTuple):
    """The entries of a leaf at several S."""

    powers: list[int]  # log2 of S
    entries: np.ndarray  # f64[S, entries]
    eps: float  # of its dtype
    is_exact: bool  # whether nothing underflows

    @property
    def is_s(self) -> bool:
        """Whether all entries that differ are S, as it is or as it is next."""
        powers, rows = np.array(self.powers)[:, None], self.entries
        rows = rows[:, (rows != rows[:1]).any(0)]
        is_s = ((rows == 2.0 ** (powers + i)).all() for i in (-1, 0, 1))
        return rows.size > 0 and any(is_s)

    @property
    def counts(self) -> list[int]:
        """Returns `count_of_power` of each three S in turn; 0 if their gaps differ."""
        steps, gaps = np.diff(self.entries, axis=0), np.diff(self.powers)
        counts = []
        for i, gap in enumerate(gaps[:-1]):
            unit = self.eps * abs(self.entries[i : i + 3]).max(0)
            old, new = steps[i], steps[i + 1]
            count = count_of_power(old, new, int(gap), unit, self.is_exact)
            counts.append(count if gap == gaps[i + 1] else 0)
        return counts

    @property
    def direction(self) -> int:
        """Returns 1 or -1 if entries grow or fall with S or its square, else 0."""
        for way in (1, -1):
            agree = [abs(count) for count in self.counts if count * way > 0]
            is_chance = max(agree, default=0) < _OF_THREE and sum(agree) < _OF_ALL
            if agree and (self.is_exact or not is_chance):
                return way
        return 0

    @property
    def falls_at_once(self) -> bool:
        """Whether entries fall from the smallest S on, where no clip is reached."""
        return self.is_exact and min(self.counts[:1], default=0) < 0

    @property
    def has_cause(self) -> bool:
        return self.direction > 0 or self.falls_at_once

    @property
    def is_unclear(self) -> bool:
        """Whether entries depend on S, by no power."""
        return not self.direction and bool((self.entries != self.entries[:1]).any())

    @property
    def is_flat_below(self) -> bool:
        """Whether entries that fall are the same at two smaller S.

        If all underflow there, they are the same too, but as they are at the largest S.
        """
        first = next((i for i, count in enumerate(self.counts) if count < 0), 0)
        last, rows = self.entries[-1], self.entries[: first + 1]
        moved = rows[-1] != last
        for low, high in itertools.pairwise(rows):
            if np.mean((low == high)[moved]) > 0.5:
                old, new = np.linalg.norm(rows[-1] - last), np.linalg.norm(high - last)
                return bool(new >= old)
        return False


def count_of_power(
    old: np.ndarray, new: np.ndarray, k: int, unit: np.ndarray, is_exact: bool = True
) -> int:
    """Returns how many entries have a ratio of 2^k or its square; below 0 of 2^-k.

    It is 0 if most of those that differ have another ratio. `unit` is the last place of
    each entry. Of an exact row the smaller difference may be lost in rounding, because
    nothing else makes one of them so small.
    """
    off, differ = _ROUNDINGS * unit, ((old != 0) | (new != 0)).sum()
    smaller, larger = np.sort([abs(old), abs(new)], axis=0)
    is_clear = (old != 0) & ((larger if is_exact else smaller) > _CLEAR * off)
    grows = is_exact & (smaller > _CLEAR * off)  # with the roundings of `old`
    for way in (1, -1):
        factors = [2.0 ** (way * k * power) for power in _POWERS]
        limits = [np.where(grows, max(factor, 1), 1) * off for factor in factors]
        pairs = zip(factors, limits, strict=True)
        agree = [abs(new - old * factor) <= limit for factor, limit in pairs]
        agree[1] &= new != 0  # what a clip limits stays as it is from some S on
        agree = np.any(agree, axis=0)
        count = int((agree & is_clear & (way * (abs(new) - abs(old)) > 0)).sum())
        if count > differ / 2:
            return way * count
    return 0
