"""Derives the facts of an operation's outputs from those of its inputs."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from ..._jaxpr import SAME_ENTRIES, Atom, constant, dtype_name, shape, size, words
from ..._types import Function
from .equation import INF, Fact, is_integer, is_wide

_MOST_OF_A_MASK = 8
_NUMBERS = ("float", "bfloat", "int", "uint")


def rounded(value: Any, dtype: str) -> Any:
    """Rounds numbers to a floating-point dtype; they may become 0 or infinite."""
    with np.errstate(all="ignore"):
        return np.asarray(value, np.float64).astype(jnp.dtype(dtype)).astype(np.float64)


def is_lost(value: float, dtype: str = "float16") -> bool:
    """Whether a constant becomes 0 or infinite in a half dtype."""
    held = rounded(value, dtype)
    return value != held and (held == 0 or math.isinf(held))


def of_dtype(dtype: str) -> Fact:
    """Returns the fact of a dtype: integer types and booleans have bounds."""
    if dtype == "bool":
        return Fact(0.0, 1.0)
    if is_integer(dtype):
        limits = jnp.iinfo(dtype)
        return Fact(float(limits.min), float(limits.max))
    return Fact()


def of_constant(value: object, dtype: str) -> Fact:
    """Returns the fact of a constant."""
    array = constant(value)
    # A NaN is not between any bounds.
    if array is None or array.size == 0 or np.isnan(array).any():
        return of_dtype(dtype)
    low, high = float(array.min()), float(array.max())
    values = np.unique(array)
    has_few = values.size <= _MOST_OF_A_MASK
    extreme = next(filter(is_lost, values.tolist() if has_few else ()), 0.0)
    return Fact(low, high, extreme)


def of_atom(atom: Atom) -> Fact:
    """Returns the fact of a literal, or of a variable by its type alone."""
    dtype = dtype_name(atom)
    if isinstance(atom, Literal):
        return of_constant(atom.val, dtype)
    return of_dtype(dtype)


def join(a: Fact, b: Fact) -> Fact:
    """Returns the fact of an array whose elements are taken from either of two."""
    return replace(
        a,
        low=min(a.low, b.low),
        high=max(a.high, b.high),
        extreme=a.extreme or b.extreme,
        epsilon=None,
        summed=max(a.summed, b.summed),
        maker=None,
    )


def transfer(eqn: JaxprEqn, facts: Sequence[Fact]) -> list[Fact]:
    """Returns the facts of the outputs of an equation without nested jaxprs."""
    rule = _RULES.get(eqn.primitive.name)
    if rule is None or len(eqn.outvars) != 1:
        return [of_atom(v) for v in eqn.outvars]
    return [rule(eqn, *facts)]


# Bounds, extremes, epsilons and sums.


def _computed(fun: Function, eqn: JaxprEqn, *facts: Fact) -> Fact:
    """Returns the fact of a function of numbers."""
    name, dtype = eqn.primitive.name, dtype_name(eqn.outvars[0])
    results = functools.partial(_results, fun, dtype)
    ends = results(map(_ends, facts)) if dtype.startswith(_NUMBERS) else np.empty(0)
    is_unbounded = name == "div" and facts[1].low < 0 <= facts[1].high
    if is_unbounded or ends.size == 0:
        return of_dtype(dtype)
    fact = Fact(float(ends[0]), float(ends[-1]))
    arrays = [f for f in facts if f.single is None]
    if not arrays:
        return replace(fact, extreme=fact.low if is_lost(fact.low) else 0.0)
    if len(arrays) > 1 or is_integer(dtype):
        return fact
    (x,) = arrays

    def result(number: float) -> float:
        found = results([number] if f is x else [f.low] for f in facts)
        return float(found[0]) if found.size else INF

    extreme = result(x.extreme) if x.extreme else 0.0
    number = eqn.invars[-1] if x is facts[0] else eqn.invars[0]
    keeps = name in ("add", "max") and shape(number) == ()
    epsilon = 0.0 if keeps and x.epsilon is None else x.epsilon
    return replace(
        fact,
        extreme=extreme if is_lost(extreme) else 0.0,
        epsilon=None if epsilon is None else result(epsilon),
        summed=abs(result(x.summed)) if x.summed and is_wide(dtype) else 0.0,
    )


def _results(
    fun: Function, dtype: str, operands: Iterable[Iterable[float]]
) -> np.ndarray:
    """Returns a function's values at all combinations of numbers, sorted, unique."""
    grid = np.meshgrid(*(np.array([*numbers], float) for numbers in operands))
    with np.errstate(all="ignore"):
        exact = fun(*grid)
    found = np.trunc(exact) if is_integer(dtype) else rounded(exact, dtype)
    limits = of_dtype(dtype)
    return np.unique(found[~np.isnan(found)]).clip(limits.low, limits.high)


def _ends(x: Fact) -> set[float]:
    """Returns numbers that include the extremes of a function of `x`."""
    return {x.low, x.high, 0.0} if x.may_be_zero else {x.low, x.high}


def _mul(eqn: JaxprEqn, x: Fact, y: Fact) -> Fact:
    if eqn.invars[0] is eqn.invars[1]:
        return _power(eqn, x, 2)
    return _computed(np.multiply, eqn, x, y)


def _power(eqn: JaxprEqn, x: Fact, exponent: int) -> Fact:
    if exponent < 2:  # no rule needs bounds of 1/x and x^0
        return Fact()
    return replace(_computed(lambda x: x**exponent, eqn, x), summed=0.0)


def _sqrt(eqn: JaxprEqn, x: Fact) -> Fact:
    # A lost epsilon is reported at the root, and so not at a division by the root.
    return _computed(np.sqrt, eqn, replace(x, epsilon=x.epsilon or None))


def _moved(eqn: JaxprEqn, x: Fact, *rest: Fact) -> Fact:
    # A sum that is broadcast to an array is part of another computation.
    spread = size(eqn.outvars[0]) > size(eqn.invars[0])
    return replace(x, summed=0.0) if spread else x


def _joined(eqn: JaxprEqn, *facts: Fact) -> Fact:
    """Returns the fact of elements that are taken from operands, except indices."""
    dtype = dtype_name(eqn.outvars[0])
    pairs = zip(eqn.invars, facts, strict=True)
    return functools.reduce(join, [f for v, f in pairs if dtype_name(v) == dtype])


def _sum(eqn: JaxprEqn, x: Fact) -> Fact:
    count = max(entries_added(eqn), 1)
    wide = is_wide(dtype_name(eqn.outvars[0]))
    summed = max(x.summed, 1.0) * count if wide else 0.0
    return Fact(x.low * count, x.high * count, summed=summed)


def _iota(eqn: JaxprEqn) -> Fact:
    count = shape(eqn.outvars[0])[eqn.params["dimension"]]
    return Fact(0.0, float(max(count - 1, 0)))


_FUNCTIONS: dict[str, Function] = {
    "abs": np.abs,
    "add": np.add,
    "add_any": np.add,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "convert_element_type": np.positive,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "sub": np.subtract,
    "tanh": np.tanh,
}
_CHOICES = words(
    "all_gather all_to_all cummax cummin pmax pmin ppermute real reduce_max reduce_min "
    "reduce_window_max reduce_window_min reshard sort"
)
_JOINS = words("concatenate dynamic_update_slice pad scatter select_n stack")

_RULES: dict[str, Callable[..., Fact]] = {
    **dict.fromkeys(SAME_ENTRIES | _CHOICES, _moved),
    **{name: functools.partial(_computed, fun) for name, fun in _FUNCTIONS.items()},
    **dict.fromkeys(_JOINS, _joined),
    **dict.fromkeys(["erf", "sign", "sin", "cos"], lambda eqn, x: Fact(-1.0, 1.0)),
    "cumsum": lambda eqn, x: join(_sum(eqn, x), x),
    "iota": _iota,
    "integer_pow": lambda eqn, x: _power(eqn, x, eqn.params["y"]),
    "logistic": lambda eqn, x: Fact(0.0, 1.0),
    "mul": _mul,
    "reduce_sum": _sum,
    "sqrt": _sqrt,
    "square": lambda eqn, x: _power(eqn, x, 2),
}


def entries_added(eqn: JaxprEqn) -> int:
    """Returns how many elements an equation adds up into one; 0 if it is not a sum."""
    match eqn.primitive.name:
        case "cumsum":
            return shape(eqn.invars[0])[eqn.params["axis"]]
        case "reduce_sum":
            return size(eqn.invars[0]) // max(size(eqn.outvars[0]), 1)
        case "scatter-add":
            # Some element receives at least this many updates.
            return size(eqn.invars[2]) // max(size(eqn.invars[0]), 1)
    return 0
