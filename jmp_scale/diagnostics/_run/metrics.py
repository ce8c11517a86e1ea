"""The loss-scale states of a pytree: as the diagnostics read them, and as scalars."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ..._scaling.finite import finite_and_norm
from ..._scaling.loss_scale import LossScale, number_of
from ..._state import START, LossScaleState, find_loss_scale_states
from ..._tree import with_arrays
from ..._types import PyTree


def metrics(opt_state: PyTree, grads: PyTree = None) -> dict[str, jax.Array]:
    """Scalars for any logger, which stay on the device until they are asked for.

    Compatible with `jit`, `vmap` and `lax.scan`.

    Args:
      opt_state: state of `with_loss_scale`, at any depth of any pytree.
      grads: unscaled gradients of the step.

    Returns:
      A dictionary of scalars. Of several states, each name except `grad_norm` starts
      with the path of its state, as in "['generator'].loss_scale".

      - `loss_scale` f32[], of the next step; a mapping of Flax has no constant S.
      - the flags, bool[], and counters, i32[], of `LossScaleState`, by their names.
      - `grad_norm` f32[], with `grads`: the Euclidean norm over all inexact leaves,
        infinite if one of them is not finite.

    Raises:
      ValueError: there is no such state in `opt_state`.
    """
    states = find_states("metrics", opt_state)
    scalars = {}
    for path, state in states:
        prefix = f"{path}." if len(states) > 1 else ""
        s = number_of(state.loss_scale)
        if s is not None:
            scalars[f"{prefix}loss_scale"] = jnp.asarray(s, jnp.float32)
        for name in START:
            scalars[prefix + name] = jnp.asarray(getattr(state, name))
    if grads is not None:
        scalars["grad_norm"] = finite_and_norm(grads)[1]
    return scalars


def find_states(
    function: str, tree: PyTree, name: str = "opt_state"
) -> list[tuple[str, LossScaleState]]:
    """Paths and states of `with_loss_scale` in a pytree, with arrays, no `inner_state`.

    Mappings, as `nnx.state` makes them, hold no configuration: `loss_scale` is then S
    alone or None, and `guard` the mapping of its statistics.
    """
    states = find_loss_scale_states(tree)
    if not states:
        raise ValueError(
            f"{function}: found no state of with_loss_scale in {name}; wrap the "
            "optimizer in it"
        )
    return [(jax.tree_util.keystr(path), _plain_state(node)) for path, node in states]


def _plain_state(node: PyTree) -> LossScaleState:
    fields = dict(node) if isinstance(node, Mapping) else node._asdict()
    loss_scale = fields.get("loss_scale")
    if not isinstance(loss_scale, LossScale):
        loss_scale = (loss_scale or {}).get("loss_scale")
    # NNX leaves out a guard of None.
    fields = {"guard": None, **fields, "loss_scale": loss_scale, "inner_state": None}
    return LossScaleState(**with_arrays(fields))
