"""The loss-scale states of a pytree, in the one form that the diagnostics read."""

from collections.abc import Mapping
from typing import Any

import jax

from .._loss_scale import LossScale
from .._state import LossScaleState, find_loss_scale_states, is_variable, with_arrays


def find_states(
    function: str, tree: Any, name: str = "opt_state"
) -> list[tuple[str, LossScaleState]]:
    """Paths and states of `with_loss_scale` in a pytree, with plain arrays.

    Their `inner_state` is left out. Mappings, as `nnx.state` and state dicts make them,
    have no static configuration: `loss_scale` is then S alone, or None where S is
    configuration itself, and `guard` the mapping of its statistics.
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
    # NNX leaves out a guard of None.
    fields = {"guard": None, **fields, "loss_scale": loss_scale, "inner_state": None}
    return LossScaleState(**with_arrays(fields))


def share_variables(before: Any, after: Any) -> bool:
    """Whether an NNX variable, which changes in place, is in the states of both."""

    def variables(tree: Any) -> set[int]:
        nodes = [node for _, node in find_loss_scale_states(tree)]
        leaves = jax.tree.leaves(nodes, is_leaf=is_variable)
        return {id(x) for x in leaves if is_variable(x)}

    return not variables(before).isdisjoint(variables(after))
