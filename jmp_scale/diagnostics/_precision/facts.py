"""What is known about traced values without running the program.

A `Fact` bounds the entries of an array and remembers the few things that decide whether
half precision holds them: constants, sums, squares, and epsilons that keep a value from
0. `transfer` derives what is known about the output of an operation from its inputs.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._jaxpr import constant, dtype_name, is_literal, shape, size
from .origins import NOTHING, Origin, entries_added, is_half, origin_of

INF = math.inf
_MOST_VALUES = 8
_LARGEST_EPSILON = 1e-2
_FAR_OUT_OF_RANGE = 2e5
_SMALL_INTEGERS = {"int8", "uint8", "int16", "uint16"}


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """What is known about the entries of an array."""

    low: float = -INF  # no entry is smaller
    high: float = INF  # no entry is larger
    values: frozenset[float] = frozenset()  # constants that entries may be equal to
    only: bool = False  # whether every entry is one of `values`
    integral: bool = False  # whether every entry is an integer
    # What was added to keep entries from 0; 0.0 once it is lost in a half dtype.
    epsilon: float | None = None
    epsilon_at: int = -1  # the equation that added it, 0 for a lower bound by `max`
    summed: int = 0  # entries that a float32 sum has added up into one, not yet divided
    squared: bool = False  # squares, or sums of squares, in float32
    peak: int = 0  # the variable whose maximum the entries are, 0 for others
    # The function of the user whose own cast to half precision was the last operation.
    narrowed: str = ""
    cast: bool = False  # whether the user cast these entries to half precision
    # The variable in which float32 met half precision and made float32 of it.
    promoted: Any = None
    literal: bool = False  # a number in the program text
    origin: Origin = NOTHING  # what the entries were made of

    def of(self, variable: Any) -> "Fact":
        """The same of a variable, whose value is its own if nothing else is known."""
        if self.origin.value:
            return self
        origin = dataclasses.replace(self.origin, value=id(variable))
        return dataclasses.replace(self, origin=origin)

    @property
    def magnitude(self) -> float:
        return max(abs(self.low), abs(self.high))

    @property
    def may_be_zero(self) -> bool:
        return self.low <= 0 <= self.high

    @property
    def single(self) -> float | None:
        """The value of all entries, if they are known to be equal."""
        return next(iter(self.values)) if self.only and len(self.values) == 1 else None


def is_wide(dtype: str) -> bool:
    return dtype in ("float32", "float64")


def is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))


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
    few = values.size <= _MOST_VALUES
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
        origin=a.origin,
    )


def transfer(eqn: Any, facts: Sequence[Fact]) -> list[Fact]:
    """What is known about the outputs of an equation without nested jaxprs."""
    outs = [of_atom(v) for v in eqn.outvars]
    if len(outs) == 1:
        rule = _RULES.get(eqn.primitive.name)
        if rule is not None:
            fact = _with_values(eqn, facts, rule(eqn, *facts))
            outs = [_with_epsilon(eqn, facts, fact)]
        outs = [dataclasses.replace(outs[0], origin=_origin(eqn, facts))]
    promoted = next((fact.promoted for fact in facts if fact.promoted), None)
    if promoted is None:
        return outs
    made = [promoted if is_wide(dtype_name(v)) else None for v in eqn.outvars]
    return [dataclasses.replace(f, promoted=v) for f, v in zip(outs, made, strict=True)]


def _origin(eqn: Any, facts: Sequence[Fact]) -> Origin:
    origin = origin_of(eqn, [fact.origin for fact in facts])
    value = origin.value
    if not value:
        # Autocast computes cheap values once for each reader: equal ones are one.
        made_of = [(fact.origin.value, fact.values) for fact in facts]
        value = hash((eqn.primitive, *made_of, str(eqn.params)))
    of_parameters = any(fact.origin.parameters for fact in facts) and all(
        fact.origin.parameters or fact.single is not None for fact in facts
    )
    return dataclasses.replace(origin, value=value, parameters=of_parameters)


def _with_values(eqn: Any, facts: Sequence[Fact], fact: Fact) -> Fact:
    """Adds the constants that the entries of an equation's output may be equal to."""
    fun = _ARITHMETIC.get(eqn.primitive.name)
    dtype = dtype_name(eqn.outvars[0])
    if fun is None or not dtype.startswith(("float", "bfloat", "int", "uint")):
        return fact
    unknown = [f for f in facts if not f.only]
    if not unknown:
        values = _evaluated(fun, facts, dtype)
        if not values:
            return fact
        low, high = min(values), max(values)
        return dataclasses.replace(fact, low=low, high=high, values=values, only=True)
    if eqn.primitive.name == "add":
        # A mask of -1e9 stays far out of half's range whatever number is added.
        values = frozenset().union(*(f.values for f in facts))
        far = frozenset(v for v in values if _FAR_OUT_OF_RANGE < abs(v) < INF)
        return dataclasses.replace(fact, values=far)
    if len(unknown) == 1 and unknown[0].values:
        return dataclasses.replace(fact, values=_evaluated(fun, facts, dtype))
    return fact


def _evaluated(
    fun: Callable[..., Any], facts: Sequence[Fact], dtype: str
) -> frozenset[float]:
    """The results of all combinations of the inputs' values; empty if they are many."""
    if math.prod(len(fact.values) for fact in facts) > _MOST_VALUES**2:
        return frozenset()
    with np.errstate(all="ignore"):
        combinations = itertools.product(*(fact.values for fact in facts))
        exact = [float(fun(*map(np.float64, values))) for values in combinations]
        results = {v if is_integer(dtype) else rounded(v, dtype) for v in exact}
    if len(results) > _MOST_VALUES or any(math.isnan(v) for v in results):
        return frozenset()
    return frozenset(results)


def _with_epsilon(eqn: Any, facts: Sequence[Fact], fact: Fact) -> Fact:
    """Notes the epsilon that an equation adds, as a number, to keep a value from 0."""
    name, dtype = eqn.primitive.name, dtype_name(eqn.outvars[0])
    numbers = [f.high for f in facts if f.literal]
    if name not in ("add", "max") or len(numbers) != 1:
        return fact
    kept = is_wide(dtype) and 0 < numbers[0] < _LARGEST_EPSILON
    lost_or_kept = is_half(dtype) and 0 <= numbers[0] < _LARGEST_EPSILON
    if not kept and not lost_or_kept:
        return fact
    at = id(eqn) if name == "add" else 0
    return dataclasses.replace(fact, epsilon=numbers[0], epsilon_at=at)


def _same(eqn: Any, x: Fact, *rest: Fact) -> Fact:
    return dataclasses.replace(x, narrowed="", literal=False)


def _moved(eqn: Any, x: Fact, *rest: Fact) -> Fact:
    # A sum that is spread over an array again is part of another computation.
    spread = size(eqn.invars[0]) != size(eqn.outvars[0])
    return dataclasses.replace(_same(eqn, x), summed=0 if spread else x.summed)


def _convert(eqn: Any, x: Fact) -> Fact:
    dtype, x = dtype_name(eqn.outvars[0]), _same(eqn, x)
    if is_integer(dtype):
        top = of_dtype(dtype)
        low, high = max(x.low, top.low), min(x.high, top.high)
        # A cast to integers cuts fractions off: such constants become other numbers.
        values = x.values if x.integral else frozenset()
        return Fact(low, high, values, only=x.only and x.integral, integral=True)
    if not is_half(dtype):
        return x
    return dataclasses.replace(
        x,
        # The wider of the two, which holds before the rounding and after it.
        low=min(x.low, rounded(x.low, dtype)),
        high=max(x.high, rounded(x.high, dtype)),
        epsilon=None if x.epsilon is None else rounded(x.epsilon, dtype),
        integral=False,
        summed=0,
        squared=False,
        peak=0,
    )


def _iota(eqn: Any) -> Fact:
    length = shape(eqn.outvars[0])[eqn.params["dimension"]]
    top = of_dtype(dtype_name(eqn.outvars[0])).high
    return Fact(0.0, min(float(max(length - 1, 0)), top), integral=True)


def _bounds(low: float, high: float, *integral: Fact) -> Fact:
    whole = bool(integral) and all(fact.integral for fact in integral)
    if math.isnan(low) or math.isnan(high):
        return Fact(integral=whole)
    return Fact(low, high, integral=whole)


def _add(eqn: Any, x: Fact, y: Fact) -> Fact:
    return _bounds(x.low + y.low, x.high + y.high, x, y)


def _sub(eqn: Any, x: Fact, y: Fact) -> Fact:
    fact = _bounds(x.low - y.high, x.high - y.low, x, y)
    # No entry is larger than the maximum of all, which softmax subtracts.
    shifted = y.peak == id(eqn.invars[0])
    return dataclasses.replace(fact, high=min(fact.high, 0.0)) if shifted else fact


def _mul(eqn: Any, x: Fact, y: Fact) -> Fact:
    if eqn.invars[0] is eqn.invars[1]:
        return _power(eqn, x, 2)
    # All four: the signs of the bounds are not known.
    products = [_times(a, b) for a in (x.low, x.high) for b in (y.low, y.high)]
    fact = _bounds(min(products), max(products), x, y)
    for other, factor in ((x, y), (y, x)):
        if factor.single is not None:
            return _scaled(fact, other, abs(factor.single))
    return fact


def _times(a: float, b: float) -> float:
    # 0 times an unknown bound, which is infinite, would be NaN.
    return 0.0 if a == 0 or b == 0 else a * b


def _div(eqn: Any, x: Fact, y: Fact) -> Fact:
    if not y.single:
        return Fact(low=0.0 if y.low >= 0 and x.low >= 0 else -INF)
    ends = (x.low / y.single, x.high / y.single)
    return _scaled(_bounds(min(ends), max(ends)), x, 1 / abs(y.single))


def _scaled(fact: Fact, x: Fact, factor: float) -> Fact:
    # A sum that is divided by its number of entries is a mean, in range again.
    summed = int(x.summed * factor) if math.isfinite(factor) else 0
    return _kept(x, dataclasses.replace(fact, summed=summed, squared=x.squared))


def _kept(x: Fact, fact: Fact) -> Fact:
    return dataclasses.replace(fact, epsilon=x.epsilon, epsilon_at=x.epsilon_at)


def _power(eqn: Any, x: Fact, exponent: int) -> Fact:
    # 1/x and x^0 have no bounds that any rule asks for.
    if exponent < 2:
        return Fact()
    high = power(x.magnitude, exponent)
    low = 0.0 if exponent % 2 == 0 or x.low >= 0 else -high
    if low == 0 and not x.may_be_zero:
        low = power(min(abs(x.low), abs(x.high)), exponent)
    wide = is_wide(dtype_name(eqn.outvars[0]))
    return Fact(low, high, integral=x.integral, squared=wide)


def _sqrt(eqn: Any, x: Fact) -> Fact:
    low, high = math.sqrt(max(x.low, 0.0)), math.sqrt(max(x.high, 0.0))
    epsilon = None if x.epsilon is None else math.sqrt(x.epsilon)
    return Fact(low, high, epsilon=epsilon, epsilon_at=x.epsilon_at)


def _abs(eqn: Any, x: Fact) -> Fact:
    low = 0.0 if x.may_be_zero else min(abs(x.low), abs(x.high))
    return _kept(x, _bounds(low, x.magnitude, x))


def _neg(eqn: Any, x: Fact) -> Fact:
    values = frozenset(-value for value in x.values)
    fact = _same(eqn, x)
    return dataclasses.replace(fact, low=-x.high, high=-x.low, values=values, peak=0)


def _max(eqn: Any, x: Fact, y: Fact) -> Fact:
    fact = _bounds(max(x.low, y.low), max(x.high, y.high), x, y)
    return dataclasses.replace(fact, peak=x.peak or y.peak)


def _min(eqn: Any, x: Fact, y: Fact) -> Fact:
    fact = _bounds(min(x.low, y.low), min(x.high, y.high), x, y)
    return _kept(x if y.epsilon is None else y, fact)


def _hull(eqn: Any, *facts: Fact) -> Fact:
    return functools.reduce(join, facts)


def _reduce_max(eqn: Any, x: Fact) -> Fact:
    return dataclasses.replace(_same(eqn, x), peak=id(eqn.invars[0]))


def _sum(eqn: Any, x: Fact) -> Fact:
    dtype, count = dtype_name(eqn.outvars[0]), entries_added(eqn)
    fact = _bounds(_times(x.low, count), _times(x.high, count))
    return dataclasses.replace(
        fact,
        integral=x.integral and is_integer(dtype),
        summed=max(x.summed, 1) * count if is_wide(dtype) else 0,
        squared=x.squared,
    )


def _index(eqn: Any, x: Fact) -> Fact:
    length = math.prod(shape(eqn.invars[0])[axis] for axis in eqn.params["axes"])
    return Fact(0.0, float(max(length - 1, 0)), integral=True)


_UNCHANGED = (
    "transpose squeeze expand_dims rev copy copy_p stop_gradient reduce_min sort "
    "cummax cummin reduce_precision real name reduce_window_max reduce_window_min "
    "optimization_barrier device_put reshard sharding_constraint all_gather ppermute "
    "pmax pmin all_to_all reshape slice dynamic_slice tile"
)

_RULES: dict[str, Callable[..., Fact]] = {
    **dict.fromkeys(_UNCHANGED.split(), _same),
    **dict.fromkeys(["broadcast_in_dim", "gather"], _moved),
    # shard_map marks a number as varying over devices before it is used.
    **dict.fromkeys(["pvary", "pcast", "pbroadcast"], lambda eqn, x: x),
    **dict.fromkeys(
        ["tanh", "sin", "cos", "erf", "sign"], lambda eqn, x: Fact(-1.0, 1.0)
    ),
    **dict.fromkeys(["argmax", "argmin"], _index),
    **dict.fromkeys(["concatenate", "stack", "pad"], _hull),
    "logistic": lambda eqn, x: Fact(0.0, 1.0),
    "convert_element_type": _convert,
    "iota": _iota,
    "add": _add,
    "add_any": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "square": lambda eqn, x: _power(eqn, x, 2),
    "integer_pow": lambda eqn, x: _power(eqn, x, eqn.params["y"]),
    "sqrt": _sqrt,
    "abs": _abs,
    "neg": _neg,
    "max": _max,
    "min": _min,
    "clamp": lambda eqn, low, x, high: _min(eqn, _max(eqn, x, low), high),
    "select_n": lambda eqn, predicate, *cases: _hull(eqn, *cases),
    "dynamic_update_slice": lambda eqn, x, update, *indices: join(x, update),
    "scatter": lambda eqn, x, indices, update: join(x, update),
    "reduce_max": _reduce_max,
    "reduce_sum": _sum,
    "cumsum": lambda eqn, x: join(_sum(eqn, x), x),
}

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "convert_element_type": float,
}
