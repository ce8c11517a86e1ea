"""Calls of a train step, and the changes that each of them makes."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .step_arguments import Arguments, Named, Path, host, is_float, is_key, like, named

FAR = -(10**6)  # a counter from which S neither grows nor seems to be put back
_SAMPLE = 4096  # entries of a leaf that are compared in size


class Change(NamedTuple):
    """What a call did to one leaf of the state."""

    old: np.ndarray  # a sample of the entries, f64
    new: np.ndarray
    is_equal: bool
    stays_finite: bool  # whether what was finite is finite
    is_float: bool
    ndim: int

    @property
    def step(self) -> np.ndarray:
        with np.errstate(all="ignore"):
            return self.new - self.old


@dataclasses.dataclass(frozen=True)
class Run:
    """One call: what went in and came out.

    Attributes:
      before: the arguments by path.
      after: what became of the leaves that come back, by the path of the argument.
      results: samples of all other results by path, f64.
    """

    before: Named
    after: Named
    results: dict[Path, np.ndarray]

    def change(self, path: Path) -> Change:
        old, new = host(self.before[path]), host(self.after[path])
        is_number = is_float(self.after[path])
        stays_finite = True
        if is_number and old.shape == new.shape:
            stays_finite = bool((np.isfinite(new) | ~np.isfinite(old)).all())
        return Change(
            old=_sampled(old),
            new=_sampled(new),
            is_equal=np.array_equal(old, new, equal_nan=is_number),
            stays_finite=stays_finite,
            is_float=is_number,
            ndim=new.ndim,
        )

    def moved(self, path: Path) -> bool:
        """Whether a flag or counter differs, in any replica or member."""
        return path in self.after and not np.array_equal(
            host(self.before[path]), host(self.after[path])
        )


class Calls:
    """A step and its arguments; each call is with fresh copies of these.

    Attributes:
      scales: paths of the loss scales that have leaves.
      states: paths of the states of `with_loss_scale`.
      outside: whether a leaf belongs to no loss scale, guard or counter of such.
      start: arrays in place of the arguments', for steps later than the first.
      count: the calls so far.
    """

    def __init__(
        self, step: Callable[..., Any], args: tuple[Any, ...], carried: Sequence[int]
    ) -> None:
        self.step, self._carried = step, carried
        self.arguments = Arguments(args)
        self.arrays = self.arguments.arrays
        self.scales = _parents(self.arrays, {"loss_scale", "counter"}, only=True)
        self.states = _parents(self.arrays, {"grads_finite", "applied", "skipped"})
        self.start: Named = {}
        self.count = 0
        self._places: dict[Path, Path] | None = None

    def __call__(
        self,
        s: float | Mapping[Path, float] | None = None,
        values: Mapping[Path, Any] = {},
        counter: int = FAR,
    ) -> Run:
        """Calls the step at S = `s`, or at that of some loss scales; others have 8."""
        before = {**self.arrays, **self.start}
        for scale in self.scales:
            value = s.get(scale) if isinstance(s, Mapping) else s
            value = 8.0 if value is None else value
            for name, entry in (("loss_scale", value), ("counter", counter)):
                before[*scale, name] = like(self.arrays[*scale, name], entry)
        before |= values
        # That of a StaticLossScale only where there are no others: it compiles.
        is_constant = bool(self.arguments.fixed) and not self.scales
        constant = s if is_constant and isinstance(s, float) else None
        args = self.arguments.copies(before, constant)
        out = self.step(*args)
        self.count += 1
        inside, results = self.arguments.in_modules(args), named(out)
        if self._places is None:
            self._places = _matched(before, results, inside, self._carried)
        after = {p: results[r] for p, r in self._places.items() if r in results}
        after |= {path: leaf for path, leaf in inside.items() if path in before}
        used = set(self._places.values())
        rest = {
            path: _sampled(host(leaf))
            for path, leaf in results.items()
            if path not in used and is_float(leaf)
        }
        return Run(before, after, rest)

    def is_ours(self, path: Path) -> bool:
        """Whether a leaf is S, a counter or flag of a state, or of its guard."""
        if any(path[: len(scale)] == scale for scale in self.scales):
            return True
        states = [p for p in self.states if path[: len(p)] == p]
        return any(path[len(p)] != "inner_state" for p in states)

    def is_optimizer(self, path: Path) -> bool:
        return any(path[: len(p)] == p for p in (*self.states, *self.scales))

    def state_paths(self, run: Run) -> list[Path]:
        """Leaves of the state that steps change and skips keep, keys left out."""
        return [p for p, x in run.after.items() if not (self.is_ours(p) or is_key(x))]

    def changes(self, run: Run) -> dict[Path, Change]:
        return {path: run.change(path) for path in self.state_paths(run)}

    def skipped(self, run: Run) -> list[Path]:
        """The states of which a step was skipped, in any replica."""
        return [path for path in self.states if run.moved((*path, "skipped"))]

    def verdicts(self, run: Run) -> dict[Path, str]:
        """Of each loss scale "finite", "overflow", "kept" or "lost", by its counter."""
        found = {}
        for scale in self.scales:
            path = (*scale, "counter")
            if path not in run.after:
                found[scale] = "lost"
                continue
            moved = host(run.after[path]).astype(np.int64) - host(run.before[path])
            is_finite = ((moved > 0) & (moved < 10**5)).all()
            is_kept = (moved == 0).all()
            found[scale] = "finite" if is_finite else "kept" if is_kept else "overflow"
        return found

    def is_applied(self, run: Run) -> bool:
        return not self.skipped(run) and "overflow" not in self.verdicts(run).values()

    def later(self, run: Run) -> Named:
        """The arrays from which the next step goes on."""
        return {**self.start, **run.after}


def _parents(arrays: Named, names: set[str], only: bool = False) -> list[Path]:
    """Paths that have all of these names below; `only`: no others but hysteresis."""
    below: dict[Path, set[str]] = {}
    for path in arrays:
        for i in range(len(path)):
            below.setdefault(path[:i], set()).add(path[i])
    rest = {"hysteresis_left"} if only else set().union(*below.values(), names)
    return [p for p, found in below.items() if names <= found <= names | rest]


def _sampled(x: np.ndarray) -> np.ndarray:
    """At most `_SAMPLE` entries, evenly spread, as f64."""
    x = np.stack([x.real, x.imag]) if np.iscomplexobj(x) else x
    return x.ravel()[:: max(1, math.ceil(x.size / _SAMPLE))].astype(np.float64)


def _matched(
    before: Named, results: Named, inside: Named, carried: Sequence[int]
) -> dict[Path, Path]:
    """The path of the result that is the next value of each leaf of an argument.

    An argument comes back as a part of the results with the same names and shapes, as a
    whole or else part by part. A bare array has none, except in a dictionary.
    """
    ours, theirs = _subtrees(before), _subtrees(results)
    by_form: dict[Any, list[Path]] = {}
    for path, form in theirs.items():
        by_form.setdefault(form, []).append(path)
    for position in carried:
        path = (str(position),)
        by_form.setdefault(ours.get(path), [])
    found: dict[Path, Path] = {}
    taken: list[Path] = []

    def distance(path: Path, place: Path) -> float:
        total = 0.0
        for suffix, _ in ours[path]:
            old, new = before[*path, *suffix], results[*place, *suffix]
            if is_float(old) and is_float(new):
                with np.errstate(all="ignore"):
                    gap = np.abs(_sampled(host(new)) - _sampled(host(old))).sum()
                total += float(gap) if np.isfinite(gap) else 1e30
        return total

    def take(path: Path, place: Path) -> None:
        taken.append(place)
        for suffix, _ in ours[path]:
            found[*path, *suffix] = (*place, *suffix)

    for position in carried:
        path = place = (str(position),)
        take(path, place if theirs.get(place) == ours[path] else ())
    is_done = lambda path: any(
        p[: len(path)] == path or path[: len(p)] == p for p in found
    )
    for length in range(1, 1 + max(map(len, ours), default=0)):
        level = [p for p in ours if len(p) == length and not is_done(p)]
        level = [p for p in level if p not in inside]
        pairs = []
        for order, path in enumerate(level):
            for place in by_form.get(ours[path], []):
                if _may_match(path, place, ours[path]):
                    pairs.append((path, place, order))
        several = len({p for p, _, _ in pairs}) < len(pairs)
        if several:
            pairs.sort(key=lambda pair: (distance(pair[0], pair[1]), pair[2]))
        for path, place, _ in pairs:
            overlaps = any(
                place[: len(t)] == t or t[: len(place)] == place for t in taken
            )
            if not (is_done(path) or overlaps):
                take(path, place)
    return found


def _subtrees(arrays: Named) -> dict[Path, frozenset[Any]]:
    """Names and shapes of the leaves below each path."""
    below: dict[Path, set[Any]] = {}
    for path, leaf in arrays.items():
        for i in range(len(path) + 1):
            below.setdefault(path[:i], set()).add((path[i:], np.shape(leaf)))
    return {path: frozenset(form) for path, form in below.items()}


def _may_match(path: Path, place: Path, form: frozenset[Any]) -> bool:
    """Whether equal names and shapes say enough."""
    names = {name for suffix, _ in form for name in suffix}
    if path[-1:] == place[-1:] and not path[-1].isdigit():
        return True
    if not all(name.isdigit() for name in names):
        return True
    # Lists of arrays, such as weights of layers: not a batch, nor a pair of scalars.
    return len(form) > 2 and any(len(shape) > 1 for _, shape in form)
