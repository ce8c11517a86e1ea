"""The state of an optimizer with a loss scale, and how it is found in others."""

import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, get_origin, get_type_hints

import jax
import jax.export
import numpy as np

from ._loss_scale import LossScale

# The types of flags and counters, which say their dtype and what they start at.
Flag = Annotated[jax.Array, np.bool_(True)]
Count = Annotated[jax.Array, np.int32(0)]


class LossScaleState(NamedTuple):
    """State of `with_loss_scale`; `optax.tree.get(opt_state, "loss_scale")` finds it.

    Attributes:
      loss_scale: the loss scale of the next step.
      inner_state: state of the wrapped optimizer, with the fields that it has.
      grads_finite: bool[], whether the last step's gradients, and its `value` if given,
        were all finite. True before the first step.
      applied: bool[], whether the last step was applied: `grads_finite`, and no spike.
        Select by it what else a skipped step must not change (an EMA, BatchNorm
        statistics). True before the first step.
      skipped: i32[], skipped steps in total, for whatever reason.
      skipped_in_a_row: i32[], skipped steps since the last applied one.
      nonfinite_losses: i32[], skipped steps whose `value` was NaN or infinite.
      spikes: i32[], steps skipped as spikes; the rest of `skipped` are overflows.
      guard: the `SpikeGuard` with its statistics, or None.
    """

    # A new counter is one line above and one at the end below: `init`, the metrics and
    # checkpoints of earlier versions read it here. `_next_state` counts.

    loss_scale: LossScale
    inner_state: Any
    grads_finite: Flag
    applied: Flag
    skipped: Count
    skipped_in_a_row: Count
    nonfinite_losses: Count
    spikes: Count
    guard: Any


FIELDS_OF_0_2 = 9
# A pickled state of an earlier version lacks the newest fields.
_DEFAULTS = (None,) * (len(LossScaleState._fields) - FIELDS_OF_0_2)
LossScaleState.__new__.__defaults__ = _DEFAULTS
_HINTS = get_type_hints(LossScaleState, include_extras=True)
# What each flag and counter is before the first step, in the order of the fields.
START: dict[str, Any] = {
    name: hint.__metadata__[0]
    for name, hint in _HINTS.items()
    if get_origin(hint) is Annotated
}

jax.export.register_namedtuple_serialization(
    LossScaleState, serialized_name="jmp_scale.LossScaleState"
)


def find_nodes(is_node: Callable[[Any], bool], tree: Any) -> list[tuple[Any, Any]]:
    """(key path, node) of every `is_node` in a pytree, outermost only."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_node)
    return [(path, node) for path, node in nodes if is_node(node)]


def is_loss_scale_state(node: Any) -> bool:
    """Whether a node is a `LossScaleState`, or what `nnx.state` or a state dict made.

    That of NNX lacks the fields that hold no array: a guard of None, a `NoOpLossScale`,
    the state of plain SGD.
    """
    if isinstance(node, Mapping):
        # Both bounds: a parameter tree may well have a key `skipped`, and no other.
        always = {"grads_finite", "skipped", "skipped_in_a_row"}
        return always <= set(node) <= set(LossScaleState._fields)
    return isinstance(node, LossScaleState)


find_loss_scale_states = functools.partial(find_nodes, is_loss_scale_state)


def with_arrays(tree: Any) -> Any:
    """`tree` with the arrays that NNX's variables in it hold."""

    def array(x: Any) -> Any:
        # A variable is a pytree of one leaf; `x[...]` is a copy in Flax 0.12.0.
        return jax.tree.leaves(x)[0] if is_variable(x) else x

    return jax.tree.map(array, tree, is_leaf=is_variable)


def is_variable(x: Any) -> bool:
    return hasattr(x, "copy_from")  # Flax need not be imported
