"""Checks steps that must be skipped as a whole: overflows, spikes and NaN.

S may be a device array outside of [min, max], so S = inf is passed like any other: no
static field changes, nothing recompiles, and each product with it is infinite or NaN in
every dtype.
"""

from collections.abc import Iterable, Iterator

import jax
import numpy as np

from .step_applied import diverging
from .step_arguments import Path, host, is_float, like
from .step_calls import Change, Run
from .step_found import COUNTS, Changes, Check, Found

_MOST_POISONED = 6  # arguments, and then parameters, to try
# Statistics of a guard that make every step a spike.
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
    """Checks that S = inf skips the optimizer of that loss scale as a whole."""
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
        yield from _adjusted_twice(check, run)
        moved = [p for p in calls.states if run.moved((*p, "nonfinite_losses"))]
        if moved and check.has("reported scaled"):
            yield Found("value is scaled")
        elif moved:
            check.not_checked.append(
                "whether value= is unscaled: at S = inf it is not finite, which is "
                "right if it is unscaled by hand"
            )


def _adjusted_twice(check: Check, run: Run) -> Iterator[Found]:
    """Loss scales that count more steps than are skipped at S = inf."""
    for scale in check.calls.scales:
        counter, skipped = (*scale, "counter"), (*scale[:-1], "skipped")
        if skipped in run.after and counter in check.base.after:
            updates = run.change(skipped).step.max()
            if check.base.change(counter).step.max() > updates > 0:
                yield Found("S adjusted twice", check.node_name(scale, "counter"))


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


def _not_skipped(check: Check, run: Run, name: str) -> Iterator[Found]:
    """Finds out why a step at S = inf is not skipped."""
    if check.has("not returned", "S never adjusted", "nothing changes"):
        return
    calls, changes = check.calls, check.calls.changes(run)
    bad = [p for p, change in changes.items() if not change.stays_finite]
    if bad:
        for path in _staying(check, run, bad):
            yield Found("overflow stays", check.name(path))
    elif all(_is_alike(change, check.changes[p]) for p, change in changes.items()):
        yield Found("S not used", name)
    elif not any(run.moved(p) for p in run.after if calls.is_optimizer(p)):
        yield Found("state put back", name)
    else:
        yield Found("overflow hidden", name)


def _is_alike(one: Change, other: Change) -> bool:
    return np.array_equal(one.new, other.new, equal_nan=True)


def _advances(change: Change, usual: Change) -> bool:
    """Whether a leaf counts steps, or changes as in a step that is applied."""
    counts = not change.is_float or np.isin(change.step, (0, 1)).all()
    return bool(counts) or _is_alike(change, usual)


def _staying(check: Check, run: Run, bad: Iterable[Path]) -> list[Path]:
    """Returns the leaves of `bad` that the next step does not make finite again."""
    calls, start = check.calls, check.calls.start
    for _ in range(check.window):
        calls.start = calls.later(run)
        later = check.run("steps after a skipped one")
        if later is None:
            break
        run = later
    calls.start = start
    return [path for path in bad if not np.isfinite(host(run.after[path])).all()]


def _left_unchanged(check: Check, run: Run, stays: str, what: str) -> Iterator[Found]:
    """Checks that a skipped step leaves each leaf of the state unchanged."""
    changes = check.calls.changes(run)
    of_s = stays == "overflow stays"  # no other optimizer has gradients of this S
    bad = [p for p, change in changes.items() if not change.stays_finite]
    for path in _staying(check, run, bad) if bad else []:
        is_sure = check.changes[path].ndim > 0 if of_s else check.matters(path)
        yield Found(stays, check.name(path), None if is_sure else "note")
    rule = "changed on a spike" if what == "spike" else "changed on a skip"
    changed = [p for p, c in changes.items() if not c.is_equal and p not in bad]
    repeated: Changes = {}
    for path in changed:
        change, usual = changes[path], check.changes[path]
        if _advances(change, usual):
            yield Found(COUNTS, check.name(path))
            continue
        if not repeated:
            run_again = check.run("the same step twice")
            repeated = check.calls.changes(run_again) if run_again else check.changes
        is_sure = _is_alike(repeated[path], usual) and not check.has_other_optimizers
        yield Found(rule, check.name(path), None if is_sure else "note")


def spike(check: Check) -> Iterator[Found]:
    """Checks that a spike is skipped in the same way as an overflow."""
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
    """Checks a NaN in one row of an argument that makes the loss NaN, or a weight."""
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
            continue  # the loss does not depend on it, such as a learning rate
        for path in diverging(run):
            when = "a step in which one of them saw a NaN"
            yield Found("replicas diverge", check.name(path), None, {"when": when})
        for state in calls.skipped(run):
            counts = run.moved((*state, "nonfinite_losses"))
            # A NaN may come up in the backward pass alone.
            is_finite = [np.isfinite(x).all() for x in run.results.values()]
            counts |= bool(is_finite) and all(is_finite)
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
    # If a call runs several steps, each needs a NaN: the others are rightly applied.
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
    """Whether a leaf is a statistic or a weight, rather than data of each step."""
    calls, old = check.calls, {**check.calls.arrays, **check.calls.start}[path]
    if isinstance(old, jax.Array) and not old.is_fully_addressable:
        return True
    run = check.run("another average", values={path: like(old, host(old) + 1)})
    if run is None:
        return False
    shares = run.change(path).new - check.changes[path].new
    # The new value of an average, running or exponential, contains a part of the old.
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
        return  # a skipped step has been checked at S = inf
    for path, change in changes.items():
        if change.is_equal or path in bad or path in poisoned:
            continue
        if _advances(change, check.changes[path]):
            yield Found(COUNTS, check.name(path))
        else:
            is_sure = change.ndim > 0 and not check.has_other_optimizers
            yield Found(
                "changed on a skip", check.name(path), None if is_sure else "note"
            )
