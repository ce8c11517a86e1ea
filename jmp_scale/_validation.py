"""Checks arguments; errors name the function and the argument."""

import dataclasses
import inspect
import math
import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._tree import is_module
from ._types import Leaf

# In this range S and 1/S are normal in float32. XLA flushes subnormals to zero.
SMALLEST, LARGEST = 2.0**-126, 2.0**126

# Modules that call users' functions: under `jit` JAX's frames are the innermost ones.
_LIBRARIES = re.compile(r"(jmp_scale|jax|flax|optax|equinox|haiku|contextlib)\b")
_ARRAYS = (np.generic, np.ndarray, jax.Array)
_LEAST_INTEGERS = {"period": 1, "growth_delay": 0, "hysteresis": 1}
_WORDS = {
    "hysteresis_reset": ("growth", "finite", "finite_or_backoff"),
    "at_max": ("hold", "clamp"),
}
# Open intervals of arguments, and how an error describes them.
_BETWEEN = {
    "factor": (1, math.inf, "a finite number > 1"),
    "backoff_factor": (0, 1, "a number in (0, 1), or None for 1 / factor"),
    "min_loss_scale": (-5e-324, math.inf, "a finite number >= 0 (0 means 2**-126)"),
    "max_loss_scale": (0, math.inf, "a finite number > 0 (2.**126 means no cap)"),
}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Checks the arguments of a function; a preset has other names for some."""

    function: str
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def name(self, argument: str) -> str:
        return self.names.get(argument, argument)

    def message(self, argument: str, allowed: str, value: object) -> str:
        name = self.name(argument)
        return f"{self.function}: expected {name} to be {allowed}, got {value!r}"

    def require(
        self, condition: bool, argument: str, value: object, allowed: str
    ) -> None:
        if not condition:
            raise ValueError(self.message(argument, allowed, value))

    def number(self, argument: str, value: Any) -> float:
        """Returns `value` as a Python number."""
        is_number = isinstance(value, (int, float, *_ARRAYS))
        if not is_number or isinstance(value, (bool, np.bool_)):
            raise TypeError(self.message(argument, "a real number", value))
        try:
            return float(value)
        except OverflowError:  # of an integer, which is then beyond any range
            return math.inf
        except TypeError as error:  # an array with axes, or a tracer
            allowed = "a number or a concrete 0-d array of one"
            raise TypeError(self.message(argument, allowed, value)) from error

    def integer(self, argument: str, value: object, least: int) -> int:
        """Returns `value` as a Python integer in [least, 2^31)."""
        number = self.number(argument, value)
        valid = number.is_integer() and least <= number < 2**31
        self.require(valid, argument, value, f"an integer in [{least}, 2**31)")
        return int(number)

    def word(self, argument: str, value: object, words: tuple[str, ...]) -> str:
        allowed = f"one of {', '.join(map(repr, words))}"
        if not isinstance(value, str):
            raise TypeError(self.message(argument, allowed, value))
        self.require(value in words, argument, value, allowed)
        return value


def static_loss_scale(arguments: Arguments, value: object) -> float:
    """Returns the S of a `StaticLossScale` as a Python number."""
    s = arguments.number("loss_scale", value)
    allowed = "a finite number in [2**-126, 2**126]"
    arguments.require(SMALLEST <= s <= LARGEST, "loss_scale", value, allowed)
    return s


def rule(arguments: Arguments, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the static fields of a `DynamicLossScale` as numbers and strings."""
    values: dict[str, Any] = {"backoff_factor": None}
    for field, least in _LEAST_INTEGERS.items():
        values[field] = arguments.integer(field, given[field], least)
    for field, words in _WORDS.items():
        values[field] = arguments.word(field, given[field], words)
    for field, (low, high, allowed) in _BETWEEN.items():
        if field != "backoff_factor" or given[field] is not None:
            number = values[field] = arguments.number(field, given[field])
            arguments.require(low < number < high, field, given[field], allowed)
    for field in ("loss_scale", "min_loss_scale"):
        dtype = getattr(given[field], "dtype", jnp.float32)
        if jnp.issubdtype(dtype, jnp.integer):
            warn(f"Expected floating type for {field}, got {dtype}")
    low = max(values["min_loss_scale"], SMALLEST)
    high = min(values["max_loss_scale"], LARGEST)
    allowed = f"at most {arguments.name('max_loss_scale')} = {high}"
    arguments.require(low <= high, "min_loss_scale", given["min_loss_scale"], allowed)
    # Rounded like S: otherwise a floor of 0.7 would refuse a saved S of 0.69999999.
    return values | {"min_loss_scale": _float32(low), "max_loss_scale": _float32(high)}


def float32_leaf(arguments: Arguments, value: Leaf, low: float, high: float) -> Leaf:
    """Returns the leaf S as float32, strongly typed; a placeholder unchanged."""
    if not _is_numeric(arguments, "loss_scale", value):
        return value
    if isinstance(value, jax.Array):
        # Not checked, because reading it would block. With a NaN, which a clip keeps,
        # every step would be skipped.
        s = jnp.asarray(value, jnp.float32)
        return jnp.clip(jnp.where(jnp.isnan(s), low, s), SMALLEST, LARGEST)
    ends = f"[{arguments.name('min_loss_scale')}, {arguments.name('max_loss_scale')}]"
    allowed = f"in {ends} = [{low}, {high}]"
    for entry in np.ravel(np.asarray(value)).tolist():
        s = _float32(arguments.number("loss_scale", entry))
        arguments.require(low <= s <= high, "loss_scale", entry, allowed)
    return jnp.asarray(value, jnp.float32)


def int32_leaf(
    arguments: Arguments, argument: str, value: Leaf, start: int, loss_scale: Leaf
) -> Leaf:
    """Returns a counter as int32 of the shape of S; None becomes `start`."""
    follows = _is_numeric(arguments, "loss_scale", loss_scale)
    value = start if value is None and follows else value
    if not _is_numeric(arguments, argument, value):
        return value
    if not isinstance(value, jax.Array):
        for entry in np.ravel(np.asarray(value)).tolist():
            arguments.integer(argument, entry, -(2**31))
    leaf = jnp.asarray(value, jnp.int32)
    return jnp.broadcast_to(leaf, jnp.shape(loss_scale)) if follows else leaf


def key_words(function: str, key: Leaf) -> jax.Array:
    """Returns the first 64 bits of a PRNG key, typed or raw, as u32[2] for Threefry."""
    dtype = getattr(key, "dtype", np.dtype(object))
    if dtype != jnp.uint32 and not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        got = repr(key) if isinstance(key, (int, str)) else described(key)
        raise TypeError(
            f"{function}: expected key to be a PRNG key, got {got}; write "
            "key=jax.random.key(0)"
        )
    words = jax.random.key_data(key)
    if words.ndim != 1 or words.size < 2:
        raise ValueError(
            f"{function}: expected one PRNG key, got {described(key)}; for an ensemble "
            "make one optimizer of one key, and give its states keys of their own: "
            "state._replace(rounding_key=jax.random.key_data(keys))"
        )
    return words[:2]


def warn(message: str) -> None:
    """Warns at the line of the first caller outside of libraries."""
    frame, level = sys._getframe(), 1
    while frame and _LIBRARIES.match(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _float32(number: float) -> float:
    """Rounds a number to float32; it becomes infinite beyond the range of float32."""
    with np.errstate(over="ignore"):
        return float(np.float32(number))


def _is_numeric(arguments: Arguments, argument: str, value: Leaf) -> bool:
    """Whether a leaf is a number or an array, and not a placeholder of JAX."""
    if isinstance(value, (str, bytes, complex)) or type(value) in (list, tuple, dict):
        raise TypeError(arguments.message(argument, "a number or an array", value))
    return isinstance(value, (bool, int, float, *_ARRAYS))


def require_function(name: str, fun: object) -> None:
    """Raises a TypeError unless `fun` is a function, and not a model or a class."""
    modules = [c.__module__ for c in type(fun).__mro__]
    is_linen = any(module.startswith("flax.linen") for module in modules)
    if is_module(fun) or is_linen or inspect.isclass(fun):
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
    if not isinstance(value, (bool, np.bool_)):
        allowed = "True or False"
        raise TypeError(Arguments(function).message(argument, allowed, value))


def described(value: Leaf) -> str:
    """Returns kind and size of a value, for an error."""
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of length {len(value)}"
    if hasattr(value, "shape"):
        return f"an array of shape {jnp.shape(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
