"""Calls a train step, and records the changes of each call."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..._types import Function, Leaf, PyTree
from .step_arguments import Arguments, Named, Path, host, is_float, is_key, like, named

FAR = -(10**6)  # at this counter S does not grow, and a reset is recognized
_SAMPLE = 4096  # entries of a leaf that are compared in size


Form = tuple[tuple[Path, tuple[int, ...]], ...]  # names and shapes of leaves


class Change(NamedTuple):
    """The change of one leaf of the state in a call."""

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
    """One call: its arguments and results.

    Attributes:
      before: the arguments by path.
      after: new values of the leaves that come back, by the path of the argument.
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
    """A step and its arguments; each call gets fresh copies of them.

    Attributes:
      arguments: their arrays and names.
      scales: paths of the loss scales that have leaves.
      states: paths of the states of `with_loss_scale`.
      has_windows: whether there is a state of `optax.MultiSteps`.
      bare: bare arrays that seem to come back, but are not among `carried`.
      has_other_states: whether a result is such a state in other shapes.
      start: arrays in place of the arguments', for steps later than the first.
      count: the calls so far.
    """

    def __init__(
        self, step: Function, args: tuple[PyTree, ...], carried: Sequence[int]
    ) -> None:
        self.step, self._carried = step, carried
        self.arguments = Arguments(args)
        self.arrays = self.arguments.arrays
        self.scales = _parents(self.arrays, {"loss_scale", "counter"}, only=True)
        self.states = _parents(self.arrays, {"grads_finite", "applied", "skipped"})
        self.has_windows = any(path[-1] == "mini_step" for path in self.arrays)
        records = _parents(self.arrays, {"log2_scale", "pushed"})  # LossScaleHistory
        self._ours = (*self.scales, *records)
        self.start: Named = {}
        self.count = 0
        self.bare: list[Path] = []
        self.has_other_states = False
        self._places: dict[Path, Path] | None = None

    def __call__(
        self,
        s: float | Mapping[Path, float] | None = None,
        values: Mapping[Path, Leaf] = {},
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
        # A StaticLossScale changes only where it is alone: each S compiles.
        is_constant = bool(self.arguments.fixed) and not self.scales
        constant = s if is_constant and isinstance(s, float) else None
        args = self.arguments.copies(before, constant)
        out = self.step(*args)
        self.count += 1
        inside, results = self.arguments.in_modules(args), named(out)
        if self._places is None:
            plain = {path: x for path, x in before.items() if path not in inside}
            self.bare = _bare(plain, results, self._carried)
            self._places = _matched(
                plain, results, self.states + self.scales, self._carried
            )
        places = self._places
        others = results.keys() - places.values()
        self.has_other_states = any(path[-1] == "skipped" for path in others if path)
        after = {p: results.get(places[p]) for p in self.arrays if p in places}
        after = {p: x for p, x in after.items() if x is not None}
        after |= {path: leaf for path, leaf in inside.items() if path in before}
        used = set(self._places.values())
        rest = {
            path: _sampled(host(leaf))
            for path, leaf in results.items()
            if path not in used and is_float(leaf)
        }
        return Run(before, after, rest)

    def is_ours(self, path: Path) -> bool:
        """Whether a leaf is S, a flag or counter, or of a guard or a history."""
        if any(_is_below(path, parent) for parent in self._ours):
            return True
        states = [p for p in self.states if _is_below(path, p)]
        return any(path[len(p)] != "inner_state" for p in states)

    def is_optimizer(self, path: Path) -> bool:
        return any(_is_below(path, p) for p in (*self.states, *self.scales))

    def state_paths(self, run: Run) -> list[Path]:
        """Returns the leaves that steps change and skips keep; keys are left out."""
        return [p for p, x in run.after.items() if not (self.is_ours(p) or is_key(x))]

    def changes(self, run: Run) -> dict[Path, Change]:
        return {path: run.change(path) for path in self.state_paths(run)}

    def skipped(self, run: Run) -> list[Path]:
        """Returns the states whose step was skipped, in any replica."""
        return [path for path in self.states if run.moved((*path, "skipped"))]

    def verdicts(self, run: Run) -> dict[Path, str]:
        """Returns "finite", "overflow", "kept" or "lost" for each loss scale."""
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
        """Returns the arrays of the next step."""
        return {**self.start, **run.after}


def _parents(arrays: Named, names: set[str], only: bool = False) -> list[Path]:
    """Returns paths with these names below; `only`: and at most a hysteresis."""
    below: dict[Path, set[str]] = {}
    for path in arrays:
        for i in range(len(path)):
            below.setdefault(path[:i], set()).add(path[i])
    found = [path for path, inner in below.items() if names <= inner]
    return [p for p in found if not only or below[p] <= {*names, "hysteresis_left"}]


def _sampled(x: np.ndarray) -> np.ndarray:
    """Returns at most `_SAMPLE` evenly spread entries as f64."""
    x = np.stack([np.real(x), np.imag(x)]) if np.iscomplexobj(x) else x
    return x.ravel()[:: max(1, math.ceil(x.size / _SAMPLE))].astype(np.float64)


def _matched(
    before: Named, results: Named, whole: Sequence[Path], carried: Sequence[int]
) -> dict[Path, Path]:
    """Returns the path of the result that is the next value of each argument's leaf.

    An argument comes back as a part of the results with the same names and shapes: as a
    whole, or part by part, except for those in `whole`. If several results match, the
    nearest one is taken. A bare array matches only within a dictionary.
    """
    ours, theirs = _subtrees(before), _subtrees(results)
    places: dict[Form, list[Path]] = {}
    for place, form in theirs.items():
        places.setdefault(form, []).append(place)
    pairs: list[tuple[Path, Path]] = []
    for position in carried:
        path = (str(position),)
        pairs.append((path, path if theirs.get(path) == ours[path] else ()))
    # The largest parts first: parameters have the form of their moments.
    for path in sorted(ours, key=lambda path: (-len(ours[path]), len(path))):
        if path and not any(path != p and _is_below(path, p) for p in whole):
            fitting = places.get(ours[path], [])
            pairs += [(path, p) for p in fitting if _may_match(path, p, ours[path])]
    several = {path for path, _ in pairs if sum(path == p for p, _ in pairs) > 1}

    def order(pair: tuple[Path, Path]) -> tuple[float, ...]:
        path, place = pair
        suffixes = [suffix for suffix, _ in ours[path]]
        gap = 0.0
        if path in several:
            old = [before[*path, *suffix] for suffix in suffixes]
            new = [results[*place, *suffix] for suffix in suffixes]
            gap = sum(map(_distance, old, new))
        is_carried = len(path) == 1 and int(path[0]) in carried
        return not is_carried, -len(suffixes), len(path), gap

    found: dict[Path, Path] = {}
    for path, place in sorted(pairs, key=order):
        taken = [
            any(_is_below(p, path) for p in found),
            any(_is_below(p, place) or _is_below(place, p) for p in found.values()),
        ]
        if not any(taken):
            found |= {(*path, *s): (*place, *s) for s, _ in ours[path]}
    return found


def _bare(before: Named, results: Named, carried: Sequence[int]) -> list[Path]:
    """Returns bare arrays that may come back as the result at the same position."""
    bare = [p for p, x in before.items() if len(p) == 1 and np.ndim(x) and is_float(x)]
    bare = [p for p in bare if int(p[0]) not in carried and p in results]
    return [p for p in bare if np.shape(results[p]) == np.shape(before[p])]


def _is_below(path: Path, other: Path) -> bool:
    return path[: len(other)] == other


def _distance(old: Leaf, new: Leaf) -> float:
    if not (is_float(old) and is_float(new)):
        return 0.0
    with np.errstate(all="ignore"):
        gap = float(np.abs(_sampled(host(new)) - _sampled(host(old))).sum())
    return gap if math.isfinite(gap) else 1e30


def _subtrees(arrays: Named) -> dict[Path, Form]:
    """Returns names and shapes of the leaves below each path."""
    below: dict[Path, set[tuple[Path, tuple[int, ...]]]] = {}
    for path, leaf in arrays.items():
        for i in range(len(path) + 1):
            below.setdefault(path[:i], set()).add((path[i:], np.shape(leaf)))
    return {path: tuple(sorted(form)) for path, form in below.items()}


def _may_match(path: Path, place: Path, form: Form) -> bool:
    """Whether equal names and shapes suffice for a match."""
    names = {name for suffix, _ in form for name in suffix}
    if path[-1:] == place[-1:] and not path[-1].isdigit():
        return True
    if not all(name.isdigit() for name in path):
        return False  # a part of something that has names
    if not all(name.isdigit() for name in names):
        return True
    # Lists of arrays, such as weights of layers: not a batch, nor a pair of scalars.
    return len(form) > 2 and any(len(shape) > 1 for _, shape in form)
