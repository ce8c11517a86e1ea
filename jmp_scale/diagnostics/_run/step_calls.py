"""Calls a train step with other values in its arguments, and records what changes."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._scaling.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from ..._state import LossScale
from ..._tree import find_nodes, is_data, is_module
from ..._types import Function, Leaf, PyTree
from .step_leaves import (
    Named,
    Path,
    flat,
    has_moved,
    host,
    is_float,
    is_key,
    like,
    matched,
    named,
    nnx,
    parents,
    path_of,
    sampled,
)
from .step_rules import RULES

FAR = -(10**6)  # at this counter S does not grow, and a reset is recognized
# What users' steps raise on purpose, what XLA raises, and the end of an iterator.
_RAISED = (
    ArithmeticError,
    AssertionError,
    MemoryError,
    RuntimeError,
    StopIteration,
    ValueError,
)


class Change(NamedTuple):
    """The change of one leaf of the state in a call."""

    old: np.ndarray  # a sample of the entries, f64
    new: np.ndarray
    stays_finite: bool  # whether what was finite is finite
    is_float: bool
    ndim: int

    @property
    def step(self) -> np.ndarray:
        with np.errstate(all="ignore"):
            return self.new - self.old

    def is_as(self, other: "Change") -> bool:
        return np.array_equal(self.new, other.new, equal_nan=True)


@dataclasses.dataclass(frozen=True)
class Run:
    """One call: arguments, what comes back of them, and all other results, by path."""

    check: "Check"
    before: Named
    after: Named
    results: Named

    @property
    def skipped(self) -> list[Path]:
        """Returns the states whose step was skipped, in any replica."""
        return [path for path in self.check.states if self.moved((*path, "skipped"))]

    @functools.cached_property
    def counted(self) -> dict[Path, str]:
        """Returns "finite", "overflow" or "kept" for each loss scale."""
        return {scale: self._count(scale) for scale in self.check.scales}

    def _count(self, scale: Path) -> str:
        counter = (*scale, "counter")
        if not self.moved(counter):
            return "kept"
        moved = self.change(counter).step
        return "finite" if ((moved > 0) & (moved < -FAR / 10)).all() else "overflow"

    @property
    def is_applied(self) -> bool:
        return not self.skipped and "overflow" not in self.counted.values()

    @functools.cached_property
    def changes(self) -> dict[Path, Change]:
        """Returns the leaves that steps change and skips keep; keys are left out."""
        leaves = [path for path, x in self.after.items() if not is_key(x)]
        return {p: self.change(p) for p in leaves if p not in self.check.ours}

    def change(self, path: Path) -> Change:
        old, new = host(self.before[path]), host(self.after[path])
        is_number = is_float(self.after[path])
        finite = not is_number or (np.isfinite(new) | ~np.isfinite(old)).all()
        return Change(sampled(old), sampled(new), bool(finite), is_number, new.ndim)

    def moved(self, path: Path) -> bool:
        """Whether a leaf differs after the call, in any replica or member."""
        return path in self.after and has_moved(self.before[path], self.after[path])


class Check:
    """A step and its arguments, for all passes, and what they found so far."""

    base: Run  # an applied step at S = 8, with which others are compared

    def __init__(
        self,
        step: Function,
        args: tuple[PyTree, ...],
        kwargs: Mapping[str, PyTree],
        carried: Sequence[int],
    ) -> None:
        self._step, self._keywords, self._carried = step, [*kwargs], carried
        labels = [f"args[{i}]" for i in range(len(args))] + self._keywords
        args = *args, *kwargs.values()
        scales = filter(_is_scale, jax.tree.leaves(args, is_leaf=_is_scale))
        self.fixed = [x.loss_scale for x in scales if isinstance(x, StaticLossScale)]
        args = jax.tree.map(_as_dynamic, args, is_leaf=_is_scale)
        self._graph, pairs, self._tree = flat(args)
        self._leaves = {path_of(keys): leaf for keys, leaf in pairs}
        self.arrays = {path: x for path, x in self._leaves.items() if is_data(x)}
        self.names: dict[Path, str] = {}  # as a reader writes them, `args[0]['w']`
        for keys, _ in pairs:
            path = path_of(keys)
            end = jax.tree_util.keystr(keys[1 : len(path)])
            self.names[path] = labels[int(path[0])] + end
        # Variables of NNX outside of modules, as in an optimizer's state, are results.
        modules = [path_of(keys) for keys, _ in find_nodes(is_module, args)]
        self._in_modules = self._below(*modules)
        self.states = parents(self.arrays, "grads_finite", "applied", "skipped")
        self.scales = parents(self.arrays, "loss_scale", "counter")
        history = parents(self.arrays, "first_norm", "pushed")
        # Leaves of optimizers with all that belongs to them, and S, flags, a guard's.
        self.in_optimizers = self._below(*self.states, *self.scales, *history)
        inner = self._below(*((*state, "inner_state") for state in self.states))
        self.ours = self.in_optimizers - inner
        self._places: dict[Path, Path] | None = None
        self.window = 1  # calls until an accumulated step ends
        self.start, self.count = self.arrays | self._apart(), 0
        self.s = 8.0  # of the base
        self.found: dict[str, tuple[str, list[str]]] = {}  # text and places by rule
        self.not_checked: list[str] = []
        self.raised: list[str] = []  # calls that raised, with the error of the first
        self.is_over = False  # later passes cannot run
        self.has_other_optimizers = False  # without a loss scale

    def _apart(self) -> Named:
        """Returns copies of other leaves, made larger: an average starts as a copy."""
        copies: Counter[tuple[object, ...]] = Counter()
        new = {}
        for path, x in self.arrays.items():
            is_state = path in self._in_modules | self.in_optimizers
            if not is_state and len(path) > 1 and is_float(x) and np.ndim(x):
                key = path[-1], np.shape(x), sampled(host(x)).tobytes()
                if copies[key]:
                    new[path] = (x * (1 + copies[key] / 16)).astype(x.dtype)
                copies[key] += 1
        return new

    def add(self, rule: str, place: Path | str = "", **values: str) -> None:
        """Records a finding at a leaf or result."""
        finding = RULES[rule].text.format(**values), []
        where = place if isinstance(place, str) else self.names[place]
        self.found.setdefault(rule, finding)[1].append(where)

    def _below(self, *nodes: Path) -> set[Path]:
        """Returns the arrays in these nodes."""
        return {p for p in self.arrays if any(p[: len(n)] == n for n in nodes)}

    def start_at(self, run: Run, window: int) -> None:
        """Makes a run the one with which others are compared; they start as it did."""
        self.base, self.start, self.window = run, run.before, window

    def is_alike(self, run: Run | None) -> TypeGuard[Run]:
        """Whether a call was applied, and counted as the first was."""
        return run is not None and run.is_applied and run.counted == self.base.counted

    def window_after(self, run: Run) -> Run:
        """Returns the last of the steps that follow a run until a window ends."""
        for _ in range(self.window):
            run = self.run("later steps", follows=run) or run
        return run

    def with_other_weights(self, s: float | None = None) -> Run | None:
        """Calls an applied step with other values outside of the optimizers."""
        values = {}
        for path, change in self.base.changes.items():
            if change.is_float and change.ndim and path not in self.in_optimizers:
                values[path] = 1.5 * host(self.start[path]).astype(np.float64) + 0.01
        run = self.run("other weights", s, values=values) if values else None
        return run if run is not None and run.is_applied else None

    def run(
        self,
        what: str,
        s: float | None = None,
        only: Path | None = None,
        values: Mapping[Path, ArrayLike] = {},
        counter: int = FAR,
        follows: Run | None = None,
    ) -> Run | None:
        """Calls the step at S = `s`, of all loss scales or of `only` one; else base S.

        `values` has new entries of leaves. The call starts as the base did, or where
        another ended. Returns None if the step raises, as its own checks may do; the
        first call may not.
        """
        before = {**self.start, **(follows.after if follows else {})}
        new = dict(values)
        for scale in self.scales:
            is_base = s is None or only not in (None, scale)
            new[*scale, "loss_scale"] = np.float32(self.s if is_base else s)
            new[*scale, "counter"] = counter
        before |= {path: like(before[path], value) for path, value in new.items()}
        args = self._copies(before)
        self.count += 1
        first = len(args) - len(self._keywords)
        keywords = dict(zip(self._keywords, args[first:], strict=True))
        try:
            out = jax.block_until_ready(self._step(*args[:first], **keywords))
        except _RAISED as error:
            if self.count == 1:
                raise
            message = str(error).partition("\n")[0][:200]
            self.raised.append(f"{what}, {type(error).__name__}: {message}")
            return None
        return self._recorded(before, named(out), args)

    def _recorded(self, before: Named, results: Named, args: PyTree) -> Run:
        """Finds the arguments' next values among the results, or in NNX modules."""
        if self._places is None:
            plain = {p: x for p, x in before.items() if p not in self._in_modules}
            whole = self.states + self.scales
            self._places = matched(plain, results, whole, self._carried)
        pairs = self._places.items()
        after = {p: x for p, x in named(args).items() if p in self._in_modules}
        after |= {p: results[q] for p, q in pairs if q in results}
        after = {p: x for p, x in after.items() if np.shape(x) == np.shape(before[p])}
        used = set(self._places.values())
        rest = {q: x for q, x in results.items() if q not in used}
        return Run(self, before, after, rest)

    def _copies(self, values: Mapping[Path, Leaf]) -> PyTree:
        """Returns copies of the arguments, since a step may donate them."""
        leaves = []
        for path, old in self._leaves.items():
            leaf = values.get(path, old)
            is_array = isinstance(leaf, (jax.Array, np.ndarray))
            leaves.append(leaf.copy() if is_array else leaf)
        args = jax.tree.unflatten(self._tree, leaves)
        return args if self._graph is None else nnx().merge(self._graph, args)


def _is_scale(x: PyTree) -> bool:
    return isinstance(x, LossScale) or is_module(x)


def _as_dynamic(x: PyTree) -> PyTree:
    """Replaces a loss scale of another rule: without a counter no S would be tried."""
    if not isinstance(x, LossScale) or isinstance(x, (NoOpLossScale, DynamicLossScale)):
        return x
    return DynamicLossScale(jnp.full(jnp.shape(x.loss_scale), 8.0))
