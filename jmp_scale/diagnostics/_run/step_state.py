"""Checks what applied and skipped steps do to the state.

S may be a device array outside of [min, max], so S = inf is passed like any other: no
static field changes, nothing recompiles, and each product with it is infinite or NaN in
every dtype.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from .step_calls import Check, Run
from .step_leaves import Path, has_moved, host, is_float

_MOST_CALLS = 16  # until a window of accumulation ends
_FEW_CALLS = 8  # after these, the call in which most leaves change is taken


def applied_step(check: Check) -> None:
    """Checks that a step at a small S is counted, and changes the state."""
    first = _first(check)
    check.is_over = not first.is_applied
    if check.states and not first.is_applied and not first.skipped:
        # No step was skipped, but the counter started over, and so did S.
        for scale in check.scales:
            check.add("S never adjusted", (*scale, "loss_scale"))
    elif not first.is_applied:
        check.add("not applied", s=f"{check.s:g}")
    for state in check.states:
        if (*state, "skipped") not in first.after:
            check.is_over = True
            check.add("not returned", (*state, "skipped"))
    if check.is_over:
        return
    for path in [p for p in check.arrays if len(p) == 1 and p in first.results]:
        old, new = check.arrays[path], first.results[path]
        if is_float(old) and np.ndim(old) and np.shape(old) == np.shape(new):
            what = f"{check.names[path]}: a bare array, which seems to come back"
            check.not_checked.append(f"{what}; pass carried=[{path[0]}]")
    for path, new in first.after.items():
        old, dtype = jnp.result_type(check.arrays[path]), jnp.result_type(new)
        if is_float(new) and old.itemsize > dtype.itemsize < 4:
            names = {"old": str(old), "new": str(dtype)}
            check.add("comes back in half precision", path, **names)
    last = _go_on(check)
    changed = {p for p, x in last.after.items() if has_moved(first.before[p], x)}
    check.is_over = not changed
    weights = _outside(check, last)
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


def _go_on(check: Check) -> Run:
    """Calls on until most leaves change, and makes that call the base.

    A window of accumulation may last several calls, and a learning rate start at 0.
    Returns the last call.
    """
    run, best = check.base, -1
    for count in range(1, 1 + _MOST_CALLS):
        floats = _outside(check, run)
        learned = sum(map(run.moved, floats))
        counts = all(counted == "finite" for counted in run.counted.values())
        if counts and learned > best:
            check.start_at(run, count)
            best = learned
        is_enough = learned == len(floats) or (best > 0 and count >= _FEW_CALLS)
        if (counts and is_enough) or not any(map(run.moved, run.after)):
            break
        later = check.run("later steps", follows=run)
        if later is None or not later.is_applied:
            break
        run = later
    return run


def next_step(check: Check) -> None:
    """Calls on, so that moments and averages differ from their initial values."""
    first = check.base
    run = check.window_after(first)
    if not check.is_alike(run):
        return
    check.start_at(run, check.window)
    losses = [path for path, x in run.results.items() if is_float(x)]
    moments = check.in_optimizers.intersection(run.changes)
    moments = [p for p in moments if run.changes[p].is_float and run.moved(p)]
    # A linear loss has the same gradients too, but moves on.
    if any(has_moved(first.results[path], run.results[path]) for path in losses):
        return
    other = check.with_other_weights() if losses and moments else None
    if other and all(other.change(p).is_as(run.changes[p]) for p in moments):
        check.add("captured parameters", _outside(check, run)[0])


def _outside(check: Check, run: Run) -> list[Path]:
    """Returns the floating-point leaves that are not an optimizer's."""
    floats = [path for path, change in run.changes.items() if change.is_float]
    return [path for path in floats if path not in check.in_optimizers]


def infinite_s(check: Check) -> None:
    """Checks that S = inf skips the optimizer of that loss scale as a whole."""
    run = None
    for scale in check.scales:
        run = check.run("S = inf", np.inf, scale)
        if run is not None and not run.skipped and run.counted[scale] != "overflow":
            _not_skipped(check, run, (*scale, "loss_scale"))
    if len(check.scales) > 1:
        run = check.run("S = inf", np.inf)
    if run is None:
        return
    alone = [scale for scale in check.scales if scale[:-1] not in check.states]
    is_whole = len(run.skipped) == len(check.states)
    if is_whole and all(run.counted[scale] == "overflow" for scale in alone):
        _left_unchanged(check, run)
    if any(run.moved((*state, "nonfinite_losses")) for state in check.states):
        what = "whether a clip hides an overflow: at S = inf the loss is not finite"
        check.not_checked.append(what)


def _not_skipped(check: Check, run: Run, place: Path | str) -> None:
    """Finds out why a step at S = inf is not skipped."""
    if "S never adjusted" in check.found or "gradients of zero" in check.found:
        return
    bad = [path for path, change in run.changes.items() if not change.stays_finite]
    for path in _staying(check, run, bad):
        check.add("NaN stays", path)
    if bad:
        return
    usual, optimizers = check.base.changes, check.in_optimizers.intersection(run.after)
    if all(change.is_as(usual[path]) for path, change in run.changes.items()):
        check.add("S not used", place)
    elif check.states and not any(map(run.moved, optimizers)):
        check.add("state put back", place)
    elif check.states or not check.fixed:
        check.add("overflow hidden", place)


def _staying(check: Check, run: Run, bad: Sequence[Path]) -> list[Path]:
    """Returns the leaves of `bad` that the next steps do not make finite again."""
    last = check.window_after(run) if bad else run
    return [path for path in bad if not np.isfinite(host(last.after[path])).all()]


def _left_unchanged(check: Check, run: Run, is_first: bool = True) -> None:
    """Checks that a skipped step leaves each leaf finite, and, at first, unchanged."""
    bad = [path for path, change in run.changes.items() if not change.stays_finite]
    for path in _staying(check, run, bad):
        # A scalar is a sum or a mean for a log.
        if run.changes[path].ndim:
            check.add("NaN stays", path)
    moved = _changed(check, run, bad) if is_first else []
    again = check.run("S = inf", np.inf, follows=run) if moved and check.scales else run
    for path in moved:
        is_copy = again is not None and again is not run and not again.moved(path)
        check.add("put back" if is_copy else "changed on a skip", path)


def _changed(check: Check, run: Run, bad: Sequence[Path]) -> list[Path]:
    """Returns finite leaves that a skipped step should have kept, but changed.

    Counters, data and statistics of all steps change as on any other step. Other
    optimizers skip nothing, as their gradients have no S.
    """
    found = []
    for path, change in run.changes.items():
        counts = not change.is_float or np.isin(change.step, (0, 1)).all()
        is_usual = (
            not run.moved(path) or counts or change.is_as(check.base.changes[path])
        )
        if change.ndim and not (is_usual or path in bad or check.has_other_optimizers):
            found.append(path)
    return found


def nan_in_batch(check: Check) -> None:
    """Checks a NaN in one row of an argument that makes the loss NaN."""
    if not (check.states or check.scales):
        return
    carried = {path[0] for path in (*check.base.after, *check.states, *check.scales)}
    arrays = [path for path, x in check.arrays.items() if hasattr(x, "dtype")]
    others = [p for p in arrays if p[0] not in carried and is_float(check.arrays[p])]
    for position in dict.fromkeys(path[0] for path in others):
        paths = [path for path in others if path[0] == position]
        values = {path: np.array(host(check.start[path])) for path in paths}
        for entries in values.values():
            np.atleast_1d(entries)[:1] = np.nan
        run = check.run("a NaN", values=values)
        if run is None or check.is_alike(run):
            continue  # the loss does not depend on it, such as a learning rate
        # A call of several steps, or members, may apply others. With a loss scale, what
        # changes on a skip was found at S = inf.
        applied = [host(run.after[*state, "applied"]).any() for state in check.states]
        if not check.has_other_optimizers:  # these skip no NaN
            _left_unchanged(check, run, not (any(applied) or check.scales))
        return
    check.not_checked.append("a NaN: no argument was found that makes the loss NaN")
