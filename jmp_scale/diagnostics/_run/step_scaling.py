"""Checks that applied steps do the same at every loss scale."""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from .step_arguments import Path, host
from .step_found import Changes, Check, Found

_POWERS = (-9, -5, -1, 3, 7, 11)  # log2 of S: a clip's threshold may lie between
# A clip may leave only the ends alone, or gradients be large and its threshold small.
_ENDS = (-17, -15, -13, -7, 9)
_BETWEEN = (6.7, 10.3)  # rounding differs at these, which are not powers of two
_HIGHEST = 126  # log2 of the largest S whose inverse is a normal number
_ALONE = (-1, 7)  # log2 of one S, while others are 2^3
_GROWS = 2**30  # a counter at which S grows, whatever its period


Rows = dict[Path, tuple[np.ndarray, np.ndarray]]  # (change, new value) by leaf


def several_s(check: Check) -> Iterator[Found]:
    """Checks the same step at eleven S: nothing may grow or fall with S."""
    calls, fixed = check.calls, check.calls.arguments.fixed
    # Each S of a StaticLossScale is a compilation.
    powers: tuple[float, ...] = (*_POWERS, *_ENDS)
    if not calls.scales:
        powers = tuple(np.log2(fixed[0]) + np.array([0, 4])) if fixed else ()
    table: dict[float, Rows] = {}
    results: dict[float, Rows] = {}
    for power in powers:
        run = check.run(f"S = 2^{power:g}", 2.0**power)
        if check.is_alike(run):
            table[power] = _rows(calls.changes(run))
            results[power] = {path: (x, x) for path, x in run.results.items()}
            for path, x in run.after.items():
                if path[-2:] == ("guard", "loss_mean"):
                    mean = host(x).astype(np.float64).ravel()
                    results[power][path] = mean, mean
    if table and not any(x.any() for rows in table.values() for x, _ in rows.values()):
        check.not_checked.append(
            "whether gradients are unscaled: they are 0 with these arguments"
        )
    slopes = _slopes(table)
    in_part: list[Path] = []
    for path in _with_part_of_s(table, 1 / 16) if 1 not in slopes.values() else ():
        # Weight decay and the moments of earlier steps do not depend on S.
        if _is_decay(table, path, check):
            slopes.setdefault(path, -1)
        else:
            in_part.append(path)
            yield Found("partly unscaled", check.name(path))
    if in_part:  # squares of these fall with S too, but not at the largest S
        slopes = _slopes({s: rows for s, rows in table.items() if s >= 3})
    elif not slopes:
        slopes = dict.fromkeys(_with_part_of_s(table, 16), 1)
    for path, slope in slopes.items():
        yield Found(
            "never unscaled" if slope > 0 else "unscaled twice", check.name(path)
        )
    for path in _slopes(results):
        if path in check.base.after:
            yield Found("value is scaled", check.name(path))
        elif "scale" not in "".join(path).lower():
            yield Found("reported scaled", _result_name(path))
    if len(calls.scales) > 1 and not slopes:
        yield from _one_s_alone(check)


def _one_s_alone(check: Check) -> Iterator[Found]:
    """Changes each S alone: together they cancel if one scales and one unscales."""
    for scale in check.calls.scales:
        table = {3.0: _rows(check.changes)}
        for power in _ALONE:
            run = check.run("S alone", {scale: 2.0**power})
            if check.is_alike(run):
                table[power] = _rows(check.calls.changes(run))
        if _slopes(table):
            yield Found("another S", check.node_name(scale, "counter"))


def _rows(changes: Changes) -> Rows:
    return {path: (c.step, c.new) for path, c in changes.items() if c.is_float}


def _result_name(path: Path) -> str:
    keys = (f"[{key}]" if key.isdigit() else f"[{key!r}]" for key in path)
    return f"result{''.join(keys)}"


def _slopes(table: Mapping[float, Rows]) -> dict[Path, int]:
    """Returns 1 or -1 for leaves that grow or fall with S or a power of it."""
    scores: dict[tuple[Path, int], int] = {}
    powers = sorted(table)
    for low, high in itertools.pairwise(powers):
        for path, (step, new) in table[high].items():
            if path not in table[low] or _is_s(new, high):
                continue
            slopes = _log2_slopes(table[low][path][0], step, high - low)[:, None]
            for sign in (1, -1):
                near = np.abs(sign * slopes - [1, 2, 3]).min(1, initial=9) < 0.15
                if near.size and near.mean() > 0.5:
                    # Few entries may agree by chance, or by rounding, once or twice.
                    # Entries that are equal agree as one.
                    is_few = np.unique(step).size < 8
                    score = 2 if is_few else 6 if near.mean() > 0.95 else 3
                    scores[path, sign] = scores.get((path, sign), 0) + score
    enough = 6 if len(powers) > 2 else 3
    paths = table[powers[0]] if powers else ()
    found = itertools.product(paths, (1, -1))
    return {path: sign for path, sign in found if scores.get((path, sign), 0) >= enough}


def _log2_slopes(low: np.ndarray, high: np.ndarray, distance: float) -> np.ndarray:
    if low.shape != high.shape:
        return np.zeros(0)
    # What underflows at the smaller S is no slope: it counts as infinite.
    usable = np.isfinite(low) & np.isfinite(high) & (high != 0)
    with np.errstate(divide="ignore"):
        return np.log2(np.abs(high[usable] / low[usable])) / distance


def _is_s(value: np.ndarray, power: float) -> bool:
    """Whether a leaf is S itself, as it is or as it is next."""
    return bool(np.isin(value, 2.0 ** np.array([power - 1, power, power + 1])).all())


def _with_part_of_s(table: Mapping[float, Rows], factor: float) -> list[Path]:
    """Returns leaves whose change is a + b S or a + b / S.

    S grows 16 times from each power to the next, and the differences of the changes by
    `factor`. Twice in a row, that is not by chance.
    """
    found = []
    low, high = _POWERS[-2:]
    for first in range(len(_POWERS) - 3):
        powers = _POWERS[first : first + 4]
        if not all(power in table for power in (*powers, low, high)):
            continue
        for path in table[powers[0]]:
            values = np.array([table[power][path][0] for power in powers])
            one, two, three = np.diff(values, axis=0)
            with np.errstate(all="ignore"):
                is_large = np.abs([one, three]).min(0) > 1e-5 * np.abs(values[-1])
                ratios = np.array([two / one, three / two])[:, is_large]
                rest = (table[high][path][0] / table[low][path][0])[is_large]
            agree = (np.abs(ratios / factor - 1) < 0.1).all(0)
            # If a is 0 (unscaled twice), the whole change shrinks 16 times.
            agree &= np.abs(rest) > 0.25
            if agree.size >= 4 and agree.mean() > 0.5:
                found.append(path)
    return list(dict.fromkeys(found))


def _is_decay(table: Mapping[float, Rows], path: Path, check: Check) -> bool:
    """Whether the constant part is a multiple of the falling one, or of the weights."""
    powers = [power for power in sorted(table) if power >= _POWERS[0]]
    low, middle, *_, high = (table[power][path][0] for power in powers)
    old = check.changes[path].old
    others = [middle - low] + [old] * (not check.calls.is_optimizer(path))
    norms = [np.linalg.norm(high) * np.linalg.norm(x) for x in others]
    return any(abs(high @ x) > 0.9 * n for x, n in zip(others, norms, strict=True))


def larger_s(check: Check) -> Iterator[Found]:
    """Checks that the step is still the same at the largest S that is applied."""
    calls = check.calls
    if not calls.scales or check.has("never unscaled", "unscaled twice"):
        return
    references = [check.changes]
    for power in _BETWEEN:
        run = check.run("larger S", 2.0**power)
        if check.is_alike(run):
            references.append(calls.changes(run))
    if len(references) <= len(_BETWEEN):
        check.not_checked.append("hidden overflow: steps at S = 2^11 are skipped")
        return
    low, high = float(_POWERS[-1]), float(_HIGHEST)
    # Just below the smallest S that is skipped, only the largest gradients overflow.
    while high - low > 2.0**-6:
        middle = np.floor((low + high) / 2) if high - low > 1 else (low + high) / 2
        run = check.run("larger S", 2.0**middle)
        if run is None:
            return
        if not check.is_alike(run):
            high = middle
            continue
        low, changes = middle, calls.changes(run)
        bad = [path for path, change in changes.items() if not change.stays_finite]
        for path in bad or list(_differing(changes, references))[:1]:
            yield Found(
                "overflow stays" if bad else "overflow hidden", check.name(path)
            )
            high = low


def _differing(changes: Changes, references: list[Changes]) -> Iterator[Path]:
    """Finds leaves that change more or less than at smaller S, where they agree."""
    for path, change in changes.items():
        steps = np.array([table[path].step for table in references])
        # Gradients that underflow or consist of rounding errors depend on S too.
        agree = np.abs(steps - steps[-1]) <= 0.2 * np.abs(steps[-1])
        usual = np.max(np.abs(steps), initial=0)
        is_sure = change.is_float and usual > 0 and agree.all(0).mean() > 0.75
        largest = np.max(np.abs(change.step), initial=0)
        if is_sure and not usual / 2 <= largest <= 2 * usual:
            yield path


def growing_s(check: Check) -> Iterator[Found]:
    """Checks that a step in which S grows is the same as one in which S stays."""
    calls = check.calls
    run = check.run("a growing S", counter=_GROWS) if calls.scales else None
    if run is None or calls.skipped(run):
        return
    grown = {
        float(np.max(host(run.after[*scale, "loss_scale"]))) / 8
        for scale in calls.scales
        if (*scale, "loss_scale") in run.after
    } - {1.0}
    if len(grown) != 1 or min(grown) < 1:
        return
    table = {0.0: check.changes, float(np.log2(grown.pop())): calls.changes(run)}
    for path in _slopes({power: _rows(changes) for power, changes in table.items()}):
        yield Found("unscaled by the next S", check.name(path))
