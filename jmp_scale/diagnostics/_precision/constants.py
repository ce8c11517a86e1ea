"""Follows constants through arithmetic, and epsilons that keep a value from 0."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..._jaxpr import dtype_name
from .facts import MOST_VALUES, Fact, is_half, is_wide, rounded
from .source import Place, names_an_epsilon, numbers_at

_LARGEST_EPSILON = 1e-2
_FAR_OUT_OF_RANGE = 2e5


def with_values(eqn: Any, facts: Sequence[Fact], fact: Fact) -> Fact:
    """Adds the constants that the entries of an equation's output may be equal to."""
    fun = _ARITHMETIC.get(eqn.primitive.name)
    dtype = dtype_name(eqn.outvars[0])
    if fun is None or not dtype.startswith(("float", "bfloat", "int", "uint")):
        return fact
    unknown = [f for f in facts if not f.only]
    if not unknown:
        values = _evaluated(fun, eqn, facts, dtype)
        if not values:
            return fact
        low, high = min(values), max(values)
        return dataclasses.replace(fact, low=low, high=high, values=values, only=True)
    if eqn.primitive.name in ("add", "sub"):
        return dataclasses.replace(fact, values=_dominant(eqn, facts))
    if len(unknown) == 1 and unknown[0].values:
        return dataclasses.replace(fact, values=_evaluated(fun, eqn, facts, dtype))
    return fact


def with_guard(eqn: Any, facts: Sequence[Fact], fact: Fact) -> Fact:
    """Notes the epsilon that an equation adds, as a number, to keep a value from 0."""
    name, dtype = eqn.primitive.name, dtype_name(eqn.outvars[0])
    if name not in ("add", "max") or not (is_half(dtype) or is_wide(dtype)):
        return fact
    for this, other in (facts, facts[::-1]):
        epsilon = other.high
        if not other.literal or this.literal or (is_wide(dtype) and epsilon == 0):
            continue
        if 0 <= epsilon < _LARGEST_EPSILON:
            at = id(eqn) if name == "add" else 0
            return dataclasses.replace(fact, guard=epsilon, guarded_at=at)
    return fact


def starts_a_sum(eqn: Any, facts: Sequence[Fact], place: Callable[[], Place]) -> bool:
    """Whether `0 + x` is Python's `sum([x])`, not an epsilon that was lost."""
    if eqn.primitive.name != "add" or not facts[0].literal:
        return False
    dtype = dtype_name(eqn.outvars[0])
    lost = any(n > 0 and rounded(n, dtype) == 0 for n in numbers_at(place()))
    return not (lost or names_an_epsilon(place()))


def _evaluated(
    fun: Callable[..., Any], eqn: Any, facts: Sequence[Fact], dtype: str
) -> frozenset[float]:
    """The results of all combinations of the inputs' values; empty if they are many."""
    if math.prod(len(fact.values) for fact in facts) > MOST_VALUES**2:
        return frozenset()
    floating = dtype.startswith(("float", "bfloat"))
    with np.errstate(all="ignore"):
        combinations = itertools.product(*(fact.values for fact in facts))
        exact = [float(fun(eqn, *map(np.float64, values))) for values in combinations]
        results = {rounded(v, dtype) if floating else v for v in exact}
    if len(results) > MOST_VALUES or any(math.isnan(v) for v in results):
        return frozenset()
    return frozenset(results)


def _dominant(eqn: Any, facts: Sequence[Fact]) -> frozenset[float]:
    # A mask of -1e9 stays far out of half's range whatever ordinary number is added.
    signs = (1, -1) if eqn.primitive.name == "sub" else (1, 1)
    far = {
        sign * value
        for sign, fact in zip(signs, facts, strict=True)
        for value in fact.values
        if _FAR_OUT_OF_RANGE < abs(value) < math.inf
    }
    return frozenset(far) if len(far) <= MOST_VALUES else frozenset()


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda eqn, x, y: x + y,
    "sub": lambda eqn, x, y: x - y,
    "mul": lambda eqn, x, y: x * y,
    "div": lambda eqn, x, y: x / y,
    "max": lambda eqn, x, y: max(x, y),
    "min": lambda eqn, x, y: min(x, y),
    "sqrt": lambda eqn, x: np.sqrt(x),
    "square": lambda eqn, x: x * x,
    "integer_pow": lambda eqn, x: x ** eqn.params["y"],
    "exp": lambda eqn, x: np.exp(x),
    "abs": lambda eqn, x: abs(x),
    "convert_element_type": lambda eqn, x: x,
}
