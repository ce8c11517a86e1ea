"""What is known about the values and the work of a traced program, by equation."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from ..._autocast.products import matrix_sizes
from ..._jaxpr import (
    PRODUCTS,
    SAME_ENTRIES,
    Atom,
    constant,
    dtype_name,
    is_literal,
    shape,
    size,
    words,
)
from ..._policy import is_half
from ..._types import Function
from .._source import Place

SourceLine = tuple[str | None, int | None]
INF = math.inf
DISTINCT_INTEGERS = {"float16": 2048, "bfloat16": 256}
_MOST_OF_A_MASK = 8
_NUMBERS = ("float", "bfloat", "int", "uint")
_ROUNDS = words("ceil clamp floor max min round")
_ADDITIONS = ("add", "add_any", "sub", "scatter-add")
_SLICE_GRADIENTS = words("dynamic_update_slice pad scatter scatter-add")
_FLOATING = ("float", "bfloat", "complex")
_NARROW = ("float16", "bfloat16", "float8", "float4")


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """Knowledge about the elements of an array."""

    low: float = -INF  # no element is smaller
    high: float = INF  # no element is larger
    extreme: float = 0.0  # a constant that some are equal to, which float16 loses
    # Result if the other operand is 0: eps for x + eps; None without a constant.
    epsilon: float | None = None
    summed: float = 0.0  # number of elements summed in float32, or two by two in half
    rounded_in: str = ""  # the half dtype from which they were cast to more, or ""
    maker: str = ""  # name of the operation that computed them
    columns: "Sequence[Fact]" = ()  # of the parts that the last axis concatenates
    varying: frozenset[Var] = frozenset()  # in the loops around, that it depends on
    # The carries of which it is `a * carry + b`, with a number `a`
    # and a `b` that does not depend on the carry; and the last addition of a `b`.
    sums: "Mapping[Var, Equation | None]" = dataclasses.field(default_factory=dict)

    @property
    def magnitude(self) -> float:
        return max(abs(self.low), abs(self.high))

    @property
    def may_be_zero(self) -> bool:
        return self.low <= 0 <= self.high

    @property
    def single(self) -> float | None:
        """The value of all elements, if they are known to be equal."""
        return self.low if self.low == self.high else None


class Equation(NamedTuple):
    """An equation of the traced program in its place."""

    eqn: JaxprEqn
    place: Callable[[], Place]  # a function, because to find its source line takes time
    backward: bool = False  # whether JAX transposed an equation of the same line
    times: int = 1  # how often it runs
    ins: Sequence[Fact] = ()  # facts of its inputs

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def source(self) -> str:  # dtype
        return dtype_name(self.eqn.invars[0]) if self.eqn.invars else ""

    @property
    def result(self) -> str:  # dtype
        return dtype_name(self.eqn.outvars[0]) if self.eqn.outvars else ""

    @property
    def line(self) -> SourceLine:
        return self.place()[:2]

    @property
    def narrows(self) -> bool:
        """Whether it casts float32 or wider to half precision."""
        casts = self.name == "convert_element_type"
        return casts and is_wide(self.source) and is_half(self.result)


def is_wide(dtype: str) -> bool:
    """Whether a dtype is float32 or float64."""
    return dtype in ("float32", "float64")


def is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))


def rounded(value: Any, dtype: str) -> Any:
    """Rounds numbers to a floating-point dtype; they may become 0 or infinite."""
    with np.errstate(all="ignore"):
        return np.asarray(value, np.float64).astype(jnp.dtype(dtype)).astype(np.float64)


def is_lost(value: float, dtype: str = "float16") -> bool:
    """Whether a constant becomes 0 or infinite in a half dtype."""
    held = rounded(value, dtype)
    return value != held and (held == 0 or math.isinf(held))


def of_type(atom: Atom) -> Fact:
    """Returns the fact of a variable's type: integer types and booleans have bounds."""
    dtype = dtype_name(atom)
    if dtype == "bool":
        return Fact(0.0, 1.0)
    if is_integer(dtype):
        limits = jnp.iinfo(dtype)
        return Fact(float(limits.min), float(limits.max))
    return Fact()


def of_constant(atom: Atom, value: object) -> Fact:
    """Returns the fact of a constant with this value."""
    array = constant(value)
    # A NaN is not between any bounds.
    if array is None or array.size == 0 or np.isnan(array).any():
        return of_type(atom)
    low, high = float(array.min()), float(array.max())
    values = np.unique(array)
    few = values.tolist() if values.size <= _MOST_OF_A_MASK else ()
    return Fact(low, high, extreme=next(filter(is_lost, few), 0.0))


def join(a: Fact, b: Fact) -> Fact:
    """Returns the fact of an array whose elements are taken from either of two."""
    return replace(
        a,
        low=min(a.low, b.low),
        high=max(a.high, b.high),
        extreme=a.extreme or b.extreme,
        epsilon=None,
        summed=max(a.summed, b.summed),
        rounded_in=a.rounded_in or b.rounded_in,
        maker="",
        columns=(),
        sums={v: a.sums[v] or b.sums[v] for v in a.sums if v in b.sums},
    )


def transfer(equation: Equation) -> list[Fact]:
    """Returns the facts of the outputs of an equation without nested jaxprs."""
    eqn, name, facts = equation.eqn, equation.name, equation.ins
    rule = _RULES.get(name, lambda eqn, *facts: of_type(eqn.outvars[0]))
    if len(eqn.outvars) != 1:
        return [of_type(v) for v in eqn.outvars]
    maker = facts[0].maker if name in SAME_ENTRIES else name
    fact = replace(rule(eqn, *facts), maker=maker, sums=_sums(equation))
    half = _rounded_in(equation)
    # The dtype represents all integers in these bounds.
    is_exact = fact.magnitude <= DISTINCT_INTEGERS.get(half, 0)
    return [replace(fact, rounded_in="" if is_exact else half)]


def _rounded_in(equation: Equation) -> str:
    """Returns the half dtype in which floats were held that became these numbers."""
    name, ins = equation.name, equation.ins
    casts = name == "convert_element_type" and not is_half(equation.result)
    if casts and is_half(equation.source):
        return equation.source
    if name in SAME_ENTRIES:
        ins = ins[:1]  # not the indices of a gather
    elif not (name in _ROUNDS or is_integer(equation.result)):
        return ""
    return next((fact.rounded_in for fact in ins if fact.rounded_in), "")


def _sums(equation: Equation) -> dict[Var, Equation | None]:
    """Returns the carries that the result is a sum of, as `Fact` defines them."""
    pairs = [*zip(equation.eqn.invars, equation.ins, strict=True)]
    found = {}
    for carry in frozenset[Var]().union(*(fact.sums for fact in equation.ins)):
        parts = [fact.sums for fact in equation.ins if carry in fact.varying]
        others = [(v, fact) for v, fact in pairs if carry not in fact.varying]
        if _is_linear(equation, others) and all(carry in part for part in parts):
            last = next((part[carry] for part in parts if part[carry]), None)
            found[carry] = equation if others and equation.name in _ADDITIONS else last
    return found


def _is_linear(equation: Equation, others: Sequence[tuple[Atom, Fact]]) -> bool:
    """Whether an operation adds to inputs, moves them, or takes them times a number."""
    (out,) = equation.eqn.outvars
    match equation.name:
        case "add" | "add_any" | "sub":
            # A gradient of `x[i]` is added to other elements each time.
            return all(fact.maker not in _SLICE_GRADIENTS for _, fact in others)
        case "scatter-add":
            return not equation.ins[1].varying  # else to other elements each time
        case "mul" | "div":
            if len(others) != 1:
                return False
            factor, _ = others[0]
            is_divisor = factor is equation.eqn.invars[1]
            # A decay rate is one number, whereas the gate of an LSTM is an array.
            is_number = is_literal(factor) or 1 == size(factor) < size(out)
            return is_number and (is_divisor or equation.name == "mul")
    return equation.name in SAME_ENTRIES | {"neg", "select_n"}


# Bounds, extremes, epsilons and sums.


def _computed(fun: Function, eqn: JaxprEqn, *facts: Fact) -> Fact:
    """Returns the fact of a function of numbers."""
    (out,) = eqn.outvars
    fact = _bounds(fun, eqn, facts)
    arrays = [f for f in facts if f.single is None]
    if fact is None:
        return of_type(out)
    if not arrays:
        return replace(fact, extreme=_if_lost(fact.low))
    if len(arrays) > 1 or is_integer(dtype_name(out)):
        return fact
    (x,) = arrays

    def value_at(number: float) -> float:
        found = _results(fun, out, ([number] if f is x else [f.low] for f in facts))
        return float(found[0]) if found.size else INF

    number = eqn.invars[-1] if x is facts[0] else eqn.invars[0]
    epsilon = _epsilon(eqn.primitive.name, x, is_scalar=shape(number) == ())
    is_cast = eqn.primitive.name == "convert_element_type"
    is_sum = is_wide(dtype_name(out)) and (len(facts) == 2 or is_cast)
    return replace(
        fact,
        extreme=_if_lost(value_at(x.extreme)) if x.extreme else 0.0,
        epsilon=None if epsilon is None else value_at(epsilon),
        summed=abs(value_at(x.summed)) if x.summed and is_sum else 0.0,
    )


def _bounds(fun: Function, eqn: JaxprEqn, facts: Sequence[Fact]) -> Fact | None:
    """Returns the least and the greatest value of a function; None without bounds."""
    (out,) = eqn.outvars
    divides_by_zero = eqn.primitive.name == "div" and facts[1].low < 0 <= facts[1].high
    if divides_by_zero or not dtype_name(out).startswith(_NUMBERS):
        return None
    ends = _results(fun, out, map(_ends, facts))
    return Fact(float(ends[0]), float(ends[-1])) if ends.size else None


def _epsilon(name: str, x: Fact, is_scalar: bool) -> float | None:
    """Returns the epsilon in `x` once an operation with another number has run."""
    if x.epsilon is None:
        return 0.0 if is_scalar and name in ("add", "max") else None
    if name == "sqrt" and x.epsilon == 0:
        return None  # reported at the root, and so not at a division by it
    return x.epsilon


def _if_lost(value: float) -> float:
    return value if is_lost(value) else 0.0


def _results(
    fun: Function, out: Atom, operands: Iterable[Iterable[float]]
) -> np.ndarray:
    """Returns a function's values at all combinations of numbers, sorted, unique."""
    grid = np.meshgrid(*(np.array([*numbers], float) for numbers in operands))
    with np.errstate(all="ignore"):
        exact = fun(*grid)
    dtype, limits = dtype_name(out), of_type(out)
    found = np.trunc(exact) if is_integer(dtype) else rounded(exact, dtype)
    return np.unique(found[~np.isnan(found)]).clip(limits.low, limits.high)


def _ends(x: Fact) -> set[float]:
    """Returns numbers that include the extremes of a function of `x`."""
    return {x.low, x.high, 0.0} if x.may_be_zero else {x.low, x.high}


def _mul(eqn: JaxprEqn, x: Fact, y: Fact) -> Fact:
    if eqn.invars[0] is eqn.invars[1]:
        return _computed(np.square, eqn, x)
    return _computed(np.multiply, eqn, x, y)


def _add(eqn: JaxprEqn, x: Fact, y: Fact) -> Fact:
    fact = _computed(np.add, eqn, x, y)
    is_sum = is_half(dtype_name(eqn.outvars[0]))
    return replace(fact, summed=summed_in_half(x, y)) if is_sum else fact


def summed_in_half(x: Fact, y: Fact) -> float:
    """Returns how many entries of half precision are in the sum of two arrays."""
    # `associative_scan` adds arrays padded with zeros, to put them together.
    if x.maker == y.maker == "pad":
        return max(x.summed, y.summed)
    return max(x.summed, 1.0) + max(y.summed, 1.0)


def _power(eqn: JaxprEqn, x: Fact) -> Fact:
    exponent = eqn.params["y"]
    if exponent < 2:  # no rule needs bounds of 1/x
        return Fact()
    return _computed(lambda x: x**exponent, eqn, x)


def _moved(eqn: JaxprEqn, x: Fact, *rest: Fact) -> Fact:
    # A sum that is broadcast to an array is part of another computation.
    spread = size(eqn.outvars[0]) > size(eqn.invars[0])
    return replace(x, summed=0.0) if spread else x


def _joined(eqn: JaxprEqn, *facts: Fact) -> Fact:
    """Returns the fact of elements that are taken from operands, except indices."""
    dtype = dtype_name(eqn.outvars[0])
    pairs = zip(eqn.invars, facts, strict=True)
    return functools.reduce(join, [f for v, f in pairs if dtype_name(v) == dtype])


def _concatenated(eqn: JaxprEqn, *facts: Fact) -> Fact:
    """Returns the fact of joined arrays, such as the indices of several axes."""
    is_last = eqn.params["dimension"] == len(shape(eqn.outvars[0])) - 1
    return replace(_joined(eqn, *facts), columns=facts if is_last else ())


def _sum(eqn: JaxprEqn, x: Fact) -> Fact:
    count = max(entries_added(eqn), 1)
    wide = is_wide(dtype_name(eqn.outvars[0]))
    summed = max(x.summed, 1.0) * count if wide else 0.0
    return Fact(x.low * count, x.high * count, summed=summed)


_FUNCTIONS: dict[str, Function] = {
    "abs": np.abs,
    "add_any": np.add,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "convert_element_type": np.positive,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "square": np.square,
    "sub": np.subtract,
    "tanh": np.tanh,
}
_CHOICES = words(
    "all_gather all_to_all cummax cummin pmax pmin ppermute real reduce_max reduce_min "
    "reduce_window_max reduce_window_min reshard sort"
)
_JOINS = words("dynamic_update_slice pad scatter select_n stack")

_RULES: dict[str, Callable[..., Fact]] = {
    **dict.fromkeys(SAME_ENTRIES | _CHOICES, _moved),
    **{name: functools.partial(_computed, fun) for name, fun in _FUNCTIONS.items()},
    **dict.fromkeys(_JOINS, _joined),
    **dict.fromkeys(["erf", "sign", "sin", "cos"], lambda eqn, x: Fact(-1.0, 1.0)),
    "add": _add,
    "concatenate": _concatenated,
    "cumsum": lambda eqn, x: join(_sum(eqn, x), x),
    "iota": lambda eqn: Fact(0.0, shape(eqn.outvars[0])[eqn.params["dimension"]] - 1.0),
    "integer_pow": _power,
    "logistic": lambda eqn, x: Fact(0.0, 1.0),
    "mul": _mul,
    "reduce_sum": _sum,
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


def flops(eqn: JaxprEqn) -> int:
    """Counts multiplications and additions of a matrix product or convolution."""
    name = eqn.primitive.name
    if name not in PRODUCTS or not dtype_name(eqn.outvars[0]).startswith(_FLOATING):
        return 0
    left, right, result = eqn.invars[0], eqn.invars[1], eqn.outvars[0]
    if sizes := matrix_sizes(eqn):
        return 2 * size(result) * math.prod(sizes[0].contracted)
    if name == "conv_general_dilated":
        features = shape(right)[eqn.params["dimension_numbers"].rhs_spec[0]]
        # Zeros inside a dilated input are not multiplied.
        zeros = math.prod(eqn.params["lhs_dilation"])
        return 2 * size(result) * (size(right) // max(features, 1)) // zeros
    # A ragged product: each row of the first operand meets one group of the second.
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    others = {*contracted, *batch, *numbers.rhs_group_dimensions}
    free = [n for axis, n in enumerate(shape(right)) if axis not in others]
    return 2 * size(left) * math.prod(free)


def operand_dtypes(eqn: JaxprEqn) -> str:
    """Returns the dtypes of the first two operands, joined by " x " if they differ."""
    operands = eqn.invars[:2] or eqn.outvars
    return " x ".join(dict.fromkeys(map(dtype_name, operands)))


def is_narrow(dtypes: str) -> bool:
    """Whether all dtypes, joined by " x ", have 16 bits or less."""
    return all(dtype.startswith(_NARROW) for dtype in dtypes.split(" x "))
