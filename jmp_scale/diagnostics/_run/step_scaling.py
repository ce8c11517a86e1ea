"""Checks that applied steps do the same at every loss scale."""

import itertools
from collections import Counter, defaultdict

import numpy as np

from .step_calls import Check, Path, Run, host, is_float, sampled

# log2 of S. A clip's threshold may lie between, and it may leave only the ends alone.
_POWERS = (-17, -15, -13, -9, -5, -1, 3, 9, 11, 13)
_FLAT = -13  # log2 of S at which a clip of scaled gradients does nothing yet
_GROWS = 2**30  # a counter at which S grows, whatever its period

Rows = dict[float, np.ndarray]  # the change of a leaf, or a result, by log2 of S


def several_s(check: Check) -> None:
    """Checks the same step at several S: nothing may grow or fall with S."""
    _growing_s(check)
    table: dict[Path, Rows] = defaultdict(dict)
    for power in _POWERS if check.scales else ():
        run: Run | None = check.base
        if 2.0**power != check.s:
            run = check.run(f"S = 2^{power}", 2.0**power)
        if check.is_alike(run):
            for path, row in _rows(run, power).items():
                table[path][power] = row
    state = {path: rows for path, rows in table.items() if path in check.base.changes}
    if check.scales and not state:
        check.add("nothing comes back")
    elif state and not any(x.any() for rows in state.values() for x in rows.values()):
        check.add("gradients of zero")
    clipped = _clipped(check, state)
    for path in clipped:
        check.add("clipped while scaled", path)
    for path, slope in [(path, _slope(rows)) for path, rows in table.items()]:
        if slope > 0 and path in state:
            check.add("never unscaled", path)
        elif slope < 0 and path in state and not clipped:
            check.add("unscaled twice", path)
        elif slope and path in check.base.after and path not in state:
            check.add("reported scaled", path)
        elif slope and path[0] == "result" and "scale" not in "".join(path).lower():
            where = "".join(f"[{key}]" for key in path[1:])
            check.add("reported scaled", f"result{where}")


def _rows(run: Run, power: float) -> dict[Path, np.ndarray]:
    """Returns changes of the state, results and the guard's loss, but not S itself."""
    results = {("result", *p): x for p, x in run.results.items() if is_float(x)}
    means = [(*state, "guard", "loss_mean") for state in run.check.states]
    results |= {path: run.after[path] for path in means if path in run.after}
    rows = {path: sampled(host(x)) for path, x in results.items()}
    floats = {path: c for path, c in run.changes.items() if c.is_float}
    values = rows | {path: change.new for path, change in floats.items()}
    rows |= {path: change.step for path, change in floats.items()}
    s = 2.0 ** np.array([power - 1, power, power + 1])  # as it is, or as it is next
    return {p: row for p, row in rows.items() if not np.isin(values[p], s).all()}


def _slope(rows: Rows) -> int:
    """Returns 1 or -1 if entries grow or fall with S or a power of it, else 0."""
    votes: Counter[int] = Counter()
    for low, high in itertools.pairwise(sorted(rows)):
        old, new = rows[low], rows[high]
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
                votes[sign] += 2 if is_few else 6 if share > 0.95 else 3
    enough = 6 if len(rows) > 2 else 3
    return next((sign for sign in (1, -1) if votes[sign] >= enough), 0)


def _clipped(check: Check, table: dict[Path, Rows]) -> list[Path]:
    """Returns leaves whose change is the same at some small S, and then falls with S.

    Moments show it, or the parameters where an optimizer has none.
    """
    flat = [path for path, rows in table.items() if _FLAT in rows]
    moments = [path for path in flat if path in check.in_optimizers]
    found = [path for path in moments or flat if _stays_then_falls(table[path])]
    # Gradients that are unscaled twice are large at a small S, where the optimizer may
    # clip them: other weights leave the size of their change.
    run = check.with_other_weights(2.0**_FLAT) if found else None
    if run is not None:
        old = np.linalg.norm([np.linalg.norm(table[path][_FLAT]) for path in found])
        new = np.linalg.norm([np.linalg.norm(run.change(p).step) for p in found])
        if np.abs(new - old) < 1e-3 * old:
            return []
    return found


def _stays_then_falls(rows: Rows) -> bool:
    """Whether a change is the same at two small S, and less at the largest."""
    steps = [rows[power] for power in sorted(rows)]
    for low, high in itertools.pairwise(steps):
        size = np.linalg.norm(high)
        if size and np.linalg.norm(high - low) < 0.1 * size:
            return bool(np.linalg.norm(steps[-1]) < 0.7 * size)
    return False


def _growing_s(check: Check) -> None:
    """Checks that a step in which S grows is the same as one in which S stays."""
    run = check.run("a growing S", counter=_GROWS) if check.scales else None
    if run is None or run.skipped or not run.moved((*check.scales[0], "loss_scale")):
        return
    s = host(run.after[*check.scales[0], "loss_scale"]).max()
    low, high = float(np.log2(check.s)), float(np.log2(s))
    old, new = _rows(check.base, low), _rows(run, high)
    for path in run.changes:
        if path in old and path in new and _slope({low: old[path], high: new[path]}):
            check.add("unscaled by the next S", path)
