"""What is known about a traced value without running the program.

A `Fact` bounds the entries of an array and remembers the few things that decide whether
half precision holds them: constants, sums, squares, and epsilons that guard a zero.
"""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._jaxpr import constant, dtype_name, is_literal

INF = math.inf
MOST_VALUES = 8
_SMALL_INTEGERS = {"int8", "uint8", "int16", "uint16"}


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """What is known about the entries of an array.

    Attributes:
      low: no entry is smaller.
      high: no entry is larger.
      values: constants that entries may be equal to, at most eight.
      only: whether every entry is one of `values`.
      integral: whether every entry is an integer.
      guard: the epsilon that was added to keep entries from 0; 0.0 once it is lost in a
        half dtype; None without one.
      guarded_at: the equation that added it, 0 for a lower bound by `max`.
      summed: how many entries a float32 sum has added up into one, not yet divided.
      squared: whether the entries are squares or sums of squares in float32.
      narrowed: the function of the user whose own cast to half precision was the last
        operation; "" if it was another operation.
      literal: whether it is a number in the program text.
    """

    low: float = -INF
    high: float = INF
    values: frozenset[float] = frozenset()
    only: bool = False
    integral: bool = False
    guard: float | None = None
    guarded_at: int = -1
    summed: int = 0
    squared: bool = False
    narrowed: str = ""
    literal: bool = False

    @property
    def magnitude(self) -> float:
        """No entry is larger in absolute value."""
        return max(abs(self.low), abs(self.high))

    @property
    def may_be_zero(self) -> bool:
        """Whether an entry can be 0 for all that is known."""
        return self.low <= 0 <= self.high


def is_half(dtype: str) -> bool:
    """Whether a dtype is one of the two half precisions, by name."""
    return dtype in ("float16", "bfloat16")


def is_wide(dtype: str) -> bool:
    """Whether a dtype is float32 or float64, by name."""
    return dtype in ("float32", "float64")


def is_integer(dtype: str) -> bool:
    """Whether a dtype is an integer type, by name; bool is not."""
    return dtype.startswith(("int", "uint"))


@functools.lru_cache(4096)
def rounded(value: float, dtype: str) -> float:
    """A number in a floating-point dtype: 0 or infinite where it does not fit."""
    with np.errstate(all="ignore"):
        return float(np.asarray(value, np.float64).astype(jnp.dtype(dtype)))


def power(value: float, exponent: int) -> float:
    """`value**exponent` for a `value` >= 0; infinite where Python would raise."""
    try:
        return value**exponent
    except OverflowError:
        return INF


def of_dtype(dtype: str) -> Fact:
    """What the dtype alone says: small integer types and booleans have bounds."""
    if dtype == "bool":
        return Fact(0.0, 1.0, frozenset({0.0, 1.0}), only=True, integral=True)
    if dtype in _SMALL_INTEGERS:
        limits = jnp.iinfo(dtype)
        return Fact(float(limits.min), float(limits.max), integral=True)
    return Fact(integral=is_integer(dtype))


def of_constant(value: Any, dtype: str) -> Fact:
    """What is known about a constant: its range, and its values if they are few."""
    array = constant(value)
    # A NaN has no place between bounds.
    if array is None or array.size == 0 or np.isnan(array).any():
        return of_dtype(dtype)
    values = np.unique(array)
    few = values.size <= MOST_VALUES
    return Fact(
        float(values[0]),
        float(values[-1]),
        frozenset(values.tolist()) if few else frozenset(),
        only=few,
        integral=bool(np.all(array == np.floor(array))),
    )


def of_atom(atom: Any) -> Fact:
    """What is known about a literal, or about a variable by its type alone."""
    if is_literal(atom):
        fact = of_constant(atom.val, dtype_name(atom))
        return dataclasses.replace(fact, literal=True)
    return of_dtype(dtype_name(atom))


def join(a: Fact, b: Fact) -> Fact:
    """What is known about a value that is one or the other, entry by entry."""
    if a == b:
        return a
    values = a.values | b.values
    if len(values) > MOST_VALUES:
        values = frozenset()
    return Fact(
        min(a.low, b.low),
        max(a.high, b.high),
        values,
        only=a.only and b.only and bool(values),
        integral=a.integral and b.integral,
        summed=max(a.summed, b.summed),
        squared=a.squared or b.squared,
    )


def widened(old: Fact, new: Fact, dtype: str) -> Fact:
    """`join`, with bounds that still grow given up: what holds in every iteration."""
    both, top = join(old, new), of_dtype(dtype)
    return dataclasses.replace(
        both,
        # A bound that moves once may move in each iteration: given up, so that the walk
        # ends after three rounds.
        low=old.low if both.low >= old.low else top.low,
        high=old.high if both.high <= old.high else top.high,
        only=both.only and both.values == old.values,
    )
