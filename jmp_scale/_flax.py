"""What `linen` and `nnx` share: Flax itself, the wrapped optimizer, and loss scales in state dicts."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ._loss_scale import (
    DynamicLossScale,
    LossScale,
    LossScaleState,
    NoOpLossScale,
    StaticLossScale,
    find_loss_scale_states,
)
from ._transform import with_loss_scale

try:
    from flax import serialization
except ImportError as error:
    raise ImportError(
        'jmp_scale.linen and jmp_scale.nnx need Flax: pip install "jmp_scale[flax]"'
    ) from error


def wrap_once(
    function: str,
    tx: optax.GradientTransformation,
    loss_scale: LossScale | None,
    params: Any,
) -> optax.GradientTransformation:
    """`with_loss_scale(tx, loss_scale)`, or `tx` itself if it is wrapped already.

    Args:
      function: the name of the caller, for errors.
      tx: an Optax optimizer.
      loss_scale: the initial loss scale, or None.
      params: the parameters that `tx` will be initialized with.

    Raises:
      ValueError: `tx` is wrapped and `loss_scale` is given as well, or it is wrapped in
        some inner place, where its loss scale would have no effect.
    """
    state = jax.eval_shape(tx.init, params)
    wrapped = isinstance(state, LossScaleState)
    for path, _ in find_loss_scale_states(state.inner_state if wrapped else state):
        place = jax.tree_util.keystr(path)
        raise ValueError(
            f"{function}: expected with_loss_scale once, around the whole of tx, got it "
            f"inside, at opt_state{'.inner_state' * wrapped}{place}, where its loss "
            "scale is not the one that the loss is multiplied by; write "
            "with_loss_scale(optax.chain(...), loss_scale)"
        )
    if wrapped and loss_scale is not None:
        raise ValueError(
            f"{function}: expected a loss scale in one place, got loss_scale="
            f"{loss_scale!r} and a tx that is already wrapped in with_loss_scale; leave "
            "out one of them"
        )
    return tx if wrapped else with_loss_scale(tx, loss_scale)


def _to_state_dict(loss_scale: LossScale) -> dict[str, Any]:
    """The leaves by name; a `StaticLossScale` has none, since its number is configuration."""
    paths, _ = jax.tree_util.tree_flatten_with_path(loss_scale)
    return {path[0].name: leaf for path, leaf in paths}


def _from_state_dict(target: LossScale, state: Any) -> LossScale:
    """The leaves of `state` in a loss scale that is configured like `target`."""
    expected = _to_state_dict(target)
    where = f"{type(target).__name__} at path {serialization.current_path()}"
    if not isinstance(state, dict) or set(state) != set(expected):
        got = sorted(state) if isinstance(state, dict) else repr(state)
        raise ValueError(
            f"{where}: expected a state dict with the names {sorted(expected)}, got {got}; was it saved "
            "with another kind of loss scale, or before there was one (jmp_scale.checkpoints)?"
        )
    for name, leaf in expected.items():
        wanted = (jnp.shape(leaf), jnp.result_type(leaf))
        got = (jnp.shape(state[name]), jnp.result_type(state[name]))
        if got != wanted:
            raise ValueError(
                f"{where}: expected {name} of shape and dtype {wanted}, got {got}: {state[name]!r}"
            )
    return jax.tree.unflatten(
        jax.tree.structure(target), [jnp.asarray(state[n]) for n in expected]
    )


for _cls in (NoOpLossScale, StaticLossScale, DynamicLossScale):
    serialization.register_serialization_state(_cls, _to_state_dict, _from_state_dict)
