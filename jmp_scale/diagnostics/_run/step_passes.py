"""The passes of `check_step`: each asks one question, by calls with other values.

A pass is a function of a base, the applied step with which it compares others. It
yields what it found, a question that is left, or `OVER` if no later pass has a base. It
changes nothing and reads no other pass's findings.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from ..._state import OVERFLOWS
from ..._tree import is_inexact
from ..._types import PyTree
from .._findings import Finding
from .step_base import Base
from .step_calls import NOISE, Run
from .step_leaves import Path, copies_of, has_moved, host, seem_to_come_back
from .step_powers import Row, count_of_power

_GROWS = 2**30  # a counter at which S grows, whatever its period
# Values of a guard to which each norm is a spike.
_SPIKE = {"accepted": 2**29, "norm_steps": 2**29, "norm_mean": -1e3, "in_a_row": 0}


Findings = Iterator[Finding | str]
OVER = ""


# The first steps.


def is_applied(base: Base) -> Findings:
    """Checks that a step at a small S is applied, and that its state comes back."""
    first, calls = base.first, base.calls
    if lost := [path for path in calls.flags if path not in first.after]:
        yield from base.found("not returned", lost)
    elif first.is_applied:
        return
    elif first.skipped or not (calls.states or all(map(first.moved, first.weights))):
        yield from _not_applied(base)
    else:  # no step was skipped, but the counter started over, and so did S
        yield from base.found("S never adjusted", calls.places_of_s)
    yield OVER


def _not_applied(base: Base) -> Findings:
    """Tells which arguments are NaN or, if none is, at which S it was called."""
    start = base.calls.start.items()
    broken = [path for path, x in start if is_inexact(x) and np.isnan(host(x)).any()]
    rule = "NaN goes in" if broken else "not applied"
    yield from base.found(rule, broken or [()], s=f"{base.s:g}")


def constant_s(base: Base) -> Findings:
    """Checks that a step is applied at the S of each `StaticLossScale`."""
    for s in base.calls.fixed:
        run = base.call(f"S = {s:g}", s=s)
        if run is not None and run.skipped:
            yield from base.found("not applied", s=f"{s:g}")


def arrays_without_names(base: Base) -> Findings:
    """Notes arrays that may come back: only what has names is taken for state."""
    first = base.first
    left = {p: x for p, x in first.before.items() if p not in first.after}
    left = {p: x for p, x in left.items() if is_inexact(x)}
    for path in seem_to_come_back(left, first.results):
        what = f"{base.calls.labels[int(path[0])]}: arrays without names, which seem to"
        yield f"{what} come back; pass carried=[{path[0]}]"


def half_results(base: Base) -> Findings:
    """Looks for leaves that come back in half precision, and went in in more."""
    for path, new in base.first.after.items():
        old, dtype = jnp.result_type(base.calls.start[path]), jnp.result_type(new)
        if is_inexact(new) and old.itemsize > dtype.itemsize < 4:
            names = {"old": str(old), "new": str(dtype)}
            yield from base.found("comes back in half precision", [path], **names)


def adjusts_s(base: Base) -> Findings:
    """Checks that a step counts, unless its optimizer may wait for a window to end."""
    calls = base.calls
    for scale, counted in base.run.counted.items():
        if counted == "finite" or not calls.adjusts:
            continue
        own = scale[:-1] if scale[:-1] in calls.states else scale
        if _may_wait(base.run, own):
            what = f"{calls.labels[int(scale[0])]}: no step of its optimizer ended"
            yield f"{what}; pass carried= for a counter, or the state of a later call"
        else:
            yield from base.found("S never adjusted", [(*scale, "loss_scale")])


def _may_wait(run: Run, own: Path) -> bool:
    """Whether something else counts, and neither its own state nor all weights move.

    A bare counter is none of the state that is seen to come back.
    """
    moved = {*filter(run.moved, run.after)}
    has_own = any(path[: len(own)] == own for path in moved)
    if has_own or moved.issuperset(run.weights):
        return False
    counts = {path for path, x in run.before.items() if _is_count(x)}
    has_bare = any(map(_is_count, run.results.values()))
    return not counts.isdisjoint(moved) or (has_bare and not counts <= run.after.keys())


def _is_count(x: PyTree) -> bool:
    return not np.ndim(x) and not is_inexact(x)


def changes_something(base: Base) -> Findings:
    """Checks that parameters are among what the applied steps changed."""
    start, weights = base.first.before, base.last.weights
    changed = {p for p, x in base.last.after.items() if has_moved(start[p], x)}
    # A window of MultiSteps may be longer.
    learns = not changed.isdisjoint(weights) or "mini_step" in {p[-1] for p in changed}
    if weights and not learns:
        yield from base.found("nothing learned", [weights[0]], calls=base.calls.count)
    elif not (changed and base.last.floats):
        yield from base.found("nothing comes back")
    if not changed:
        yield OVER


def guards_see_losses(base: Base) -> Findings:
    """Checks that a guard that sees norms sees losses, too."""
    # A count may start again at 1, where the mean is another.
    names = "norm_steps", "norm_mean", "loss_steps", "loss_mean"
    for guard in [(*state, "guard") for state in base.calls.states]:
        seen = {name[:4] for name in names if base.last.moved((*guard, name))}
        if seen == {"norm"}:
            yield from base.found("guard without a loss", [(*guard, "loss_steps")])


def replicas_agree(base: Base) -> Findings:
    """Checks that devices with equal parameters have equal moments after the steps."""
    last = base.last
    rows = [host(base.first.before[path]) for path in last.weights]
    is_mapped = all(x.ndim and (x == x[0]).all() for x in rows)  # as under pmap
    is_mapped = is_mapped and any((x != x.flat[0]).any() for x in rows)
    apart = [path for path in last.moments if _disagree(last.after[path], is_mapped)]
    yield from base.found("replicas diverge", apart)


def _disagree(leaf: PyTree, is_mapped: bool = False) -> bool:
    """Whether devices that hold copies of a leaf hold different ones."""
    is_copy = is_mapped or getattr(leaf, "is_fully_replicated", False)
    first, *others = copies_of(leaf) if is_copy else [np.zeros(1)]
    return not all(np.allclose(first, x, NOISE, 0) for x in others)


def is_comparable(base: Base) -> Findings:
    """Checks that the first steps stay finite, and that equal calls are equal."""
    broken = [*base.first.broken, *base.last.broken]
    if broken:
        yield from base.found("update not finite", broken)
        yield OVER
    again = base.call("the same again")
    if again is not None and again.differs(base.run):
        yield from base.found("not repeatable")
        yield OVER


# The same step at several S.


def has_gradients(base: Base) -> Findings:
    run = base.exact.run
    if base.calls.scales and run.floats and not any(map(run.moved, run.floats)):
        yield from base.found("gradients of zero")


def unscaled_once(base: Base) -> Findings:
    """Checks that no leaf of the state grows or falls by powers of an S."""
    rows = _telling(base)
    growing = [path for path, row in rows.items() if row.direction > 0]
    clipped = [path for path, row in rows.items() if row.is_flat_below]
    if growing:
        rule, told = "never unscaled", growing
    elif clipped and not _is_clipped_unscaled(base, rows, clipped):
        rule, told = "clipped while scaled", clipped
    else:
        rule, told = "unscaled twice", rows
    yield from base.found(rule, told)


def _telling(base: Base) -> dict[Path, Row]:
    """Returns the moments, or else the weights, that grow or fall by powers of S.

    Moments are sums of gradients. If these grow, Adam's updates hardly do, and seem to
    fall: so weights are asked only if no moment moves, or if none of these changes.
    """
    changing, run = base.changing, base.exact.run
    moments = base.calls.in_optimizers if run.moving else changing
    found = {path: row for path, row in changing.items() if path in moments}
    # Sums of a window end at 0. A mean for a log has not the form of any moment.
    forms = {(path[-1], np.shape(run.after[path])) for path in run.moving}
    form = {path: (path[-1], np.shape(run.after[path])) for path in changing}
    return found or {p: row for p, row in changing.items() if form[p] in forms}


def _is_clipped_unscaled(base: Base, rows: dict[Path, Row], paths: list[Path]) -> bool:
    """Whether a leaf falls at once, or other weights leave a small S's step its size.

    Gradients that are unscaled twice are so large there that the optimizer's own clip
    determines their size.
    """
    if any(row.falls_at_once for row in rows.values()):
        return True
    low, high = (2.0 ** rows[paths[0]].powers[i] for i in (0, -1))
    usual = base.exact.call("a clip", s=low), base.exact.call("a clip", s=high)
    other = [base.exact.with_other_weights(s) for s in (low, high)]
    steps = [run.steps(paths) for run in (*usual, *other) if run]
    if len(steps) < 4:
        return False
    old = np.linalg.norm(steps[0] - steps[1])
    return bool(abs(np.linalg.norm(steps[2] - steps[3]) - old) < 1e-3 * old)


def reported_unscaled(base: Base) -> Findings:
    """Checks what is reported and not named scaled, and the loss that a guard sees."""
    means = {(*state, "guard", "loss_mean") for state in base.calls.states}
    # A mean that a step carries may change, too.
    carried = means if _telling(base) else means | base.changing.keys()
    for path in base.told:
        is_named = path not in means and "scale" in "".join(path).lower()
        if (path[0] == "result" or path in carried) and not is_named:
            yield from base.found("reported scaled", [path])


def unscaled_by_its_own_s(base: Base) -> Findings:
    """Checks that a step in which S grows is the same as one in which S stays."""
    exact, old = base.exact, base.exact.run
    # What depends on S differs from the second step in a call on, where S has grown.
    is_asked = base.calls.scales and not _telling(base)
    new = exact.call("a growing S", counter=_GROWS) if is_asked else None
    if new is None or new.skipped or not new.moved(base.calls.places_of_s[0]):
        return
    for path in old.learning:
        steps = old.change(path).step, new.change(path).step
        # Weights change by a power of 2: a target is copied at some counters.
        is_halved = count_of_power(*steps, 1, NOISE * np.abs(steps[0]) / 4) != 0
        if new.differs(old, [path]) and (old.moving or is_halved):
            yield from base.found("unscaled by the next S", [path])


def overflow_is_skipped(base: Base) -> Findings:
    """Checks that infinite gradients are skipped: unscaled ones, and those of float16.

    At S = inf most are NaN, which a clip does not hide, and a loss may be infinite.
    """
    usual = base.exact.run
    if "finite" not in usual.counted.values() or base.changing:
        return  # no skip is told, or what is hidden cannot be told apart
    run = base.exact.call("infinite gradients on one device", counter=OVERFLOWS)
    if any(itertools.starmap(_is_hidden, [(usual, run), *_at_large_s(base)])):
        yield from base.found("overflow hidden")
    elif run is not None:
        yield from base.found("skipped alone", _alone(run))


def _at_large_s(base: Base) -> Iterator[tuple[Run, Run | None]]:
    """Yields pairs of runs of which the second may overflow in part."""
    yield base.run, base.call("S = 2^100", s=2.0**100)
    for several in base.several_s:
        if not several.is_exact:
            yield from [*itertools.pairwise(several.runs.values())][-1:]


def _alone(run: Run) -> list[Path]:
    """Returns the counters that differ between devices."""
    counters = run.calls.flags or [(*s, "counter") for s in run.calls.scales]
    return [p for p in counters if p in run.after and _disagree(run.after[p])]


def _is_hidden(usual: Run, run: Run | None) -> bool:
    return usual.is_alike(run) and run.differs(usual)


# The step that follows.


def reads_its_parameters(base: Base) -> Findings:
    """Checks that other parameters have other gradients, if the loss stays."""
    run, later = base.later.run, base.later
    losses = [path for path in run.results if is_inexact(run.results[path])]
    # A linear loss has the same gradients too, but moves on.
    moved = {has_moved(base.run.results[path], run.results[path]) for path in losses}
    # Old moments of a large S hide gradients that are scaled by a small one.
    is_asked = later is not base and run.moving and not base.changing
    if is_asked and moved == {False}:
        other = later.with_other_weights(later.s)
        if other is not None and not other.differs(run):
            yield from base.found("captured parameters", [run.weights[0]])


def infinite_s(base: Base) -> Findings:
    """Checks that S = inf, whose products are not finite, skips a step as a whole."""
    calls, later, run = base.calls, base.later, None
    for scale in calls.scales:
        run = later.call("S = inf", calls.at(np.inf, [scale]))
        if run is not None:
            yield from _of_one_scale(base, run, scale)
    if len(calls.scales) > 1:
        run = later.call("S = inf", s=np.inf)
    if run is not None and run.is_skipped:
        yield from _left_finite(later, run)
        yield from _left_unchanged(later, run)


def _of_one_scale(base: Base, run: Run, scale: Path) -> Iterator[Finding]:
    """Checks that S = inf skips the optimizer of that S, which counts it once."""
    counted, place = run.counted[scale], (*scale, "loss_scale")
    if counted == "overflow" and scale[:-1] in run.skipped:
        adjusted = base.later.run.change((*scale, "counter")).step
        if (adjusted > run.change((*scale[:-1], "skipped")).step).any():
            yield from base.found("S adjusted twice", [place])
    elif counted == "finite" and run.skipped:
        yield from base.found("S not used", [place])
    elif counted != "overflow" and not run.skipped:
        yield from _not_skipped(base, run, scale)


def _not_skipped(base: Base, run: Run, scale: Path) -> Iterator[Finding]:
    """Finds out why S = inf skips no step."""
    usual, place = base.later.run, [(*scale, "loss_scale")]
    adjusts, is_counted = base.calls.adjusts, usual.counted[scale] == "finite"
    if (adjusts and not is_counted) or not any(map(usual.moved, usual.floats)):
        return  # S is never adjusted, or gradients are 0
    if is_counted and run.counted[scale] == "kept":
        yield from base.found("state put back", place)
    elif run.broken:
        yield from _left_finite(base.later, run)
    elif all(change.is_as(usual.changes[path]) for path, change in run.changes.items()):
        yield from base.found("S not used", place)
    elif adjusts and not base.changing:  # what is not scaled does not overflow
        yield from base.found("overflow hidden", place)


def _left_finite(base: Base, run: Run) -> Iterator[Finding]:
    """Checks that the next steps make finite again what a step did not leave so.

    If it skips them, even a scalar is the cause, which else is for a log.
    """
    last = base.window_after(run) if run.lost else run
    left = [path for path in run.lost if not np.isfinite(host(last.after[path])).all()]
    arrays = [path for path in left if run.changes[path].ndim]
    if last.is_applied:
        left = arrays = [*filter(lambda path: _stays(base, run, last, path), arrays)]
    yield from base.found("NaN stays", arrays or left)


def _stays(base: Base, run: Run, last: Run, path: Path) -> bool:
    """Whether entries stay that usual steps change: a record keeps its old ones."""
    is_kept = host(base.run.after[path]) == host(base.following.after[path])
    is_finite = [np.isfinite(host(each.after[path])) for each in (run, last)]
    return not np.all(is_kept | is_finite[0] | is_finite[1])


def _left_unchanged(base: Base, run: Run) -> Findings:
    """Checks that a skip changes no leaf, but those that it did not leave finite."""
    if base.calls.has_other_optimizers:
        return  # these skip nothing, as their gradients have no S
    for path, change in run.changes.items():
        # A counter, data, or a statistic changes as on any other step.
        is_usual = change.counts or change.is_as(base.run.changes[path])
        is_usual |= change.is_rounding  # as where weights are normalized anew
        if change.ndim and change.stays_finite and not is_usual:
            yield from base.found("changed on a skip", [path])


def spike(base: Base) -> Findings:
    """Checks that a step that a guard skips, with finite gradients, changes nothing."""
    calls = base.calls
    values = {(*p, "guard", k): v for p in calls.states for k, v in _SPIKE.items()}
    values = {path: value for path, value in values.items() if path in calls.start}
    run = base.later.call("a spike", values) if values else None
    if run is not None and len(run.skipped) == len(calls.states):
        yield from _left_unchanged(base.later, run)


def nan_in_batch(base: Base) -> Findings:
    """Checks a NaN in one row of an argument that makes the loss NaN."""
    calls, later = base.calls, base.later
    if calls.has_other_optimizers or not (calls.states or calls.scales):
        return  # something does not skip a NaN
    for values in _batches_with_nan(later):
        run = later.call("a NaN", values)
        # The loss does not depend on some arguments, such as a learning rate.
        if run is not None and not later.run.is_alike(run):
            yield from _left_finite(later, run)
            # A call of several steps, or members, may apply others.
            applied = (host(run.after[*state, "applied"]) for state in calls.states)
            # With a loss scale, S = inf has shown what changes on a skip.
            if not (calls.scales or any(map(np.any, applied))):
                yield from _left_unchanged(later, run)
            return
    yield "a NaN: no argument was found that makes the loss NaN"


def _batches_with_nan(base: Base) -> list[dict[Path, np.ndarray]]:
    """Returns the arrays of each argument that is no state, with a NaN in one row."""
    calls, batches = base.calls, defaultdict[str, dict[Path, np.ndarray]](dict)
    carried = {path[0] for path in (*base.run.after, *calls.states, *calls.scales)}
    for path, x in base.run.before.items():
        if path[0] not in carried and hasattr(x, "dtype") and is_inexact(x):
            entries = batches[path[0]][path] = np.array(host(x))
            np.atleast_1d(entries)[:1] = np.nan
    return list(batches.values())


PASSES = (
    *(is_applied, constant_s, arrays_without_names, half_results),
    *(adjusts_s, changes_something, guards_see_losses, replicas_agree, is_comparable),
    *(has_gradients, unscaled_by_its_own_s, unscaled_once),
    *(reported_unscaled, overflow_is_skipped, reads_its_parameters, infinite_s),
    *(spike, nan_in_batch),
)
