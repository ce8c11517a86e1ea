"""What is known about the values of a traced program: a fact for each rule to read.

A `Fact` has a field for each, and the function of the same name computes it from the
facts of the operands.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    name_of,
    shape,
    size,
    words,
)
from ..._policy import is_half
from ..._types import Function
from .._source import Place

DISTINCT_INTEGERS = {"float16": 2048, "bfloat16": 256}
_MOST_OF_A_MASK = 8
_NUMBERS = ("float", "bfloat", "int", "uint")
_ROUNDS = words("ceil clamp floor max min round")
_ADDITIONS = ("add", "add_any", "sub", "scatter-add")
_SLICE_GRADIENTS = words("dynamic_update_slice pad scatter scatter-add")
_FLOATING = ("float", "bfloat", "complex")
_NARROW = ("float16", "bfloat16", "float8", "float4")

_FUNCTIONS: dict[str, Function] = {
    "abs": np.abs,
    "add": np.add,
    "add_any": np.add,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "convert_element_type": np.positive,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "square": np.square,
    "sub": np.subtract,
    "tanh": np.tanh,
}
# The result consists of elements of the first operand, or of all of its dtype.
_MOVES = (SAME_ENTRIES - _FUNCTIONS.keys()) | words("""
    all_gather all_to_all cummax cummin cumsum pmax pmin ppermute real reduce_max
    reduce_min reduce_window_max reduce_window_min reshard sort
""")
_JOINS = words("concatenate dynamic_update_slice pad scatter select_n stack")
_SUMS = ("cumsum", "reduce_sum")
# A sum with a number is a sum, but not its root.
_KEEP_SUMS = words("add add_any convert_element_type div max min mul sub")


class Bounds(NamedTuple):
    """Numbers between which all elements of an array are."""

    low: float = -math.inf
    high: float = math.inf

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

    @property
    def ends(self) -> set[float]:
        """Numbers that include the extremes of a function of the elements."""
        return {*self, 0.0} if self.may_be_zero else {*self}

    def join(self, other: "Bounds") -> "Bounds":
        return Bounds(min(self.low, other.low), max(self.high, other.high))


_RANGES = dict.fromkeys(["erf", "sign", "sin", "cos"], Bounds(-1.0, 1.0))
_RANGES["logistic"] = Bounds(0.0, 1.0)
# How an array depends on a variable of a loop around it, such as a carry. It is a sum
# if it is `a * carry + b`, with a number `a` and a `b` that does not depend on the
# carry: then the last addition of a `b`, or (). If it is not a sum, None.
Growth = tuple["Equation", ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """Knowledge about the elements of an array."""

    bounds: Bounds
    constant: float = 0.0  # a number that some are equal to, which float16 loses
    # Result if the other operand is 0: eps for x + eps; None without a constant.
    epsilon: float | None = None
    summed: float = 0.0  # number of elements summed in float32, or two by two in half
    # The half dtype in which they were held once, or ""; of arrays that were just
    # joined, that of each.
    rounded_in: tuple[str, ...] = ("",)
    maker: str = ""  # name of the operation that computed them
    growth: Mapping[Var, Growth] = dataclasses.field(default_factory=dict)


class Equation(NamedTuple):
    """An equation of the traced program in its place."""

    eqn: JaxprEqn
    place: Callable[[], Place]  # a function, because to find its source line takes time
    backward: bool = False  # whether JAX transposed an equation of the same line
    times: int = 1  # how often it runs
    ins: Sequence[Fact] = ()  # facts of its inputs

    @property
    def name(self) -> str:
        return name_of(self.eqn)

    @property
    def source(self) -> str:  # dtype
        return dtype_name(self.eqn.invars[0]) if self.eqn.invars else ""

    @property
    def result(self) -> str:  # dtype
        return dtype_name(self.eqn.outvars[0]) if self.eqn.outvars else ""

    @property
    def casts(self) -> bool:
        return self.name == "convert_element_type"

    @property
    def narrows(self) -> bool:
        """Whether it casts float32 or wider to half precision."""
        return self.casts and is_wide(self.source) and is_half(self.result)

    @property
    def widens(self) -> bool:
        """Whether it casts half precision to another type."""
        return self.casts and is_half(self.source) and not is_half(self.result)

    @property
    def taken(self) -> Sequence[Fact]:
        """Facts of the operands whose elements the result consists of."""
        if self.name in _MOVES:
            return self.ins[:1]
        if self.name not in _JOINS:
            return ()
        pairs = zip(self.eqn.invars, self.ins, strict=True)
        return [fact for v, fact in pairs if dtype_name(v) == self.result]


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
    """Returns the fact of a variable of which only the type is known."""
    dtype = dtype_name(atom)
    if dtype == "bool":
        return Fact(Bounds(0.0, 1.0))
    if is_integer(dtype):
        limits = jnp.iinfo(dtype)
        return Fact(Bounds(float(limits.min), float(limits.max)))
    return Fact(Bounds())


def of_constant(atom: Atom, value: object) -> Fact:
    """Returns the fact of a constant with this value."""
    array = constant(value)
    # A NaN is not between any bounds.
    if array is None or array.size == 0 or np.isnan(array).any():
        return of_type(atom)
    values = np.unique(array)
    few = values.tolist() if values.size <= _MOST_OF_A_MASK else ()
    lost = next(filter(is_lost, few), 0.0)
    return Fact(Bounds(float(array.min()), float(array.max())), lost)


def join(a: Fact, b: Fact) -> Fact:
    """Returns the fact of an array that is either of two, as of two branches."""
    return Fact(
        bounds=a.bounds.join(b.bounds),
        constant=a.constant or b.constant,
        summed=max(a.summed, b.summed),
        rounded_in=(first_half([a, b]),),
        growth={
            v: joined([a.growth.get(v), b.growth.get(v)])
            for v in {*a.growth, *b.growth}
        },
    )


def transfer(equation: Equation) -> list[Fact]:
    """Returns the facts of the outputs of an equation without nested jaxprs."""
    if len(equation.eqn.outvars) != 1:
        return [of_type(v) for v in equation.eqn.outvars]
    bounds = _bounds(equation)
    fact = Fact(
        bounds=bounds,
        constant=_constant(equation, bounds),
        epsilon=_epsilon(equation),
        summed=_summed(equation),
        rounded_in=_rounded_in(equation, bounds),
        maker=equation.ins[0].maker if equation.name in SAME_ENTRIES else equation.name,
        growth=_growth(equation),
    )
    return [fact]


def _bounds(equation: Equation) -> Bounds:
    """Returns bounds of the result: of a function of numbers, or of what it takes."""
    eqn, name, (out,) = equation.eqn, equation.name, equation.eqn.outvars
    known = [fact.bounds for fact in equation.taken]
    if name in _SUMS:
        low, high = equation.ins[0].bounds
        count = max(entries_added(eqn), 1)
        known.append(Bounds(low * count, high * count))
    elif name == "iota":
        known.append(Bounds(0.0, shape(out)[eqn.params["dimension"]] - 1.0))
    elif name in _RANGES:
        known.append(_RANGES[name])
    elif (applied := _applied(equation)) is not None:
        fun, ins = applied
        ends = _results(fun, out, [fact.bounds.ends for fact in ins])
        known += [Bounds(float(ends[0]), float(ends[-1]))] if ends.size else []
    return functools.reduce(Bounds.join, known) if known else of_type(out).bounds


def _applied(equation: Equation) -> tuple[Function, Sequence[Fact]] | None:
    """Returns a function of numbers and its operands, if the equation computes one."""
    eqn, name, ins = equation.eqn, equation.name, equation.ins
    if not equation.result.startswith(_NUMBERS):
        return None
    if name == "integer_pow":
        exponent = eqn.params["y"]
        # No rule needs bounds of 1/x.
        return (lambda x: x**exponent, ins) if exponent >= 2 else None
    if name == "mul" and eqn.invars[0] is eqn.invars[1]:
        return np.square, ins[:1]
    if name == "div" and ins[1].bounds.low < 0 <= ins[1].bounds.high:
        return None
    return (_FUNCTIONS[name], ins) if name in _FUNCTIONS else None


def _results(
    fun: Function, out: Atom, operands: Iterable[Iterable[float]]
) -> np.ndarray:
    """Returns a function's values at all combinations of numbers, sorted, unique."""
    grid = np.meshgrid(*(np.array([*numbers], float) for numbers in operands))
    with np.errstate(all="ignore"):
        exact = fun(*grid)
    dtype, limits = dtype_name(out), of_type(out).bounds
    found = np.trunc(exact) if is_integer(dtype) else rounded(exact, dtype)
    return np.unique(found[~np.isnan(found)]).clip(limits.low, limits.high)


def _image(
    equation: Equation, number_of: Callable[[Fact], float | None]
) -> float | None:
    """Returns what a number in the only array among the operands becomes.

    None without a function of one array and numbers, or without a number in it.
    """
    applied = None if is_integer(equation.result) else _applied(equation)
    if applied is None:
        return None
    fun, ins = applied
    arrays = [fact for fact in ins if fact.bounds.single is None]
    number = number_of(arrays[0]) if len(arrays) == 1 else None
    if number is None:
        return None
    operands = ([number] if f is arrays[0] else [f.bounds.low] for f in ins)
    found = _results(fun, equation.eqn.outvars[0], operands)
    return float(min(found, default=math.inf))


def _constant(equation: Equation, bounds: Bounds) -> float:
    """Returns a constant in the result that float16 loses, or 0."""
    if equation.taken:
        return next((f.constant for f in equation.taken if f.constant), 0.0)
    number = bounds.single or _image(equation, lambda x: x.constant or None) or 0.0
    return number if is_lost(number) else 0.0


def _epsilon(equation: Equation) -> float | None:
    """Returns the constant that was added to another number, or None."""
    if equation.taken:
        return equation.taken[0].epsilon if len(equation.taken) == 1 else None
    if equation.name == "sqrt" and equation.ins[0].epsilon == 0:
        return None  # reported at the root, and so not at a division by it
    adds = equation.name in ("add", "max") and () in map(shape, equation.eqn.invars)
    start = 0.0 if adds else None
    return _image(equation, lambda x: start if x.epsilon is None else x.epsilon)


def _summed(equation: Equation) -> float:
    """Returns how many elements of float32, or two by two of half, are added up."""
    eqn, name, ins = equation.eqn, equation.name, equation.ins
    wide = name * is_wide(equation.result)
    if wide in _SUMS:
        return max(ins[0].summed, 1.0) * max(entries_added(eqn), 1)
    if wide in _KEEP_SUMS:
        return abs(_image(equation, lambda x: x.summed or None) or 0.0)
    if name == "add" and is_half(equation.result):
        return summed_in_half(*ins)
    # A sum that is broadcast to an array is part of another computation.
    is_spread = name in _MOVES and size(eqn.outvars[0]) > size(eqn.invars[0])
    return max([0.0, *(fact.summed for fact in equation.taken)]) * (not is_spread)


def summed_in_half(x: Fact, y: Fact) -> float:
    """Returns how many entries of half precision are in the sum of two arrays."""
    # `associative_scan` adds arrays padded with zeros, to put them together.
    if x.maker == y.maker == "pad":
        return max(x.summed, y.summed)
    return max(x.summed, 1.0) + max(y.summed, 1.0)


def _rounded_in(equation: Equation, bounds: Bounds) -> tuple[str, ...]:
    """Returns the half dtypes in which floats were held that became these numbers."""
    name, ins, halves = equation.name, equation.ins, ("",)
    # The index of a maximum is exact, whatever the elements were.
    counts = is_integer(equation.result) and "float" not in equation.source
    if equation.widens:
        halves = (equation.source,)
    elif name == "concatenate":  # perhaps the indices of several axes
        halves = tuple(first_half([fact]) for fact in ins)
    elif name in SAME_ENTRIES:
        halves = ins[0].rounded_in  # not those of the indices of a gather
    elif name in _ROUNDS or counts:
        halves = (first_half(ins),)
    # A dtype represents all integers up to its limit.
    most, limits = bounds.magnitude, DISTINCT_INTEGERS
    return tuple(half * (most > limits.get(half, 0)) for half in halves)


def first_half(facts: Iterable[Fact]) -> str:
    """Returns the first half dtype in which some of the elements were held, or ""."""
    return next((half for fact in facts for half in fact.rounded_in if half), "")


def _growth(equation: Equation) -> dict[Var, Growth]:
    """Returns how the result depends on each variable of the loops around."""
    variables = dict.fromkeys(v for fact in equation.ins for v in fact.growth)
    return {v: _growth_with(equation, v) for v in variables}


def _growth_with(equation: Equation, v: Var) -> Growth:
    pairs = zip(equation.eqn.invars, equation.ins, strict=True)
    others = [(atom, fact) for atom, fact in pairs if v not in fact.growth]
    grown = joined(fact.growth[v] for fact in equation.ins if v in fact.growth)
    if grown is None or not _is_linear(equation, others):
        return None
    return (equation,) if others and equation.name in _ADDITIONS else grown


def joined(parts: Iterable[Growth]) -> Growth:
    """Returns how what consists of these parts depends on a variable."""
    found = [*parts]
    return None if None in found else next(filter(None, found), ())


def _is_linear(equation: Equation, others: Sequence[tuple[Atom, Fact]]) -> bool:
    """Whether an operation adds to inputs, moves them, or takes them times a number."""
    eqn, name = equation.eqn, equation.name
    if name in ("add", "add_any", "sub"):
        # A gradient of `x[i]` is added to other elements each time.
        return all(fact.maker not in _SLICE_GRADIENTS for _, fact in others)
    if name == "scatter-add":
        return not equation.ins[1].growth  # else to other elements each time
    if name not in ("mul", "div"):
        return name in SAME_ENTRIES | {"neg", "select_n"}
    # A decay rate is one number, whereas the gate of an LSTM is an array.
    return any(
        (name == "mul" or v is eqn.invars[1])
        and (is_literal(v) or 1 == size(v) < size(eqn.outvars[0]))
        for v, _ in others
    )


def entries_added(eqn: JaxprEqn) -> int:
    """Returns how many elements an equation adds up into one; 0 if it is not a sum."""
    match name_of(eqn):
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
    name = name_of(eqn)
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
