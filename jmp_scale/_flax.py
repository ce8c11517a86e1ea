"""Shared by `linen` and `nnx`: Flax itself, the wrapped optimizer, state dicts."""

from typing import Any

import jax
import optax

from . import _pytree
from ._loss_scale import LossScale
from ._spike_guard import SpikeGuard
from ._state import LossScaleState, find_loss_scale_states
from ._transform import with_loss_scale

try:
    import flax.serialization  # noqa: F401  (_pytree looks for it)
except ImportError as error:
    raise ImportError(
        "jmp_scale.linen and jmp_scale.nnx need Flax: pip install 'flax>=0.12'"
    ) from error


def wrap_once(
    function: str,
    tx: optax.GradientTransformation,
    params: Any,
    loss_scale: LossScale | None,
    guard: SpikeGuard | None,
) -> optax.GradientTransformation:
    """`tx` in `with_loss_scale`, or as it is if it is wrapped already."""
    state = jax.eval_shape(tx.init, params)
    if not isinstance(state, LossScaleState):
        for path, _ in find_loss_scale_states(state):
            raise ValueError(
                f"{function}: expected with_loss_scale once, around the whole of tx, "
                f"got it inside, at opt_state{jax.tree_util.keystr(path)}, where its "
                "loss scale is not the one that the loss is multiplied by; write "
                "with_loss_scale(optax.chain(...), loss_scale)"
            )
        return with_loss_scale(tx, loss_scale, guard=guard)
    for name, value in {"loss_scale": loss_scale, "guard": guard}.items():
        if value is not None:
            raise ValueError(
                f"{function}: expected {name} in one place, got {name}={value!r} and a "
                "tx that is already wrapped in with_loss_scale; give it there"
            )
    return tx


for _cls in _pytree.registered_classes:
    _pytree.register_state_dict(_cls)  # those that were made before Flax was imported
