"""Checks steps that must be skipped as a whole: overflows, spikes and NaN.

S may be a device array outside of [min, max], so S = inf is passed like any other: no
static field changes, nothing recompiles, and each product with it is infinite or NaN in
every dtype.
"""

from collections.abc import Sequence

import numpy as np

from .step_applied import diverging
from .step_calls import Check, Run
from .step_leaves import Path, host, is_float

_MOST_POISONED = 6  # arguments, and then parameters, to try
# Statistics of a guard that make every step a spike.
_SPIKES = {
    "loss_mean": -1e30,
    "norm_mean": -120.0,
    "loss_steps": 10**6,
    "norm_steps": 10**6,
    "accepted": 10**6,
}


def infinite_s(check: Check) -> None:
    """Checks that S = inf skips the optimizer of that loss scale as a whole."""
    run = None
    for scale in check.scales:
        run = check.run("S = inf", np.inf, scale)
        if run is not None:
            _skips_its_own(check, scale, run)
    if len(check.scales) > 1 or check.fixed:
        run = check.run("S = inf", np.inf)
    if run is None:
        return
    if not check.scales and run.is_applied:
        _not_skipped(check, run, "")
    alone = [scale for scale in check.scales if scale[:-1] not in check.states]
    is_whole = len(run.skipped) == len(check.states)
    if is_whole and all(run.counted[scale] == "overflow" for scale in alone):
        _left_unchanged(check, run, "overflow stays", "changed on a skip")
    for scale in check.scales:
        # S counts as many applied steps as are skipped at S = inf.
        counter, skipped = (*scale, "counter"), (*scale[:-1], "skipped")
        if skipped in run.after and counter in check.base.after:
            updates = run.change(skipped).step.max()
            if check.base.change(counter).step.max() > updates > 0:
                check.add("S adjusted twice", check.node_name(scale))
    if any(run.moved((*state, "nonfinite_losses")) for state in check.states):
        check.not_checked.append(
            "whether value= is unscaled: at S = inf it is not finite, which is right "
            "if it is unscaled by hand"
        )


def _skips_its_own(check: Check, scale: Path, run: Run) -> None:
    own, counted = scale[:-1], run.counted[scale]
    name = check.node_name(scale)
    if not run.skipped and counted != "overflow":
        _not_skipped(check, run, name)
    elif own in check.states and own not in run.skipped:
        check.add("another S", name)
    elif own not in check.states and counted == "finite":
        check.add("S never adjusted", name)


def _not_skipped(check: Check, run: Run, name: str) -> None:
    """Finds out why a step at S = inf is not skipped."""
    if check.has("S never adjusted", "gradients of zero"):
        return
    bad = [path for path, change in run.changes.items() if not change.stays_finite]
    usual = check.base.changes
    for path in _staying(check, run, bad):
        check.add(check.unskipped, path)
    if bad:
        return
    if all(change.is_as(usual[path]) for path, change in run.changes.items()):
        check.add("S not used", name)
    elif not any(run.moved(path) for path in run.after if check.is_optimizer(path)):
        check.add("state put back", name)
    else:
        check.add("overflow hidden", name)


def _staying(check: Check, run: Run, bad: Sequence[Path]) -> list[Path]:
    """Returns the leaves of `bad` that the next steps do not make finite again."""
    last = check.window_after(run) if bad else run
    return [path for path in bad if not np.isfinite(host(last.after[path])).all()]


def _left_unchanged(
    check: Check,
    run: Run,
    stays: str,
    changes: str = "",
    poisoned: Sequence[Path] = (),
) -> None:
    """Checks that a skipped step leaves each leaf of the state finite, and unchanged.

    `stays` and `changes` are the rules otherwise.
    """

    def matters(path: Path) -> bool:
        # A scalar is a sum or a mean for a log. Other optimizers skip nothing, but
        # their gradients have no S.
        is_ours = stays == "overflow stays" or not check.has_other_optimizers
        return run.changes[path].ndim > 0 and is_ours

    others = {path: x for path, x in run.changes.items() if path not in poisoned}
    bad = [path for path, change in others.items() if not change.stays_finite]
    for path in _staying(check, run, bad):
        is_kept = not poisoned or _is_kept(check, path)
        check.add(stays, path, matters(path) and is_kept)
    for path, change in others.items() if changes else ():
        if change.is_equal or path in bad:
            continue
        counts = not change.is_float or np.isin(change.step, (0, 1)).all()
        if counts or change.is_as(check.base.changes[path]):
            check.add("counts skipped steps", path)
        else:
            check.add(changes, path, matters(path) and not check.has_other_optimizers)


def spike(check: Check) -> None:
    """Checks that a spike is skipped in the same way as an overflow."""
    guards = [path for path in check.arrays if path[-2:-1] == ("guard",)]
    values = {path: _SPIKES[path[-1]] for path in guards if path[-1] in _SPIKES}
    run = check.run("a spike", values=values) if values else None
    if run is not None and len(run.skipped) == len(check.states):
        _left_unchanged(check, run, "NaN stays", "changed on a spike")


def nan_in_batch(check: Check) -> None:
    """Checks a NaN in one row of an argument that makes the loss NaN, or a weight."""
    carried = {path[0] for path in (*check.base.after, *check.states, *check.scales)}
    others: dict[str, list[Path]] = {}
    for path, leaf in check.arrays.items():
        if path[0] not in carried and is_float(leaf) and hasattr(leaf, "dtype"):
            others.setdefault(path[0], []).append(path)
    weights = [
        path
        for path, change in check.base.changes.items()
        if change.is_float and change.ndim and not check.is_optimizer(path)
    ]
    weights.sort(key=lambda path: -np.size(check.arrays[path]))
    tries = [*others.values()][:_MOST_POISONED]
    tries += [[path] for path in weights[:_MOST_POISONED]]
    for paths in tries:
        values = {path: np.array(host(check.start[path])) for path in paths}
        for entries in values.values():
            np.atleast_1d(entries)[:1] = np.nan
        run = check.run("a NaN", values=values)
        if run is None or check.is_alike(run):
            continue  # the loss does not depend on it, such as a learning rate
        for path in diverging(run):
            when = "a step in which one of them saw a NaN"
            check.add("replicas diverge", path, when=when)
        results = [host(x) for x in run.results.values() if is_float(x)]
        for state in run.skipped:
            # A NaN may come up in the backward pass alone.
            is_finite = bool(results) and all(np.isfinite(x).all() for x in results)
            counts = is_finite or run.moved((*state, "nonfinite_losses"))
            if (*state, "loss_scale") in check.scales and not counts:
                check.add("no value", check.node_name(state, "skipped"))
        # A call of several steps, or members, may apply others.
        applied = [host(run.after[*state, "applied"]).any() for state in check.states]
        # With a loss scale, what changes on a skip was found at S = inf.
        is_new = not (any(applied) or check.scales or check.fixed)
        changes = "changed on a skip" if is_new else ""
        return _left_unchanged(check, run, "NaN stays", changes, paths)
    if check.states or check.scales:
        check.not_checked.append("a NaN: no argument was found that makes the loss NaN")
    return None


def _is_kept(check: Check, path: Path) -> bool:
    """Whether a leaf is a statistic or a weight, rather than data of each step."""
    values = {path: host(check.start[path]) + 1}
    run = check.run("another average", values=values)
    if run is None:
        return False
    shares = run.change(path).new - check.base.changes[path].new
    # The new value of an average, running or exponential, contains a part of the old.
    if shares.size and shares.min() > 0.01 and shares.max() < 0.99999:
        return bool(np.ptp(shares) < 0.01)
    _, counting = check.found.get(("counts skipped steps", "note"), ("", []))
    return check.names[path] not in counting and bool(check.scales or check.fixed)
