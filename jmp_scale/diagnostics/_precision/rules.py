"""The rules of `precision_report`, each a function that yields findings.

docs/precision.md has the table of the rules, with programs and remedies.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from jax.extend.core import Var

from ..._autocast.products import stays_float32
from ..._jaxpr import Loop, dtype_name, shape, words
from ..._policy import is_half
from .._source import Place
from .._tables import printed
from .facts import (
    DISTINCT_INTEGERS,
    Equation,
    Fact,
    SourceLine,
    entries_added,
    flops,
    is_integer,
    is_lost,
    is_narrow,
    operand_dtypes,
    rounded,
    summed_in_half,
    transfer,
)

FLOAT16_MAX = 65504
_LONG = 4096
_UNKNOWN_EXTENT = 2**31 - 1  # of int32 and wider
_COMPARISONS = words("eq ge gt le lt ne")
_COLLECTIVES = ("psum", "reduce_scatter", "all_reduce", "unreduced_psum")
_EXPONENTIALS = words("exp exp2 expm1 log log1p pow cumlogsumexp")
_OVERFLOWING = words("exp exp2 expm1 pow")
_LARGEST_EXPONENT = 11

# Functions of jax.nn that handle large arguments themselves.
_SAFE_FUNCTIONS = words(
    "celu elu gelu hard_silu hard_swish log_sigmoid mish relu selu sigmoid silu "
    "soft_sign softplus sparse_plus squareplus swish"
)
_NOT_ZERO = {"div": 1, "rsqrt": 0, "log": 0, "sqrt": 0}  # positions of operands
_LONG_BACKWARD_LOOP = 64

Severity = Literal["error", "warning", "note"]
SEVERITIES = ("note", "warning", "error")
Fault = tuple[Severity, str]  # and the problem with a remedy
FindFaults = Callable[[Equation], Iterator[Fault]]


@printed
class Finding(NamedTuple):
    """A line of a program that half precision harms.

    Attributes:
      rule: name of the rule, such as "half-sum".
      severity: "error" (wrong or not finite for ordinary values), "warning" (loses
        precision, or depends on the data) or "note" (cost).
      message: the problem and a remedy; within a library, its file and line too.
      file: path of the user's source file, or None if it is unknown.
      line: line in that file, from 1, or None.
      primitive: JAX's name of the operation; "" for a whole program.
      dtype: the dtype in question.
      shape: shape of the array in question.
      backward: whether the problem occurs in the backward pass only.
    """

    rule: str
    severity: Severity
    message: str
    file: str | None
    line: int | None
    primitive: str
    dtype: str
    shape: tuple[int, ...]
    backward: bool

    def summary(self) -> str:
        """Returns the finding in a compiler's format, in one line."""
        where = location((self.file, self.line))
        end = " (backward pass)" if self.backward else ""
        return f"{where}: {self.severity}: {self.message} [{self.rule}]{end}"


def location(line: SourceLine) -> str:
    return f"{line[0]}:{line[1]}" if line[0] else "<unknown line>"


def finding_at(
    place: Place, rule: str, severity: Severity, text: str, dtype: str
) -> Finding:
    """Returns the finding of a rule at a line; its message names a library's line."""
    library = f" (in {place.library})" if place.library else ""
    message = f"{text[0].upper()}{text[1:]}{library}."
    return Finding(rule, severity, message, *place[:2], "", dtype, (), False)


def _finding(equation: Equation, rule: str, severity: Severity, text: str) -> Finding:
    shapes = map(shape, (*equation.eqn.invars, *equation.eqn.outvars))
    found = finding_at(equation.place(), rule, severity, text, equation.result)
    return found._replace(
        primitive=equation.name,
        shape=max(shapes, key=math.prod),
        backward=equation.backward,
    )


def faults(equation: Equation) -> Iterator[Finding]:
    """Applies all rules to an equation."""
    # Transposing creates no square and no exp; a user's backward rule may.
    for rule, check in (_BACKWARD if equation.backward else _FORWARD).items():
        for severity, text in check(equation):
            yield _finding(equation, rule, severity, text)


def _half_sum(equation: Equation) -> Iterator[Fault]:
    narrows, dtype = equation.narrows, equation.result
    # A gradient that is summed in float32 and rounded once is right.
    count = equation.ins[0].summed if narrows and not equation.backward else 0
    if is_half(equation.source):
        count = entries_added(equation.eqn)
        if equation.name == "add":
            count = summed_in_half(*equation.ins)
    if count < _LONG or not is_half(dtype):
        return
    harms = ["overflows at 65,504"] if dtype == "float16" else []
    wrong = count >= FLOAT16_MAX and (harms or not narrows)
    severity: Severity = "error" if wrong else "warning"
    if not narrows:
        harms.append("drops small terms")
    cure = "sum with dtype=jnp.float32 and keep the result in float32"
    if equation.backward:
        cure = "broadcast the smaller operand in float32, then cast it"
        if equation.place().library:  # whose code a user cannot change
            severity = "note"
    how = "comes back" if narrows else "accumulates"
    harm = " and ".join(harms) or "keeps two digits"
    what = f"a sum of {count:,.0f} entries {how} in {dtype}, which {harm}"
    yield severity, f"{what}; {cure}"


def _half_collective(equation: Equation) -> Iterator[Fault]:
    dtypes = [*filter(is_half, map(dtype_name, equation.eqn.invars))]
    if dtypes and equation.name.startswith(_COLLECTIVES):
        yield (
            "warning",
            f"a sum over devices in {dtypes[0]} rounds at each addition; cast to "
            "float32 before the collective, or use sum_gradients",
        )


def _half_integers(equation: Equation) -> Iterator[Fault]:
    if equation.name not in ("iota", "convert_element_type"):
        yield from _half_indices(equation)
        return
    (fact,) = equation.ins or transfer(equation)
    limit = DISTINCT_INTEGERS.get(equation.result, math.inf)
    if fact.single is not None or not limit < fact.magnitude < _UNKNOWN_EXTENT:
        return
    # The points of linspace are not integers.
    counts = fact.maker == "iota" and "linspace" not in equation.place().calls
    if counts or is_integer(equation.source):
        yield (
            "error",
            f"integers up to {fact.magnitude:,.0f} are cast to {equation.result}, "
            f"which tells them apart only up to {limit:,}; keep them integers or "
            "compute in float32",
        )


def _half_indices(equation: Equation) -> Iterator[Fault]:
    for index, entries in _indexed(equation):
        dtype = index.rounded_in
        limit = DISTINCT_INTEGERS.get(dtype, math.inf)
        if limit < entries:
            yield (
                "error",
                f"numbers that were {dtype} choose among {entries:,} entries, and "
                f"{dtype} tells integers apart only up to {limit:,}; do not cast "
                "positions, labels and coordinates with the rest of a batch",
            )


def _indexed(equation: Equation) -> Iterator[tuple[Fact, int]]:
    """Yields indices, and the number of entries that they choose among."""
    name, ins = equation.name, equation.ins
    sizes: Sequence[int] = shape(equation.eqn.invars[0]) if ins else []
    numbers = equation.eqn.params.get("dimension_numbers")
    axes = getattr(numbers, "start_index_map", ())
    axes = axes or getattr(numbers, "scatter_dims_to_operand_dims", ())
    if axes:
        columns = ins[1].columns
        if len(columns) == len(axes):
            yield from zip(columns, (sizes[axis] for axis in axes), strict=True)
        else:  # which column of the indices is of which axis is not known
            yield ins[1], min(sizes[axis] for axis in axes)
    elif name == "dynamic_slice":
        yield from zip(ins[1:], sizes, strict=True)
    elif name == "dynamic_update_slice":
        yield from zip(ins[2:], sizes, strict=True)
    elif name in _COMPARISONS:  # with a count, as in `jax.nn.one_hot`
        for index, count in (ins, ins[::-1]):
            if count.maker == "iota" and count.magnitude < _UNKNOWN_EXTENT:
                yield index, int(count.high) + 1


def _half_square(equation: Equation) -> Iterator[Fault]:
    exponent = _exponent(equation) if equation.result == "float16" else 0
    if exponent < 1 or equation.ins[0].magnitude <= FLOAT16_MAX ** (1 / exponent):
        return
    what = {1: "variance", 2: "square"}.get(exponent, f"power of {exponent}")
    largest = math.ceil(65520 ** (1 / max(exponent, 2)))
    if not _is_safe(equation.place()):
        yield (
            "warning",
            f"a {what} is computed in float16, which overflows for entries of "
            f"{largest} and more; cast to float32 first and keep the result there",
        )


def _exponent(equation: Equation) -> int:
    """Returns the exponent of a power of one value; 1 for a variance, else 0."""
    if equation.narrows:  # `jnp.var` divides a float32 sum of squares
        divides = equation.ins[0].maker == "div" and not equation.backward
        return int(divides and "_var" in equation.place().calls)
    if equation.name == "integer_pow":
        return equation.eqn.params["y"]
    same = equation.name == "mul" and equation.ins[0] is equation.ins[1]
    return 2 if same or equation.name == "square" else 0


def _half_exp(equation: Equation) -> Iterator[Fault]:
    name, dtype = equation.name, equation.result
    if name not in _EXPONENTIALS or not is_half(dtype) or _is_safe(equation.place()):
        return
    (x, *_) = equation.ins  # perhaps a difference from the maximum
    bounded = x.maker == "sub" or x.high <= _LARGEST_EXPONENT
    harm = "three digits" if dtype == "float16" else "two digits"
    if dtype == "float16" and name in _OVERFLOWING and not bounded:
        harm += " and overflows at 65,504"
    yield "warning", f"{name} in {dtype} keeps {harm}; cast its argument to float32"


def _is_safe(place: Place) -> bool:
    return any(call.rpartition(".")[2] in _SAFE_FUNCTIONS for call in place.calls)


def _half_constant(equation: Equation) -> Iterator[Fault]:
    dtype = equation.result
    if equation.name != "convert_element_type" or not is_half(dtype):
        return
    constant = equation.ins[0].extreme
    if not is_lost(constant, dtype):
        return
    held, cure = rounded(constant, dtype), f"use jnp.finfo({dtype}).min or .max"
    if held == 0:
        cure = "use a constant of at least 1e-4"
    text = f"the constant {constant:.6g} becomes {held:g} in {dtype}; {cure}"
    yield "error", f"{text}, or compute this in float32"


def _half_division(equation: Equation) -> Iterator[Fault]:
    name, ins = equation.name, equation.ins
    is_inverse = name == "pow" and ins[1].high < 0
    is_inverse |= name == "integer_pow" and equation.eqn.params["y"] < 0
    at = 0 if is_inverse else _NOT_ZERO.get(name)
    if at is None or ins[at].epsilon != 0 or not ins[at].may_be_zero:
        return
    what = "division by" if name == "div" else f"{name} of"
    end = "; the gradient of sqrt is infinite there" if name == "sqrt" else ""
    yield (
        "warning",
        f"{what} a value that can be 0, because its epsilon rounds to 0 in half "
        f"precision{end}; use an epsilon of at least 1e-4, or float32",
    )


_BACKWARD: dict[str, FindFaults] = {
    "half-sum": _half_sum,
    "half-collective": _half_collective,
    "half-square": _half_square,
    "half-exp": _half_exp,
}
_FORWARD = _BACKWARD | {
    "half-constant": _half_constant,
    "half-integers": _half_integers,
    "half-division": _half_division,
}


def half_carry(
    carry: Var, addition: Equation | None, loop: Loop, backward: bool
) -> Iterator[Finding]:
    """Finds a carry of a loop that accumulates in half precision by an addition."""
    # In the backward pass carries are gradients of values that all iterations share.
    least, dtype = _LONG_BACKWARD_LOOP if backward else 2, dtype_name(carry)
    is_short = loop.trips is not None and loop.trips < least  # None: a while loop
    if is_short or addition is None or not is_half(dtype):
        return
    cure = "keep the carry in float32 and add float32 values"
    if backward:
        cure = (
            "cast what the iterations share to half precision inside the loop, and a "
            "parameter that is stored so to float32, once outside of it"
        )
    text = f"a carry adds up in {dtype} and loses what is small beside it; {cure}"
    yield _finding(addition, "half-carry", "warning", text)._replace(dtype=dtype)


def full_matmuls(equations: Iterable[Equation]) -> Iterator[Finding]:
    """Finds products in float32 while others are half precision."""
    products = [equation for equation in equations if flops(equation.eqn)]
    wide = [e for e in products if not is_narrow(operand_dtypes(e.eqn))]
    for equation in wide if len(wide) < len(products) else ():
        # A solve, or its derivative, needs the precision.
        if stays_float32(equation.eqn) or equation.place().in_linalg:
            continue
        message = (
            f"a matrix product runs in {operand_dtypes(equation.eqn)} while others are "
            "half precision; cast both operands if its time matters"
        )
        found = _finding(equation, "full-matmul", "note", message)
        yield found._replace(dtype="float32")
