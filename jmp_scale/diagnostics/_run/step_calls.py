"""Calls a train step with other values in its arguments, and finds what comes back."""

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._scaling.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from ..._state import (
    IS_CHECKED,
    LossScale,
    LossScaleState,
    find_loss_scale_states,
)
from ..._tree import find_nodes, is_data, is_inexact, is_module
from ..._types import Function, KeyPath, PyTree
from .._findings import Finding, finding
from .._tables import said
from . import step_leaves
from .step_leaves import Named, Path, flat, has_moved, host, is_below, path_of, sampled
from .step_rules import RULES

FAR = -(10**6)  # at this counter S does not grow, and a reset is recognized
# Of a change: some operations of a GPU add in another order each time.
NOISE = 1e-2
_ON_PURPOSE = ArithmeticError, AssertionError, ValueError
# What XLA raises, and the end of an iterator.
_RAISED = *_ON_PURPOSE, MemoryError, RuntimeError, StopIteration


class Change(NamedTuple):
    """The change of one leaf of the state in a call."""

    new: np.ndarray  # a sample of the entries, f64
    step: np.ndarray  # how much these changed
    stays_finite: bool  # whether what was finite is finite
    eps: float  # of its dtype; 0 of integers
    ndim: int

    @property
    def counts(self) -> bool:
        """Whether a leaf has integers, or changes by 0 or 1."""
        return not self.eps or bool(np.isin(self.step, (0, 1)).all())

    @property
    def is_rounding(self) -> bool:
        """Whether entries change by four of their last places at most."""
        return bool((abs(self.step) <= 4 * self.eps * abs(self.new)).all())

    def is_as(self, other: "Change") -> bool:
        return np.array_equal(self.new, other.new, equal_nan=True)


@dataclasses.dataclass(frozen=True)
class Run:
    """One call: arguments, what comes back of them, and all other results, by path."""

    calls: "Calls"
    before: Named
    after: Named
    results: Named

    @functools.cached_property
    def skipped(self) -> list[Path]:
        """Returns the states whose step was skipped, in any replica."""
        return [path for path in self.calls.states if self.moved((*path, "skipped"))]

    @functools.cached_property
    def counted(self) -> dict[Path, str]:
        """Returns "finite", "overflow" or "kept" for each loss scale."""
        found = dict.fromkeys(self.calls.scales, "kept")
        for scale in self.calls.scales:
            if self.moved((*scale, "counter")):
                steps = self.change((*scale, "counter")).step
                is_finite = ((steps > 0) & (steps < -FAR / 10)).all()
                found[scale] = "finite" if is_finite else "overflow"
        return found

    @property
    def is_applied(self) -> bool:
        return not self.skipped and "overflow" not in self.counted.values()

    def is_alike(self, run: "Run | None") -> "TypeGuard[Run]":
        """Whether another call was applied, and counted as this one was."""
        return run is not None and run.is_applied and run.counted == self.counted

    @property
    def leaves(self) -> Named:
        """Returns all results, and what comes back of arguments."""
        return {("result", *path): x for path, x in self.results.items()} | self.after

    @functools.cached_property
    def changes(self) -> dict[Path, Change]:
        """Returns the leaves that steps change and skips keep."""
        return {p: self.change(p) for p in self.after if p not in self.calls.ours}

    @property
    def is_skipped(self) -> bool:
        """Whether each optimizer skipped the step, and each S counts an overflow."""
        is_overflow = [counted == "overflow" for counted in self.counted.values()]
        return len(self.skipped) == len(self.calls.states) and all(is_overflow)

    @functools.cached_property
    def floats(self) -> list[Path]:
        return [path for path, change in self.changes.items() if change.eps]

    @property
    def weights(self) -> list[Path]:
        """Returns the floating-point leaves that are not of optimizers."""
        return [path for path in self.floats if path not in self.calls.in_optimizers]

    @property
    def moments(self) -> list[Path]:
        """Returns the leaves of optimizers, with all that belongs to them."""
        return [path for path in self.changes if path in self.calls.in_optimizers]

    @functools.cached_property
    def moving(self) -> list[Path]:
        """Returns the floating-point ones that move."""
        return [p for p in self.moments if self.changes[p].eps and self.moved(p)]

    @property
    def learning(self) -> list[Path]:
        """Returns the moments that move or, if none does, all weights."""
        return self.moving or self.weights

    @property
    def lost(self) -> list[Path]:
        """Returns the leaves that the call made infinite or NaN."""
        return [path for path, c in self.changes.items() if not c.stays_finite]

    @property
    def broken(self) -> list[Path]:
        """Returns those that are no scalars, as a sum or a mean for a log is."""
        return [path for path in self.lost if self.changes[path].ndim]

    def change(self, path: Path) -> Change:
        old, new = self.before[path], self.after[path]
        is_number, entries = is_inexact(new), host(new)
        finite = not is_number or (np.isfinite(entries) | ~np.isfinite(host(old))).all()
        step, size = step_leaves.difference(old, new), entries.ndim
        eps = float(jnp.finfo(jnp.result_type(new)).eps) if is_number else 0.0
        return Change(sampled(entries), step, bool(finite), eps, size)

    def steps(self, paths: Iterable[Path]) -> np.ndarray:
        """Returns the changes of the entries of several leaves."""
        return np.concatenate([np.zeros(1), *(self.change(p).step for p in paths)])

    def differs(self, usual: "Run", paths: Sequence[Path] = ()) -> bool:
        """Whether what learns changes otherwise than usually, by more than noise."""
        old = usual.steps(paths or usual.learning)
        off = np.linalg.norm(self.steps(paths or usual.learning) - old)
        return not off <= NOISE * np.linalg.norm(old)  # NaN differs, too

    def moved(self, path: Path) -> bool:
        """Whether a leaf differs after the call, in any replica or member."""
        return path in self.after and has_moved(self.before[path], self.after[path])


class Calls:
    """A step with its arguments, and how it is called with others."""

    def __init__(
        self, step: Function, args: PyTree, kwargs: PyTree, carried: Sequence[int]
    ) -> None:
        self._step, self._keywords = step, [*kwargs]
        self.labels = [*map("args[{}]".format, range(len(args))), *kwargs]
        names = _names(step)[: len(args)]
        names += self.labels[len(names) :]
        self._carried = [(str(position),) for position in carried]
        # Where an argument comes back first of all: at its name, or its position.
        self._own = {(str(i),): (name,) for i, name in enumerate(names)}
        self._own |= zip(self._carried, self._carried, strict=True)
        args = [*args, *kwargs.values()]  # a tuple of states would look like a chain
        optimizers = dict(find_nodes(_is_of_optimizer, args))
        leaves = jax.tree.leaves(args, is_leaf=_is_scale)
        # The S of each constant loss scale.
        self.fixed = [x.loss_scale for x in leaves if isinstance(x, StaticLossScale)]
        args = jax.tree.map(_as_dynamic, args, is_leaf=_is_scale)
        pairs, self._join = flat(args)
        self._leaves = {path_of(keys): leaf for keys, leaf in pairs}
        self._keys = {path_of(keys): keys for keys, _ in pairs}
        self.start = {path: x for path, x in self._leaves.items() if is_data(x)}
        # Variables of NNX outside of modules, as in an optimizer's state, are results.
        modules = dict(find_nodes(is_module, args))
        self._in_modules = self._below(*map(path_of, modules))
        self._places: dict[Path, Path] | None = None
        self.count = 0
        self.raised: list[str] = []  # calls that raised, with the error of the first
        self._find_states(optimizers)

    def _find_states(self, optimizers: Mapping[KeyPath, PyTree]) -> None:
        """Finds S, and the leaves of optimizers with all that belongs to them."""
        self.states = self._parents("grads_finite", "applied", "skipped")
        self.scales = self._parents("loss_scale", "counter")
        history = self._parents("first_norm", "pushed")
        self.in_optimizers = self._below(*self.states, *self.scales, *history)
        inner = [(*state, "inner_state") for state in self.states]
        # S, flags, and what a guard has.
        self.ours = self.in_optimizers - self._below(*inner)
        self.in_optimizers |= self._below(*map(path_of, optimizers))
        self.has_optimizer = any((optimizers, self.scales, self.states))
        have_s = all(map(find_loss_scale_states, optimizers.values()))
        self.has_other_optimizers = bool(self.states) and not have_s

    def _below(self, *nodes: Path) -> set[Path]:
        """Returns the arrays in these nodes."""
        return {path for path in self.start if is_below(path, nodes)}

    def _parents(self, *names: str) -> list[Path]:
        """Returns the nodes with leaves of these names."""
        nodes = dict.fromkeys(path[:-1] for path in self.start)
        return [n for n in nodes if all((*n, name) in self.start for name in names)]

    def found(
        self, rule: str, places: Iterable[Path] = ((),), **values: object
    ) -> Iterator[Finding]:
        """Yields the finding of a rule at each of these leaves or results."""
        for place in places:
            where = "".join([*place[:1], *(f"[{key}]" for key in place[1:])])
            if keys := self._keys.get(place):  # as a reader writes it, `args[0]['w']`
                name = jax.tree_util.keystr(keys[1 : len(place)])
                where = self.labels[int(place[0])] + name
            yield finding(RULES, rule, where, **values)

    @property
    def flags(self) -> list[Path]:
        """Returns the counters of skipped steps."""
        return [(*state, "skipped") for state in self.states]

    @property
    def places_of_s(self) -> list[Path]:
        return [(*scale, "loss_scale") for scale in self.scales]

    @property
    def adjusts(self) -> bool:
        """Whether a step should count: a loop with a `StaticLossScale` does not."""
        return bool(self.states) or not self.fixed

    def at(
        self, s: float, scales: Sequence[Path] = (), counter: int = FAR
    ) -> dict[Path, ArrayLike]:
        """Returns the values of an S and its counter, for `scales` or for all."""
        values: dict[Path, ArrayLike] = {}
        for scale in scales or self.scales:
            values[*scale, "loss_scale"] = np.float32(s)
            values[*scale, "counter"] = counter
        return values

    def run(
        self,
        what: str,
        values: Mapping[Path, ArrayLike],
        start: Named | None = None,
        in_float32: bool = False,
    ) -> Run | None:
        """Calls the step with new values of leaves, the others as in `start`.

        Returns None if a later call than the first one raises.
        """
        before = self.start | (start or {})
        new = {p: step_leaves.like(before[p], value) for p, value in values.items()}
        before |= new
        self.count += 1
        try:
            args, keywords = self.arguments(before)
            with IS_CHECKED(in_float32):
                out = jax.block_until_ready(self._step(*args, **keywords))
        except _RAISED as error:
            if self.count == 1:
                raise
            self.raised.append(f"{what}, {type(error).__name__}: {said(error)[:200]}")
            return None
        # Modules among the arguments have changed.
        return Run(self, before, *self._after(before, [*args, *keywords.values()], out))

    def arguments(self, values: Named) -> tuple[list[PyTree], dict[str, PyTree]]:
        """Returns arguments and keywords, with copies that the step may donate."""
        leaves = [values.get(path, leaf) for path, leaf in self._leaves.items()]
        arrays = jax.Array, np.ndarray
        args = self._join([x.copy() if isinstance(x, arrays) else x for x in leaves])
        first = len(args) - len(self._keywords)
        return args[:first], dict(zip(self._keywords, args[first:], strict=True))

    def _after(self, before: Named, args: PyTree, out: PyTree) -> tuple[Named, Named]:
        """Returns the leaves after a call, and all other results."""
        results = step_leaves.named(out)
        ins = step_leaves.named(args).items()
        after = {path: x for path, x in ins if path in self._in_modules}
        if self._places is None:
            plain = {path: x for path, x in before.items() if path not in after}
            self._places = self._matched(plain, results)
        places = self._places.items()
        after |= {p: results.pop(place) for p, place in places if place in results}
        alike = {p: x for p, x in after.items() if np.shape(x) == np.shape(before[p])}
        return alike, results

    def _matched(self, before: Named, results: Named) -> dict[Path, Path]:
        whole = self.states + self.scales
        found = step_leaves.matched(before, results, whole, self._own)
        for path in self._carried:
            if path not in {leaf[:1] for leaf in found}:
                raise ValueError(
                    "check_step: expected carried= to have positions of arguments that "
                    f"come back among the results, got {path[0]}"
                )
        return found


def _names(step: Function) -> list[str]:
    """Returns the names of the parameters by position, `*args` left out."""
    try:
        parameters = inspect.signature(step).parameters.values()
        return [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
    except ValueError:  # a function of C
        return []


def _is_scale(x: PyTree) -> bool:
    return isinstance(x, LossScale) or is_module(x)


def _as_dynamic(x: PyTree) -> PyTree:
    """Replaces a loss scale of another rule: without a counter no S would be tried."""
    if not isinstance(x, LossScale) or isinstance(x, (NoOpLossScale, DynamicLossScale)):
        return x
    return DynamicLossScale(jnp.full(jnp.shape(x.loss_scale), 8.0))


def _is_of_optimizer(node: PyTree) -> bool:
    """Whether it is the state of an optimizer, or of a chain around a loss scale."""
    parts = node if type(node) is tuple else (node,)
    has_s = any(isinstance(part, LossScaleState) for part in parts)
    has_optax = any(type(part).__module__.startswith("optax") for part in parts)
    return has_s and has_optax if parts is node else has_s or has_optax
