"""Loss scales in the state dicts of `flax.serialization`: leaves by name."""

import sys
from typing import Any

import jax
import jax.numpy as jnp


def register(cls: type) -> None:
    """Lets `flax.serialization` save and restore objects of a class.

    Only if Flax is imported, which is not done here; so constructors call this. Flax
    has no other way to learn of a class, and whoever serializes one has imported Flax,
    nearly always at the top of the file, before the first object is made.
    """
    serialization: Any = sys.modules.get("flax.serialization")
    if serialization is not None and not serialization.is_serializable(cls):
        serialization.register_serialization_state(
            cls, _to_state_dict, _from_state_dict
        )


def _to_state_dict(target: Any) -> dict[str, Any]:
    """The leaves by name; a `StaticLossScale` has none, its S is configuration."""
    paths, _ = jax.tree_util.tree_flatten_with_path(target)
    return {path[0].name: leaf for path, leaf in paths}


def _from_state_dict(target: Any, state: Any) -> Any:
    """The leaves of `state` in an object that is configured like `target`."""
    expected = _to_state_dict(target)
    path = sys.modules["flax.serialization"].current_path()
    where = f"{type(target).__name__} at path {path}"
    # Flax compares names only for its own kinds of containers: without this a truncated
    # state is a KeyError (test_a_foreign_or_truncated_state_dict_is_a_clear_error).
    if not isinstance(state, dict) or set(state) != set(expected):
        got = sorted(state) if isinstance(state, dict) else repr(state)
        raise ValueError(
            f"{where}: expected a state dict with the names {sorted(expected)}, got "
            f"{got}; was it saved with another kind of loss scale or guard, or before "
            "there was one (jmp_scale.checkpoints)?"
        )
    for name, leaf in expected.items():
        wanted, got = ((jnp.shape(x), jnp.result_type(x)) for x in (leaf, state[name]))
        if got != wanted:
            raise ValueError(
                f"{where}: expected {name} of shape and dtype {wanted}, got {got}: "
                f"{state[name]!r}"
            )
    # Not by the constructor, which would refuse an S outside the bounds of the code
    # that restores. And JAX arrays: what Flax reads from bytes are NumPy arrays, which
    # cannot be donated.
    leaves = [jnp.asarray(state[name]) for name in expected]
    return jax.tree.unflatten(jax.tree.structure(target), leaves)
