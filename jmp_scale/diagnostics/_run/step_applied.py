"""Checks that an applied step is counted, and that it changes the state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._types import Leaf
from .step_calls import Check, Run
from .step_leaves import Path, has_moved, host, is_float

_MOST_CALLS = (
    16  # until a window of accumulation ends; of MultiSteps four times as many
)
_FEW_CALLS = 8  # after these, the call in which most leaves change is taken


def applied_step(check: Check) -> None:
    """Checks that a step at a small S is counted, and changes the state."""
    first = _first(check)
    check.is_over = not first.is_applied
    if check.states and not first.is_applied and not first.skipped:
        # No step was skipped, but the counter started over, and so did S.
        for scale in check.scales:
            check.add("S never adjusted", check.node_name(scale))
    elif not first.is_applied:
        check.add("not applied")
    for state in check.states:
        if (*state, "skipped") not in first.after:
            check.is_over = True
            has_flags = any(path[-1:] == ("skipped",) for path in first.results)
            rule = "other shapes" if has_flags else "not returned"
            check.add(rule, check.node_name(state, "skipped"))
    if check.is_over:
        return
    for path in [p for p in check.arrays if len(p) == 1 and p in first.results]:
        old, new = check.arrays[path], first.results[path]
        if is_float(old) and np.ndim(old) and np.shape(old) == np.shape(new):
            what = f"{check.names[path]}: a bare array, which seems to come back"
            check.not_checked.append(f"{what}; pass carried=[{path[0]}]")
    for path, new in first.after.items():
        old = check.arrays[path]
        if _described(old) != _described(new):
            sizes = [jnp.result_type(x).itemsize for x in (old, new)]
            is_half = is_float(old) and sizes[0] > sizes[1] and sizes[1] < 4
            rule = "comes back in half precision" if is_half else "compiles twice"
            check.add(rule, path, old=_described(old), new=_described(new))
    last = _go_on(check)
    moved = [p for p in last.after if has_moved(first.before[p], last.after[p])]
    if not moved:
        check.is_over = True
        check.add("nothing changes" if last.after else "nothing comes back")
        return
    for scale, counted in check.base.counted.items():
        if counted != "finite":
            check.add("S never adjusted", check.node_name(scale))
    for guard in [(*state, "guard") for state in check.states]:
        if last.moved((*guard, "norm_steps")) and not last.moved(
            (*guard, "loss_steps")
        ):
            check.add("guard without a loss", check.node_name(guard, "norm_steps"))
    _unchanged(check, last, moved)
    for path in diverging(check.base):
        check.add("replicas diverge", path, when="a step")


def _first(check: Check) -> Run:
    """Returns a step at the largest of some small S that is not skipped.

    A `StaticLossScale` is called as it is first.
    """
    tries = [2.0**-3, 2.0**-9] if check.scales else [8.0] if check.fixed else []
    check.base = first = check.run(f"S = {_s_of(check)}") or check.base
    for s in tries:
        if first.is_applied or not first.skipped:
            break
        smaller = check.run(f"S = {s:g}", s)
        if smaller is not None and smaller.is_applied:
            if check.fixed:
                check.add("S too large", s=_s_of(check), smaller=f"{s:g}")
            check.s, check.base = s, smaller
            break
    return check.base


def _s_of(check: Check) -> str:
    """Returns the S of the base as text."""
    return f"{check.s or check.fixed[0]:g}"


def _go_on(check: Check) -> Run:
    """Calls on until most leaves change, and makes that call the base.

    A window of accumulation may last several calls, and a learning rate start at 0.
    Returns the last call.
    """
    run, best = check.base, -1
    for count in range(1, 1 + _MOST_CALLS * (4 if check.has_windows else 1)):
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
    results = [path for path, x in run.results.items() if is_float(x)]
    if not any(has_moved(first.results[path], run.results[path]) for path in results):
        _other_weights(check, results)


def _other_weights(check: Check, results: list[Path]) -> None:
    """Checks that other parameters have other gradients."""
    moments, values = [], {}
    for path, change in check.base.changes.items():
        if check.is_optimizer(path):
            moments += [path] if change.is_float and not change.is_equal else []
        elif change.is_float and change.ndim:
            values[path] = 1.5 * host(check.start[path]).astype(np.float64) + 0.01
    run = check.run("other weights", values=values) if moments and values else None
    if not check.is_alike(run):
        return
    if all(run.change(path).is_as(check.base.changes[path]) for path in moments):
        # Without a loss among the results, a linear one looks the same.
        check.add("captured parameters", next(iter(values)), bool(results))


def _described(leaf: Leaf) -> str:
    kind: Any = jax.typeof(leaf)
    weak = ", weakly typed" if kind.weak_type else ""
    return f"{kind.dtype}[{','.join(map(str, kind.shape))}]{weak}"


def _outside(check: Check, run: Run) -> list[Path]:
    """Returns the floating-point leaves that are not an optimizer's."""
    floats = [path for path, change in run.changes.items() if change.is_float]
    return [path for path in floats if not check.is_optimizer(path)]


def _unchanged(check: Check, last: Run, moved: list[Path]) -> None:
    """Finds arguments that no call so far has changed."""
    floats = _outside(check, last)
    inner = [path for path in moved if check.is_optimizer(path)]
    # A counter moves on without gradients, too.
    trains = any(last.changes[p].is_float for p in inner if p in last.changes)
    if floats and trains and set(floats).isdisjoint(moved):
        # A window of MultiSteps may be longer.
        is_sure, calls = not check.has_windows, str(check.count)
        return check.add("nothing learned", floats[0], is_sure, calls=calls)
    arguments = {path[0] for path in moved}
    for argument in dict.fromkeys(path[0] for path in floats):
        if argument not in arguments:
            check.add("comes back unchanged", f"args[{argument}]")


def diverging(run: Run) -> list[Path]:
    """Returns leaves whose replicas were equal before the call and differ after it."""
    spread = {path: x for path, x in run.after.items() if _devices_of(x) > 1}
    found = [path for path, x in spread.items() if not _replicas_equal(x)]
    found = [path for path in found if _replicas_equal(run.before[path])]
    rows = {p: (host(run.before[p]), host(x)) for p, x in spread.items() if x.ndim}
    is_pmap = all(len(new) == _devices_of(spread[p]) for p, (_, new) in rows.items())
    # Replicas of `pmap` are rows; those of members of an ensemble differ before it too.
    if found or not is_pmap or not all(_are_equal(old) for old, _ in rows.values()):
        return found
    return [path for path, (_, new) in rows.items() if not _are_equal(new)]


def _devices_of(x: Leaf) -> int:
    """Returns the number of devices that hold an array, or a part of it."""
    return len(x.sharding.device_set) if isinstance(x, jax.Array) else 1


def _replicas_equal(x: Leaf) -> bool:
    """Whether the parts of an array that hold the same rows are equal."""
    replicas: dict[str, list[np.ndarray]] = {}
    for shard in x.addressable_shards if isinstance(x, jax.Array) else ():
        replicas.setdefault(str(shard.index), []).append(host(shard.data))
    return all(map(_are_equal, replicas.values()))


def _are_equal(parts: Any) -> bool:
    is_number = parts[0].dtype.kind in "fV"
    return all(np.array_equal(x, parts[0], equal_nan=is_number) for x in parts[1:])
