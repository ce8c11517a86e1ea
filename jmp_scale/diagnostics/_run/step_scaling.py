"""Checks that applied steps do the same at every loss scale."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from .step_calls import Change, Check, Run
from .step_leaves import Path, host, is_float, sampled

# log2 of S. A clip's threshold may lie between, and it may leave only the ends alone.
_POWERS = (-17, -15, -13, -9, -7, -5, -1, 3, 7, 9, 11)
_FLAT = -13  # log2 of S at which a clip of scaled gradients does nothing yet
_ALONE = (-1, 7)  # log2 of one S, while others are those of the base
_BETWEEN = (6.7, 10.3)  # rounding differs at these, which are not powers of two
_HIGHEST = 126  # log2 of the largest S whose inverse is a normal number
_GROWS = 2**30  # a counter at which S grows, whatever its period

Rows = dict[Path, np.ndarray]  # a change or a result by path
Changes = Mapping[Path, Change]


def several_s(check: Check) -> None:
    """Checks the same step at eleven S: nothing may grow or fall with S."""
    powers: Sequence[float] = _POWERS
    if not check.scales:  # each S of a StaticLossScale is a compilation
        powers = [
            np.log2(check.s or s) + more for s in check.fixed[:1] for more in (0, 4)
        ]
    table: dict[float, Rows] = {}
    results: dict[float, Rows] = {}
    for power, run in _alike(check, powers):
        table[power] = _steps(run.changes, power)
        named = {p: x for p, x in run.after.items() if p[-2:] == ("guard", "loss_mean")}
        named |= {path: x for path, x in run.results.items() if is_float(x)}
        rows = {path: sampled(host(x)) for path, x in named.items()}
        results[power] = {p: x for p, x in rows.items() if not _is_s(x, power)}
    steps = [x for rows in table.values() for x in rows.values()]
    if table and not any(x.any() for x in steps):
        check.add("gradients of zero" if steps else "nothing comes back")
    slopes = _slopes(table)
    if 1 not in slopes.values() and len(table) > 2:
        slopes |= dict.fromkeys(_in_part(table, max(table), -1), -1)
        slopes = slopes or dict.fromkeys(_in_part(table, -1, 1), 1)
    # A clip of scaled gradients falls too, but only from some S on.
    clipped = []
    for path in table.get(max(table, default=0), {}):
        powers = [power for power in sorted(table) if path in table[power]]
        rows = [table[power][path] for power in powers]
        is_full = len(rows) > 4 and all(np.isfinite(row).all() for row in rows)
        if is_full and _stays_first(rows):
            falls = _falls_at_last(powers[-3:], rows[-3:])
            clipped += [path] if falls or slopes.get(path) == -1 else []
    moments = [path for path in clipped if check.is_optimizer(path)]
    has_moments = any(map(check.is_optimizer, table.get(_FLAT, {})))
    clipped = moments if has_moments else clipped
    if clipped and _is_of_one_size(check, table.get(_FLAT, {}), clipped):
        clipped = []
    for path in clipped:
        check.add("clipped while scaled", path)
    falling = [path for path, slope in slopes.items() if slope < 0 and not clipped]
    for path in [path for path, slope in slopes.items() if slope > 0]:
        check.add("never unscaled", path)
    # A decay in the optimizer keeps a part too, where all gradients fall.
    is_part = all(_keeps_a_part(check, table, path) for path in falling)
    for path in falling:
        check.add("partly unscaled" if is_part else "unscaled twice", path)
    for path in _slopes(results):
        if path in check.base.after:
            check.add("value is scaled", path)
        elif "scale" not in "".join(path).lower():
            keys = (f"[{key}]" if key.isdigit() else f"[{key!r}]" for key in path)
            check.add("reported scaled", f"result{''.join(keys)}")
    # Together they cancel if one scales and one unscales.
    for scale in check.scales if len(check.scales) > 1 and not slopes else ():
        power = np.log2(check.s or 1)
        table = {power: _steps(check.base.changes, power)}
        for power, run in _alike(check, _ALONE, scale):
            table[power] = _steps(run.changes, power)
        if _slopes(table):
            check.add("another S", check.node_name(scale))


def _alike(
    check: Check, powers: Sequence[float], only: Path | None = None
) -> Iterator[tuple[float, Run]]:
    """Calls the step at several S, and yields log2 of S and the runs as at S = 8."""
    base = np.log2(check.s or check.fixed[0])
    for power in powers:
        run: Run | None = check.base
        if power != base or only is not None:
            run = check.run(f"S = 2^{power:g}", 2.0**power, only)
        if check.is_alike(run):
            yield power, run


def _steps(changes: Changes, power: float) -> Rows:
    floats = {path: change for path, change in changes.items() if change.is_float}
    return {p: c.step for p, c in floats.items() if not _is_s(c.new, power)}


def _is_s(value: np.ndarray, power: float) -> bool:
    """Whether a leaf is S itself, as it is or as it is next."""
    return bool(np.isin(value, 2.0 ** np.array([power - 1, power, power + 1])).all())


def _slopes(table: Mapping[float, Rows], tolerance: float = 0.15) -> dict[Path, int]:
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
                share = np.mean(gaps < tolerance)
                if share > 0.5:
                    # Few entries may agree by chance, or by rounding, once or twice.
                    # Entries that are equal agree as one.
                    is_few = np.unique(new).size < 8
                    votes[path, sign] += 2 if is_few else 6 if share > 0.95 else 3
    enough = 6 if len(powers) > 2 else 3
    found = itertools.product(table[powers[0]] if powers else (), (1, -1))
    return {path: sign for path, sign in found if votes[path, sign] >= enough}


def _in_part(table: Mapping[float, Rows], power: float, sign: int) -> list[Path]:
    """Returns leaves whose change is a + b S, or a + b / S if `sign` is -1.

    The difference from the change at an S where that part is small is then b S.
    """
    constant = table.get(power, {})
    differences: dict[float, Rows] = {}
    for s, rows in table.items():
        differences[s] = {}
        for path in rows.keys() & constant.keys():
            gap = rows[path] - constant[path]
            is_large = np.abs(gap) > 1e-5 * np.abs(constant[path])
            differences[s][path] = np.where(is_large, gap, 0)
    slopes = _slopes(differences, 0.04)
    return [path for path in constant if slopes.get(path) == sign]


def _keeps_a_part(check: Check, table: Mapping[float, Rows], path: Path) -> bool:
    """Whether a part of a change that falls with S is left at the largest S.

    Weight decay and moments of earlier steps do not depend on S either: these are
    multiples of the weights, or of the part that falls.
    """
    powers = [power for power in sorted(table) if path in table[power]]
    middle, last = table[powers[len(powers) // 2]][path], table[powers[-1]][path]
    distance, largest = powers[-1] - powers[-2], np.linalg.norm(last)
    if largest < 2 ** (-distance / 2) * np.linalg.norm(table[powers[-2]][path]):
        return False
    others = [middle - last]
    if not check.is_optimizer(path):
        others.append(check.base.changes[path].old)
    return not any(abs(last @ x) > 0.9 * largest * np.linalg.norm(x) for x in others)


def _is_of_one_size(check: Check, rows: Rows, paths: Sequence[Path]) -> bool:
    """Whether other weights leave the size of a change: the optimizer clips it.

    Gradients that are unscaled twice are large at a small S, and clipped there.
    """
    weights = [
        p for p in rows if not check.is_optimizer(p) and check.base.changes[p].ndim
    ]
    values = {path: 1.5 * host(check.start[path]) + 0.01 for path in weights}
    run = check.run("other weights", 2.0**_FLAT, values=values)
    if run is None or not run.is_applied or not all(path in rows for path in paths):
        return False
    old = np.linalg.norm([np.linalg.norm(rows[path]) for path in paths])
    new = np.linalg.norm([np.linalg.norm(run.change(path).step) for path in paths])
    return bool(np.abs(new - old) < 1e-3 * old)


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
    if still.sum() < 4:
        return False
    found = np.zeros(still.sum(), bool)
    for n in (1, 2):
        inverse = [2.0 ** (-n * power) for power in powers]
        expected = (inverse[0] - inverse[1]) / (inverse[1] - inverse[2])
        with np.errstate(divide="ignore", invalid="ignore"):
            found |= np.abs(first[still] / middle[still] / expected - 1) < 0.1
    return bool(found.mean() > 0.5)


def larger_s(check: Check) -> None:
    """Checks that the step is still the same at the largest S that is applied."""
    known = "never unscaled", "unscaled twice", "clipped while scaled"
    if not check.scales or check.has(*known, "S never adjusted"):
        return
    references = [check.base.changes]
    references += [run.changes for _, run in _alike(check, _BETWEEN)]
    if len(references) == 1:
        check.not_checked.append("hidden overflow: steps at S = 2^11 are skipped")
        return
    low, high = float(_POWERS[-1]), float(_HIGHEST)
    # Just below the smallest S that is skipped, only the largest gradients overflow.
    while high - low > 2.0**-6:
        middle = (low + high) / 2
        run = check.run("larger S", 2.0**middle)
        if not check.is_alike(run):
            high = middle
            continue
        low = middle
        bad = [path for path, x in run.changes.items() if not x.stays_finite]
        other = _differing(run.changes, references)[:1]
        for path in bad or other:
            lower = check.run("larger S", 2.0 ** (middle - 1)) if other else None
            is_clip = lower and _is_halved(lower.change(path), run.change(path))
            rule = "clipped while scaled" if is_clip else "overflow hidden"
            check.add(check.unskipped if bad else rule, path)
            high = low


def _is_halved(old: Change, new: Change) -> bool:
    """Whether a clip of scaled gradients halves a change where S doubles."""
    sizes = [float(np.linalg.norm(change.step)) for change in (old, new)]
    return sizes[1] > 0 and 1.8 < sizes[0] / sizes[1] < 4.2


def _differing(changes: Changes, references: Sequence[Changes]) -> list[Path]:
    """Returns leaves that change more or less than at smaller S, where they agree."""
    found = []
    for path, change in changes.items():
        steps = np.array([table[path].step for table in references])
        # Gradients that underflow or consist of rounding errors depend on S too.
        agree = np.abs(steps - steps[-1]) <= 0.2 * np.abs(steps[-1])
        usual = np.max(np.abs(steps), initial=0)
        largest = np.max(np.abs(change.step), initial=0)
        is_sure = change.is_float and usual > 0 and agree.all(0).mean() > 0.75
        if is_sure and not usual / 2 <= largest <= 2 * usual:
            found.append(path)
    return found


def growing_s(check: Check) -> None:
    """Checks that a step in which S grows is the same as one in which S stays."""
    run = check.run("a growing S", counter=_GROWS) if check.scales else None
    if run is None or run.skipped:
        return
    old_s = check.s or 1.0
    new_s = host(run.after.get((*check.scales[0], "loss_scale"), old_s))
    grown = float(np.log2(np.max(new_s) / old_s))
    if grown > 0:
        table = {0.0: _steps(check.base.changes, 0), grown: _steps(run.changes, grown)}
        for path in _slopes(table):
            check.add("unscaled by the next S", path)
