"""The passes of `check_step`: calls of a step, and what they find.

A right step does the same at every S, except that it is skipped as a whole where the
gradients overflow. S may be a device array outside of [min, max], so S = inf goes in as
any other: no static field changes, nothing compiles once more, and each product with it
is infinite or NaN in every dtype.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np

from .step_arguments import Path, host, is_float, like
from .step_calls import Calls, Change, Run
from .step_rules import Level

_POWERS = (-9, -5, -1, 3, 7, 11)  # log2 of S: a clip's threshold may lie between
_HIGHEST = 126  # log2 of the largest S whose inverse is a normal number
_MOST_CALLS = 16  # until a window of accumulation ends
_GROWS = 2**30  # a counter at which S grows, whatever its period
_MOST_POISONED = 6  # arguments or parameters that are tried
# Statistics of a guard for which every step is a spike.
_SPIKES = {
    "loss_mean": -1e30,
    "norm_mean": -120.0,
    "loss_deviation": 0.0,
    "norm_deviation": 0.0,
    "loss_steps": 10**6,
    "norm_steps": 10**6,
    "accepted": 10**6,
    "in_a_row": 0,
}

Changes = dict[Path, Change]


class Found(NamedTuple):
    """A finding: its rule, the leaf or result, and the words in its text."""

    rule: str
    where: str = ""
    level: Level | None = None  # if it is not the rule's
    values: Mapping[str, Any] = {}


@dataclasses.dataclass
class Check:
    """What the passes share: the calls, and what the first ones have shown."""

    calls: Calls
    base: Run = None  # pyright: ignore  (set by `applied_step`)
    changes: Changes = dataclasses.field(default_factory=dict)
    window: int = 1  # calls until an accumulated step ends
    found: list[Found] = dataclasses.field(default_factory=list)
    not_checked: list[str] = dataclasses.field(default_factory=list)
    has_other_optimizers: bool = False  # without a loss scale

    def has(self, *rules: str) -> bool:
        return any(found.rule in rules for found in self.found)

    def name(self, path: Path) -> str:
        return self.calls.arguments.names[path]

    def node_name(self, path: Path, field: str) -> str:
        """The name of a state or loss scale, by one of its fields."""
        return self.name((*path, field)).rpartition(field)[0].rstrip(".['")

    def is_alike(self, run: Run | None) -> TypeGuard[Run]:
        """Whether a call was applied, and counted as the first was."""
        if run is None or not self.calls.is_applied(run):
            return False
        return self.calls.verdicts(run) == self.calls.verdicts(self.base)

    def run(self, what: str, *args: Any, **kwargs: Any) -> Run | None:
        """A call, or None if the step raises, as a check of its own may do."""
        try:
            return self.calls(*args, **kwargs)
        except Exception as error:
            self.not_checked.append(f"{what}: the step raised {type(error).__name__}")
            return None


def applied_step(check: Check) -> Iterator[Found]:
    """A step at S = 8: it counts, and changes what it should."""
    calls = check.calls
    first = check.base = calls()
    if not calls.is_applied(first):
        yield Found("not applied")
        return
    last = _go_on(check)
    check.changes = calls.changes(check.base)
    lost = [path for path in calls.states if (*path, "skipped") not in first.after]
    for path in lost:
        yield Found("not returned", check.node_name(path, "skipped"))
    yield from _other_types(check, first)
    moved = {p for p in last.after if _moved(calls.arrays[p], last.after[p])}
    if not moved and not lost:
        if last.after:
            yield Found("nothing changes")
        else:
            check.not_checked.append("the state: no argument comes back")
        return
    for path, said in calls.verdicts(check.base).items():
        if said in ("kept", "lost") and not lost:
            yield Found("S never adjusted", check.node_name(path, "counter"))
    yield from _unchanged(check, last, moved)
    for path in _diverging(check.base):
        yield Found("replicas diverge", check.name(path), None, {"when": "a step"})


def _go_on(check: Check) -> Run:
    """Goes on to a step in which S and something beside the optimizer change."""
    calls, run = check.calls, check.base
    learned: set[Path] = set()
    for count in range(1, _MOST_CALLS + 1):
        floats = [p for p in calls.state_paths(run) if is_float(run.after[p])]
        outside = [p for p in floats if not calls.is_optimizer(p)]
        learns = not outside or any(map(run.moved, outside))
        said = calls.verdicts(run).values()
        if learns and all(word == "finite" for word in said):
            check.base, check.window = run, count
            return run
        if "lost" in said or not any(map(run.moved, run.after)):
            break
        calls.start = {**calls.start, **run.after}
        later = check.run("later steps")
        if later is None or not calls.is_applied(later):
            break
        run = later
    calls.start = {}
    return run


def _moved(old: Any, new: Any) -> bool:
    return not np.array_equal(host(old), host(new))


def _other_types(check: Check, run: Run) -> Iterator[Found]:
    for path, new in run.after.items():
        old, new = (jax.typeof(x) for x in (check.calls.arrays[path], new))
        if (old.shape, old.dtype, old.weak_type) != (
            new.shape,
            new.dtype,
            new.weak_type,
        ):
            types = {"old": _described(old), "new": _described(new)}
            yield Found("compiles twice", check.name(path), None, types)


def _described(kind: Any) -> str:
    weak = ", weakly typed" if kind.weak_type else ""
    return f"{kind.dtype}[{','.join(map(str, kind.shape))}]{weak}"


def _unchanged(check: Check, last: Run, moved: set[Path]) -> Iterator[Found]:
    """Arguments that come back as they went in, of all calls so far."""
    calls = check.calls
    outside = [p for p in calls.state_paths(last) if not calls.is_optimizer(p)]
    floats = [p for p in outside if is_float(last.after[p])]
    inner = [p for p in moved if calls.is_optimizer(p) and not calls.is_ours(p)]
    if (
        floats
        and not moved.intersection(floats)
        and any(is_float(last.after[p]) for p in inner)
    ):
        values = {"calls": calls.count}
        yield Found("nothing learned", check.name(floats[0]), None, values)
        return
    for argument in sorted({path[0] for path in floats}):
        mine = [path for path in floats if path[0] == argument]
        if not moved.intersection(mine):
            yield Found("comes back unchanged", f"args[{argument}]")


def _diverging(run: Run) -> list[Path]:
    """Leaves whose replicas were equal before the call and are not after it."""
    found = []
    for path, new in run.after.items():
        old = run.before[path]
        if not isinstance(new, jax.Array) or len(new.sharding.device_set) == 1:
            continue
        if not _replicas_equal(new) and _replicas_equal(old):
            found.append(path)
    return found or _diverging_rows(run)


def _replicas_equal(x: Any) -> bool:
    """Whether all parts of an array that should be equal are."""
    if not isinstance(x, jax.Array):
        return True
    first: dict[str, np.ndarray] = {}
    for shard in x.addressable_shards:
        data = host(shard.data)
        other = first.setdefault(str(shard.index), data)
        if not np.array_equal(data, other, equal_nan=is_float(x)):
            return False
    return True


def _diverging_rows(run: Run) -> list[Path]:
    """The same of `pmap`, whose replicas are rows; members of an ensemble differ."""
    rows = {}
    for path, new in run.after.items():
        if isinstance(new, jax.Array) and len(new.sharding.device_set) > 1 and new.ndim:
            old, entries = host(run.before[path]), host(new)
            if (
                len(entries) != len(new.addressable_shards)
                or old.shape != entries.shape
            ):
                return []  # not of pmap
            rows[path] = old, entries
    if not all(_rows_equal(old) for old, _ in rows.values()):
        return []
    return [path for path, (_, new) in rows.items() if not _rows_equal(new)]


def _rows_equal(x: np.ndarray) -> bool:
    return np.array_equal(
        x, np.broadcast_to(x[:1], x.shape), equal_nan=x.dtype.kind == "f"
    )


def several_s(check: Check) -> Iterator[Found]:
    """The same step at six S: nothing may grow or fall with S."""
    calls, fixed = check.calls, check.calls.arguments.fixed
    # Each S of a StaticLossScale is a compilation.
    powers: tuple[float, ...] = _POWERS
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
    in_part = _with_inverse_part(steps)
    for path in in_part:
        yield Found("partly unscaled", check.name(path))
    for path, slope in _slopes(steps, news).items():
        if slope > 0:
            yield Found("never unscaled", check.name(path))
        elif not in_part:
            yield Found("unscaled twice", check.name(path))
    results = {s: found for s, (_, found) in table.items()}
    for path, slope in _slopes(results, results).items():
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
    for low, high in zip(powers, powers[1:], strict=False):
        for path in table[low]:
            if path not in table[high] or _is_s(values[high][path], high):
                continue
            slopes = _log2_slopes(table[low][path], table[high][path], high - low)
            for sign in (1, -1):
                near = np.abs(slopes[:, None] * sign - [1, 2]).min(1, initial=9) < 0.15
                if near.size and near.mean() > 0.5:
                    hits.setdefault((path, sign), []).append(near.size)
    # Few entries may agree by chance, or by rounding, once or twice.
    sure = {key for key, n in hits.items() if max(n) >= 8 or len(n) >= 3}
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


def _with_inverse_part(steps: Mapping[float, dict[Path, np.ndarray]]) -> list[Path]:
    """Leaves whose change is a + b / S: its differences shrink 16 times, and again."""
    found = []
    low, high = _POWERS[-2:]
    for first in range(len(_POWERS) - 3):
        powers = _POWERS[first : first + 4]
        if not all(power in steps for power in (*powers, low, high)):
            continue
        for path in steps[powers[0]]:
            values = np.array([steps[power][path] for power in powers])
            one, two, three = -np.diff(values, axis=0)
            with np.errstate(all="ignore"):
                is_large = np.abs(three) > 1e-5 * np.abs(values[-1])
                ratios = np.array([one / two, two / three])[:, is_large]
                rest = steps[high][path][is_large] / steps[low][path][is_large]
            agree = (np.abs(ratios / 16 - 1) < 0.1).all(0)
            # Without a, unscaled twice, all of it shrinks 16 times.
            agree &= np.abs(rest) > 0.25
            if agree.size >= 4 and agree.mean() > 0.5:
                found.append(path)
    return list(dict.fromkeys(found))


def larger_s(check: Check) -> Iterator[Found]:
    """The largest S whose step is applied: there it must still be the same."""
    calls = check.calls
    if not calls.scales or (
        check.found and check.has("never unscaled", "unscaled twice")
    ):
        return
    references = []
    for power in _POWERS[-3:]:
        run = check.run(f"S = 2^{power}", 2.0**power)
        if check.is_alike(run):
            references.append(calls.changes(run))
    if len(references) < 3:
        check.not_checked.append("hidden overflow: S = 2^11 is skipped")
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
        low = middle
        for path in _enlarged(calls.changes(run), references):
            yield Found("overflow hidden", check.name(path))
            return


def _enlarged(changes: Changes, references: list[Changes]) -> Iterator[Path]:
    """Leaves that change otherwise than in steps at smaller S, which agree."""
    for path, change in changes.items():
        sizes = [_size(table[path]) for table in references]
        if not change.is_float or min(sizes) == 0 or max(sizes) > 1.5 * min(sizes):
            continue  # gradients that underflow at small S grow with S too
        if _size(change) > 8 * max(sizes):
            yield path


def _size(change: Change) -> float:
    return float(np.max(np.abs(change.step), initial=0))


def infinite_s(check: Check) -> Iterator[Found]:
    """S = inf, in one loss scale at a time: its own optimizer is skipped, as a whole."""
    calls = check.calls
    runs: list[Run] = []
    for scale in calls.scales:
        run = check.run("S = inf", {scale: np.inf})
        if run is not None:
            runs.append(run)
            yield from _skips_its_own(check, scale, run)
    if len(calls.scales) != 1:
        run = (
            check.run("S = inf", np.inf)
            if calls.scales or calls.arguments.fixed
            else None
        )
        runs = [] if run is None else [run]
        if run is not None and not calls.scales and calls.is_applied(run):
            yield from _not_skipped(check, run, "")
    for run in runs:
        said = calls.verdicts(run)
        loose = [s for s in said if s[:-1] not in calls.states]
        if len(calls.skipped(run)) == len(calls.states) and all(
            said[scale] == "overflow" for scale in loose
        ):
            yield from _left_unchanged(check, run, "overflow stays", "S = inf")
        moved = [p for p in calls.states if run.moved((*p, "nonfinite_losses"))]
        if moved and check.has("reported scaled"):
            yield Found("value is scaled")
        elif moved:
            check.not_checked.append(
                "whether value= is unscaled: at S = inf it is not finite, which is "
                "right if it is unscaled by hand"
            )


def _skips_its_own(check: Check, scale: Path, run: Run) -> Iterator[Found]:
    calls, own = check.calls, scale[:-1]
    skipped, said = calls.skipped(run), calls.verdicts(run)[scale]
    name = check.node_name(scale, "counter")
    if not skipped and said != "overflow":
        yield from _not_skipped(check, run, name)
    elif own in calls.states and own not in skipped:
        yield Found("another S", name)
    elif own not in calls.states and said == "finite":
        yield Found("S never adjusted", name)
    elif any(p != own and (*p, "loss_scale") in calls.scales for p in skipped):
        yield Found("coupled", name)


def _not_skipped(check: Check, run: Run, name: str) -> Iterator[Found]:
    """Why a step at S = inf is not skipped."""
    if check.has("not returned", "S never adjusted", "nothing changes"):
        return
    calls, changes = check.calls, check.calls.changes(run)
    bad = [p for p, change in changes.items() if not change.stays_finite]
    if bad:
        for path in _staying(check, run, bad):
            yield Found("overflow stays", check.name(path))
    elif not any(run.moved(p) for p in run.after if calls.is_optimizer(p)):
        yield Found("state put back", name)
    elif all(_is_alike(change, check.changes[p]) for p, change in changes.items()):
        yield Found("S not used", name)
    else:
        yield Found("overflow hidden", name)


def _is_alike(one: Change, other: Change) -> bool:
    return np.array_equal(one.new, other.new, equal_nan=True)


def _staying(check: Check, run: Run, bad: Iterable[Path]) -> list[Path]:
    """What is not finite after a call, nor once the next step has ended."""
    calls, start = check.calls, check.calls.start
    for _ in range(check.window):
        calls.start = {**calls.start, **run.after}
        later = check.run("steps after a skipped one")
        if later is None:
            break
        run = later
    calls.start = start
    return [path for path in bad if not np.isfinite(host(run.after[path])).all()]


def _left_unchanged(check: Check, run: Run, stays: str, what: str) -> Iterator[Found]:
    """Each leaf of the state is after a skipped step what it was before."""
    changes = check.calls.changes(run)
    bad = [p for p, change in changes.items() if not change.stays_finite]
    for path in _staying(check, run, bad) if bad else []:
        # A sum or a mean for a log, of no consequence for the training.
        is_number = changes[path].ndim == 0
        yield Found(stays, check.name(path), "note" if is_number else None)
    rule = "changed on a spike" if what == "spike" else "changed on a skip"
    changed = [p for p, c in changes.items() if not c.is_equal and p not in bad]
    repeated: Changes = {}
    for path in changed:
        change, usual = changes[path], check.changes[path]
        counts = not change.is_float or np.isin(change.step, (0, 1)).all()
        if counts or _is_alike(change, usual):
            yield Found("counts skipped steps", check.name(path))
            continue
        if not repeated:
            run_again = check.run("the same step twice")
            repeated = check.calls.changes(run_again) if run_again else check.changes
        is_sure = _is_alike(repeated[path], usual) and not check.has_other_optimizers
        yield Found(rule, check.name(path), None if is_sure else "note")


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


def spike(check: Check) -> Iterator[Found]:
    """A step that is a spike for its guard: skipped as one that overflows."""
    calls = check.calls
    values = {
        path: like(leaf, _SPIKES[path[-1]])
        for path, leaf in calls.arrays.items()
        if path[-2:-1] == ("guard",) and path[-1] in _SPIKES
    }
    run = check.run("a spike", values=values) if values else None
    if run is not None and len(calls.skipped(run)) == len(calls.states):
        yield from _left_unchanged(check, run, "NaN stays", "spike")


def nan_in_batch(check: Check) -> Iterator[Found]:
    """NaN in one row of an argument that makes the loss NaN, or else in a weight."""
    calls = check.calls
    carried = {path[0] for path in (*check.base.after, *calls.states, *calls.scales)}
    others: dict[str, list[Path]] = {}
    for path, leaf in calls.arrays.items():
        if path[0] not in carried and is_float(leaf) and hasattr(leaf, "dtype"):
            others.setdefault(path[0], []).append(path)
    weights = [
        path
        for path, change in check.changes.items()
        if change.is_float and change.ndim and not calls.is_optimizer(path)
    ]
    weights.sort(key=lambda path: -np.size(calls.arrays[path]))
    tries = [*others.values()][:_MOST_POISONED]
    tries += [[path] for path in weights[:_MOST_POISONED]]
    for paths in tries:
        run = _poisoned(check, paths)
        if run is None or check.is_alike(run):
            continue  # such as a learning rate: it is no part of the loss
        for path in _diverging(run):
            when = "a step in which one of them saw a NaN"
            yield Found("replicas diverge", check.name(path), None, {"when": when})
        for state in calls.skipped(run):
            counts = run.moved((*state, "nonfinite_losses"))
            if (*state, "loss_scale") in calls.scales and not counts:
                yield Found("no value", check.node_name(state, "skipped"))
        yield from _after_nan(check, run, paths)
        return
    if calls.states or calls.scales:
        check.not_checked.append("a NaN: no argument was found that makes the loss NaN")


def _poisoned(check: Check, paths: list[Path]) -> Run | None:
    calls = check.calls
    counters = [(*scale, "counter") for scale in calls.scales]
    moved = [
        np.max(host(check.base.after[p]) - host(check.base.before[p]))
        for p in counters
        if p in check.base.after
    ]
    # Of several steps in a call each needs its NaN: else some are rightly applied.
    has_several = max(moved, default=1) > 1
    values = {}
    for path in paths:
        leaf = {**calls.arrays, **calls.start}[path]
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return None
        entries = np.array(host(leaf))
        entries[... if has_several or not entries.ndim else 0] = np.nan
        values[path] = like(leaf, entries)
    return check.run("a NaN", values=values)


def _after_nan(check: Check, run: Run, poisoned: list[Path]) -> Iterator[Found]:
    calls, changes = check.calls, check.calls.changes(run)
    bad = [p for p, c in changes.items() if not c.stays_finite and p not in poisoned]
    for path in _staying(check, run, bad) if bad else []:
        is_number = changes[path].ndim == 0
        yield Found("NaN stays", check.name(path), "note" if is_number else None)
    if (
        calls.scales
        or calls.arguments.fixed
        or len(calls.skipped(run)) < len(calls.states)
    ):
        return  # a skipped step has been looked at, at S = inf
    for path, change in changes.items():
        if change.is_equal or path in bad or path in poisoned:
            continue
        counts = not change.is_float or np.isin(change.step, (0, 1)).all()
        if counts or _is_alike(change, check.changes[path]):
            yield Found("counts skipped steps", check.name(path))
        else:
            is_sure = change.ndim > 0 and not check.has_other_optimizers
            yield Found(
                "changed on a skip", check.name(path), None if is_sure else "note"
            )


PASSES = (applied_step, several_s, larger_s, infinite_s, growing_s, spike, nan_in_batch)
