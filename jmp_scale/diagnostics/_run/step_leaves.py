"""Leaves of a step's arguments and results by path, and which belong together."""

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import ArrayLike

from ..._tree import find_nodes, is_data, is_module
from ..._types import Function, KeyPath, PyTree

Path = tuple[str, ...]  # keys, indices and names of fields
Named = dict[Path, PyTree]
Form = tuple[tuple[Path, tuple[int, ...]], ...]  # names and shapes of leaves

_SAMPLE = 4096  # entries of a leaf that are compared


def flat(tree: PyTree) -> tuple[list[tuple[KeyPath, PyTree]], Function]:
    """Returns keys and leaves, and a function that makes such a tree of others."""
    graph, nnx = None, sys.modules.get("flax.nnx")
    if nnx and find_nodes(is_module, tree):
        graph, tree = nnx.split(tree)
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)

    def join(leaves: list[PyTree]) -> PyTree:
        tree = jax.tree.unflatten(structure, leaves)
        return nnx.merge(graph, tree) if graph is not None and nnx else tree

    return pairs, join


def named(tree: PyTree) -> Named:
    """Returns the arrays and numbers of a pytree by path, NNX modules included."""
    return {path_of(keys): leaf for keys, leaf in flat(tree)[0] if is_data(leaf)}


def path_of(keys: KeyPath) -> Path:
    if not keys:
        return ()
    path = tuple(jax.tree_util.keystr(keys, simple=True, separator="\n").split("\n"))
    # An NNX variable has its array in a field.
    is_variable = hasattr(keys[-1], "name") and "flax.nnx" in sys.modules
    return path[:-1] if is_variable and path[-1] == "value" else path


def is_below(path: Path, nodes: Iterable[Path]) -> bool:
    return any(path != node and path[: len(node)] == node for node in nodes)


# Entries.


def host(leaf: PyTree) -> np.ndarray:
    """Returns the entries; of copies on several devices, those of the first one.

    All processes of a job get the same, so that they go on with the same calls.
    """
    if jnp.issubdtype(getattr(leaf, "dtype", bool), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if leaf.is_fully_replicated:
            own = np.asarray(leaf.addressable_data(0))
            return np.asarray(multihost_utils.broadcast_one_to_all(own))
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def like(leaf: PyTree, value: ArrayLike) -> PyTree:
    """Returns `value`, broadcast to the shape, dtype and devices of `leaf`."""
    filled = np.broadcast_to(value, np.shape(leaf)).astype(leaf.dtype)
    if not isinstance(leaf, jax.Array):
        return filled
    if leaf.is_fully_addressable:
        return jax.device_put(filled, leaf.sharding if leaf.committed else None)
    # `device_put` compares values between processes, and NaN differs from itself.
    at = filled.__getitem__
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, at)


def sampled(x: np.ndarray) -> np.ndarray:
    """Returns at most `_SAMPLE` evenly spread entries as f64."""
    x = np.stack([np.real(x), np.imag(x)]) if np.iscomplexobj(x) else x
    return x.ravel()[:: max(1, math.ceil(x.size / _SAMPLE))].astype(np.float64)


def difference(old: PyTree, new: PyTree) -> np.ndarray:
    """Returns the changes of a sample of the entries; 0 for a least loss of inf."""
    before, after = sampled(host(old)), sampled(host(new))
    with np.errstate(all="ignore"):
        return np.where(np.isinf(before), 0, after - before)


def has_moved(old: PyTree, new: PyTree) -> bool:
    return not np.array_equal(host(old), host(new))


def copies_of(leaf: jax.Array) -> list[np.ndarray]:
    """Returns a sample of what each device holds, of all processes."""
    parts = [sampled(host(shard.data)) for shard in leaf.addressable_shards]
    if leaf.is_fully_addressable:
        return parts
    gathered = multihost_utils.process_allgather(np.stack(parts))
    return [*gathered.reshape(-1, parts[0].size)]


# Pairs of arguments and results.


def matched(
    before: Named, results: Named, whole: Sequence[Path], own: Mapping[Path, Path]
) -> dict[Path, Path]:
    """Returns the path of the result that is the next value of each argument's leaf.

    A part of a node of `whole` matches only with that node. `own` has the places in
    which arguments come back first of all. One that has its position there needs no
    names to match.
    """
    found: dict[Path, Path] = {}
    equal = defaultdict[object, list[dict[Path, Path]]](list)
    for key, leaves in _candidates(before, results, whole, own):
        is_free = found.keys().isdisjoint(leaves)
        if is_free and not set(leaves.values()).intersection(found.values()):
            found |= leaves
            equal[key].append(leaves)
    for twins in equal.values():  # none is nearer to a place: they keep their order
        parts = [[*leaves.values()] for leaves in twins]
        parts.sort(key=lambda part: [*results].index(part[0]))
        for leaves, part in zip(twins, parts, strict=True):
            found |= zip(leaves, part, strict=True)
    left = {path: x for path, x in before.items() if path not in found}
    return found | _memories(left, results, found)


def _candidates(
    before: Named, results: Named, whole: Sequence[Path], own: Mapping[Path, Path]
) -> list[tuple[object, dict[Path, Path]]]:
    """Returns the pairs of parts with equal names and shapes, the best first.

    The largest, those in their own place, then the nearest: parameters have the form of
    their moments. Parts that start equal, as states of optimizers and the copies of
    averages do, have one key.
    """
    places: dict[Form, list[Path]] = defaultdict(list)
    for place, form in subtrees(results).items():
        places[form].append(place)
    candidates = []
    for path, form in subtrees(before).items():
        for place in () if is_below(path, whole) else places[form]:
            if own.get(path) == path or _may_match(path, place, form):
                leaves = _pairs(path, place, form)
                is_own = own.get(path) == place
                key = form, *_bytes_of(before, leaves)
                rank = -len(form), not is_own, len(path), _gap(before, results, leaves)
                candidates.append((rank, (is_own and place, key), leaves))
    return [each[1:] for each in sorted(candidates, key=lambda each: each[0])]


def _bytes_of(arrays: Named, paths: Iterable[Path]) -> list[bytes]:
    return [sampled(host(arrays[path])).tobytes() for path in paths]


def _gap(before: Named, results: Named, leaves: Mapping[Path, Path]) -> float:
    gaps = [difference(before[p], results[place]) for p, place in leaves.items()]
    return float(np.nansum(np.abs(np.concatenate(gaps))))


def _may_match(path: Path, place: Path, form: Form) -> bool:
    """Whether equal names and shapes suffice for a match."""
    if _has_names(path):
        # A part of something that has names.
        return not path[-1].isdigit() and path[-1:] == place[-1:]
    # Lists of arrays, such as weights of layers: not a batch, nor scalars.
    is_list = len(form) > 2 and any(shape for _, shape in form)
    return bool(path) and (is_list or any(_has_names(end) for end, _ in form))


def _has_names(path: Path) -> bool:
    """Whether a path is more than positions in tuples and lists."""
    return not all(map(str.isdigit, path))


def _memories(
    left: Named, results: Named, found: Mapping[Path, Path]
) -> dict[Path, Path]:
    """Returns leaves of tuples that come back beside what they stand beside.

    These are a memory, such as the (c, h) of an LSTM, if a batch is left: a model of
    pairs may return other pairs in the place of its batch.
    """
    tops = {path[0]: place[0] for path, place in found.items() if place}
    forms, memories = subtrees(results), {}
    for path, form in _arrays(left).items():
        for step in (-1, 1):
            top = tops.get(str(int(path[0]) - step), "")
            place = (str(int(top) + step),) if top.isdigit() else ()
            if form[0][0] and forms.get(place) == form:
                memories |= _pairs(path, place, form)
    has_batch = any(np.ndim(left[path]) for path in left.keys() - memories.keys())
    return memories if has_batch else {}


def _pairs(path: Path, place: Path, form: Form) -> dict[Path, Path]:
    return {(*path, *end): (*place, *end) for end, _ in form}


def _arrays(leaves: Named) -> dict[Path, Form]:
    """Returns the forms of arguments that are arrays, or tuples or lists of these."""

    def is_plain(form: Form) -> bool:
        return all(shape and not _has_names(end) for end, shape in form)

    forms = subtrees(leaves).items()
    return {path: form for path, form in forms if len(path) == 1 and is_plain(form)}


def seem_to_come_back(before: Named, results: Named) -> list[Path]:
    """Returns the arguments without names that have the form of another result.

    A bare array has the form of many: it counts in its own place.
    """
    forms, found = subtrees(results), []
    for path, form in _arrays(before).items():
        places = forms if form[0][0] else [path]
        if form in map(forms.get, places):
            found.append(path)
    return found


def subtrees(arrays: Named) -> dict[Path, Form]:
    """Returns names and shapes of the leaves below each path."""
    below: dict[Path, set[tuple[Path, tuple[int, ...]]]] = {}
    for path, leaf in arrays.items():
        for i in range(len(path) + 1):
            below.setdefault(path[:i], set()).add((path[i:], np.shape(leaf)))
    return {path: tuple(sorted(form)) for path, form in below.items()}
