"""Steps that must be skipped as a whole: by overflow, as spikes, by a NaN.

S may be a device array outside of [min, max], so S = inf goes in as any other: no
static field changes, nothing compiles once more, and each product with it is infinite
or NaN in every dtype.
"""

from collections.abc import Iterable, Iterator

import jax
import numpy as np

from .step_applied import diverging
from .step_arguments import Path, host, is_float, like
from .step_calls import Change, Run
from .step_found import COUNTS, Changes, Check, Found

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


def infinite_s(check: Check) -> Iterator[Found]:
    """S = inf, in one loss scale at a time: its optimizer is skipped, as a whole."""
    calls = check.calls
    runs: list[Run] = []
    for scale in calls.scales:
        run = check.run("S = inf", {scale: np.inf})
        if run is not None:
            runs.append(run)
            yield from _skips_its_own(check, scale, run)
    if len(calls.scales) > 1 or calls.arguments.fixed:
        run = check.run("S = inf", np.inf)
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
        yield Found(stays, check.name(path), None if check.matters(path) else "note")
    rule = "changed on a spike" if what == "spike" else "changed on a skip"
    changed = [p for p, c in changes.items() if not c.is_equal and p not in bad]
    repeated: Changes = {}
    for path in changed:
        change, usual = changes[path], check.changes[path]
        counts = not change.is_float or np.isin(change.step, (0, 1)).all()
        if counts or _is_alike(change, usual):
            yield Found(COUNTS, check.name(path))
            continue
        if not repeated:
            run_again = check.run("the same step twice")
            repeated = check.calls.changes(run_again) if run_again else check.changes
        is_sure = _is_alike(repeated[path], usual) and not check.has_other_optimizers
        yield Found(rule, check.name(path), None if is_sure else "note")


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
        for path in diverging(run):
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


def _is_kept(check: Check, path: Path) -> bool:
    """Whether a leaf is a statistic or a weight, and not the data of each step."""
    calls, old = check.calls, {**check.calls.arrays, **check.calls.start}[path]
    if isinstance(old, jax.Array) and not old.is_fully_addressable:
        return True
    run = check.run("another average", values={path: like(old, host(old) + 1)})
    if run is None:
        return False
    shares = run.change(path).new - check.changes[path].new
    # Of an average, running or exponential, a part of the old value is in the new one.
    if shares.size and shares.min() > 0.01 and shares.max() < 0.99999:
        return bool(np.ptp(shares) < 0.01)
    if check.name(path) in check.seen_on_a_skip:
        return False
    if calls.scales or calls.arguments.fixed:
        return True
    run = _poisoned(check, [path])
    return run is not None and not check.is_alike(run)


def _after_nan(check: Check, run: Run, poisoned: list[Path]) -> Iterator[Found]:
    calls, changes = check.calls, check.calls.changes(run)
    bad = [p for p, c in changes.items() if not c.stays_finite and p not in poisoned]
    for path in _staying(check, run, bad) if bad else []:
        is_sure = check.matters(path) and _is_kept(check, path)
        yield Found("NaN stays", check.name(path), None if is_sure else "note")
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
            yield Found(COUNTS, check.name(path))
        else:
            is_sure = change.ndim > 0 and not check.has_other_optimizers
            yield Found(
                "changed on a skip", check.name(path), None if is_sure else "note"
            )
