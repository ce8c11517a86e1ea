"""The state of an optimizer with a loss scale, and how it is found in others."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.export

from ._loss_scale import LossScale


class LossScaleState(NamedTuple):
    """State of `with_loss_scale`; `optax.tree.get(opt_state, "loss_scale")` finds it.

    Attributes:
      loss_scale: the loss scale of the next step.
      inner_state: state of the wrapped optimizer.
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

    loss_scale: LossScale
    inner_state: Any
    grads_finite: jax.Array
    applied: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    nonfinite_losses: jax.Array
    spikes: jax.Array
    guard: Any


def _attribute(state: LossScaleState, name: str) -> Any:
    raise AttributeError(
        f"LossScaleState has no {name!r}; the optimizer's own state is .inner_state: "
        f"optax.tree.get(opt_state, {name!r}) finds a field at any depth"
    )


# Not within the class, where type checkers would take any attribute for one of it.
LossScaleState.__getattr__ = _attribute  # pyright: ignore[reportAttributeAccessIssue]

jax.export.register_namedtuple_serialization(
    LossScaleState, serialized_name="jmp_scale.LossScaleState"
)


def find_loss_scale_states(tree: Any) -> list[tuple[Any, Any]]:
    """(key path, node) of every `is_loss_scale_state` in a pytree, outermost only."""
    nodes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_loss_scale_state)[0]
    return [(path, node) for path, node in nodes if is_loss_scale_state(node)]


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


def with_arrays(tree: Any) -> Any:
    """`tree` with the arrays that NNX's variables in it hold."""

    def array(x: Any) -> Any:
        # A variable is a pytree of one leaf; `x[...]` is a copy in Flax 0.12.0.
        return jax.tree.leaves(x)[0] if is_variable(x) else x

    return jax.tree.map(array, tree, is_leaf=is_variable)


def is_variable(x: Any) -> bool:
    return hasattr(x, "copy_from")  # Flax need not be imported
