"""The loss-scale states of a pytree, in the one form that the diagnostics read."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._loss_scale import LossScale
from .._state import LossScaleState, find_loss_scale_states


def find_states(
    function: str, tree: Any, name: str = "opt_state"
) -> list[tuple[str, LossScaleState]]:
    """Paths and states of `with_loss_scale` in a pytree, with plain arrays.

    NNX variables are replaced by their arrays. `nnx.state` and state dicts turn a state
    into a mapping, which has no static configuration: `loss_scale` is then S alone, or
    None where S is configuration itself, and `guard` the mapping of its statistics. An
    error names the function and its argument.
    """
    states = find_loss_scale_states(tree)
    if not states:
        raise ValueError(
            f"{function}: found no state of with_loss_scale in {name}; wrap the "
            "optimizer in it"
        )
    return [(jax.tree_util.keystr(path), _plain_state(node)) for path, node in states]


def _plain_state(node: Any) -> LossScaleState:
    fields = dict(node) if isinstance(node, Mapping) else node._asdict()
    loss_scale = fields.get("loss_scale")
    if not isinstance(loss_scale, LossScale):
        loss_scale = (loss_scale or {}).get("loss_scale")
    # State dicts from before steps were counted by cause lack the newer fields.
    grads_finite = plain(fields["grads_finite"])
    zeros = jnp.zeros(jnp.shape(grads_finite), jnp.int32)
    return LossScaleState(
        loss_scale=plain(loss_scale),
        inner_state=fields.get("inner_state"),
        grads_finite=grads_finite,
        applied=plain(fields.get("applied", grads_finite)),
        skipped=plain(fields["skipped"]),
        skipped_in_a_row=plain(fields["skipped_in_a_row"]),
        nonfinite_losses=plain(fields.get("nonfinite_losses", zeros)),
        spikes=plain(fields.get("spikes", zeros)),
        guard=plain(fields.get("guard")),
    )


def share_variables(before: Any, after: Any) -> bool:
    """Whether an NNX variable, which changes in place, is in the states of both."""

    def variables(tree: Any) -> set[int]:
        nodes = [node for _, node in find_loss_scale_states(tree)]
        leaves = jax.tree.leaves(nodes, is_leaf=_is_variable)
        return {id(x) for x in leaves if _is_variable(x)}

    return not variables(before).isdisjoint(variables(after))


def plain(node: Any) -> Any:
    """A pytree with an array for each leaf that is an NNX variable."""
    return jax.tree.map(
        lambda x: jax.tree.leaves(x)[0] if _is_variable(x) else x,
        node,
        is_leaf=_is_variable,
    )


def _is_variable(x: Any) -> bool:
    # A pytree of one leaf, known by an attribute, so that Flax need not be imported.
    return hasattr(x, "copy_from")
