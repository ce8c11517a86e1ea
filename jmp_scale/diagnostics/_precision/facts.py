"""Facts about traced values, derived without running the program.

A `Fact` contains bounds of an array's elements, and a few properties that decide
whether half precision can represent them. `transfer` derives the facts of an
operation's outputs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from ..._jaxpr import SAME_ENTRIES, Atom, constant, dtype_name, shape, size, words
from ..._types import Function
from .lineage import NOTHING, Lineage, entries_added, lineage_of

if TYPE_CHECKING:
    from .step import Step

INF = math.inf
_MOST_VALUES = 8
_FAR_OUT_OF_RANGE = 2e5
_NUMBERS = ("float", "bfloat", "int", "uint")


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """Knowledge about the elements of an array."""

    low: float = -INF  # no element is smaller
    high: float = INF  # no element is larger
    values: frozenset[float] = frozenset()  # constants that elements may be equal to
    only: bool = False  # whether every element is one of `values`
    integral: bool = False  # whether every element is an integer
    # Result if the other operand is 0: eps for x + eps; None without a constant.
    epsilon: float | None = None
    summed: float = 0.0  # number of float32 elements summed
    squared: bool = False  # squares, or sums of squares, in float32
    cast: bool = False  # whether the user cast these elements to half precision
    promoted: "Step | None" = None  # the `Step` that promoted them from half precision
    maker: "Step | None" = None  # the `Step` that computed their array, inside of calls
    lineage: Lineage = NOTHING  # the values from which they were computed

    @property
    def magnitude(self) -> float:
        return max(abs(self.low), abs(self.high))

    @property
    def may_be_zero(self) -> bool:
        return self.low <= 0 <= self.high

    @property
    def single(self) -> float | None:
        """The value of all elements, if they are known to be equal."""
        return next(iter(self.values)) if self.only and len(self.values) == 1 else None


def is_wide(dtype: str) -> bool:
    """Whether a dtype is float32 or float64."""
    return dtype in ("float32", "float64")


def is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))


def rounded(value: Any, dtype: str) -> Any:
    """Rounds numbers to a floating-point dtype; they may become 0 or infinite."""
    with np.errstate(all="ignore"):
        return np.asarray(value, np.float64).astype(jnp.dtype(dtype)).astype(np.float64)


def of_dtype(dtype: str) -> Fact:
    """Returns the fact of a dtype: small integer types and booleans have bounds."""
    if dtype == "bool":
        return Fact(0.0, 1.0, frozenset({0.0, 1.0}), only=True, integral=True)
    if dtype.endswith(("int8", "int16")):
        limits = jnp.iinfo(dtype)
        return Fact(float(limits.min), float(limits.max), integral=True)
    return Fact(integral=is_integer(dtype))


def of_constant(value: object, dtype: str) -> Fact:
    """Returns the fact of a constant: its range, and its values if they are few."""
    array = constant(value)
    # A NaN is not between any bounds.
    if array is None or array.size == 0 or np.isnan(array).any():
        return of_dtype(dtype)
    return _of_values(np.unique(array), bool(np.all(array == np.floor(array))))


def _of_values(values: np.ndarray, integral: bool) -> Fact:
    few = values.size <= _MOST_VALUES
    constants = frozenset(values.tolist()) if few else frozenset()
    return Fact(float(values[0]), float(values[-1]), constants, few, integral)


def of_atom(atom: Atom) -> Fact:
    """Returns the fact of a literal, or of a variable by its type alone."""
    dtype = dtype_name(atom)
    if isinstance(atom, Literal):
        return of_constant(atom.val, dtype)
    return dataclasses.replace(of_dtype(dtype), lineage=Lineage(id(atom)))


def join(a: Fact, b: Fact) -> Fact:
    """Returns the fact of an array whose elements are taken from either of two."""
    values = a.values | b.values
    if len(values) > _MOST_VALUES:
        values = frozenset()
    return Fact(
        min(a.low, b.low),
        max(a.high, b.high),
        values,
        only=a.only and b.only and bool(values),
        integral=a.integral and b.integral,
        summed=max(a.summed, b.summed),
        squared=a.squared or b.squared,
        promoted=a.promoted or b.promoted,
        lineage=a.lineage,
    )


def transfer(eqn: JaxprEqn, facts: Sequence[Fact]) -> list[Fact]:
    """Returns the facts of the outputs of an equation without nested jaxprs."""
    outs = [of_atom(v) for v in eqn.outvars]
    if len(outs) == 1:
        rule = _RULES.get(eqn.primitive.name)
        fact = outs[0] if rule is None else rule(eqn, *facts)
        outs = [dataclasses.replace(fact, lineage=_lineage(eqn, facts))]
    promoted = next((fact.promoted for fact in facts if fact.promoted), None)
    made = [promoted if is_wide(dtype_name(v)) else None for v in eqn.outvars]
    return [dataclasses.replace(f, promoted=p) for f, p in zip(outs, made, strict=True)]


def _lineage(eqn: JaxprEqn, facts: Sequence[Fact]) -> Lineage:
    lineage = lineage_of(eqn, [fact.lineage for fact in facts])
    # Autocast computes cheap values once for each reader; equal computations count as
    # one value.
    made_of = [(fact.lineage.value, fact.values) for fact in facts]
    value = lineage.value or hash((eqn.primitive, *made_of, str(eqn.params)))
    of_parameters = any(fact.lineage.parameters for fact in facts) and all(
        fact.lineage.parameters or fact.single is not None for fact in facts
    )
    return dataclasses.replace(lineage, value=value, parameters=of_parameters)


def _computed(fun: Function, eqn: JaxprEqn, *facts: Fact) -> Fact:
    """Returns bounds, constants, epsilon and sum of a function of numbers."""
    name, dtype = eqn.primitive.name, dtype_name(eqn.outvars[0])
    results = functools.partial(_results, fun, dtype)
    ends = results(map(_ends, facts)) if dtype.startswith(_NUMBERS) else np.empty(0)
    if ends.size == 0:
        return of_dtype(dtype)
    whole = all(f.integral for f in facts) and name not in _FRACTIONS
    fact = _of_values(ends, is_integer(dtype) or (whole and is_wide(dtype)))
    unknown = [f for f in facts if not f.only]
    if unknown:
        values: frozenset[float] = frozenset()
        if len(unknown) == 1 and unknown[0].values:
            values = _of_values(results(f.values for f in facts), False).values
        elif name == "add":
            # A mask of -1e9 stays far out of half precision's range whatever is added.
            numbers = frozenset().union(*(f.values for f in facts))
            values = frozenset(v for v in numbers if _FAR_OUT_OF_RANGE < abs(v) < INF)
        fact = dataclasses.replace(fact, values=values, only=False)
    arrays = [f for f in facts if f.single is None]
    if len(arrays) != 1 or is_integer(dtype):
        return fact
    (x,) = arrays

    def result(number: float) -> float:
        found = results([number] if f is x else f.values for f in facts)
        return float(found[0]) if found.size else INF

    number = eqn.invars[-1] if x is facts[0] else eqn.invars[0]
    keeps = name in ("add", "max") and shape(number) == ()
    epsilon = 0.0 if keeps and x.epsilon is None else x.epsilon
    return dataclasses.replace(
        fact,
        epsilon=None if epsilon is None else result(epsilon),
        summed=abs(result(x.summed)) if x.summed and is_wide(dtype) else 0.0,
        squared=x.squared and is_wide(dtype) and name != "sqrt",
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


def _ends(x: Fact) -> Iterable[float]:
    """Returns numbers that include the extremes of a function of `x`."""
    if x.only:
        return x.values
    return {x.low, x.high, 0.0} if x.may_be_zero else {x.low, x.high}


def _div(eqn: JaxprEqn, x: Fact, y: Fact) -> Fact:
    if y.low < 0 <= y.high:  # the quotient is unbounded
        return of_dtype(dtype_name(eqn.outvars[0]))
    return _computed(np.divide, eqn, x, y)


def _mul(eqn: JaxprEqn, x: Fact, y: Fact) -> Fact:
    if eqn.invars[0] is eqn.invars[1]:
        return _power(eqn, x, 2)
    return _computed(np.multiply, eqn, x, y)


def _power(eqn: JaxprEqn, x: Fact, exponent: int) -> Fact:
    # No rule needs bounds of 1/x and x^0.
    if exponent < 2:
        return Fact()
    wide = is_wide(dtype_name(eqn.outvars[0]))
    fact = _computed(lambda x: x**exponent, eqn, x)
    return dataclasses.replace(fact, summed=0.0, squared=wide)


def _sqrt(eqn: JaxprEqn, x: Fact) -> Fact:
    # A lost epsilon is reported at the root, and so not at a division by the root.
    without_lost = dataclasses.replace(x, epsilon=x.epsilon or None)
    return _computed(np.sqrt, eqn, without_lost)


def _moved(eqn: JaxprEqn, x: Fact, *rest: Fact) -> Fact:
    # A sum that is broadcast to an array is part of another computation.
    spread = size(eqn.outvars[0]) > size(eqn.invars[0])
    return dataclasses.replace(x, summed=0.0) if spread else x


def _joined(eqn: JaxprEqn, *facts: Fact) -> Fact:
    """Returns the fact of elements that are taken from operands, except indices."""
    dtype = dtype_name(eqn.outvars[0])
    pairs = zip(eqn.invars, facts, strict=True)
    return functools.reduce(join, [f for v, f in pairs if dtype_name(v) == dtype])


def _sum(eqn: JaxprEqn, x: Fact) -> Fact:
    count = max(entries_added(eqn), 1)
    wide = is_wide(dtype_name(eqn.outvars[0]))
    return Fact(
        x.low * count,
        x.high * count,
        summed=max(x.summed, 1.0) * count if wide else 0.0,
        squared=x.squared,
    )


def _up_to(count: int) -> Fact:
    return Fact(0.0, float(max(count - 1, 0)), integral=True)


def _index(eqn: JaxprEqn, x: Fact) -> Fact:
    return _up_to(size(eqn.invars[0]) // max(size(eqn.outvars[0]), 1))


_FRACTIONS = words("div sqrt tanh")
_FUNCTIONS: dict[str, Function] = {
    "abs": np.abs,
    "add": np.add,
    "add_any": np.add,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "convert_element_type": np.positive,
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
    **dict.fromkeys(["argmax", "argmin"], _index),
    **dict.fromkeys(["erf", "sign", "sin", "cos"], lambda eqn, x: Fact(-1.0, 1.0)),
    "cumsum": lambda eqn, x: join(_sum(eqn, x), x),
    "div": _div,
    "integer_pow": lambda eqn, x: _power(eqn, x, eqn.params["y"]),
    "iota": lambda eqn: _up_to(shape(eqn.outvars[0])[eqn.params["dimension"]]),
    "logistic": lambda eqn, x: Fact(0.0, 1.0),
    "mul": _mul,
    "reduce_sum": _sum,
    "sqrt": _sqrt,
    "square": lambda eqn, x: _power(eqn, x, 2),
}
