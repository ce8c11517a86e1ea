"""Checks arguments; errors name the function and the argument."""

import dataclasses
import inspect
import math
import re
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._tree import is_module
from ._types import PyTree

# In this range S and 1/S are normal in float32. XLA flushes subnormals to zero.
SMALLEST, LARGEST = 2.0**-126, 2.0**126

# Modules that call users' functions: under `jit` JAX's frames are the innermost ones.
_LIBRARIES = re.compile(r"(jmp_scale|jax|flax|optax|equinox|haiku|numpy|contextlib)\b")
_ARRAYS = (np.generic, np.ndarray, jax.Array)
_WORDS = {
    "hysteresis_reset": ("growth", "finite", "finite_or_backoff"),
    "at_max": ("hold", "clamp"),
}
# Static arguments of loss scales and guards: the least value of integers, the open
# intervals of other numbers, and how an error describes them.
_LEAST = {"growth_delay": 0, "warmup": 0}
_LEAST |= dict.fromkeys(("period", "hysteresis", "max_in_a_row"), 1)
_BETWEEN = {
    "threshold": (0, math.inf, "a finite number > 0"),
    "decay": (0, 1, "a number in (0, 1)"),
    "factor": (1, math.inf, "a finite number > 1"),
    "backoff_factor": (0, 1, "a number in (0, 1), or None for 1 / factor"),
    "min_loss_scale": (-5e-324, math.inf, "a finite number >= 0 (0 means 2**-126)"),
    "max_loss_scale": (0, math.inf, "a finite number > 0 (2.**126 means no cap)"),
}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Checks the arguments of a function."""

    function: str

    def message(self, argument: str, allowed: str, value: object) -> str:
        return f"{self.function}: expected {argument} to be {allowed}, got {value!r}"

    def require(
        self, condition: bool, argument: str, value: object, allowed: str
    ) -> None:
        if not condition:
            raise ValueError(self.message(argument, allowed, value))

    def number(self, argument: str, value: Any) -> float:
        """Returns `value`, also a concrete 0-d array, as a Python number."""
        is_bool = isinstance(value, bool) or getattr(value, "dtype", None) == np.bool_
        is_scalar = isinstance(value, (int, float, *_ARRAYS)) and np.shape(value) == ()
        if is_bool or not is_scalar:
            raise TypeError(self.message(argument, "a real number", value))
        try:
            return float(value)
        except OverflowError:  # of an integer, which is in no range then
            return math.inf

    def integer(self, argument: str, value: object, least: int) -> int:
        """Returns `value` as a Python integer in [least, 2^31)."""
        number = self.number(argument, value)
        valid = number.is_integer() and least <= number < 2**31
        self.require(valid, argument, value, f"an integer in [{least}, 2**31)")
        return int(number)


def static_loss_scale(function: str, value: object) -> float:
    """Returns the S of a `StaticLossScale` as a Python number."""
    arguments = Arguments(function)
    s = arguments.number("loss_scale", value)
    allowed = "a finite number in [2**-126, 2**126]"
    arguments.require(SMALLEST <= s <= LARGEST, "loss_scale", value, allowed)
    return s


def numbers(arguments: Arguments, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the static numbers among arguments as Python numbers."""
    values: dict[str, Any] = {}
    for field, value in given.items():
        if field in _LEAST:
            values[field] = arguments.integer(field, value, _LEAST[field])
        elif field in _BETWEEN and (field != "backoff_factor" or value is not None):
            low, high, allowed = _BETWEEN[field]
            number = values[field] = arguments.number(field, value)
            arguments.require(low < number < high, field, value, allowed)
    return values


def rule(arguments: Arguments, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the static fields of a `DynamicLossScale` as numbers and strings."""
    values = numbers(arguments, given)
    for field, words in _WORDS.items():
        allowed = f"one of {', '.join(map(repr, words))}"
        arguments.require(given[field] in words, field, given[field], allowed)
    for field in ("loss_scale", "min_loss_scale"):
        dtype = getattr(given[field], "dtype", jnp.float32)
        if jnp.issubdtype(dtype, jnp.integer):
            warn(f"Expected floating type for {field}, got {dtype}")
    low = max(values["min_loss_scale"], SMALLEST)
    high = min(values["max_loss_scale"], LARGEST)
    allowed = f"at most max_loss_scale = {high}"
    arguments.require(low <= high, "min_loss_scale", given["min_loss_scale"], allowed)
    # Rounded like S: otherwise a floor of 0.7 would refuse a saved S of 0.69999999.
    return values | {"min_loss_scale": _float32(low), "max_loss_scale": _float32(high)}


def float32_leaf(
    arguments: Arguments, value: PyTree, low: float, high: float
) -> PyTree:
    """Returns the leaf S as float32, strongly typed; a placeholder unchanged."""
    if not _is_numeric(arguments, "loss_scale", value):
        return value
    if isinstance(value, jax.Array) or np.ndim(value):
        # Not checked, because reading it would block. With a NaN, which a clip keeps,
        # every step would be skipped.
        s = jnp.asarray(value, jnp.float32)
        return jnp.clip(jnp.where(jnp.isnan(s), low, s), SMALLEST, LARGEST)
    s = _float32(arguments.number("loss_scale", value))
    allowed = f"in [min_loss_scale, max_loss_scale] = [{low}, {high}]"
    arguments.require(low <= s <= high, "loss_scale", value, allowed)
    return jnp.asarray(s, jnp.float32)


def int32_leaf(
    arguments: Arguments, argument: str, value: PyTree, start: int, loss_scale: PyTree
) -> PyTree:
    """Returns a counter as int32 of the shape of S; None becomes `start`."""
    follows = _is_numeric(arguments, "loss_scale", loss_scale)
    value = start if value is None and follows else value
    if not _is_numeric(arguments, argument, value):
        return value
    if not np.ndim(value) and not isinstance(value, jax.Array):
        value = arguments.integer(argument, value, -(2**31))
    leaf = jnp.asarray(value, jnp.int32)
    return jnp.broadcast_to(leaf, jnp.shape(loss_scale)) if follows else leaf


def warn(message: str) -> None:
    """Warns at the line of the first caller outside of libraries."""
    warnings.warn(message, stacklevel=user_frame()[1])


def user_frame() -> tuple[types.FrameType | None, int]:
    """Returns the first caller outside of libraries, and its level above this one's."""
    level = 0
    for level, (frame, module) in enumerate(callers()):
        if not _LIBRARIES.match(module):
            return frame, level
    return None, level


def callers() -> Iterator[tuple[types.FrameType, str]]:
    """Yields frames and the names of their modules, that of the caller first."""
    frame = sys._getframe(1)
    while frame:
        yield frame, frame.f_globals.get("__name__", "")
        frame = frame.f_back


def _float32(number: float) -> float:
    """Rounds a number to float32; it becomes infinite beyond the range of float32."""
    with np.errstate(over="ignore"):
        return float(np.float32(number))


def _is_numeric(arguments: Arguments, argument: str, value: PyTree) -> bool:
    """Whether a leaf is a number or an array, and not a placeholder of JAX."""
    if isinstance(value, (str, bytes, complex)) or type(value) in (list, tuple, dict):
        raise TypeError(arguments.message(argument, "a number or an array", value))
    return isinstance(value, (bool, int, float, *_ARRAYS))


def require_function(name: str, fun: object) -> None:
    """Raises a TypeError unless `fun` is a function, and not a model or a class."""
    is_linen = hasattr(fun, "apply") and getattr(fun, "scope", fun) is None
    if is_linen or is_module(fun) or inspect.isclass(fun):
        raise TypeError(
            f"{name}: expected a function, got {described(fun)}; wrap the function "
            "that calls the model: lambda model, x: loss(model(x)), or of Linen "
            "lambda params, x: loss(model.apply(params, x))"
        )
    call = f'{name}(loss_fn, "float16")(params, batch). It is not a context manager'
    require_callable(name, fun, f"write {call}")


def require_callable(name: str, fun: object, cure: str) -> None:
    if not callable(fun):
        raise TypeError(f"{name}: expected a function, got {described(fun)}; {cure}")


def require_bool(function: str, argument: str, value: object) -> None:
    if not isinstance(value, bool):
        message = Arguments(function).message(argument, "True or False", value)
        raise TypeError(message)


def described(value: PyTree) -> str:
    """Returns kind and size of a value, for an error."""
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of length {len(value)}"
    if hasattr(value, "shape"):
        return f"an array of shape {jnp.shape(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
