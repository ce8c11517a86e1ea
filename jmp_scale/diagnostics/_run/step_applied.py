"""Checks that an applied step is counted, and that it changes the state."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ..._types import Leaf
from .step_arguments import Path, host, is_float
from .step_calls import Run
from .step_found import Check, Found

_MOST_CALLS = 16  # until a window of accumulation ends
_MOST_CALLS_OF_MULTI_STEPS = 64
_FEW_CALLS = 8  # after these, the call in which most leaves change is taken


def applied_step(check: Check) -> Iterator[Found]:
    """Checks that a step at S = 8 is counted, and changes the state."""
    calls = check.calls
    first = check.base = calls()
    said = calls.verdicts(first)
    if not calls.is_applied(first):
        # No step was skipped, but the counter started over, and so did S.
        anew = [] if not calls.states or calls.skipped(first) else list(said)
        for path in anew:
            yield Found("S never adjusted", check.node_name(path, "counter"))
        if not anew:
            yield Found("not applied")
        check.is_over = True
        return
    for path in calls.bare:
        what = f"args[{path[0]}]: a bare array, which seems to come back"
        check.not_checked.append(f"{what}; pass carried=[{path[0]}]")
    last = _go_on(check)
    check.changes = calls.changes(check.base)
    lost = [path for path in calls.states if (*path, "skipped") not in first.after]
    for path in lost:
        check.is_over = True
        name = check.node_name(path, "skipped")
        if calls.has_other_states:
            check.not_checked.append(
                f"{name}: it comes back in other shapes; return it as it went in, of a "
                "pmap with out_axes=None or with in_axes=0"
            )
        else:
            yield Found("not returned", name)
    yield from _other_types(check, first)
    moved = {p for p in last.after if _moved(first.before[p], last.after[p])}
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
    for path in diverging(check.base):
        yield Found("replicas diverge", check.name(path), None, {"when": "a step"})


def _go_on(check: Check) -> Run:
    """Calls on until most leaves change; `start` is then the state before that call.

    A window of accumulation may last several calls, and a learning rate start at 0.
    Returns the last call.
    """
    calls, run, most = check.calls, check.base, -1
    start = calls.start
    most_calls = _MOST_CALLS_OF_MULTI_STEPS if calls.has_windows else _MOST_CALLS
    for count in range(1, most_calls + 1):
        floats = [p for p in calls.state_paths(run) if is_float(run.after[p])]
        outside = [p for p in floats if not calls.is_optimizer(p)]
        learned = sum(map(run.moved, outside))
        counts = all(said == "finite" for said in calls.verdicts(run).values())
        if counts and learned > most:
            check.base, check.window, most = run, count, learned
            start = calls.start
        is_enough = learned == len(outside) or (most > 0 and count >= _FEW_CALLS)
        if (counts and is_enough) or not any(map(run.moved, run.after)):
            break
        if "lost" in calls.verdicts(run).values():
            break
        calls.start = calls.later(run)
        later = check.run("later steps")
        if later is None or not calls.is_applied(later):
            break
        run = later
    calls.start = start
    return run


def next_step(check: Check) -> tuple[Found, ...]:
    """Calls on, so that moments and averages differ from their initial values."""
    calls, start, run = check.calls, check.calls.start, check.base
    for _ in range(check.window):
        calls.start = calls.later(run)
        later = check.run("later steps")
        if later is None:
            break
        run = later
    if check.is_alike(run):
        check.base, check.changes = run, calls.changes(run)
    else:
        calls.start = start
    return ()


def _moved(old: Leaf, new: Leaf) -> bool:
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
    """Finds arguments that no call so far has changed."""
    calls = check.calls
    outside = [p for p in calls.state_paths(last) if not calls.is_optimizer(p)]
    floats = [p for p in outside if is_float(last.after[p])]
    inner = [p for p in moved if calls.is_optimizer(p) and not calls.is_ours(p)]
    trains = any(is_float(last.after[p]) for p in inner)
    if floats and trains and not moved.intersection(floats):
        # A window of MultiSteps may be longer.
        level = "note" if calls.has_windows else None
        values = {"calls": calls.count}
        yield Found("nothing learned", check.name(floats[0]), level, values)
        return
    for argument in dict.fromkeys(path[0] for path in floats):
        if argument not in {path[0] for path in moved}:
            yield Found("comes back unchanged", f"args[{argument}]")


def diverging(run: Run) -> list[Path]:
    """Returns leaves whose replicas were equal before the call and differ after it."""
    found = []
    for path, new in run.after.items():
        old = run.before[path]
        if not isinstance(new, jax.Array) or len(new.sharding.device_set) == 1:
            continue
        if not _replicas_equal(new) and _replicas_equal(old):
            found.append(path)
    return found or _diverging_rows(run)


def _replicas_equal(x: Leaf) -> bool:
    """Whether the parts of an array that hold the same rows are equal."""
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
    """Does so for `pmap`, whose replicas are rows; members of an ensemble differ."""
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
