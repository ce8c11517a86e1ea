"""The states of the wrappers of an optimizer, and how they are found in others."""

import abc
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from . import _mesh, _pytree
from ._tree import find_nodes, map_gradients, multiply
from ._types import Flag, PyTree, Scalar
from ._validation import described

T = TypeVar("T")

# Whether `value_and_grad` differentiates unscaled; None outside of it. It is a context
# of JAX, part of the key by which `jit` finds an earlier trace.
UNSCALED = jax.make_user_context(None)
# Whether `check_step` asks how a step is wired. Then `autocast` calls its function in
# float32, in which no S loses a bit, and `unscale` overflows at this counter.
IS_CHECKED, OVERFLOWS = jax.make_user_context(False), -(10**6) - 1


def is_checked() -> bool:
    """Whether `check_step` asks. A context of JAX cannot be pickled, a function can."""
    return IS_CHECKED.value


class LossScale(_pytree.Pytree, abc.ABC):
    """What every loss scale has; a subclass of your own may have another rule of S.

    A subclass is a frozen dataclass that JAX knows as a pytree. It has a field or a
    property `loss_scale`, which is S, f32[], and `adjust`. What changes from step to
    step is a leaf, the rest is static. Every function that takes a loss scale takes it.
    """

    loss_scale: Any

    def __float__(self) -> float:
        return float(self.loss_scale)

    def scale(self, tree: T) -> T:
        """Multiplies by S, in float32 or wider, so that a float16 loss cannot overflow.

        Floating-point leaves narrower than 32 bits come back as float32; float64 and
        complex leaves keep their dtype. Other leaves are returned unchanged, like
        Flax's float8 collection `_overwrite_with_gradient`.

        Raises:
          ValueError: S has a shape other than ().
        """
        return multiply("scale", tree, jnp.asarray(self.loss_scale, jnp.float32))

    def unscale(self, tree: T) -> T:
        """Divides by S, in float32 or wider, so that small gradients do not underflow.

        Call it with the gradients of the loss that this very S scaled: before `adjust`,
        and before any mean over devices or micro-batches. Leaves, dtypes and errors are
        those of `scale`. The division is exact if S is a power of two.
        """
        s = jnp.asarray(self.loss_scale, jnp.float32)
        tree = multiply("unscale", tree, s, inverse=True)
        return _overflowed(tree, self) if IS_CHECKED.value else tree

    @abc.abstractmethod
    def adjust(self, grads_finite: ArrayLike, *, loss_finite: ArrayLike = True) -> Self:
        """Returns the loss scale of the next step, with leaves of the same types.

        Args:
          grads_finite: bool[], whether the gradients of this step were finite.
          loss_finite: bool[]; False if the unscaled loss itself was not finite, or the
            step was a spike. Then S should stay, because no S helps.
        """


def _overflowed(grads: T, loss_scale: LossScale) -> T:
    """Adds an infinity to gradients of one device at a counter of S, and 0 else."""
    is_due = getattr(loss_scale, "counter", 0) == OVERFLOWS

    def overflowed(x: jax.Array) -> jax.Array:
        if not x.ndim:
            return x  # it may be the loss
        indices = map(lax.axis_index, _mesh.disagreeing_axes(x))
        is_here = functools.reduce(jnp.logical_and, (i == 0 for i in indices), is_due)
        more = jnp.where(is_here, jnp.inf, 0.0).astype(x.dtype)
        return _mesh.on_parts(jnp.add, x, more)

    return map_gradients(overflowed, grads)


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

    loss_scale: LossScale
    inner_state: PyTree
    grads_finite: Flag
    applied: Flag
    skipped: Scalar
    skipped_in_a_row: Scalar
    nonfinite_losses: Scalar
    spikes: Scalar
    guard: PyTree


# What each flag and counter is before the first step, in the order of the fields.
START: dict[str, np.generic] = dict.fromkeys(("grads_finite", "applied"), np.True_)
START |= dict.fromkeys(
    ("skipped", "skipped_in_a_row", "nonfinite_losses", "spikes"), np.int32(0)
)


class HalfStorageState(NamedTuple):
    """State of `with_half_storage`.

    Attributes:
      inner_state: state of the wrapped optimizer, of float32 parameters, with its
        `averages` in bfloat16.
      remainders: the part of each float32 value that its bfloat16 parameter lacks, a
        tree of the structure of the parameters: int16 for a bfloat16 leaf, None for all
        others, and without `remainders`.
      rounding_key: u32[2], the key of the next step's rounding, or None.
    """

    inner_state: PyTree
    remainders: PyTree
    rounding_key: PyTree


for _cls in (LossScaleState, HalfStorageState):
    jax.export.register_namedtuple_serialization(
        _cls, serialized_name=f"jmp_scale.{_cls.__name__}"
    )


def is_loss_scale_state(node: PyTree) -> bool:
    """Whether a node is a `LossScaleState`, or the mapping that Flax made of it."""
    # A mapping must have all flags and counters, and no other names. `nnx.state` leaves
    # out the fields that hold no array, such as a guard of None.
    if isinstance(node, Mapping):
        return START.keys() <= set(node) <= set(LossScaleState._fields)
    return isinstance(node, LossScaleState)


def is_half_storage(node: PyTree) -> bool:
    """Whether a node is a `HalfStorageState`, or the mapping that Flax made of it.

    A mapping must have only fields of that class, and integers besides `inner_state`.
    Parameters of these names are floating-point.
    """
    if not isinstance(node, Mapping):
        return isinstance(node, HalfStorageState)
    own = {name: x for name, x in node.items() if name != "inner_state"}
    # A checkpoint's template has numbers in place of arrays.
    dtypes = [getattr(x, "dtype", np.int32) for x in jax.tree.leaves(own)]
    is_own = own.keys() <= set(HalfStorageState._fields) and bool(own)
    return is_own and all(jnp.issubdtype(dtype, np.integer) for dtype in dtypes)


def fields_of(node: PyTree) -> Mapping[str, PyTree]:
    """Returns the fields of a state, or of the mapping that Flax made of it."""
    return node if isinstance(node, Mapping) else node._asdict()


find_loss_scale_states = functools.partial(find_nodes, is_loss_scale_state)
find_half_storage = functools.partial(find_nodes, is_half_storage)


def checked_optimizer(
    function: str, inner: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that takes extra arguments, or raises an error."""
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"{function}: expected inner to be an optax.GradientTransformation, got "
            f"{described(inner)}; pass the optimizer first, an optax.MultiSteps as its "
            ".gradient_transformation()"
        )
    return optax.with_extra_args_support(inner)


def is_nothing(x: PyTree) -> bool:
    """Whether it stands for a leaf or a subtree without an update."""
    return x is None or isinstance(x, optax.MaskedNode)
