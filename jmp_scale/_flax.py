"""What `linen` and `nnx` share: Flax itself, the wrapped optimizer, state dicts."""

from typing import Any

import jax
import optax

from . import _state_dict
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
    import flax.serialization  # noqa: F401  (_state_dict looks for it)
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
            f"{function}: expected with_loss_scale once, around the whole of tx, got "
            f"it inside, at opt_state{'.inner_state' * wrapped}{place}, where its loss "
            "scale is not the one that the loss is multiplied by; write "
            "with_loss_scale(optax.chain(...), loss_scale)"
        )
    if wrapped and loss_scale is not None:
        raise ValueError(
            f"{function}: expected a loss scale in one place, got loss_scale="
            f"{loss_scale!r} and a tx that is already wrapped in with_loss_scale; "
            "leave out one of them"
        )
    return tx if wrapped else with_loss_scale(tx, loss_scale)


for _cls in (NoOpLossScale, StaticLossScale, DynamicLossScale):
    _state_dict.register(_cls)  # those that were made before Flax was imported
