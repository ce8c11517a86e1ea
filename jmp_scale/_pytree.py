"""Frozen dataclasses as pytrees of named leaves, and their Flax state dicts."""

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Self, TypeVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey
from jax.typing import ArrayLike

from ._tree import leaves_by_name
from ._types import PyTree

# The type of fields that are leaves: arrays, or whatever JAX puts in their place.
LeafField = Annotated[Any, "leaf"]


class Pytree:
    """A frozen dataclass as a pytree; its leaves are fields of type `LeafField`."""

    _leaf_names: ClassVar[tuple[str, ...]] = ()  # set by `register`
    _may_round: ClassVar[bool] = False  # whether floats may come back from bfloat16
    subclasses: ClassVar[list[type]] = []

    def __repr__(self) -> str:
        """Shows the arguments that differ from defaults, and make an equal object."""
        parts = []
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            default = self._starts().get(field.name, field.default)
            text = _text(getattr(self, field.name))
            if text not in (_text(default), f"{default}.0"):  # 2 is stored as 2.0
                parts.append(f"{field.name}={text}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def _starts(self) -> dict[str, int]:
        """Returns the values of leaves that are given as None."""
        return {}

    def __init_subclass__(cls) -> None:
        Pytree.subclasses.append(cls)

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        register_state_dict(cls)
        return super().__new__(cls)


C = TypeVar("C", bound=Pytree)
T = TypeVar("T")
Fields = tuple[PyTree, ...]  # values of leaves, or of static fields


def _text(value: Any) -> str:
    """Returns an argument as text; of an array that it cannot read, its type."""
    if hasattr(value, "dtype"):
        with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
            return _text(value.item())
        return f"{value.dtype}{[*value.shape]}"
    if isinstance(value, float) and math.frexp(value)[0] == 0.5:
        return min(repr(value), f"2.0**{round(math.log2(value))}", key=len)
    return repr(value)


def with_fields(tree: T, /, **fields: PyTree) -> T:
    """Returns a copy with other fields, unchecked: they may be placeholders."""
    return _instance(type(tree), vars(tree) | fields)


def _instance(cls: type[T], fields: dict[str, PyTree]) -> T:
    """Creates an object with these fields, without calling its constructor."""
    instance = cls.__new__(cls)
    instance.__dict__.update(fields)  # in C, for every call of a compiled step
    return instance


def register(cls: type[C]) -> type[C]:
    """Registers a class as a pytree, whose leaves are all that a checkpoint has of it.

    Static fields come from the code that restores; `jax.export` saves them as JSON.
    """
    # `jax.tree_util.register_dataclass` would call `__init__` to unflatten. But that
    # checks leaves, and JAX replaces them by None, object() or a PartitionSpec.
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    leaf_names = cls._leaf_names = tuple(f.name for f in fields if f.type is LeafField)
    static_names = [f.name for f in fields if f.name not in leaf_names]
    keys = [GetAttrKey(name) for name in leaf_names]
    names = (*leaf_names, *static_names)

    def flatten(x: C) -> tuple[Fields, Fields]:
        leaves = tuple(getattr(x, name) for name in leaf_names)
        return leaves, tuple(getattr(x, name) for name in static_names)

    def flatten_with_keys(x: C) -> tuple[tuple[tuple[object, PyTree], ...], Fields]:
        leaves, static = flatten(x)
        return tuple(zip(keys, leaves, strict=True)), static

    def unflatten(static: Fields, leaves: Iterable[PyTree]) -> C:
        return _instance(cls, dict(zip(names, (*leaves, *static), strict=True)))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=f"jmp_scale.{cls.__name__}",
        serialize_auxdata=lambda static: json.dumps(static).encode(),
        deserialize_auxdata=lambda data: tuple(json.loads(bytes(data))),
    )
    return cls


def register_state_dict(cls: type) -> None:
    """Lets `flax.serialization`, if imported, save and restore objects of a class."""
    # Called wherever objects are made: Flax may be imported at any time.
    flax: Any = sys.modules.get("flax.serialization")
    if flax is not None and not flax.is_serializable(cls):
        flax.register_serialization_state(cls, leaves_by_name, _from_state_dict)


def _types(leaves: dict[str, PyTree]) -> dict[str, str]:
    return {k: f"{jnp.result_type(x)}{[*jnp.shape(x)]}" for k, x in leaves.items()}


def _from_state_dict(target: Pytree, state: PyTree) -> Pytree:
    """Returns an object configured like `target` with the leaves of `state`."""
    leaves = leaves_by_name(target)
    expected, got = _types(leaves), repr(state)
    # Flax compares names only for its own kinds of containers.
    if isinstance(state, dict) and state.keys() == leaves.keys():
        state = {k: cast(x, leaves[k], target._may_round) for k, x in state.items()}
        got = _types(state)
    if got != expected:
        path = sys.modules["flax.serialization"].current_path()
        raise ValueError(
            f"{type(target).__name__} at path {path}: expected {expected}, got {got}; "
            "was it saved in a dtype that rounds it (save float32), with another kind "
            "of loss scale or guard, or before there was one (jmp_scale.checkpoints)?"
        )
    # JAX arrays, because the NumPy arrays of Flax cannot be donated.
    arrays = [jnp.asarray(state[name]) for name in leaves]
    # Unchecked: the S may be outside the bounds of the restoring code.
    return jax.tree.unflatten(jax.tree.structure(target), arrays)


def cast(x: ArrayLike, like: ArrayLike, may_round: bool) -> ArrayLike:
    """Casts floats, which some checkpointers write as bfloat16.

    S is a power of two, which bfloat16 represents exactly; others may be rounded.
    """
    dtypes = jnp.result_type(x), jnp.result_type(like)
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return x
    values = np.asarray(x, np.float64)
    is_kept = np.isfinite(values) if may_round else np.frexp(values)[0] == 0.5
    return jnp.asarray(x, dtypes[1]) if is_kept.all() else x
