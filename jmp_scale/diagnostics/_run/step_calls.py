"""Calls a train step with other values in its arguments, and finds what comes back."""

import dataclasses
import functools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._scaling.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from ..._state import LossScale, LossScaleState, find_loss_scale_states
from ..._tree import find_nodes, is_data, is_inexact, is_module
from ..._types import Function, KeyPath, PyTree
from .._tables import said
from .step_rules import RULES

Path = tuple[str, ...]  # keys, indices and names of fields
Named = dict[Path, PyTree]
Form = tuple[tuple[Path, tuple[int, ...]], ...]  # names and shapes of leaves

FAR = -(10**6)  # at this counter S does not grow, and a reset is recognized
_ON_PURPOSE = ArithmeticError, AssertionError, ValueError
# What XLA raises, and the end of an iterator.
_RAISED = *_ON_PURPOSE, MemoryError, RuntimeError, StopIteration
_SAMPLE = 4096  # entries of a leaf that are compared in size


class Change(NamedTuple):
    """The change of one leaf of the state in a call."""

    new: np.ndarray  # a sample of the entries, f64
    step: np.ndarray  # how much these changed
    stays_finite: bool  # whether what was finite is finite
    is_float: bool
    ndim: int

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
        found = dict.fromkeys(self.check.scales, "kept")
        for scale in self.check.scales:
            if self.moved((*scale, "counter")):
                steps = self.change((*scale, "counter")).step
                is_finite = ((steps > 0) & (steps < -FAR / 10)).all()
                found[scale] = "finite" if is_finite else "overflow"
        return found

    @property
    def is_applied(self) -> bool:
        return not self.skipped and "overflow" not in self.counted.values()

    @functools.cached_property
    def changes(self) -> dict[Path, Change]:
        """Returns the leaves that steps change and skips keep."""
        return {p: self.change(p) for p in self.after if p not in self.check.ours}

    @property
    def is_skipped(self) -> bool:
        """Whether each optimizer, and each S that is not of one, skipped the step."""
        scales = [s for s in self.check.scales if s[:-1] not in self.check.states]
        is_overflow = [self.counted[scale] == "overflow" for scale in scales]
        return len(self.skipped) == len(self.check.states) and all(is_overflow)

    @property
    def moments(self) -> list[Path]:
        """Returns the floating-point leaves of optimizers."""
        leaves = self.changes.items()
        return [p for p, c in leaves if c.is_float and p in self.check.in_optimizers]

    @property
    def weights(self) -> list[Path]:
        """Returns all other floating-point leaves."""
        floats = [path for path, change in self.changes.items() if change.is_float]
        return [path for path in floats if path not in self.check.in_optimizers]

    @property
    def broken(self) -> list[Path]:
        """Returns the leaves that the call made infinite or NaN."""
        return [path for path, c in self.changes.items() if not c.stays_finite]

    def change(self, path: Path) -> Change:
        old, new = self.before[path], self.after[path]
        is_number, entries = is_inexact(new), host(new)
        finite = not is_number or (np.isfinite(entries) | ~np.isfinite(host(old))).all()
        step, size = difference(old, new), entries.ndim
        return Change(sampled(entries), step, bool(finite), is_number, size)

    def moved(self, path: Path) -> bool:
        """Whether a leaf differs after the call, in any replica or member."""
        return path in self.after and has_moved(self.before[path], self.after[path])


class Check:
    """A step and its arguments, for all passes, and what they found so far."""

    base: Run  # an applied step, with which others are compared
    s = 8.0  # of the base
    window = 1  # calls until an accumulated step ends
    count = 0  # of calls
    is_over = False  # whether later passes cannot run

    def __init__(
        self, step: Function, args: PyTree, kwargs: PyTree, carried: Sequence[int]
    ) -> None:
        self._step, self._keywords, self._carried = step, [*kwargs], carried
        labels = [f"args[{i}]" for i in range(len(args))] + self._keywords
        args = [*args, *kwargs.values()]  # a tuple of states would look like a chain
        optimizers = [node for _, node in find_nodes(_is_of_optimizer, args)]
        self.fixed = _static_scales(args)
        args = jax.tree.map(_as_dynamic, args, is_leaf=_is_scale)
        self._leaves, self.names, self._join = _named_leaves(args, labels)
        self.start = {path: x for path, x in self._leaves.items() if is_data(x)}
        # Variables of NNX outside of modules, as in an optimizer's state, are results.
        modules = [_path_of(keys) for keys, _ in find_nodes(is_module, args)]
        self._in_modules = self._below(*modules)
        self.states = self._parents("grads_finite", "applied", "skipped")
        self.scales = self._parents("loss_scale", "counter")
        # Leaves of optimizers with all that belongs to them, and S, flags, a guard's.
        history = self._parents("first_norm", "pushed")
        self.in_optimizers = self._below(*self.states, *self.scales, *history)
        inner = [(*state, "inner_state") for state in self.states]
        self.ours = self.in_optimizers - self._below(*inner)
        self.start |= self._apart()
        self._places: dict[Path, Path] | None = None
        self.has_optimizer = bool(optimizers or self.scales or self.states)
        with_s = all(map(find_loss_scale_states, optimizers))
        self.has_other_optimizers = bool(self.states) and not with_s
        self.found: dict[str, tuple[str, list[str]]] = {}  # text and places by rule
        self.not_checked: list[str] = []
        self.raised: list[str] = []  # calls that raised, with the error of the first

    def _below(self, *nodes: Path) -> set[Path]:
        """Returns the arrays in these nodes."""
        return {path for path in self.start if _is_below(path, nodes)}

    def _parents(self, *names: str) -> list[Path]:
        """Returns the nodes with leaves of these names."""
        nodes = dict.fromkeys(path[:-1] for path in self.start)
        return [n for n in nodes if all((*n, name) in self.start for name in names)]

    def _apart(self) -> Named:
        """Scales leaves that equal another one, so that both can be told apart.

        An average starts as a copy of the parameters.
        """
        copies: Counter[tuple[object, ...]] = Counter()
        new = {}
        for path, x in self.start.items():
            is_state = path in self.in_optimizers | self._in_modules
            if not is_state and len(path) > 1 and is_inexact(x) and np.ndim(x):
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

    def is_alike(self, run: Run | None) -> TypeGuard[Run]:
        """Whether a call was applied, and counted as the first was."""
        return run is not None and run.is_applied and run.counted == self.base.counted

    def step(self, run: Run) -> np.ndarray:
        """Returns the changes of moments or, if none moves, of all other floats."""
        base = self.base
        paths = [path for path in base.moments if base.moved(path)] or base.weights
        return np.concatenate([np.zeros(1), *(run.change(p).step for p in paths)])

    def followed(self, run: Run | None) -> Iterator[Run]:
        """Yields a run and those that follow it, as long as they are applied."""
        while run is not None and run.is_applied:
            yield run
            run = self.run("later steps", follows=run)

    def window_after(self, run: Run) -> Run:
        """Returns the last of the steps that follow a run until a window ends."""
        for _ in range(self.window):
            run = self.run("later steps", follows=run) or run
        return run

    def with_other_weights(self, s: float) -> Run | None:
        """Calls an applied step with other values outside of the optimizers."""
        values = {
            path: 1.5 * host(self.start[path]).astype(np.float64) + 0.01
            for path in self.base.weights
            if self.base.changes[path].ndim
        }
        run = self.run("other weights", values | self.at(s)) if values else None
        return run if run is not None and run.is_applied else None

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
        values: Mapping[Path, ArrayLike] = {},
        follows: Run | None = None,
    ) -> Run | None:
        """Calls the step with new values of leaves; with the S of the base by default.

        Returns None if a later call than the first one raises.
        """
        before = {**self.start, **(follows.after if follows else {})}
        new = {**self.at(self.s), **values}
        before |= {path: _like(before[path], value) for path, value in new.items()}
        leaves = [before.get(path, old) for path, old in self._leaves.items()]
        self.count += 1
        try:
            args, out = self._call(leaves)
        except _RAISED as error:
            if self.count == 1:
                raise
            self.raised.append(f"{what}, {type(error).__name__}: {said(error)[:200]}")
            return None
        return Run(self, before, *self._after(before, args, out))

    def _call(self, leaves: Sequence[PyTree]) -> tuple[PyTree, PyTree]:
        """Calls the step with copies, which it may donate; returns these, and results.

        Modules among the arguments have changed then.
        """
        arrays = jax.Array, np.ndarray
        args = self._join([x.copy() if isinstance(x, arrays) else x for x in leaves])
        first = len(args) - len(self._keywords)
        keywords = dict(zip(self._keywords, args[first:], strict=True))
        return args, jax.block_until_ready(self._step(*args[:first], **keywords))

    def _after(self, before: Named, args: PyTree, out: PyTree) -> tuple[Named, Named]:
        """Returns the leaves after a call, and all other results."""
        results = _named(out)
        if self._places is None:
            plain = {p: x for p, x in before.items() if p not in self._in_modules}
            whole = self.states + self.scales
            self._places = _matched(plain, results, whole, self._carried)
        after = {p: x for p, x in _named(args).items() if p in self._in_modules}
        for path, place in self._places.items():
            if place in results:
                after[path] = results.pop(place)
        return {p: x for p, x in after.items() if _are_alike(x, before[p])}, results


def _is_scale(x: PyTree) -> bool:
    return isinstance(x, LossScale) or is_module(x)


def _as_dynamic(x: PyTree) -> PyTree:
    """Replaces a loss scale of another rule: without a counter no S would be tried."""
    if not isinstance(x, LossScale) or isinstance(x, (NoOpLossScale, DynamicLossScale)):
        return x
    return DynamicLossScale(jnp.full(jnp.shape(x.loss_scale), 8.0))


def _static_scales(args: PyTree) -> list[float]:
    """Returns the S of each `StaticLossScale`."""
    leaves = jax.tree.leaves(args, is_leaf=_is_scale)
    return [x.loss_scale for x in leaves if isinstance(x, StaticLossScale)]


def _is_of_optimizer(node: PyTree) -> bool:
    """Whether it is the state of an optimizer, or of a chain around a loss scale."""
    parts = node if type(node) is tuple else (node,)
    has_s = any(isinstance(part, LossScaleState) for part in parts)
    has_optax = any(type(part).__module__.startswith("optax") for part in parts)
    return has_s and has_optax if parts is node else has_s or has_optax


def _flat(tree: PyTree) -> tuple[list[tuple[KeyPath, PyTree]], Function]:
    """Returns keys and leaves, and a function that makes such a tree of others."""
    graph, nnx = None, sys.modules.get("flax.nnx")
    if nnx and find_nodes(is_module, tree):
        graph, tree = nnx.split(tree)
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)

    def join(leaves: list[PyTree]) -> PyTree:
        tree = jax.tree.unflatten(structure, leaves)
        return nnx.merge(graph, tree) if graph is not None and nnx else tree

    return pairs, join


def _named_leaves(
    args: PyTree, labels: Sequence[str]
) -> tuple[Named, dict[Path, str], Function]:
    """Returns leaves and their names by path, and a function that joins others.

    A name is as a reader writes it, `args[0]['w']`.
    """
    pairs, join = _flat(args)
    leaves, names = {}, {}
    for keys, leaf in pairs:
        path = _path_of(keys)
        leaves[path] = leaf
        names[path] = labels[int(path[0])] + jax.tree_util.keystr(keys[1 : len(path)])
    return leaves, names, join


def _named(tree: PyTree) -> Named:
    """Returns the arrays and numbers of a pytree by path, NNX modules included."""
    return {_path_of(keys): leaf for keys, leaf in _flat(tree)[0] if is_data(leaf)}


def _path_of(keys: KeyPath) -> Path:
    if not keys:
        return ()
    path = tuple(jax.tree_util.keystr(keys, simple=True, separator="\n").split("\n"))
    # An NNX variable has its array in a field.
    is_variable = hasattr(keys[-1], "name") and "flax.nnx" in sys.modules
    return path[:-1] if is_variable and path[-1] == "value" else path


def host(leaf: PyTree) -> np.ndarray:
    """Returns the entries; of an array over processes, those of its first part here."""
    if jnp.issubdtype(getattr(leaf, "dtype", bool), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = leaf.addressable_data(0)
    return np.asarray(leaf)


def difference(old: PyTree, new: PyTree) -> np.ndarray:
    """Returns the changes of a sample of the entries; 0 for a least loss of inf."""
    before, after = sampled(host(old)), sampled(host(new))
    with np.errstate(all="ignore"):
        return np.where(np.isinf(before), 0, after - before)


def has_moved(old: PyTree, new: PyTree) -> bool:
    return not np.array_equal(host(old), host(new))


def sampled(x: np.ndarray) -> np.ndarray:
    """Returns at most `_SAMPLE` evenly spread entries as f64."""
    x = np.stack([np.real(x), np.imag(x)]) if np.iscomplexobj(x) else x
    return x.ravel()[:: max(1, math.ceil(x.size / _SAMPLE))].astype(np.float64)


def _like(leaf: PyTree, value: ArrayLike) -> PyTree:
    """Returns `value`, broadcast to the shape, dtype and devices of `leaf`."""
    filled = np.broadcast_to(value, np.shape(leaf)).astype(leaf.dtype)
    if isinstance(leaf, jax.Array):
        return jax.device_put(filled, leaf.sharding if leaf.committed else None)
    return filled


def _matched(
    before: Named, results: Named, whole: Sequence[Path], carried: Sequence[int]
) -> dict[Path, Path]:
    """Returns the path of the result that is the next value of each argument's leaf.

    A part of a node of `whole` matches only with that node.
    """
    found = dict(_carried(position, before, results) for position in carried)
    for leaves in _candidates(before, results, whole):
        is_free = found.keys().isdisjoint(leaves)
        if is_free and not set(leaves.values()).intersection(found.values()):
            found |= leaves
    return found


def _carried(position: int, before: Named, results: Named) -> tuple[Path, Path]:
    """Returns the paths of a bare array, and of its next value among the results."""
    path = (str(position),)
    place = path if path in results else ()  # the only result
    both = path in before and place in results
    if not both or not _are_alike(before[path], results[place]):
        raise ValueError(
            "check_step: expected carried= to have positions of bare arrays that "
            f"come back at that position of the results, got {position}"
        )
    return path, place


def _candidates(
    before: Named, results: Named, whole: Sequence[Path]
) -> list[dict[Path, Path]]:
    """Returns the pairs of parts with equal names and shapes, the best first.

    The largest, then the nearest: parameters have the form of their moments.
    """
    places: dict[Form, list[Path]] = defaultdict(list)
    for place, form in _subtrees(results).items():
        places[form].append(place)
    pairs: list[tuple[int, int, float, dict[Path, Path]]] = []
    for path, form in _subtrees(before).items():
        for place in places[form] if path and not _is_below(path, whole) else ():
            if _may_match(path, place, form):
                leaves = {(*path, *end): (*place, *end) for end, _ in form}
                gaps = (difference(before[p], results[q]) for p, q in leaves.items())
                gap = sum(float(np.nansum(np.abs(x))) for x in gaps)
                pairs.append((-len(form), len(path), gap, leaves))
    return [leaves for *_, leaves in sorted(pairs, key=lambda pair: pair[:3])]


def _may_match(path: Path, place: Path, form: Form) -> bool:
    """Whether equal names and shapes suffice for a match."""
    if _has_names(path):
        # A part of something that has names.
        return not path[-1].isdigit() and path[-1:] == place[-1:]
    # Lists of arrays, such as weights of layers: not a batch, nor scalars.
    is_list = len(form) > 2 and any(shape for _, shape in form)
    return is_list or any(_has_names(end) for end, _ in form)


def _has_names(path: Path) -> bool:
    """Whether a path is more than positions in tuples and lists."""
    return not all(map(str.isdigit, path))


def _is_below(path: Path, nodes: Sequence[Path]) -> bool:
    return any(path != node and path[: len(node)] == node for node in nodes)


def _are_alike(x: PyTree, y: PyTree) -> bool:
    return np.shape(x) == np.shape(y)


def _subtrees(arrays: Named) -> dict[Path, Form]:
    """Returns names and shapes of the leaves below each path."""
    below: dict[Path, set[tuple[Path, tuple[int, ...]]]] = {}
    for path, leaf in arrays.items():
        for i in range(len(path) + 1):
            below.setdefault(path[:i], set()).add((path[i:], np.shape(leaf)))
    return {path: tuple(sorted(form)) for path, form in below.items()}
