"""Checks that applied steps do the same at every loss scale."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from .step_calls import Change, Check, Run
from .step_leaves import Path, host, is_float, sampled

# log2 of S. A clip's threshold may lie between, and it may leave only the ends alone.
_POWERS = (-17, -15, -13, -9, -7, -5, -1, 3, 9, 11, 13)
_FLAT = -13  # log2 of S at which a clip of scaled gradients does nothing yet
_GROWS = 2**30  # a counter at which S grows, whatever its period

Rows = dict[Path, np.ndarray]  # a change or a result by path


def several_s(check: Check) -> None:
    """Checks the same step at several S: nothing may grow or fall with S."""
    table: dict[float, Rows] = {}
    results: dict[float, Rows] = {}
    for power in _POWERS if check.scales else ():
        run: Run | None = check.base
        if 2.0**power != check.s:
            run = check.run(f"S = 2^{power}", 2.0**power)
        if not check.is_alike(run):
            continue
        table[power] = _steps(run.changes, power)
        named = {p: x for p, x in run.after.items() if p[-2:] == ("guard", "loss_mean")}
        named |= {path: x for path, x in run.results.items() if is_float(x)}
        rows = {path: sampled(host(x)) for path, x in named.items()}
        results[power] = {p: x for p, x in rows.items() if not _is_s(x, power)}
    steps = [x for rows in table.values() for x in rows.values()]
    if table and not any(x.any() for x in steps):
        check.add("gradients of zero" if steps else "nothing comes back")
    clipped = _clipped(check, table)
    for path in clipped:
        check.add("clipped while scaled", path)
    for path, slope in _slopes(table).items():
        if slope > 0:
            check.add("never unscaled", path)
        elif not clipped:
            check.add("unscaled twice", path)
    for path in _slopes(results):
        if path in check.base.after:
            check.add("reported scaled", path)
        elif "scale" not in "".join(path).lower():
            check.add("reported scaled", "".join(["result", *(f"[{x}]" for x in path)]))


def _steps(changes: Mapping[Path, Change], power: float) -> Rows:
    floats = {path: change for path, change in changes.items() if change.is_float}
    return {p: c.step for p, c in floats.items() if not _is_s(c.new, power)}


def _is_s(value: np.ndarray, power: float) -> bool:
    """Whether a leaf is S itself, as it is or as it is next."""
    return bool(np.isin(value, 2.0 ** np.array([power - 1, power, power + 1])).all())


def _slopes(table: Mapping[float, Rows]) -> dict[Path, int]:
    """Returns 1 or -1 for leaves that grow or fall with S or a power of it."""
    votes: Counter[tuple[Path, int]] = Counter()
    powers = sorted(table)
    for low, high in itertools.pairwise(powers):
        for path, new in table[high].items():
            old = table[low].get(path)
            if old is None or old.shape != new.shape:
                continue
            # What underflows at the smaller S is no slope: it counts as infinite.
            usable = np.isfinite(old) & np.isfinite(new) & (new != 0)
            with np.errstate(divide="ignore"):
                slopes = np.log2(np.abs(new[usable] / old[usable])) / (high - low)
            for sign in (1, -1) if slopes.size else ():
                gaps = np.abs(sign * slopes[:, None] - [1, 2, 3]).min(1)
                share = np.mean(gaps < 0.15)
                if share > 0.5:
                    # Few entries may agree by chance, or by rounding, once or twice.
                    # Entries that are equal agree as one.
                    is_few = np.unique(new).size < 8
                    votes[path, sign] += 2 if is_few else 6 if share > 0.95 else 3
    enough = 6 if len(powers) > 2 else 3
    found = itertools.product(table[powers[0]] if powers else (), (1, -1))
    return {path: sign for path, sign in found if votes[path, sign] >= enough}


def _clipped(check: Check, table: Mapping[float, Rows]) -> list[Path]:
    """Returns leaves whose change is the same at some small S, and then falls with S.

    Moments show it, or the parameters where an optimizer has none.
    """
    slopes = _slopes(table)
    flat = table.get(_FLAT, {})
    has_moments = any(path in check.in_optimizers for path in flat)
    found = []
    for path in flat:
        powers = [power for power in sorted(table) if path in table[power]]
        rows = [table[power][path] for power in powers]
        is_full = len(rows) > 4 and all(np.isfinite(row).all() for row in rows)
        if not (is_full and _stays_first(rows)):
            continue
        falls = slopes.get(path) == -1 or _falls_at_last(powers[-3:], rows[-3:])
        if falls and (path in check.in_optimizers) >= has_moments:
            found.append(path)
    # Gradients that are unscaled twice are large at a small S, where the optimizer may
    # clip them: other weights leave the size of their change.
    run = check.with_other_weights(2.0**_FLAT) if found else None
    if run is not None:
        old = np.linalg.norm([np.linalg.norm(flat[path]) for path in found])
        new = np.linalg.norm([np.linalg.norm(run.change(p).step) for p in found])
        if np.abs(new - old) < 1e-3 * old:
            return []
    return found


def _stays_first(rows: Sequence[np.ndarray]) -> bool:
    """Whether a change is the same at some small S before it falls with S."""
    for low, high in itertools.pairwise(rows):
        size = np.linalg.norm(high)
        if size and np.linalg.norm(high - low) < 0.1 * size:
            return True
        if np.linalg.norm(low) > 1.5 * size:
            return False
    return False


def _falls_at_last(powers: Sequence[float], rows: Sequence[np.ndarray]) -> bool:
    """Whether most entries that still change at the largest S are a + b / S there.

    With a clip by value, each entry begins to fall at an S of its own.
    """
    first, middle = rows[0] - rows[1], rows[1] - rows[2]
    still = np.abs(first) > 1e-3 * np.max(np.abs(rows[2]))
    inverse = [2.0**-power for power in powers]
    expected = (inverse[0] - inverse[1]) / (inverse[1] - inverse[2])
    with np.errstate(divide="ignore", invalid="ignore"):
        agree = np.abs(first[still] / middle[still] / expected - 1) < 0.1
    return agree.size >= 4 and bool(agree.mean() > 0.5)


def growing_s(check: Check) -> None:
    """Checks that a step in which S grows is the same as one in which S stays."""
    run = check.run("a growing S", counter=_GROWS) if check.scales else None
    if run is None or run.skipped or not run.moved((*check.scales[0], "loss_scale")):
        return
    s = run.change((*check.scales[0], "loss_scale"))
    grown = float(np.log2(s.new / s.old).max())
    table = {0.0: _steps(check.base.changes, 0), grown: _steps(run.changes, grown)}
    for path in _slopes(table):
        check.add("unscaled by the next S", path)
