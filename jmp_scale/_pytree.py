"""Frozen dataclasses as pytrees of named leaves, and their Flax state dicts."""

import contextlib
import dataclasses
import json
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Self, TypeVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

# The type of fields that are leaves: arrays, or whatever JAX puts in their place.
Leaf = Annotated[Any, "leaf"]


class Pytree:
    """A frozen dataclass (`repr=False`) that `register` makes a pytree.

    Its leaves are the fields of type `Leaf`; all others are static.
    """

    _leaf_names: ClassVar[tuple[str, ...]] = ()  # set by `register`

    def __repr__(self) -> str:
        """The arguments that differ from the defaults, which make an equal object."""
        parts = []
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            default = self._starts().get(field.name, field.default)
            text = _text(getattr(self, field.name))
            # A default of 2 is stored as 2.0.
            if field.init and text not in (repr(default), f"{default}.0"):
                parts.append(f"{field.name}={text}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def _starts(self) -> dict[str, Any]:
        """What leaves are that were given as None."""
        return {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        register_state_dict(cls)
        return super().__new__(cls)


C = TypeVar("C", bound=Pytree)
registered_classes: set[type] = set()


def _text(value: Any) -> str:
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return repr(value)
    with contextlib.suppress(Exception):  # traced, donated, on another host
        entries = np.asarray(value).tolist()
        return f"jnp.array({entries})" if np.ndim(value) else repr(entries)
    return f"{value.dtype}{[*value.shape]}"


def with_fields(tree: Any, /, **fields: Any) -> Any:
    """A copy with other fields, unchecked: they may be placeholders."""
    return _instance(type(tree), vars(tree) | fields)


def register(cls: type[C]) -> type[C]:
    """Makes a class a pytree, whose static fields `jax.export` saves as JSON.

    Not by `jax.tree_util.register_dataclass`, whose unflatten calls `__init__`: that
    checks leaves, for which JAX puts None, object() or a PartitionSpec.
    """
    registered_classes.add(cls)
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    leaf_names = cls._leaf_names = tuple(f.name for f in fields if f.type is Leaf)
    static_names = [f.name for f in fields if f.name not in leaf_names]
    keys = [jax.tree_util.GetAttrKey(name) for name in leaf_names]
    leaves_of, static_of = _getter(leaf_names), _getter(static_names)
    names = (*leaf_names, *static_names)

    def flatten(x: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return leaves_of(x), static_of(x)

    def flatten_with_keys(x: Any) -> tuple[Any, tuple[Any, ...]]:
        return tuple(zip(keys, leaves_of(x), strict=True)), static_of(x)

    def unflatten(static: tuple[Any, ...], leaves: Any) -> Any:
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
    # Called by constructors: nearly always Flax is imported before an object is made.
    flax: Any = sys.modules.get("flax.serialization")
    if flax is not None and not flax.is_serializable(cls):
        flax.register_serialization_state(cls, _to_state_dict, _from_state_dict)


def _instance(cls: type, fields: dict[str, Any]) -> Any:
    instance = object.__new__(cls)
    instance.__dict__.update(fields)  # in C, for every call of a compiled step
    return instance


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return operator.attrgetter(*names)  # in C
    return lambda x: tuple(getattr(x, name) for name in names)


def _to_state_dict(target: Any) -> dict[str, Any]:
    """The leaves by name; a `StaticLossScale` has none, its S is configuration."""
    paths, _ = jax.tree_util.tree_flatten_with_path(target)
    return {path[0].name: leaf for path, leaf in paths}


def _types(leaves: dict[str, Any]) -> dict[str, str]:
    return {k: f"{jnp.result_type(x)}{[*jnp.shape(x)]}" for k, x in leaves.items()}


def _from_state_dict(target: Any, state: Any) -> Any:
    """The leaves of `state` in an object that is configured like `target`."""
    leaves = _to_state_dict(target)
    expected, got = _types(leaves), repr(state)
    # Flax compares names only for its own kinds of containers.
    reason = (
        "was it saved with another kind of loss scale or guard, or before there was "
        "one (jmp_scale.checkpoints)?"
    )
    if isinstance(state, dict) and state.keys() == leaves.keys():
        state = {name: _exactly(x, leaves[name]) for name, x in state.items()}
        got = _types(state)
        coarse = [n for n, x in state.items() if _is_cast(x, leaves[n])]
        if coarse:
            dtype = jnp.result_type(state[coarse[0]])
            reason = f"{dtype} does not hold {', '.join(coarse)} exactly, save float32"
    if got != expected:
        path = sys.modules["flax.serialization"].current_path()
        raise ValueError(
            f"{type(target).__name__} at path {path}: expected {expected}, got {got}; "
            f"{reason}"
        )
    # Not by the constructor, which refuses an S outside the bounds of the code that
    # restores. JAX arrays, because the NumPy arrays of Flax cannot be donated.
    leaves = [jnp.asarray(state[name]) for name in expected]
    return jax.tree.unflatten(jax.tree.structure(target), leaves)


def _is_cast(x: Any, like: Any) -> bool:
    """Whether a leaf is a floating-point number of another dtype than before saving."""
    dtypes = jnp.result_type(x), jnp.result_type(like)
    are_floating = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    return are_floating and dtypes[0] != dtypes[1] and jnp.shape(x) == jnp.shape(like)


def _exactly(x: Any, like: Any) -> Any:
    """`x` in the dtype of `like`, if it is a power of two, which any cast has kept.

    EasyLM's checkpointer writes all floating-point arrays in bfloat16.
    """
    if not _is_cast(x, like):
        return x
    mantissas, _ = np.frexp(np.asarray(x, np.float64))
    return jnp.asarray(x, like.dtype) if (mantissas == 0.5).all() else x
