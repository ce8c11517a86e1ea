"""Reads the arguments and results of a train step as named arrays, and copies them."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._scaling.loss_scale import StaticLossScale
from ..._tree import is_inexact, is_module
from ..._types import KeyPath, Leaf, PyTree

Path = tuple[str, ...]  # keys, indices and names of fields
Named = dict[Path, Leaf]


class Arguments:
    """The arguments of a step. Each call gets a copy, since it may donate them.

    Attributes:
      arrays: arrays and numbers by path, those that NNX modules hold last.
      names: the same paths as a reader writes them, `args[0]['w']`.
      fixed: S of each `StaticLossScale`, which has no leaves.
    """

    def __init__(self, args: tuple[PyTree, ...]) -> None:
        pairs, self._tree = jax.tree_util.tree_flatten_with_path(args, is_leaf=_is_one)
        self._leaves = [leaf for _, leaf in pairs]
        self._paths = [path_of(keys) for keys, _ in pairs]
        self._places = [keys for keys, leaf in pairs if is_module(leaf)]
        modules = [leaf for leaf in self._leaves if is_module(leaf)]
        self._graph, self._state = _nnx().split(modules) if modules else (None, ())
        found = [(keys, leaf) for keys, leaf in pairs if is_data(leaf)]
        found += self._inside(self._state)
        self.arrays: Named = {path_of(keys): leaf for keys, leaf in found}
        self.names = {path_of(keys): _name_of(keys) for keys, _ in found}
        self.fixed = [scale.loss_scale for scale in _constant_scales(self._leaves)]

    def copies(self, values: Mapping[Path, Leaf], s: float | None = None) -> PyTree:
        """Returns copies with other arrays at some paths, and S for constant scales."""

        def fresh(path: Path, leaf: Leaf) -> PyTree:
            leaf = values.get(path, leaf)
            return leaf.copy() if isinstance(leaf, (jax.Array, np.ndarray)) else leaf

        new = {path: fresh(path, leaf) for path, leaf in self.arrays.items()}
        leaves = [new.get(p, x) for p, x in zip(self._paths, self._leaves, strict=True)]
        if self._graph is not None:
            inner = [new[path_of(keys)] for keys, _ in self._inside(self._state)]
            state = jax.tree.unflatten(jax.tree.structure(self._state), inner)
            modules = iter(_nnx().merge(self._graph, state))
            leaves = [next(modules) if is_module(x) else x for x in leaves]
        if s is not None:
            leaves = [_with_constant(leaf, s) for leaf in leaves]
        return jax.tree.unflatten(self._tree, leaves)

    def in_modules(self, args: PyTree) -> Named:
        """Returns the arrays that the NNX modules among the arguments hold now."""
        leaves = jax.tree.leaves(args, is_leaf=_is_one)
        modules = [leaf for leaf in leaves if is_module(leaf)]
        state = _nnx().state(modules) if modules else ()
        return {path_of(keys): leaf for keys, leaf in self._inside(state)}

    def _inside(self, state: PyTree) -> list[tuple[KeyPath, Leaf]]:
        """Returns keys, from the arguments down, and leaves of the modules' state."""
        found = []
        for (first, *rest), leaf in jax.tree_util.tree_leaves_with_path(state):
            place = self._places[int(path_of([first])[0])]
            found.append(((*place, *rest), leaf))
        return found


def named(tree: PyTree) -> Named:
    """Returns the arrays and numbers of a result by path, NNX modules included."""
    found: Named = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_module):
        if is_module(leaf):
            for inner, x in jax.tree_util.tree_leaves_with_path(_nnx().state(leaf)):
                found[path_of((*keys, *inner))] = x
        elif is_data(leaf):
            found[path_of(keys)] = leaf
    return found


def path_of(keys: Sequence[object]) -> Path:
    """Returns the same names for a pytree and for its NNX state."""

    def name(key: Any) -> str:
        if isinstance(key, jax.tree_util.FlattenedIndexKey):
            return f"#{key.key}"  # of a class, unlike an index of a tuple
        parts = (getattr(key, part, None) for part in ("key", "name", "idx"))
        return str(next((part for part in parts if part is not None), key))

    path = tuple(map(name, keys))
    is_variable = bool(path) and hasattr(keys[-1], "name") and "flax.nnx" in sys.modules
    return path[:-1] if is_variable and path[-1] == "value" else path


def _name_of(keys: KeyPath) -> str:
    keys = keys[: len(path_of(keys))]
    return f"args{jax.tree_util.keystr(keys)}"


def is_data(leaf: Leaf) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex))


def is_float(leaf: Leaf) -> bool:
    return is_inexact(leaf) and not is_key(leaf)


def is_key(leaf: Leaf) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def host(leaf: Leaf) -> np.ndarray:
    """Returns the entries; of an array over processes, those of its first part here."""
    leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = leaf.addressable_data(0)
    return np.asarray(leaf)


def like(leaf: Leaf, value: Leaf) -> PyTree:
    """Returns `value`, broadcast to the shape, dtype and devices of `leaf`."""
    filled = np.broadcast_to(value, np.shape(leaf)).astype(leaf.dtype)
    if not isinstance(leaf, jax.Array):
        return filled
    return (
        jax.device_put(filled, leaf.sharding) if leaf.committed else jnp.asarray(filled)
    )


def _nnx() -> PyTree:
    return sys.modules["flax.nnx"]  # it is imported where there are modules


def _is_one(x: Leaf) -> bool:
    return is_module(x) or isinstance(x, StaticLossScale)


def _constant_scales(args: PyTree) -> list[StaticLossScale]:
    found: list[StaticLossScale] = []
    for leaf in jax.tree.leaves(args, is_leaf=_is_one):
        inner = [getattr(leaf, "opt_state", None)] if is_module(leaf) else [leaf]
        found += [x for x in jax.tree.leaves(inner, is_leaf=_is_one) if _is_constant(x)]
    return found


def _is_constant(x: Leaf) -> bool:
    return isinstance(x, StaticLossScale)


def _with_constant(leaf: Leaf, s: float) -> PyTree:
    """Returns a constant loss scale, or a module with one, at another S."""

    def other(x: Leaf) -> PyTree:
        if not _is_constant(x):
            return x
        new = StaticLossScale(1.0)
        object.__setattr__(new, "loss_scale", s)  # infinity too
        return new

    if is_module(leaf):
        state = getattr(leaf, "opt_state", None)
        if any(map(_is_constant, jax.tree.leaves(state, is_leaf=_is_constant))):
            leaf.opt_state = jax.tree.map(other, state, is_leaf=_is_constant)
        return leaf
    return other(leaf)
