"""The passes of `check_step`: each calls the step with other values."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from ..._tree import is_inexact
from ..._types import PyTree
from .step_calls import Change, Check, Path, Run, has_moved, host, sampled

_MOST_CALLS = 16  # until a window of accumulation ends
_FEW_CALLS = 8  # after these, the call in which most leaves change is taken
# log2 of S. A clip's threshold may lie between, and it may leave only the ends alone.
_POWERS = (-17, -15, -13, -9, -5, -1, 3, 9, 11, 13)
_FLAT = -13  # log2 of S at which a clip of scaled gradients does nothing yet
_HIGHEST = 40.0  # log2 of an S at which half-precision gradients overflow
_GROWS = 2**30  # a counter at which S grows, whatever its period
# Values of a guard to which each norm is a spike.
_SPIKE = {"accepted": 2**29, "norm_steps": 2**29, "norm_mean": -1e3, "in_a_row": 0}

_CAUSES = {"never unscaled", "unscaled twice", "clipped while scaled", "S not used"}
_CAUSES |= {"gradients of zero", "unscaled by the next S"}

Rows = dict[float, np.ndarray]  # the change of a leaf, or a result, by log2 of S


def applied_step(check: Check) -> None:
    """Checks that a step at a small S is counted, and changes the state."""
    first = _first_applied(check)
    _returns_its_state(check, first)
    _is_applied(check, first)
    if not check.is_over:
        _bare_arrays(check, first)
        _half_results(check, first)
        last = _go_on(check)
        _changes_something(check, first, last)
        _adjusts_each_s(check)
        _guards_see_losses(check, last)
        _replicas_agree(check, first, last)
        _updates_are_finite(check, first, last)
    if not check.is_over:
        _is_repeatable(check)


def _first_applied(check: Check) -> Run:
    """Makes a step the base: at S = 8 or, if it is skipped there, at a smaller S."""
    check.base = first = check.run(f"S = {check.s:g}") or check.base
    for s in (2.0**-3, 2.0**-9) if check.scales and first.skipped else ():
        smaller = check.run(f"S = {s:g}", check.at(s))
        if smaller is not None and smaller.is_applied:
            check.s, check.base = s, smaller
            break
    return check.base


def _returns_its_state(check: Check, first: Run) -> None:
    for path in [(*state, "skipped") for state in check.states]:
        if path not in first.after:
            check.add("not returned", path)
            check.is_over = True


def _is_applied(check: Check, first: Run) -> None:
    """Checks that the step is not skipped, at this S and at the constant ones."""
    for s in check.fixed:
        run = check.run(f"S = {s:g}", check.at(s))
        if run is not None and run.skipped:
            check.add("not applied", s=f"{s:g}")
    if first.is_applied:
        return
    check.is_over = True
    if first.skipped or not check.states:
        check.add("not applied", s=f"{check.s:g}")
        return
    # No step was skipped, but the counter started over, and so did S.
    for scale in check.scales:
        check.add("S never adjusted", (*scale, "loss_scale"))


def _bare_arrays(check: Check, first: Run) -> None:
    """Notes arrays without a name that may come back: only named ones are state."""
    for path, x in check.start.items():
        is_bare = len(path) == 1 and is_inexact(x) and np.ndim(x) > 0
        if is_bare and np.shape(x) == np.shape(first.results.get(path, 0.0)):
            what = f"{check.names[path]}: a bare array, which seems to come back"
            check.not_checked.append(f"{what}; pass carried=[{path[0]}]")


def _half_results(check: Check, first: Run) -> None:
    """Looks for leaves that come back in half precision, and went in in more."""
    for path, new in first.after.items():
        old, dtype = jnp.result_type(check.start[path]), jnp.result_type(new)
        if is_inexact(new) and old.itemsize > dtype.itemsize < 4:
            names = {"old": str(old), "new": str(dtype)}
            check.add("comes back in half precision", path, **names)


def _go_on(check: Check) -> Run:
    """Calls on until most leaves change, makes that call the base; returns the last."""
    run, most = check.base, -1
    runs = itertools.islice(check.followed(run), _MOST_CALLS)
    for count, run in enumerate(runs, 1):
        learned = sum(map(run.moved, run.weights))
        counts = all(counted == "finite" for counted in run.counted.values())
        if counts and learned > most:
            check.base, check.start, check.window = run, run.before, count
            most = learned
        is_enough = most == len(run.weights) or (most > 0 and count >= _FEW_CALLS)
        if is_enough or not any(map(run.moved, run.after)):
            break
    return run


def _changes_something(check: Check, first: Run, last: Run) -> None:
    """Checks that parameters are among what the applied steps changed."""
    changed = {p for p, x in last.after.items() if has_moved(first.before[p], x)}
    check.is_over = not changed
    # A window of MultiSteps may be longer.
    in_window = any(path[-1] == "mini_step" for path in changed)
    if not (last.weights or changed):
        check.add("nothing comes back")
    elif last.weights and changed.isdisjoint(last.weights) and not in_window:
        check.add("nothing learned", last.weights[0], calls=str(check.count))


def _adjusts_each_s(check: Check) -> None:
    for scale, counted in check.base.counted.items():
        # A loop by hand with a StaticLossScale adjusts nothing.
        if counted != "finite" and (check.states or not check.fixed):
            check.add("S never adjusted", (*scale, "loss_scale"))


def _guards_see_losses(check: Check, last: Run) -> None:
    for guard in [(*state, "guard") for state in check.states]:
        sees_loss = last.moved((*guard, "loss_steps"))
        if last.moved((*guard, "norm_steps")) and not sees_loss:
            check.add("guard without a loss", (*guard, "loss_steps"))


def _replicas_agree(check: Check, first: Run, last: Run) -> None:
    """Checks that devices with equal parameters have equal moments after the steps."""
    rows = [host(first.before[path]) for path in last.weights]
    is_mapped = all(x.ndim and (x == x[0]).all() for x in rows)  # as under pmap
    is_mapped = is_mapped and any((x != x.flat[0]).any() for x in rows)
    for path in last.changes:
        if path in check.in_optimizers and _differs(last.after[path], is_mapped):
            check.add("replicas diverge", path)


def _differs(leaf: PyTree, is_mapped: bool) -> bool:
    """Whether devices that hold copies of a leaf hold different ones."""
    shards = getattr(leaf, "addressable_shards", ())
    parts = [sampled(host(shard.data)) for shard in shards]
    is_copy = len(parts) > 1 and (is_mapped or leaf.is_fully_replicated)
    # Some operations of a GPU round in another way each time.
    return is_copy and not all(np.allclose(parts[0], x, 1e-2, 0) for x in parts)


def _updates_are_finite(check: Check, first: Run, last: Run) -> None:
    for run in (first, last):
        # A scalar is a sum or a mean for a log.
        for path in [path for path in run.broken if run.changes[path].ndim]:
            check.add("update not finite", path)
            check.is_over = True


def _is_repeatable(check: Check) -> None:
    """Checks that two calls are alike, but for what a GPU rounds in another way."""
    old, again = check.step(check.base), check.run("the same again")
    if again is not None and _size(check.step(again) - old) > 1e-2 * _size(old):
        check.add("not repeatable")
        check.is_over = True


def several_s(check: Check) -> None:
    """Checks the same step at several S: nothing may grow or fall with S."""
    state: dict[Path, Rows] = defaultdict(dict)
    reports: dict[Path, Rows] = defaultdict(dict)
    for power, run in _at_several_s(check):
        for path, step in _steps(run, power).items():
            state[path][power] = step
        for path, values in _reports(run, power).items():
            reports[path][power] = values
    if check.scales and not state:
        check.add("nothing comes back")
    elif state and not any(x.any() for rows in state.values() for x in rows.values()):
        check.add("gradients of zero")
    _unscaled_once(check, state)
    _reported_unscaled(check, reports)


def _at_several_s(check: Check) -> Iterator[tuple[float, Run]]:
    """Yields log2 of S, and the step at that S."""
    for power in _POWERS if check.scales else ():
        is_base = 2.0**power == check.s
        run = (
            check.base if is_base else check.run(f"S = 2^{power}", check.at(2.0**power))
        )
        if check.is_alike(run):
            yield power, run


def _steps(run: Run, power: float) -> dict[Path, np.ndarray]:
    """Returns the changes of the state, but not those of S itself."""
    changes = run.changes.items()
    return {p: c.step for p, c in changes if c.is_float and not _are_s(c.new, power)}


def _reports(run: Run, power: float) -> dict[Path, np.ndarray]:
    """Returns results, and what a guard saw of the loss, but not S itself."""
    results = {("result", *p): x for p, x in run.results.items() if is_inexact(x)}
    means = [(*state, "guard", "loss_mean") for state in run.check.states]
    results |= {path: run.after[path] for path in means if path in run.after}
    rows = {path: sampled(host(x)) for path, x in results.items()}
    return {path: row for path, row in rows.items() if not _are_s(row, power)}


def _are_s(entries: np.ndarray, power: float) -> bool:
    """Whether all entries are S, as it is or as it is next."""
    return bool(np.isin(entries, 2.0 ** np.array([power - 1, power, power + 1])).all())


def _unscaled_once(check: Check, state: Mapping[Path, Rows]) -> None:
    """Checks that changes of the state neither grow nor fall with S."""
    clipped = _clipped(check, state)
    for path in clipped:
        check.add("clipped while scaled", path)
    for path, rows in state.items():
        slope = _slope(rows)
        if slope > 0:
            check.add("never unscaled", path)
        elif slope < 0 and not clipped:
            check.add("unscaled twice", path)


def _reported_unscaled(check: Check, reports: Mapping[Path, Rows]) -> None:
    """Checks what is reported and not named scaled, and the loss that a guard sees."""
    for path in [path for path, rows in reports.items() if _slope(rows)]:
        if path in check.names:
            check.add("reported scaled", path)
        elif "scale" not in "".join(path).lower():
            where = "".join(f"[{key}]" for key in path[1:])
            check.add("reported scaled", f"result{where}")


def _slope(rows: Rows) -> int:
    """Returns 1 or -1 if entries grow or fall with S or a power of it, else 0."""
    pairs = itertools.pairwise(sorted(rows))
    votes = [_vote(rows[low], rows[high], high - low) for low, high in pairs]
    enough = 6 if len(rows) > 2 else 3
    if sum(vote for vote in votes if vote > 0) >= enough:
        return 1
    return -1 if sum(vote for vote in votes if vote < 0) <= -enough else 0


def _vote(old: np.ndarray, new: np.ndarray, powers: float) -> int:
    """Returns how sure it is that entries grow with S (or fall: below 0).

    S has grown by these powers of two.
    """
    # What underflows at the smaller S is no slope: it counts as infinite.
    usable = np.isfinite(old) & np.isfinite(new) & (new != 0)
    if not usable.any():
        return 0
    with np.errstate(divide="ignore"):
        slopes = np.log2(np.abs(new[usable] / old[usable])) / powers
    is_power = np.abs(np.abs(slopes)[:, None] - [1, 2, 3]).min(1) < 0.15
    share = np.mean(np.where(is_power, np.sign(slopes), 0))
    if abs(share) <= 0.5:
        return 0
    # Few entries may agree by chance, or by rounding, once or twice.
    # Entries that are equal agree as one.
    is_few = np.unique(new).size < 8
    return int(np.sign(share)) * (2 if is_few else 6 if abs(share) > 0.95 else 3)


def _clipped(check: Check, table: Mapping[Path, Rows]) -> list[Path]:
    """Returns moments, or else parameters, that change alike at small S, then less."""
    flat = [path for path, rows in table.items() if _FLAT in rows]
    moments = [path for path in flat if path in check.in_optimizers]
    found = [path for path in moments or flat if _stays_then_falls(table[path])]
    steps = {path: table[path][_FLAT] for path in found}
    return [] if found and _is_clipped_unscaled(check, steps) else found


def _is_clipped_unscaled(check: Check, steps: Mapping[Path, np.ndarray]) -> bool:
    """Whether other weights change nothing in the size of a step at a small S.

    Gradients that are unscaled twice are so large there that the optimizer's own clip
    determines their size.
    """
    run = check.with_other_weights(2.0**_FLAT)
    if run is None:
        return False
    old = _size([_size(step) for step in steps.values()])
    new = _size([_size(run.change(path).step) for path in steps])
    return bool(np.abs(new - old) < 1e-3 * old)


def _size(x: np.ndarray | list[float]) -> float:
    return float(np.linalg.norm(x))


def _stays_then_falls(rows: Rows) -> bool:
    """Whether a change is the same at two small S, and less at the largest."""
    steps = [rows[power] for power in sorted(rows)]
    for low, high in itertools.pairwise(steps):
        size = _size(high)
        if size and _size(high - low) < 0.1 * size:
            return bool(_size(steps[-1]) < 0.7 * size)
    return False


def growing_s(check: Check) -> None:
    """Checks that a step in which S grows is the same as one in which S stays."""
    if not check.scales:
        return
    run = check.run("a growing S", check.at(check.s, counter=_GROWS))
    if run is None or run.skipped or not run.moved((*check.scales[0], "loss_scale")):
        return
    s = host(run.after[*check.scales[0], "loss_scale"]).max()
    low, high = float(np.log2(check.s)), float(np.log2(s))
    old, new = _steps(check.base, low), _steps(run, high)
    for path in [path for path in new if path in old]:
        if _slope({low: old[path], high: new[path]}):
            check.add("unscaled by the next S", path)


def largest_s(check: Check) -> None:
    """Looks for an S that overflows, from which on each step is skipped.

    Below it S changes nothing. There is none in the range of float32, 2^40 and more.
    """
    old, power = check.step(check.base), _HIGHEST
    if not (check.scales and old.any()) or _CAUSES & check.found.keys():
        return
    low, high = float(np.log2(check.s)), power
    changes = []  # of the largest change, as its share
    while high - low > 1 / 32:  # some entries are infinite, and none NaN
        run = check.run(f"S = 2^{power:g}", check.at(2.0**power))
        change = 1.0
        if check.is_alike(run):
            change = np.abs(check.step(run) - old).max() / np.abs(old).max()
            changes += [] if change < 0.5 else [change]
        if change < 0.5:
            low = power
        else:
            high = power
        power = (low + high) / 2
    if changes:
        # A clip changes little at first, and an overflow all of an entry.
        is_clip = changes[-1] < 0.6
        check.add("clipped while scaled" if is_clip else "overflow hidden")


def next_step(check: Check) -> None:
    """Calls on, so that moments and averages differ from their initial values."""
    first, run = check.base, check.window_after(check.base)
    if check.is_alike(run):
        check.base, check.start = run, run.before
        _reads_its_parameters(check, first, run)


def _reads_its_parameters(check: Check, first: Run, run: Run) -> None:
    """Checks that other parameters have other gradients, if the loss stays."""
    losses = [path for path, x in run.results.items() if is_inexact(x)]
    moments = [path for path in run.moments if run.moved(path)]
    # A linear loss has the same gradients too, but moves on.
    moves_on = any(has_moved(first.results[path], run.results[path]) for path in losses)
    if losses and moments and not moves_on:
        other = check.with_other_weights(check.s)
        if other and all(other.change(p).is_as(run.changes[p]) for p in moments):
            check.add("captured parameters", run.weights[0])


def infinite_s(check: Check) -> None:
    """Checks that S = inf, whose products are not finite, skips a step as a whole."""
    run = None
    for scale in check.scales:
        run = check.run("S = inf", check.at(np.inf, [scale]))
        if run is not None:
            _of_one_scale(check, run, scale)
    if len(check.scales) > 1:
        run = check.run("S = inf", check.at(np.inf))
    if run is not None:
        _of_all_scales(check, run)


def _of_one_scale(check: Check, run: Run, scale: Path) -> None:
    """Checks that S = inf skips the optimizer of that S, which counts it once."""
    counted, place = run.counted[scale], (*scale, "loss_scale")
    if counted == "overflow" and scale[:-1] in run.skipped:
        adjusted = check.base.change((*scale, "counter")).step
        if (adjusted > run.change((*scale[:-1], "skipped")).step).any():
            check.add("S adjusted twice", place)
    elif counted == "finite" and run.skipped:
        check.add("S not used", place)
    elif counted != "overflow" and not run.skipped:
        _not_skipped(check, run, scale)


def _not_skipped(check: Check, run: Run, scale: Path) -> None:
    """Finds out why S = inf skips no step."""
    place = (*scale, "loss_scale")
    if {"S never adjusted", "gradients of zero"} & check.found.keys():
        return
    usual = check.base.changes
    if run.counted[scale] == "kept" and check.base.counted[scale] == "finite":
        check.add("state put back", place)
    elif run.broken:
        _left_finite(check, run)
    elif all(change.is_as(usual[path]) for path, change in run.changes.items()):
        check.add("S not used", place)
    elif check.states or not check.fixed:
        check.add("overflow hidden", place)


def _of_all_scales(check: Check, run: Run) -> None:
    """Checks what a step leaves that each optimizer skipped."""
    if run.is_skipped:
        again = check.run("S = inf", check.at(np.inf), follows=run)
        _left_finite(check, run)
        _left_unchanged(check, run, again)
    if any(run.moved((*state, "nonfinite_losses")) for state in check.states):
        what = "whether a clip hides an overflow: at S = inf the loss is not finite"
        check.not_checked.append(what)


def _left_finite(check: Check, run: Run) -> None:
    """Checks that the next steps make finite again what a step did not leave so."""
    last = check.window_after(run) if run.broken else run
    for path in run.broken:
        # A scalar is a sum or a mean for a log.
        if run.changes[path].ndim and not np.isfinite(host(last.after[path])).all():
            check.add("NaN stays", path)


def _left_unchanged(check: Check, run: Run, again: Run | None = None) -> None:
    """Checks that a skip changes no finite leaf; `again` is a skip that follows it."""
    if check.has_other_optimizers:  # these skip nothing, as their gradients have no S
        return
    for path, change in run.changes.items():
        if change.ndim and change.stays_finite and not _is_usual(check, path, change):
            is_copy = again is not None and not again.moved(path)
            check.add("put back" if is_copy else "changed on a skip", path)


def _is_usual(check: Check, path: Path, change: Change) -> bool:
    """Whether a leaf changes as on any other step: a counter, data, a statistic."""
    counts = not change.is_float or np.isin(change.step, (0, 1)).all()
    return bool(counts or change.is_as(check.base.changes[path]))


def spike(check: Check) -> None:
    """Checks that a step that a guard skips, with finite gradients, changes nothing."""
    values = {(*p, "guard", k): v for p in check.states for k, v in _SPIKE.items()}
    values = {path: value for path, value in values.items() if path in check.start}
    run = check.run("a spike", values) if values else None
    if run is not None and len(run.skipped) == len(check.states):
        _left_unchanged(check, run)


def nan_in_batch(check: Check) -> None:
    """Checks a NaN in one row of an argument that makes the loss NaN."""
    if not (check.states or check.scales):
        return
    for values in _batches_with_nan(check):
        run = check.run("a NaN", values)
        # The loss does not depend on some arguments, such as a learning rate.
        if run is not None and not check.is_alike(run):
            _after_nan(check, run)
            return
    check.not_checked.append("a NaN: no argument was found that makes the loss NaN")


def _batches_with_nan(check: Check) -> list[dict[Path, np.ndarray]]:
    """Returns the arrays of each argument that is no state, with a NaN in one row."""
    carried = {path[0] for path in (*check.base.after, *check.states, *check.scales)}
    found: dict[str, dict[Path, np.ndarray]] = defaultdict(dict)
    for path, x in check.start.items():
        if path[0] not in carried and hasattr(x, "dtype") and is_inexact(x):
            entries = found[path[0]][path] = np.array(host(x))
            np.atleast_1d(entries)[:1] = np.nan
    return list(found.values())


def _after_nan(check: Check, run: Run) -> None:
    """Checks what a step leaves whose loss is NaN."""
    if check.has_other_optimizers:  # these skip no NaN
        return
    _left_finite(check, run)
    # A call of several steps, or members, may apply others.
    applied = [host(run.after[*state, "applied"]).any() for state in check.states]
    # With a loss scale, S = inf has shown what changes on a skip.
    if not (any(applied) or check.scales):
        _left_unchanged(check, run)


# Later ones read the findings of earlier ones.
PASSES = (
    *(applied_step, growing_s, several_s, largest_s),
    *(next_step, infinite_s, spike, nan_in_batch),
)
