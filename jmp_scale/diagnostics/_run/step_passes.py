"""The passes of `check_step`: each calls the step with other values."""

import itertools
from collections import Counter, defaultdict

import jax.numpy as jnp
import numpy as np

from ..._tree import is_inexact
from ..._types import Leaf
from .step_calls import Check, Path, Run, has_moved, host, sampled

_MOST_CALLS = 16  # until a window of accumulation ends
_FEW_CALLS = 8  # after these, the call in which most leaves change is taken
# log2 of S. A clip's threshold may lie between, and it may leave only the ends alone.
_POWERS = (-17, -15, -13, -9, -5, -1, 3, 9, 11, 13)
_FLAT = -13  # log2 of S at which a clip of scaled gradients does nothing yet
_GROWS = 2**30  # a counter at which S grows, whatever its period
# Values of a guard to which each norm is a spike.
_SPIKE = {"accepted": 2**29, "norm_steps": 2**29, "norm_mean": -1e3, "in_a_row": 0}

Rows = dict[float, np.ndarray]  # the change of a leaf, or a result, by log2 of S


def applied_step(check: Check) -> None:
    """Checks that a step at a small S is counted, and changes the state."""
    first = _first(check)
    flags = [(*state, "skipped") for state in check.states]
    missing = [path for path in flags if path not in first.after]
    check.is_over = bool(missing) or not first.is_applied
    for path in missing:
        check.add("not returned", path)
    if check.states and not (first.is_applied or first.skipped):
        # No step was skipped, but the counter started over, and so did S.
        for scale in check.scales:
            check.add("S never adjusted", (*scale, "loss_scale"))
    elif not first.is_applied:
        check.add("not applied", s=f"{check.s:g}")
    if not check.is_over:
        _of_results(check, first)
        _of_changes(check, first, _go_on(check))


def _first(check: Check) -> Run:
    """Returns a step at the largest of some small S that is not skipped."""
    check.base = first = check.run(f"S = {check.s:g}") or check.base
    for s in (2.0**-3, 2.0**-9) if check.scales and first.skipped else ():
        smaller = check.run(f"S = {s:g}", s)
        if smaller is not None and smaller.is_applied:
            check.s, check.base = s, smaller
            break
    for s in check.fixed:
        run = check.run(f"S = {s:g}", s)
        if run is not None and run.skipped:
            check.add("not applied", s=f"{s:g}")
    return check.base


def _of_results(check: Check, first: Run) -> None:
    """Looks for bare arrays that may come back, and for leaves that come back half."""
    for path, old in check.start.items():
        new = first.results.get(path)
        is_bare = len(path) == 1 and is_inexact(old) and np.ndim(old) > 0
        if is_bare and new is not None and np.shape(old) == np.shape(new):
            what = f"{check.names[path]}: a bare array, which seems to come back"
            check.not_checked.append(f"{what}; pass carried=[{path[0]}]")
    for path, new in first.after.items():
        old, dtype = jnp.result_type(check.start[path]), jnp.result_type(new)
        if is_inexact(new) and old.itemsize > dtype.itemsize < 4:
            names = {"old": str(old), "new": str(dtype)}
            check.add("comes back in half precision", path, **names)


def _go_on(check: Check) -> Run:
    """Calls on until most leaves change, makes that call the base; returns the last."""
    run, best = check.base, -1
    for count in range(1, 1 + _MOST_CALLS):
        floats = run.weights
        learned = sum(map(run.moved, floats))
        counts = all(counted == "finite" for counted in run.counted.values())
        if counts and learned > best:
            check.base, check.start, check.window = run, run.before, count
            best = learned
        is_enough = best == len(floats) or (best > 0 and count >= _FEW_CALLS)
        if is_enough or not any(map(run.moved, run.after)):
            break
        later = check.run("later steps", follows=run)
        if later is None or not later.is_applied:
            break
        run = later
    return run


def _of_changes(check: Check, first: Run, last: Run) -> None:
    """Checks what some applied steps changed, and what S and a guard saw of them."""
    changed = {p for p, x in last.after.items() if has_moved(first.before[p], x)}
    check.is_over = not changed
    weights = last.weights
    # A window of MultiSteps may be longer.
    in_window = any(path[-1] == "mini_step" for path in changed)
    if not (weights or changed):
        check.add("nothing comes back")
    elif weights and changed.isdisjoint(weights) and not in_window:
        check.add("nothing learned", weights[0], calls=str(check.count))
    for scale, counted in check.base.counted.items():
        # A loop by hand with a StaticLossScale adjusts nothing.
        if counted != "finite" and (check.states or not check.fixed):
            check.add("S never adjusted", (*scale, "loss_scale"))
    for guard in [(*state, "guard") for state in check.states]:
        sees_loss = last.moved((*guard, "loss_steps"))
        if last.moved((*guard, "norm_steps")) and not sees_loss:
            check.add("guard without a loss", (*guard, "loss_steps"))
    rows = [host(first.before[path]) for path in weights]
    is_mapped = all(x.ndim and (x == x[0]).all() for x in rows)  # as under pmap
    is_mapped = is_mapped and any((x != x.flat[0]).any() for x in rows)
    for path in last.changes:
        if path in check.in_optimizers and _differs(last.after[path], is_mapped):
            check.add("replicas diverge", path)


def _differs(leaf: Leaf, is_mapped: bool) -> bool:
    """Whether devices that hold copies of a leaf hold different ones."""
    shards = getattr(leaf, "addressable_shards", ())
    parts = [sampled(host(shard.data)) for shard in shards]
    is_copy = len(parts) > 1 and (is_mapped or leaf.is_fully_replicated)
    # Some operations of a GPU round in another way each time.
    return is_copy and not all(np.allclose(parts[0], x, 1e-2, 0) for x in parts)


def several_s(check: Check) -> None:
    """Checks the same step at several S: nothing may grow or fall with S."""
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
    results = {("result", *p): x for p, x in run.results.items() if is_inexact(x)}
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
    """Returns moments, or else parameters, that change alike at small S, then less."""
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


def growing_s(check: Check) -> None:
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


def next_step(check: Check) -> None:
    """Calls on, so that moments and averages differ from their initial values."""
    first, run = check.base, check.window_after(check.base)
    if not check.is_alike(run):
        return
    check.base, check.start = run, run.before
    losses = [path for path, x in run.results.items() if is_inexact(x)]
    moments = check.in_optimizers.intersection(run.changes)
    moments = [p for p in moments if run.changes[p].is_float and run.moved(p)]
    # A linear loss has the same gradients too, but moves on.
    if any(has_moved(first.results[path], run.results[path]) for path in losses):
        return
    other = check.with_other_weights() if losses and moments else None
    if other and all(other.change(p).is_as(run.changes[p]) for p in moments):
        check.add("captured parameters", run.weights[0])


def infinite_s(check: Check) -> None:
    """Checks that S = inf, whose products are not finite, skips a step as a whole."""
    run = None
    for scale in check.scales:
        run = check.run("S = inf", np.inf, scale)
        if run is not None:
            _of_one_scale(check, run, scale)
    if len(check.scales) > 1:
        run = check.run("S = inf", np.inf)
    if run is not None:
        alone = [scale for scale in check.scales if scale[:-1] not in check.states]
        is_whole = len(run.skipped) == len(check.states)
        if is_whole and all(run.counted[scale] == "overflow" for scale in alone):
            again = check.run("S = inf", np.inf, follows=run)
            _left_finite(check, run)
            _left_unchanged(check, run, again)
        if any(run.moved((*state, "nonfinite_losses")) for state in check.states):
            what = "whether a clip hides an overflow: at S = inf the loss is not finite"
            check.not_checked.append(what)


def _of_one_scale(check: Check, run: Run, scale: Path) -> None:
    """Checks that S = inf skips the optimizer of that S, which counts it once."""
    counted, place = run.counted[scale], (*scale, "loss_scale")
    if counted == "overflow":
        if scale[:-1] in run.skipped:
            adjusted = check.base.change((*scale, "counter")).step
            if (adjusted > run.change((*scale[:-1], "skipped")).step).any():
                check.add("S adjusted twice", place)
        return
    if run.skipped and counted == "finite":
        check.add("S not used", place)
    if run.skipped or {"S never adjusted", "gradients of zero"} & check.found.keys():
        return
    usual = check.base.changes
    if run.broken:
        _left_finite(check, run)
    elif all(change.is_as(usual[path]) for path, change in run.changes.items()):
        check.add("S not used", place)
    elif check.states and not any(map(run.moved, check.in_optimizers)):
        check.add("state put back", place)
    elif check.states or not check.fixed:
        check.add("overflow hidden", place)


def _left_finite(check: Check, run: Run) -> None:
    """Checks that the next steps make finite again what a step did not leave so."""
    last = check.window_after(run) if run.broken else run
    for path in run.broken:
        # A scalar is a sum or a mean for a log.
        if run.changes[path].ndim and not np.isfinite(host(last.after[path])).all():
            check.add("NaN stays", path)


def _left_unchanged(check: Check, run: Run, again: Run | None = None) -> None:
    """Checks that a skip changes no finite leaf; `again` is a skip that follows it."""
    # Other optimizers skip nothing, as their gradients have no S.
    changes = {} if check.has_other_optimizers else run.changes
    for path, change in changes.items():
        counts = not change.is_float or np.isin(change.step, (0, 1)).all()
        # Counters, data and statistics of all steps change as on any other step.
        is_usual = counts or change.is_as(check.base.changes[path])
        if change.ndim and change.stays_finite and not is_usual:
            is_copy = again is not None and not again.moved(path)
            check.add("put back" if is_copy else "changed on a skip", path)


def spike(check: Check) -> None:
    """Checks that a step that a guard skips, with finite gradients, changes nothing."""
    values = {(*p, "guard", k): v for p in check.states for k, v in _SPIKE.items()}
    values = {path: value for path, value in values.items() if path in check.start}
    run = check.run("a spike", values=values) if values else None
    if run is not None and len(run.skipped) == len(check.states):
        _left_unchanged(check, run)


def nan_in_batch(check: Check) -> None:
    """Checks a NaN in one row of an argument that makes the loss NaN."""
    if not (check.states or check.scales):
        return
    carried = {path[0] for path in (*check.base.after, *check.states, *check.scales)}
    arrays = [path for path, x in check.start.items() if hasattr(x, "dtype")]
    others = [p for p in arrays if p[0] not in carried and is_inexact(check.start[p])]
    for position in dict.fromkeys(path[0] for path in others):
        paths = [path for path in others if path[0] == position]
        values = {path: np.array(host(check.start[path])) for path in paths}
        for entries in values.values():
            np.atleast_1d(entries)[:1] = np.nan
        run = check.run("a NaN", values=values)
        if run is None or check.is_alike(run):
            continue  # the loss does not depend on it, such as a learning rate
        # A call of several steps, or members, may apply others.
        applied = [host(run.after[*state, "applied"]).any() for state in check.states]
        if not check.has_other_optimizers:  # these skip no NaN
            _left_finite(check, run)
            # With a loss scale, S = inf has shown what changes on a skip.
            if not (any(applied) or check.scales):
                _left_unchanged(check, run)
        return
    check.not_checked.append("a NaN: no argument was found that makes the loss NaN")


# Later ones read the findings of earlier ones.
PASSES = applied_step, growing_s, several_s, next_step, infinite_s, spike, nan_in_batch
