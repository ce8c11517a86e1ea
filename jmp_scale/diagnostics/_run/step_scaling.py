"""Steps at other loss scales that are applied: they do the same at each."""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from .step_arguments import Path, host
from .step_found import Changes, Check, Found

_POWERS = (-9, -5, -1, 3, 7, 11)  # log2 of S: a clip's threshold may lie between
_ENDS = (-7, 9)  # where a clip leaves one of these pairs alone, there are two
_BETWEEN = (6.7, 10.3)  # no powers of two, at which rounding differs
_HIGHEST = 126  # log2 of the largest S whose inverse is a normal number
_GROWS = 2**30  # a counter at which S grows, whatever its period


def several_s(check: Check) -> Iterator[Found]:
    """The same step at eight S: nothing may grow or fall with S."""
    calls, fixed = check.calls, check.calls.arguments.fixed
    # Each S of a StaticLossScale is a compilation.
    powers: tuple[float, ...] = (*_POWERS, *_ENDS)
    if not calls.scales:
        powers = tuple(np.log2(fixed[0]) + np.array([0, 4])) if fixed else ()
    table: dict[float, tuple[Changes, dict[Path, np.ndarray]]] = {}
    for power in powers:
        run = check.run(f"S = 2^{power:g}", 2.0**power)
        if check.is_alike(run):
            means = {
                path: host(x).astype(np.float64).ravel()
                for path, x in run.after.items()
                if path[-2:] == ("guard", "loss_mean")
            }
            table[power] = calls.changes(run), {**run.results, **means}
    steps = {
        s: {p: c.step for p, c in rows.items() if c.is_float}
        for s, (rows, _) in table.items()
    }
    news = {s: {p: c.new for p, c in rows.items()} for s, (rows, _) in table.items()}
    if steps and not any(x.any() for found in steps.values() for x in found.values()):
        check.not_checked.append(
            "whether gradients are unscaled: they are 0 with these arguments"
        )
    slopes = _slopes(steps, news)
    in_part = [p for p in _with_part_of_s(steps, 1 / 16) if slopes.get(p, -1) < 0]
    for path in in_part:
        yield Found("partly unscaled", check.name(path))
    if in_part:  # squares of these fall with S too
        slopes = {path: slope for path, slope in slopes.items() if slope > 0}
    for path, slope in slopes.items():
        yield Found(
            "never unscaled" if slope > 0 else "unscaled twice", check.name(path)
        )
    if not slopes and not in_part:
        for path in _with_part_of_s(steps, 16):
            yield Found("never unscaled", check.name(path))
    results = {s: found for s, (_, found) in table.items()}
    for path in _slopes(results, results):
        if path in check.base.after:
            yield Found("value is scaled", check.name(path))
        elif "scale" not in "".join(path).lower():
            yield Found("reported scaled", _result_name(path))


def _result_name(path: Path) -> str:
    keys = (f"[{key}]" if key.isdigit() else f"[{key!r}]" for key in path)
    return f"result{''.join(keys)}"


def _slopes(
    table: Mapping[float, dict[Path, np.ndarray]],
    values: Mapping[float, dict[Path, np.ndarray]],
) -> dict[Path, int]:
    """1 or -1 for what grows or falls as S does, or as its square."""
    hits: dict[tuple[Path, int], list[int]] = {}
    powers = sorted(table)
    for low, high in itertools.pairwise(powers):
        for path in table[low]:
            if path not in table[high] or _is_s(values[high][path], high):
                continue
            slopes = _log2_slopes(table[low][path], table[high][path], high - low)
            for sign in (1, -1):
                near = np.abs(slopes[:, None] * sign - [1, 2]).min(1, initial=9) < 0.15
                if near.size and near.mean() > 0.5:
                    hits.setdefault((path, sign), []).append(near.size)
    # Few entries may agree by chance, or by rounding, once or twice. Many agree once
    # where the rest of a gradient underflows from one S to the next.
    least = 2 if len(powers) > 2 else 1
    sure = {
        key
        for key, n in hits.items()
        if len(n) >= least and (max(n) >= 8 or len(n) >= 3)
    }
    paths = table[powers[0]] if powers else ()
    return {path: sign for path in paths for sign in (1, -1) if (path, sign) in sure}


def _log2_slopes(low: np.ndarray, high: np.ndarray, distance: float) -> np.ndarray:
    if low.shape != high.shape:
        return np.zeros(0)
    usable = np.isfinite(low) & np.isfinite(high) & (low != 0) & (high != 0)
    return np.log2(np.abs(high[usable] / low[usable])) / distance


def _is_s(value: np.ndarray, power: float) -> bool:
    """Whether a leaf is S itself, as it is or as it is next."""
    return bool(np.isin(value, 2.0 ** np.array([power - 1, power, power + 1])).all())


def _with_part_of_s(
    steps: Mapping[float, dict[Path, np.ndarray]], factor: float
) -> list[Path]:
    """Leaves whose change is a + b S or a + b / S: its differences are times `factor`.

    S is times 16 from each power to the next. Twice in a row is no chance.
    """
    found = []
    low, high = _POWERS[-2:]
    for first in range(len(_POWERS) - 3):
        powers = _POWERS[first : first + 4]
        if not all(power in steps for power in (*powers, low, high)):
            continue
        for path in steps[powers[0]]:
            values = np.array([steps[power][path] for power in powers])
            one, two, three = np.diff(values, axis=0)
            with np.errstate(all="ignore"):
                is_large = np.abs([one, three]).min(0) > 1e-5 * np.abs(values[-1])
                ratios = np.array([two / one, three / two])[:, is_large]
                rest = steps[high][path][is_large] / steps[low][path][is_large]
            agree = (np.abs(ratios / factor - 1) < 0.1).all(0)
            # Without a, unscaled twice, all of it shrinks 16 times.
            agree &= np.abs(rest) > 0.25
            if agree.size >= 4 and agree.mean() > 0.5:
                found.append(path)
    return list(dict.fromkeys(found))


def larger_s(check: Check) -> Iterator[Found]:
    """The largest S whose step is applied: there it must still be the same."""
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
    # Just below the first S that is skipped, only the largest gradients overflow.
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
        for path in bad or list(_enlarged(changes, references))[:1]:
            yield Found(
                "overflow stays" if bad else "overflow hidden", check.name(path)
            )
            high = low


def _enlarged(changes: Changes, references: list[Changes]) -> Iterator[Path]:
    """Leaves that change much more than in steps at smaller S, which agree."""
    for path, change in changes.items():
        steps = np.array([table[path].step for table in references])
        # Gradients that underflow at a small S, or are rounding alone, depend on S too.
        agree = np.abs(steps - steps[-1]) <= 0.2 * np.abs(steps[-1])
        largest = np.max(np.abs(steps), initial=0)
        is_sure = change.is_float and largest > 0 and agree.all(0).mean() > 0.75
        if is_sure and np.max(np.abs(change.step), initial=0) > 2 * largest:
            yield path


def growing_s(check: Check) -> Iterator[Found]:
    """A step in which S grows: it does what it does where S stays."""
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
    steps = [
        {p: c.step for p, c in changes.items() if c.is_float}
        for changes in (check.changes, calls.changes(run))
    ]
    power = float(np.log2(grown.pop()))
    table = {0.0: steps[0], power: steps[1]}
    nothing = {p: np.full(1, np.nan) for p in steps[0]}
    for path in _slopes(table, {0.0: nothing, power: nothing}):
        yield Found("unscaled by the next S", check.name(path))
