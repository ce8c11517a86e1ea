"""Names the leaves of a step's arguments, and finds them among its results."""

import math
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._tree import is_data, is_inexact, is_module
from ..._types import KeyPath, Leaf, PyTree

Path = tuple[str, ...]  # keys, indices and names of fields
Named = dict[Path, Leaf]
Form = tuple[tuple[Path, tuple[int, ...]], ...]  # names and shapes of leaves

_SAMPLE = 4096  # entries of a leaf that are compared in size


def flat(tree: PyTree) -> tuple[PyTree, list[tuple[KeyPath, Leaf]], PyTree]:
    """Returns the graph of NNX modules or None, keys and leaves, and the structure."""
    graph = None
    if any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module))):
        graph, tree = nnx().split(tree)
    return graph, *jax.tree_util.tree_flatten_with_path(tree)


def named(tree: PyTree) -> Named:
    """Returns the arrays and numbers of a pytree by path, NNX modules included."""
    return {path_of(keys): leaf for keys, leaf in flat(tree)[1] if is_data(leaf)}


def path_of(keys: KeyPath) -> Path:
    if not keys:
        return ()
    path = tuple(jax.tree_util.keystr(keys, simple=True, separator="\n").split("\n"))
    # An NNX variable has its array in a field.
    is_variable = hasattr(keys[-1], "name") and "flax.nnx" in sys.modules
    return path[:-1] if is_variable and path[-1] == "value" else path


def is_float(leaf: Leaf) -> bool:
    return is_inexact(leaf) and not is_key(leaf)


def is_key(leaf: Leaf) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", bool), jax.dtypes.prng_key)


def host(leaf: Leaf) -> np.ndarray:
    """Returns the entries; of an array over processes, those of its first part here."""
    leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = leaf.addressable_data(0)
    return np.asarray(leaf)


def has_moved(old: Leaf, new: Leaf) -> bool:
    return not np.array_equal(host(old), host(new))


def sampled(x: np.ndarray) -> np.ndarray:
    """Returns at most `_SAMPLE` evenly spread entries as f64."""
    x = np.stack([np.real(x), np.imag(x)]) if np.iscomplexobj(x) else x
    return x.ravel()[:: max(1, math.ceil(x.size / _SAMPLE))].astype(np.float64)


def like(leaf: Leaf, value: ArrayLike) -> Leaf:
    """Returns `value`, broadcast to the shape, dtype and devices of `leaf`."""
    filled = np.broadcast_to(value, np.shape(leaf)).astype(leaf.dtype)
    if isinstance(leaf, jax.Array):
        return jax.device_put(filled, leaf.sharding if leaf.committed else None)
    return filled


def nnx() -> PyTree:
    return sys.modules["flax.nnx"]  # it is imported where there are modules


def parents(arrays: Named, *names: str) -> list[Path]:
    """Returns the paths of nodes with leaves of these names."""
    nodes = dict.fromkeys(path[:-1] for path in arrays)
    return [node for node in nodes if all((*node, name) in arrays for name in names)]


def matched(
    before: Named, results: Named, whole: Sequence[Path], carried: Sequence[int]
) -> dict[Path, Path]:
    """Returns the path of the result that is the next value of each argument's leaf.

    An argument comes back as a part of the results with the same names and shapes: as a
    whole, or part by part, except for those in `whole`. If several results match, the
    nearest one is taken. A bare array matches only within a dictionary.
    """
    ours, theirs = _subtrees(before), _subtrees(results)
    found: dict[Path, Path] = {}
    for position in carried:
        path = (str(position),)
        found[path] = path if path in results else ()  # the only result
        if path not in before or theirs.get(found[path]) != ours[path]:
            raise ValueError(
                "check_step: expected carried= to have positions of bare arrays that "
                f"come back at that position of the results, got {position}"
            )
    places: dict[Form, list[Path]] = {}
    for place, form in theirs.items():
        places.setdefault(form, []).append(place)
    inside = {p for p in ours if any(p != w and p[: len(w)] == w for w in whole)}
    pairs: list[tuple[int, int, float, dict[Path, Path]]] = []
    for path, form in ours.items():
        for place in places.get(form, ()) if path and path not in inside else ():
            if _may_match(path, place, form):
                leaves = {(*path, *end): (*place, *end) for end, _ in form}
                gap = sum(_distance(before[p], results[q]) for p, q in leaves.items())
                pairs.append((-len(form), len(path), gap, leaves))
    # The largest parts first: parameters have the form of their moments.
    for *_, leaves in sorted(pairs, key=lambda pair: pair[:3]):
        is_free = found.keys().isdisjoint(leaves)
        if is_free and not set(leaves.values()).intersection(found.values()):
            found |= leaves
    return found


def _may_match(path: Path, place: Path, form: Form) -> bool:
    """Whether equal names and shapes suffice for a match."""
    names = [name for suffix, _ in form for name in suffix]
    if any(not name.isdigit() for name in path):
        # A part of something that has names.
        return not path[-1].isdigit() and path[-1:] == place[-1:]
    # Lists of arrays, such as weights of layers: not a batch, nor a pair of scalars.
    is_list = len(form) > 2 and any(len(shape) > 1 for _, shape in form)
    return is_list or any(not name.isdigit() for name in names)


def _distance(old: Leaf, new: Leaf) -> float:
    if not (is_float(old) and is_float(new)):
        return 0.0
    with np.errstate(all="ignore"):
        gap = float(np.abs(sampled(host(new)) - sampled(host(old))).sum())
    return gap if math.isfinite(gap) else 1e30


def _subtrees(arrays: Named) -> dict[Path, Form]:
    """Returns names and shapes of the leaves below each path."""
    below: dict[Path, set[tuple[Path, tuple[int, ...]]]] = {}
    for path, leaf in arrays.items():
        for i in range(len(path) + 1):
            below.setdefault(path[:i], set()).add((path[i:], np.shape(leaf)))
    return {path: tuple(sorted(form)) for path, form in below.items()}
