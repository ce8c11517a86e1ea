"""The three loss scales, made from code or configuration, and their verbs."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .. import _pytree, _validation
from .._policy import half_dtype, name_to_dtype
from .._state import LossScale
from .._tree import type_name

T = TypeVar("T")


@_pytree.register
@dataclasses.dataclass(frozen=True, repr=False)
class NoOpLossScale(LossScale):
    """A loss scale of 1 that does nothing, for bfloat16 and float32; without leaves."""

    @property
    def loss_scale(self) -> int:
        """S = 1."""
        return 1

    def scale(self, tree: T) -> T:
        """Returns `tree` itself."""
        return tree

    unscale = scale

    def adjust(self, grads_finite: ArrayLike, *, loss_finite: ArrayLike = True) -> Self:
        """Returns itself."""
        return self


@_pytree.register
@dataclasses.dataclass(frozen=True, repr=False)
class StaticLossScale(LossScale):
    """A constant loss scale: a pytree without leaves, so another S recompiles a step.

    Args:
      loss_scale: S, a number or a concrete 0-d array in [2^-126, 2^126]. A power of two
        scales and unscales exactly.

    Raises:
      TypeError: `loss_scale` is not a real number.
      ValueError: it is not finite, zero, negative or out of range.
    """

    loss_scale: float

    def __post_init__(self) -> None:
        s = _validation.static_loss_scale("StaticLossScale", self.loss_scale)
        vars(self).update(loss_scale=s)

    def adjust(self, grads_finite: ArrayLike, *, loss_finite: ArrayLike = True) -> Self:
        """Returns itself."""
        return self


@_pytree.register
@dataclasses.dataclass(frozen=True, repr=False)
class DynamicLossScale(LossScale):
    """A loss scale that backs off at an overflow, and grows after a finite period.

    Use it for float16. It needs no tuning: S settles just below where overflows begin.

    ```text
    finite:      counter += 1
                 if hysteresis_reset is not "growth": left = hysteresis
                 if counter >= period:
                     grown = S * factor
                     if grown <= max_loss_scale: S = grown
                     elif at_max is "clamp": S = max_loss_scale
                     counter = 0
                     if hysteresis_reset is "growth": left = hysteresis
    not finite:  counter = -growth_delay
                 left = max(left - 1, 0)
                 if left == 0:
                     S = max(S * backoff_factor, min_loss_scale)
                     if hysteresis_reset is "finite_or_backoff": left = hysteresis
    ```

    With S = 8 and period 3, S is 16 on the third finite step in a row, 32 on the sixth.

    It is a frozen dataclass and a pytree. Its leaves are `loss_scale` and `counter`,
    and with hysteresis `hysteresis_left`. Under `vmap` they may have leading axes.

    Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2. The
    first five arguments are jmp's (0.0.4), hysteresis is that of Megatron-LM.

    Args:
      loss_scale: initial S, f32[]; 2^15 is the largest power of two in float16. A
        Python or NumPy number must lie in [min_loss_scale, max_loss_scale]. A device
        array is clipped to [2^-126, 2^126], NaN to the floor.
      counter: finite steps since the last change of S, i32[]; None is -growth_delay.
      period: finite steps in a row after which S grows; 2000, as in most frameworks.
      factor: growth of S, > 1; 2 keeps S a power of two, which scales exactly.
      min_loss_scale: floor of S; < 1 for unscaled gradients that overflow, 0 is 2^-126.
      max_loss_scale: cap of S, at most 2^126; beyond 2^24 float16 gains nothing.
      backoff_factor: factor in (0, 1) at an overflow; None divides by `factor`.
      growth_delay: finite steps that do not count after the start and each overflow.
      hysteresis: overflows until S backs off; 1 backs off at each.
      hysteresis_reset: the event that refills the hysteresis: "growth" of S, every
        "finite" step, or "finite_or_backoff".
      at_max: "hold" skips a growth that would exceed the cap, "clamp" grows to the cap.
      hysteresis_left: overflows left until S backs off, i32[]; None is `hysteresis`.

    Raises:
      TypeError: an argument is not a number.
      ValueError: an argument is out of its range; the message names the range.
    """

    loss_scale: _pytree.LeafField = 2.0**15
    counter: _pytree.LeafField = None
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
    hysteresis_left: _pytree.LeafField = None

    def __post_init__(self) -> None:
        arguments = _validation.Arguments(type(self).__name__)
        values = _validation.rule(arguments, vars(self))
        low, high = values["min_loss_scale"], values["max_loss_scale"]
        s = _validation.float32_leaf(arguments, self.loss_scale, low, high)
        values |= {"loss_scale": s, "hysteresis_left": None}
        for name, start in self._starts().items():
            given = getattr(self, name)
            values[name] = _validation.int32_leaf(arguments, name, given, start, s)
        vars(self).update(values)

    def _starts(self) -> dict[str, int]:
        # Without hysteresis (the default) checkpoints have one leaf less.
        left = {"hysteresis_left": self.hysteresis} if self.hysteresis > 1 else {}
        return {"counter": -self.growth_delay, **left}

    def adjust(self, grads_finite: ArrayLike, *, loss_finite: ArrayLike = True) -> Self:
        """Returns the loss scale of the next step: the rule above, as one select.

        Flags are those of `LossScale.adjust`, of the shape of `loss_scale`.

        Raises:
          ValueError: a flag that is not boolean, or not of the shape of `loss_scale`.
        """
        self._check_flag("grads_finite", grads_finite)
        cases = self._after_finite(), self._after_overflow()
        new = jax.tree.map(functools.partial(jnp.where, grads_finite), *cases)
        # The default, a Python True, needs no second select.
        if loss_finite is not True:
            self._check_flag("loss_finite", loss_finite)
            new = jax.tree.map(functools.partial(jnp.where, loss_finite), new, self)
        return new

    def _after_finite(self) -> Self:
        s, counter = self.loss_scale, self.counter + 1
        # Not `==`: a restored counter may be beyond a period that is shorter now.
        grows = counter >= self.period
        grown = s * self.factor
        # `at_max` is static, so only one of the two is compiled.
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
        return _pytree.with_fields(self, **leaves)

    def _after_overflow(self) -> Self:
        s, counter = self.loss_scale, jnp.full_like(self.counter, -self.growth_delay)
        backoff = self.backoff_factor
        backed_off = s / self.factor if backoff is None else s * backoff
        # Not jnp.maximum, which keeps a NaN: every step would be skipped.
        floor = self.min_loss_scale
        backed_off = jnp.where(backed_off > floor, backed_off, floor)
        leaves = {"loss_scale": backed_off, "counter": counter}
        if self.hysteresis > 1:
            # If only growth resets it, `left` stays 0 until S grows: each further
            # overflow backs off at once.
            left = jnp.maximum(self.hysteresis_left - 1, 0)
            backs_off = left == 0
            leaves["loss_scale"] = jnp.where(backs_off, backed_off, s)
            if self.hysteresis_reset == "finite_or_backoff":
                left = jnp.where(backs_off, self.hysteresis, left)
            leaves["hysteresis_left"] = left
        return _pytree.with_fields(self, **leaves)

    def _check_flag(self, name: str, flag: ArrayLike) -> None:
        shape = jnp.shape(self.loss_scale)
        if (got := type_name(flag)) != f"bool{[*shape]}":
            raise ValueError(
                f"adjust: expected {name} to be a boolean of the shape {shape} of "
                f"loss_scale, got {got}; write adjust(all_finite(grads)), or vmap it"
            )


def scale(loss_scale: LossScale, tree: T) -> T:
    """Returns `loss_scale.scale(tree)`, to map over several loss scales."""
    return loss_scale.scale(tree)


def unscale(loss_scale: LossScale, tree: T) -> T:
    """Returns `loss_scale.unscale(tree)`, to map over several loss scales."""
    return loss_scale.unscale(tree)


def adjust(
    loss_scale: LossScale, grads_finite: ArrayLike, *, loss_finite: ArrayLike = True
) -> LossScale:
    """Returns `loss_scale.adjust(...)`, to map over several loss scales."""
    return loss_scale.adjust(grads_finite, loss_finite=loss_finite)


def get_loss_scale(spec: LossScale | ArrayLike | DTypeLike) -> LossScale:
    """Reads a loss scale from a configuration value, as `get_policy` reads a policy.

    | `spec` | loss scale |
    |---|---|
    | `"none"` | `NoOpLossScale()` |
    | `"dynamic"` | `DynamicLossScale()` |
    | `"dynamic:2**16"` | `DynamicLossScale(2.0**16)`, with the other defaults |
    | `1024`, `"2**10"`, `"static:1024"` | `StaticLossScale` of that number |
    | `"fp16"`, `"f16"`, `"half"` | `DynamicLossScale()`: float16 needs one |
    | `"bf16"`, `"fp32"`, `"f64"` | `NoOpLossScale()`: at least the range of float32 |
    | a loss scale | itself |

    A dtype means the same as its name. Names are those of `get_policy`; case and blanks
    do not matter.

    Raises:
      TypeError: neither a string, a number, a dtype nor a loss scale.
      ValueError: an unknown string, or a number out of the range of the loss scale.
    """
    if isinstance(spec, LossScale):
        return spec
    if isinstance(spec, Mapping):
        raise TypeError(
            "get_loss_scale: expected a name, a number or a dtype, got the section "
            f"{spec!r}; pass one value of it, or its values to the framework's "
            "function in jmp_scale.presets"
        )
    is_class = isinstance(spec, type) and issubclass(spec, LossScale)
    if is_class or _foreign_name(spec) in _REPLACEMENTS:
        return checked_loss_scale("get_loss_scale", spec)
    if isinstance(spec, (type, np.dtype)):
        spec = str(jnp.dtype(spec))
    if not isinstance(spec, str):
        return StaticLossScale(spec)  # pyright: ignore[reportArgumentType]
    loss_scale = _named(spec.lower().strip())
    if loss_scale is None:
        raise ValueError(
            f'get_loss_scale: unknown loss scale {spec!r}; known are "none"; "dynamic" '
            'or "dynamic:2**16"; a number, "1024" or "static:2**10"; the name of a '
            'dtype ("half", "fp16", "bf16", "fp32", ...). A framework\'s own '
            "configuration is for its function in jmp_scale.presets"
        )
    return loss_scale


def _named(text: str) -> LossScale | None:
    """Returns the loss scale that a name stands for, or None if it is unknown."""
    # Only "half" looks at the devices, which starts JAX.
    dtype = half_dtype() if text == "half" else name_to_dtype.get(text)
    if text == "dynamic" or (dtype is not None and dtype == jnp.float16):
        return DynamicLossScale()
    if text == "none" or dtype is not None:
        return NoOpLossScale()
    kind, _, argument = text.rpartition(":")
    base, power, exponent = argument.partition("**")
    try:
        number = float(float(base) ** (float(exponent) if power else 1))
    except (TypeError, ValueError, ArithmeticError):
        return None
    makers = {"dynamic": DynamicLossScale, "static": StaticLossScale}
    make = (makers | {"": StaticLossScale}).get(kind.strip())
    return make(number) if make else None


def checked_loss_scale(function: str, value: object) -> LossScale:
    """Returns `value`, a loss scale; otherwise an error says how to get one."""
    if isinstance(value, LossScale):
        return value
    is_short = isinstance(value, (str, int, float, type)) or hasattr(value, "dtype")
    got = repr(value) if is_short else f"a {type(value).__name__}"
    cure = (
        "pass an instance such as DynamicLossScale(), jmp_scale.get_loss_scale(...) of "
        "a number or a name, or the .loss_scale of a state, "
        'optax.tree.get(opt_state, "loss_scale")'
    )
    if (name := _foreign_name(value)) in _REPLACEMENTS:
        got, cure = name, f"write {_REPLACEMENTS[name]}"
    raise TypeError(f"{function}: expected a loss scale, got {got}; {cure}")


# The lines that replace the loss scales of other packages.
_REPLACEMENTS = {
    "jmp.DynamicLossScale": "import jmp_scale as jmp in place of import jmp",
    "jmp.StaticLossScale": "import jmp_scale as jmp in place of import jmp",
    "jmp.NoOpLossScale": "import jmp_scale as jmp in place of import jmp",
    "flax.DynamicScale": "jmp_scale.presets.flax(scale=..., growth_interval=...)",
    "mpx.DynamicLossScaling": "jmp_scale.presets.mpx(loss_scaling, min_loss_scaling)",
    "torch.GradScaler": "jmp_scale.presets.pytorch(init_scale=...)",
}


def _foreign_name(value: object) -> str:
    """Returns the name of a value's class, with the package that defines it."""
    package = type(value).__module__.partition(".")[0]
    return f"{package}.{type(value).__name__}"


def scale_value(function: str, loss_scale: LossScale | ArrayLike) -> float:
    """Returns S of a loss scale or a number, which must be in [2^-126, 2^126]."""
    value = number_of(loss_scale)
    if not (isinstance(value, (int, float)) or hasattr(value, "dtype")):
        checked_loss_scale(function, loss_scale)
    return _validation.static_loss_scale(function, value)


def number_of(loss_scale: LossScale | ArrayLike) -> Any:
    """Returns S of a loss scale; a number or an array in its place as it is."""
    return getattr(loss_scale, "loss_scale", loss_scale)
