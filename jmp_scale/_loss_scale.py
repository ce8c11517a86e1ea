"""The three loss scales, and their three verbs: scale, unscale, adjust."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.export
import jax.numpy as jnp
from jax.typing import ArrayLike

from . import _validation
from ._scaling import multiply

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """A loss scale of 1 that does nothing, for bfloat16 and float32 runs. A pytree without leaves."""

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
class StaticLossScale:
    """A constant loss scale. A pytree without leaves: another S is another compilation.

    Args:
      loss_scale: S, a number or a concrete 0-d array in [2^-126, 2^126]. Take a power of two, which
        scales and unscales exactly.

    Raises:
      TypeError: no real number.
      ValueError: not finite, zero, negative or out of range.
    """

    loss_scale: float

    def __post_init__(self) -> None:
        value = _validation.static_loss_scale(self.loss_scale)
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


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that follows the overflows: it backs off at each, and grows after a finite period.

    One rule, of which the defaults use only a part::

        finite:      counter += 1
                     if hysteresis_reset is not "growth": left = hysteresis
                     if counter >= period:
                         grown = S * factor
                         S = grown if grown <= max_loss_scale else (S if at_max == "hold" else max_loss_scale)
                         counter = 0;  if hysteresis_reset is "growth": left = hysteresis
        not finite:  counter = -growth_delay
                     left = max(left - 1, 0)
                     if left == 0:
                         S = max(S * backoff_factor, min_loss_scale)
                         if hysteresis_reset is "finite_or_backoff": left = hysteresis

    S grows *on* the period-th finite step in a row: with S = 8 and period = 3, the steps after which
    S is 16 are the third, fourth and fifth, and the sixth makes it 32. An overflow on the second of
    three steps halves S and starts the count again.

    A frozen dataclass and a pytree of two leaves, `loss_scale` and `counter` (three with hysteresis);
    all else is static configuration, validated here once and kept by every flatten. The leaves are
    strongly typed whatever is given, and `adjust` keeps their types: one compilation, and a valid
    `lax.scan` carry. Under `vmap` the leaves may have a leading axis.

    Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2; the first five
    arguments are those of jmp 0.0.4; hysteresis as in Megatron-LM, DeepSpeed, Apex and Paddle.

    Args:
      loss_scale: initial S, f32[]; default 2^15, the largest power of two that float16 holds. A Python
        or NumPy number must lie in [min_loss_scale, max_loss_scale]; a device array, which is not looked
        at, is brought into [2^-126, 2^126].
      counter: finite steps since the last change of S, i32[]; default None starts at -growth_delay.
      period: finite steps in a row after which S grows; 2000, as in most frameworks.
      factor: growth of S, > 1; 2 keeps S a power of two, which scales exactly.
      min_loss_scale: floor of S; default 1. Below 1 the forward pass itself is out of range, which is
        allowed. Values under 2^-126, also 0, mean 2^-126: S is never 0.
      max_loss_scale: cap of S; default 2^24, beyond which float16 training gains nothing. Values over
        2^126 mean 2^126.
      backoff_factor: factor in (0, 1) at an overflow; default None divides by `factor`.
      growth_delay: finite steps that do not count after the start and after each overflow; 0.
      hysteresis: overflows that are needed for S to back off; 1 backs off at each.
      hysteresis_reset: what refills the hysteresis: "growth" of S, every "finite" step, or
        "finite_or_backoff".
      at_max: "hold" makes no growth that would pass the cap, "clamp" ends at the cap.
      hysteresis_left: overflows left until S backs off, i32[]; default None starts at `hysteresis`.
        No leaf with hysteresis = 1.

    Raises:
      TypeError: an argument that is no number (or no string, for the two words).
      ValueError: an argument out of its range; the message names it, its value and what is allowed.

    Example:
      >>> import jax.numpy as jnp, jmp_scale
      >>> loss_scale = jmp_scale.DynamicLossScale(2.0**15, period=2)
      >>> for finite in (True, True, False):
      ...     loss_scale = loss_scale.adjust(jnp.array(finite))
      ...     print(float(loss_scale.loss_scale), int(loss_scale.counter))
      32768.0 1
      65536.0 0
      32768.0 0
    """

    loss_scale: Any = 2.0**15
    counter: Any = None
    period: int = 2000
    factor: float = 2
    min_loss_scale: float = 1.0
    _: dataclasses.KW_ONLY
    max_loss_scale: float = 2.0**24
    backoff_factor: float | None = None
    growth_delay: int = 0
    hysteresis: int = 1
    hysteresis_reset: str = "growth"
    at_max: str = "hold"
    hysteresis_left: Any = None

    def __post_init__(self) -> None:
        # Only for what a user gives: an unflatten does not come here, since JAX puts None, object(),
        # PartitionSpec and the like in the place of leaves.
        values = _validation.checked(self)
        values["loss_scale"] = _validation.float32_leaf(self.loss_scale, values)
        starts = {
            "counter": -values["growth_delay"],
            "hysteresis_left": values["hysteresis"],
        }
        for name, start in starts.items():
            values[name] = _validation.int32_leaf(
                name, getattr(self, name), start, values["loss_scale"]
            )
        if values["hysteresis"] == 1:
            values["hysteresis_left"] = None
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def scale(self, tree: T) -> T:
        """Multiplies by S, in float32 or wider, so that a float16 loss cannot overflow by it.

        Args:
          tree: pytree; leaves that are not real or complex floating point pass unchanged.

        Returns:
          The same structure; floating-point leaves narrower than 32 bits come as float32, float64 and
          complex leaves keep their dtype.
        """
        return multiply("scale", tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divides by S, in float32 or wider, so that what scaling saved is not lost again.

        Give it the gradients of the loss that this very S scaled: before `adjust`, and before any
        mean over devices or micro-batches.

        Args:
          tree: pytree; leaves that are not real or complex floating point pass unchanged.

        Returns:
          The same structure and dtypes as from `scale`. Exact when S is a power of two.
        """
        return multiply("unscale", tree, self.loss_scale, inverse=True)

    def adjust(
        self, grads_finite: ArrayLike, *, loss_finite: ArrayLike = True
    ) -> "DynamicLossScale":
        """The loss scale of the next step: the rule above, as one select.

        Args:
          grads_finite: bool, of the shape of `loss_scale` (so bool[], but for a vmapped loss scale).
          loss_finite: bool of that shape; False when the unscaled loss itself is NaN or infinite.
            No S changes the forward pass, so everything then stays as it is.

        Returns:
          A loss scale of the same structure, shapes and dtypes.

        Raises:
          ValueError: a flag that is not boolean, or not of the shape of `loss_scale`.
        """
        self._check_flag("grads_finite", grads_finite)
        new = _select(grads_finite, self._after_finite(), self._after_overflow())
        if loss_finite is not True:
            self._check_flag("loss_finite", loss_finite)
            new = _select(loss_finite, new, self)
        return new

    def _after_finite(self) -> "DynamicLossScale":
        s, counter = self.loss_scale, self.counter + 1
        grows = counter >= self.period
        grown = s * self.factor
        if self.at_max == "hold":
            grown = jnp.where(grown <= self.max_loss_scale, grown, s)
        else:
            grown = jnp.minimum(grown, self.max_loss_scale)
        leaves = {
            "loss_scale": jnp.where(grows, grown, s),
            "counter": jnp.where(grows, 0, counter),
        }
        if self.hysteresis > 1:
            left = jnp.full_like(self.hysteresis_left, self.hysteresis)
            if self.hysteresis_reset == "growth":
                left = jnp.where(grows, left, self.hysteresis_left)
            leaves["hysteresis_left"] = left
        return _with_leaves(self, **leaves)

    def _after_overflow(self) -> "DynamicLossScale":
        s, counter = self.loss_scale, jnp.full_like(self.counter, -self.growth_delay)
        backed_off = (
            s / self.factor if self.backoff_factor is None else s * self.backoff_factor
        )
        backed_off = jnp.maximum(backed_off, self.min_loss_scale)
        if self.hysteresis == 1:
            return _with_leaves(self, loss_scale=backed_off, counter=counter)
        left = jnp.maximum(self.hysteresis_left - 1, 0)
        backs_off = left == 0
        s = jnp.where(backs_off, backed_off, s)
        if self.hysteresis_reset == "finite_or_backoff":
            left = jnp.where(backs_off, self.hysteresis, left)
        return _with_leaves(self, loss_scale=s, counter=counter, hysteresis_left=left)

    def _check_flag(self, name: str, flag: ArrayLike) -> None:
        shape, expected = jnp.shape(flag), jnp.shape(self.loss_scale)
        if shape != expected or jnp.result_type(flag) != jnp.bool_:
            raise ValueError(
                f"adjust: expected {name} to be a boolean of the shape {expected} of loss_scale, got "
                f"{jnp.result_type(flag)}{list(shape)}; reduce it with all_finite, or vmap adjust"
            )


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale


class LossScaleState(NamedTuple):
    """State of `with_loss_scale`; `optax.tree.get(opt_state, "loss_scale")` finds it.

    Attributes:
      loss_scale: the loss scale of the next step.
      inner_state: state of the wrapped optimizer.
      grads_finite: bool[], whether the last step's gradients, and its loss if given as
        `value`, were all finite. True before the first step.
      applied: bool[], whether the last step was applied: `grads_finite`, and not a
        spike. Select by it what else must not change on a skipped step (an EMA of the
        parameters, BatchNorm statistics). True before the first step.
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

    A node is a `LossScaleState`, or a mapping with the same names, which `nnx.state` and
    state dicts make of it. What lies within a state is not searched.
    """
    nodes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_loss_scale_state)[0]
    return [(path, node) for path, node in nodes if is_loss_scale_state(node)]


def is_loss_scale_state(node: Any) -> bool:
    """Whether a node is a `LossScaleState`, also in the form of a mapping.

    A mapping made by Flax lacks the fields that hold no array: a guard of None, say.
    """
    if isinstance(node, Mapping):
        names = set(node)
        return (
            {"loss_scale", "skipped_in_a_row"} <= names <= set(LossScaleState._fields)
        )
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
    """`loss_scale.adjust(grads_finite, loss_finite=loss_finite)`, to map over several loss scales."""
    return loss_scale.adjust(grads_finite, loss_finite=loss_finite)


def scale_value(function: str, loss_scale: Any) -> jax.Array:
    """S as f32[], of a loss scale, a number or an array.

    Raises:
      TypeError: a value that is no number.
      ValueError: a number outside [2^-126, 2^126], or an S of a shape other than ().
    """
    value = number_of(loss_scale)
    if not isinstance(value, jax.Array):
        value = _validation.static_loss_scale(value)
    if jnp.shape(value) != ():
        raise ValueError(
            f"{function}: expected a scalar loss_scale, got one of shape {jnp.shape(value)}; vmap over it"
        )
    return jnp.asarray(value).astype(jnp.float32)


def number_of(loss_scale: Any) -> Any:
    """S of a loss scale, or what is given in place of one: a number or an array."""
    return getattr(loss_scale, "loss_scale", loss_scale)


def _select(
    pred: ArrayLike, on_true: DynamicLossScale, on_false: DynamicLossScale
) -> DynamicLossScale:
    def select_leaf(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(pred, a, b)

    return jax.tree.map(select_leaf, on_true, on_false)


def _with_leaves(loss_scale: Any, /, **leaves: Any) -> Any:
    """A copy with other leaves, which are taken as they are."""
    copy = object.__new__(type(loss_scale))
    for name, value in (vars(loss_scale) | leaves).items():
        object.__setattr__(copy, name, value)
    return copy


def _register(cls: type, leaf_names: tuple[str, ...]) -> None:
    # By hand rather than jax.tree_util.register_dataclass, which calls __init__ at every unflatten.
    # All that is no leaf is static, read off the fields, so that none can be forgotten.
    static_names = tuple(
        f.name for f in dataclasses.fields(cls) if f.name not in leaf_names
    )
    keys = tuple(jax.tree_util.GetAttrKey(name) for name in leaf_names)

    def flatten(x: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(x, n) for n in leaf_names), tuple(
            getattr(x, n) for n in static_names
        )

    def flatten_with_keys(x: Any) -> tuple[Any, tuple[Any, ...]]:
        leaves, static = flatten(x)
        return tuple(zip(keys, leaves, strict=True)), static

    def unflatten(static: tuple[Any, ...], leaves: Any) -> Any:
        empty = object.__new__(cls)
        fields = zip(leaf_names + static_names, (*leaves, *static), strict=True)
        return _with_leaves(empty, **dict(fields))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=f"jmp_scale.{cls.__name__}",
        serialize_auxdata=lambda static: json.dumps(static).encode(),
        deserialize_auxdata=lambda data: tuple(json.loads(bytes(data))),
    )


_register(NoOpLossScale, ())
_register(StaticLossScale, ())
_register(DynamicLossScale, ("loss_scale", "counter", "hysteresis_left"))
