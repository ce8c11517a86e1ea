"""The loss scales, their three verbs, and the state of an optimizer that has one."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.export
import jax.numpy as jnp
from jax.typing import ArrayLike

from . import _pytree, _validation
from ._dynamic import DynamicLossScale
from ._scaling import multiply

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class NoOpLossScale(_pytree.Pytree):
    """A loss scale of 1 that does nothing, for bfloat16 and float32 runs.

    A pytree without leaves.
    """

    @property
    def loss_scale(self) -> int:
        """S = 1."""
        return 1

    def scale(self, tree: T) -> T:
        """Returns `tree` itself."""
        return tree

    def unscale(self, tree: T) -> T:
        """Returns `tree` itself."""
        return tree

    def adjust(
        self, grads_finite: ArrayLike, *, loss_finite: ArrayLike = True
    ) -> "NoOpLossScale":
        """Returns itself."""
        del grads_finite, loss_finite
        return self


@dataclasses.dataclass(frozen=True)
class StaticLossScale(_pytree.Pytree):
    """A constant loss scale.

    A pytree without leaves: another S is another compilation.

    Args:
      loss_scale: S, a number or a concrete 0-d array in [2^-126, 2^126]. Take a power
        of two, which scales and unscales exactly.

    Raises:
      TypeError: `loss_scale` is not a real number.
      ValueError: it is not finite, zero, negative or out of range.
    """

    loss_scale: float

    def __post_init__(self) -> None:
        arguments = _validation.Arguments(type(self).__name__)
        value = _validation.static_loss_scale(arguments, self.loss_scale)
        object.__setattr__(self, "loss_scale", value)

    def scale(self, tree: T) -> T:
        """Multiplies by S, in float32 or wider: see `DynamicLossScale.scale`."""
        return multiply("scale", tree, jnp.float32(self.loss_scale))

    def unscale(self, tree: T) -> T:
        """Divides by S, in float32 or wider: see `DynamicLossScale.unscale`."""
        return multiply("unscale", tree, jnp.float32(self.loss_scale), inverse=True)

    def adjust(
        self, grads_finite: ArrayLike, *, loss_finite: ArrayLike = True
    ) -> "StaticLossScale":
        """Returns itself."""
        del grads_finite, loss_finite
        return self


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale
"""One of the three loss scales, for annotations and `isinstance`."""


class LossScaleState(NamedTuple):
    """State of `with_loss_scale`; `optax.tree.get(opt_state, "loss_scale")` finds it.

    Attributes:
      loss_scale: the loss scale of the next step.
      inner_state: state of the wrapped optimizer.
      grads_finite: bool[], whether the last step's gradients, and its loss if given as
        `value`, were all finite. True before the first step.
      applied: bool[], whether the last step was applied: `grads_finite`, and not a
        spike. Use it to select whatever else must not change on a skipped step (an EMA
        of the parameters, BatchNorm statistics). True before the first step.
      skipped: i32[], skipped steps in total, for whatever reason.
      skipped_in_a_row: i32[], skipped steps since the last applied one.
      nonfinite_losses: i32[], how many of the skipped steps had a `value` that was NaN
        or infinite.
      spikes: i32[], how many of them were skipped as spikes; 0 without a guard. The
        rest of `skipped` are overflows.
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


jax.export.register_namedtuple_serialization(
    LossScaleState, serialized_name="jmp_scale.LossScaleState"
)


def find_loss_scale_states(tree: Any) -> list[tuple[Any, Any]]:
    """(key path, node) of every state of `with_loss_scale` in a pytree.

    A node is a `LossScaleState`, or a mapping with the same names, which is what
    `nnx.state` and state dicts turn it into. The inside of a state is not searched.
    """
    nodes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_loss_scale_state)[0]
    return [(path, node) for path, node in nodes if is_loss_scale_state(node)]


def is_loss_scale_state(node: Any) -> bool:
    """Whether a node is a `LossScaleState`, also in the form of a mapping.

    A mapping made by NNX lacks the fields that hold no array: a guard of None, a
    `NoOpLossScale`, the state of plain SGD.
    """
    if isinstance(node, Mapping):
        names = set(node)
        # Names alone tell a state from any other mapping, so both bounds are needed: a
        # parameter tree may well have a key `skipped`, and none of the others.
        always = {"grads_finite", "skipped", "skipped_in_a_row"}
        return always <= names <= set(LossScaleState._fields)
    return isinstance(node, LossScaleState)


def scale(loss_scale: LossScale, tree: T) -> T:
    """`loss_scale.scale(tree)`, to map over several loss scales."""
    return loss_scale.scale(tree)


def unscale(loss_scale: LossScale, tree: T) -> T:
    """`loss_scale.unscale(tree)`, to map over several loss scales."""
    return loss_scale.unscale(tree)


def adjust(
    loss_scale: LossScale, grads_finite: ArrayLike, *, loss_finite: ArrayLike = True
) -> LossScale:
    """`loss_scale.adjust(...)`, to map over several loss scales."""
    return loss_scale.adjust(grads_finite, loss_finite=loss_finite)


def checked_loss_scale(function: str, value: Any) -> LossScale:
    """`value`, which must be a loss scale.

    Args:
      function: name of the caller's public function, for the error.
      value: what its user gave.

    Raises:
      TypeError: `value` is not a loss scale; the message says how to get one from it.
    """
    if isinstance(value, LossScale):
        return value
    got, cure = f"a {type(value).__name__}", "pass DynamicLossScale() or another one"
    if isinstance(value, type):
        got = f"the class {value.__name__}"
        cure = f"pass an instance, {value.__name__}(...)"
    elif isinstance(value, (str, int, float)) or hasattr(value, "dtype"):
        got = repr(value)
        cure = f"pass jmp_scale.get_loss_scale({value!r})"
    elif isinstance(getattr(value, "loss_scale", None), LossScale):
        cure = "pass its .loss_scale"
    elif any(isinstance(x, LossScale) for x in _leaves_and_loss_scales(value)):
        cure = (
            "pass the loss scale in it, for an optimizer state "
            'optax.tree.get(opt_state, "loss_scale")'
        )
    raise TypeError(f"{function}: expected a loss scale, got {got}; {cure}")


def scale_value(function: str, loss_scale: Any) -> jax.Array:
    """S as f32[], of a loss scale, a number or an array.

    Raises:
      TypeError: a value that is not a number; the message says how to get one from it.
      ValueError: a number outside [2^-126, 2^126], or an S of a shape other than ().
    """
    value = number_of(loss_scale)
    # A device array passes unchecked: reading it would wait for the device, or fail
    # while tracing (test_a_report_is_the_same_in_jit_vmap_and_scan).
    if not isinstance(value, jax.Array):
        if not (isinstance(value, (int, float)) or hasattr(value, "dtype")):
            checked_loss_scale(function, loss_scale)
        arguments = _validation.Arguments(function)
        value = _validation.static_loss_scale(arguments, value)
    if jnp.shape(value) != ():
        raise ValueError(
            f"{function}: expected a scalar loss_scale, got one of shape "
            f"{jnp.shape(value)}; vmap over it"
        )
    return jnp.asarray(value).astype(jnp.float32)


def number_of(loss_scale: Any) -> Any:
    """S of a loss scale, or what is given in place of one: a number or an array."""
    return getattr(loss_scale, "loss_scale", loss_scale)


def _leaves_and_loss_scales(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, LossScale))


for _cls in (NoOpLossScale, StaticLossScale):
    _pytree.register(_cls)
    _pytree.register_serialization(_cls)
