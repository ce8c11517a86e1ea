"""The loss scales and their three verbs."""

import contextlib
import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from . import _pytree, _validation
from ._dynamic import DynamicLossScale
from ._tree import multiply

T = TypeVar("T")


@_pytree.register
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
        return self


@_pytree.register
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
        return self


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale
"""One of the three loss scales, for annotations and `isinstance`."""


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
    """`value`, which must be a loss scale: else the error says how to get one."""

    def is_loss_scale(x: Any) -> bool:
        return isinstance(x, LossScale)

    if isinstance(value, LossScale):
        return value
    got, cure = f"a {type(value).__name__}", "pass DynamicLossScale() or another one"
    if isinstance(value, type):
        got = f"the class {value.__name__}"
        cure = f"pass an instance, {value.__name__}(...)"
    elif isinstance(value, (str, int, float)) or hasattr(value, "dtype"):
        got = repr(value)
        if isinstance(value, str):
            cure = f"pass jmp_scale.get_loss_scale({value!r}), or DynamicLossScale()"
        with contextlib.suppress(TypeError, ValueError):
            StaticLossScale(value)  # pyright: ignore[reportArgumentType]
            number = float(value) if isinstance(value, jax.Array) else value
            cure = f"pass jmp_scale.get_loss_scale({number!r})"
    elif any(map(is_loss_scale, jax.tree.leaves(value, is_leaf=is_loss_scale))):
        find = '.loss_scale, or optax.tree.get(opt_state, "loss_scale")'
        cure = f"pass the loss scale in it: {find}"
    raise TypeError(f"{function}: expected a loss scale, got {got}; {cure}")


def scale_value(function: str, loss_scale: Any) -> jax.Array:
    """S as f32[], of a loss scale, a number in [2^-126, 2^126] or a scalar array."""
    value = number_of(loss_scale)
    # A device array passes unchecked: reading it would wait, or fail while tracing.
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
