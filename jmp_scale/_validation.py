"""What a loss scale may be configured with: checked once, with errors that name the argument."""

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The loss scales S for which S and 1/S are normal float32 numbers. Beyond them XLA flushes one of the
# two to zero, and with it every gradient.
SMALLEST, LARGEST = 2.0**-126, 2.0**126

_ARRAYS = (np.generic, np.ndarray, jax.Array)
_INTEGERS = {
    "period": 1,
    "growth_delay": 0,
    "hysteresis": 1,
}  # with the least that is allowed
_WORDS = {
    "hysteresis_reset": ("growth", "finite", "finite_or_backoff"),
    "at_max": ("hold", "clamp"),
}


def static_loss_scale(value: Any) -> float:
    """The S of a `StaticLossScale` as a Python number."""
    s = number("loss_scale", value)
    _require(
        SMALLEST <= s <= LARGEST,
        "loss_scale",
        s,
        "a finite number in [2**-126, 2**126]",
    )
    return s


def checked(given: Any) -> dict[str, Any]:
    """The static fields of a `DynamicLossScale` as Python numbers and strings, each in its range."""
    values: dict[str, Any] = {}
    for field, least in _INTEGERS.items():
        value = number(field, getattr(given, field))
        _require(
            value.is_integer() and least <= value < 2**31,
            field,
            value,
            f"an integer >= {least}",
        )
        values[field] = int(value)
    for field, words in _WORDS.items():
        values[field] = value = getattr(given, field)
        if not isinstance(value, str):
            raise TypeError(f"{field} must be one of {words}, got {value!r}")
        _require(value in words, field, value, f"one of {words}")
    values["factor"] = value = number("factor", given.factor)
    _require(1 < value < math.inf, "factor", value, "a finite number > 1")
    if given.backoff_factor is not None:
        values["backoff_factor"] = value = number(
            "backoff_factor", given.backoff_factor
        )
        _require(
            0 < value < 1,
            "backoff_factor",
            value,
            "a number in (0, 1), or None for 1 / factor",
        )
    for field in ("loss_scale", "min_loss_scale"):
        _warn_if_integer_array(field, getattr(given, field))
    return values | _bounds(given.min_loss_scale, given.max_loss_scale)


def float32_leaf(value: Any, configuration: dict[str, Any]) -> Any:
    """The leaf S as f32, strongly typed. A number of the host is checked; a placeholder passes."""
    if not _is_numeric(value):
        return value
    if isinstance(
        value, jax.Array
    ):  # it is brought into range, since looking at it would wait for it
        return jnp.clip(jnp.asarray(value, jnp.float32), SMALLEST, LARGEST)
    low, high = configuration["min_loss_scale"], configuration["max_loss_scale"]
    allowed = f"in [min_loss_scale, max_loss_scale] = [{low}, {high}]"
    for entry in np.ravel(np.asarray(value)):
        entry = number("loss_scale", entry)
        _require(low <= entry <= high, "loss_scale", entry, allowed)
    return jnp.asarray(value, jnp.float32)


def int32_leaf(name: str, value: Any, start: int, loss_scale: Any) -> Any:
    """A counter as i32 of the shape of S, strongly typed; None becomes `start`."""
    if value is None and _is_numeric(loss_scale):
        value = start
    if not _is_numeric(value):
        return value
    if not isinstance(value, jax.Array):
        for entry in np.ravel(np.asarray(value)):
            entry = number(name, entry)
            _require(entry.is_integer(), name, entry, "an integer")
    leaf = jnp.asarray(value, jnp.int32)
    return (
        jnp.broadcast_to(leaf, jnp.shape(loss_scale))
        if _is_numeric(loss_scale)
        else leaf
    )


def number(name: str, value: Any) -> float:
    """`value` as a Python number; a `TypeError` that begins with `name` if it is none."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(
        value, (int, float, *_ARRAYS)
    ):
        raise TypeError(f"{name} must be a real number, got {value!r}")
    try:
        return float(value)
    except (
        TypeError
    ) as error:  # an array with axes, or one whose value is not known while tracing
        raise TypeError(
            f"{name} must be a number or a concrete 0-d array of one, got {value!r}"
        ) from error


def _bounds(min_loss_scale: Any, max_loss_scale: Any) -> dict[str, float]:
    low, high = (
        number("min_loss_scale", min_loss_scale),
        number("max_loss_scale", max_loss_scale),
    )
    _require(
        0 <= low < math.inf,
        "min_loss_scale",
        low,
        "a finite number >= 0 (0 means 2**-126)",
    )
    _require(
        0 < high < math.inf,
        "max_loss_scale",
        high,
        "a finite number > 0 (2.**126 means no cap)",
    )
    low, high = max(low, SMALLEST), min(high, LARGEST)
    _require(low <= high, "min_loss_scale", low, f"at most max_loss_scale = {high}")
    return {"min_loss_scale": low, "max_loss_scale": high}


def _is_numeric(value: Any) -> bool:
    """Whether a leaf is a number or an array of numbers, and no placeholder that JAX put there."""
    if isinstance(value, (str, bytes, complex)) or type(value) in (list, tuple, dict):
        raise TypeError(
            f"loss_scale and counter must be numbers or arrays, got {value!r}"
        )
    return isinstance(value, (bool, int, float, *_ARRAYS))


def _require(condition: bool, name: str, value: Any, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def _warn_if_integer_array(name: str, value: Any) -> None:
    if isinstance(value, _ARRAYS) and jnp.issubdtype(value.dtype, jnp.integer):
        warnings.warn(
            f"Expected floating type for {name}, got {value.dtype}", stacklevel=5
        )
