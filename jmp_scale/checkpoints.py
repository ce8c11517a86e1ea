"""Checkpoints from before loss scaling.

A checkpoint of a state with a loss scale needs nothing from here: S and its counter are named leaves,
which Orbax, `flax.serialization` and pickle save and restore like all others.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ._loss_scale import LossScaleState, is_loss_scale_state

T = TypeVar("T")


def restore_without_loss_scale(load: Callable[[Any], Any], state: T) -> T:
    """Restores a checkpoint that was saved before the optimizer was wrapped in `with_loss_scale`.

    Everything comes from disk but the loss scale, its flags and its counts, which are those of `state`.
    Nothing is written.

    Args:
      load: reads the checkpoint into a template, with whatever wrote it: for Orbax
        `lambda template: ocp.load(path, template)`, for Flax
        `lambda template: flax.serialization.from_bytes(template, data)`. The template is `state` as it
        was before: each `LossScaleState` in it is replaced by its `inner_state`. A `load` that ignores
        it may return nested dicts and lists with the same names.
      state: the new state, as the training code creates it, with a loss scale at any depth: an Optax
        state, a `TrainState`, `nnx.state(optimizer)`, or a tree of these. Its other leaves may be
        abstract (`jax.ShapeDtypeStruct`, with the sharding to restore to).

    Returns:
      A tree like `state`, of arrays only.

    Raises:
      ValueError: `state` has no loss scale or an abstract one; the checkpoint has other leaves than the
        template (it is foreign, incomplete, or has a loss scale already), or leaves of another shape or
        dtype, or leaves that were left unread (Orbax's partial restore leaves a `ShapeDtypeStruct`).
        Whatever `load` raises passes through.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_scale, optax
      >>> from jmp_scale.checkpoints import restore_without_loss_scale
      >>> params = {"w": jnp.ones(2)}
      >>> saved = optax.adam(0.1).init(params)
      >>> tx = jmp_scale.with_loss_scale(optax.adam(0.1), jmp_scale.DynamicLossScale(2.0**15))
      >>> opt_state = restore_without_loss_scale(lambda template: saved, tx.init(params))
      >>> float(opt_state.loss_scale.loss_scale)
      32768.0
    """
    if not any(
        is_loss_scale_state(node)
        for node in jax.tree.leaves(state, is_leaf=is_loss_scale_state)
    ):
        raise ValueError(
            "restore_without_loss_scale: state has no loss scale; give the new state, whose optimizer is "
            "wrapped in with_loss_scale"
        )
    template = jax.tree.map(
        lambda x: _inner(x) if is_loss_scale_state(x) else x,
        state,
        is_leaf=is_loss_scale_state,
    )
    restored = _like(template, load(template))
    state = jax.tree.map(
        lambda x, old: _with_inner(x, old) if is_loss_scale_state(x) else old,
        state,
        restored,
        is_leaf=is_loss_scale_state,
    )
    abstract = [
        path for path, leaf in _named_leaves(state).items() if _is_abstract(leaf)
    ]
    if abstract:
        raise ValueError(
            f"restore_without_loss_scale: the loss scale of state is abstract: {_listed(abstract)}; give "
            "one with values, as tx.init returns it"
        )
    return state


def _inner(node: Any) -> Any:
    return node.inner_state if isinstance(node, LossScaleState) else node["inner_state"]


def _with_inner(node: Any, inner_state: Any) -> Any:
    if isinstance(node, LossScaleState):
        return node._replace(inner_state=inner_state)
    return type(node)({**node, "inner_state": inner_state})


def _like(template: Any, restored: Any) -> Any:
    """The leaves of `restored` in the structure of `template`, matched by name."""
    wanted, got = _named_leaves(template), _named_leaves(restored)
    data = {path for path, leaf in wanted.items() if _is_data(leaf)}
    missing, foreign = data - got.keys(), got.keys() - wanted.keys()
    unread = {
        path
        for path in data & got.keys()
        if not _is_data(got[path]) or _is_abstract(got[path])
    }
    if missing or foreign or unread:
        raise ValueError(
            "restore_without_loss_scale: the checkpoint is not one of this state before loss scaling\n"
            f"  missing in the checkpoint: {_listed(missing)}\n"
            f"  only in the checkpoint:    {_listed(foreign)}\n"
            f"  named but not read:        {_listed(unread)}\n"
            "One that has a loss scale already is restored into the state as it is, without this function."
        )
    leaves = [
        _checked(path, got[path], leaf) if path in data else leaf
        for path, leaf in wanted.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by path, in order, with the same names for NamedTuples, dicts and lists as on disk."""

    def name(key: Any) -> str:
        return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))

    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(map(name, path)): leaf for path, leaf in paths}


def _checked(path: str, value: Any, like: Any) -> Any:
    shapes = (jnp.shape(value), jnp.shape(like))
    python_number = not hasattr(value, "dtype") or not hasattr(like, "dtype")
    if shapes[0] != shapes[1] or not (python_number or value.dtype == like.dtype):
        raise ValueError(
            f"restore_without_loss_scale: {path} has shape {shapes[0]} and dtype "
            f"{getattr(value, 'dtype', type(value))} in the checkpoint, but {shapes[1]} and "
            f"{getattr(like, 'dtype', type(like))} in state"
        )
    return jnp.asarray(value) if isinstance(value, (np.ndarray, np.generic)) else value


def _is_data(leaf: Any) -> bool:
    # Functions and the like, which an Equinox model has as leaves, are no part of a checkpoint.
    return hasattr(leaf, "dtype") or isinstance(leaf, (bool, int, float, complex))


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _listed(paths: Iterable[str]) -> str:
    paths = sorted(paths)
    return (
        ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
        or "none"
    )
