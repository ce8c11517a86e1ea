"""Checks that an applied step is counted, and that it changes the state."""

from typing import Any

import jax
import numpy as np

from ..._types import Leaf
from .step_calls import Check, Path, Run, has_moved, host, is_float

_MOST_CALLS = (
    16  # until a window of accumulation ends; of MultiSteps four times as many
)
_FEW_CALLS = 8  # after these, the call in which most leaves change is taken


def applied_step(check: Check) -> None:
    """Checks that a step at S = 8 is counted, and changes the state."""
    first = check.base = check.call()
    lost = [path for path in check.states if (*path, "skipped") not in first.after]
    check.is_over = bool(lost) or not first.is_applied
    if check.states and not first.is_applied and not first.skipped:
        # No step was skipped, but the counter started over, and so did S.
        for scale in check.scales:
            check.add("S never adjusted", check.node_name(scale, "counter"))
    elif not first.is_applied:
        check.add("not applied")
    for name in [check.node_name(path, "skipped") for path in lost]:
        if any(path[-1:] == ("skipped",) for path in first.results):
            check.not_checked.append(
                f"{name}: it comes back in other shapes; return it as it went in, of a "
                "pmap with out_axes=None or with in_axes=0"
            )
        else:
            check.add("not returned", name)
    if check.is_over:
        return
    for path in [p for p in check.arrays if len(p) == 1 and p in first.results]:
        old, new = check.arrays[path], first.results[path]
        if is_float(old) and np.ndim(old) and np.shape(old) == np.shape(new):
            what = f"args[{path[0]}]: a bare array, which seems to come back"
            check.not_checked.append(f"{what}; pass carried=[{path[0]}]")
    for path, new in first.after.items():
        old, new = _described(check.arrays[path]), _described(new)
        if old != new:
            check.add("compiles twice", path, old=old, new=new)
    last = _go_on(check)
    moved = [p for p in last.after if has_moved(first.before[p], last.after[p])]
    if not moved:
        if last.after:
            check.is_over = True
            check.add("nothing changes")
        else:
            check.not_checked.append("the state: no argument comes back")
        return
    for scale, counted in check.base.counted.items():
        if counted != "finite":
            check.add("S never adjusted", check.node_name(scale, "counter"))
    _unchanged(check, last, moved)
    for path in diverging(check.base):
        check.add("replicas diverge", path, when="a step")


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
    run = check.window_after(check.base)
    if check.is_alike(run):
        check.start_at(run, check.window)


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
