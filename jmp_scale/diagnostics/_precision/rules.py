"""The rules of `precision_report`: their table, and what breaks each.

docs/precision.md has programs that break them, and cured ones.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jax.extend.core import Var

from ..._autocast.products import stays_float32
from ..._jaxpr import Loop, dtype_name, shape, words
from ..._policy import is_half
from .._findings import Finding, Rule, error_rule, finding, warning_rule
from .._source import Place
from . import facts
from .facts import Equation, Growth

# {library} is the line of a library, in parentheses.
RULES = {
    "half-sum": Rule(
        "{level}",
        "A sum of {count:,.0f} entries {how} in {dtype}, which {harm}{library}.",
        "{cure}",
    ),
    "half-collective": warning_rule(
        "A sum over devices in {dtype} rounds at each addition{library}.",
        "Cast to float32 before the collective, or use sum_gradients.",
    ),
    "half-integers": error_rule(
        "{what} {dtype}, which tells integers apart only up to {limit:,}{library}.",
        "Keep them integers, or compute in float32: do not cast positions, labels and "
        "coordinates with the rest of a batch.",
    ),
    "half-square": warning_rule(
        "A {what} is computed in float16, which overflows for entries of {largest} and "
        "more{library}.",
        "Cast to float32 first, and keep the result there.",
    ),
    "half-exp": warning_rule(
        "{name} in {dtype} keeps {harm}{library}.", "Cast its argument to float32."
    ),
    "half-constant": error_rule(
        "{what} becomes {held} in {dtype}{library}.",
        "{cure}, or compute this in float32.",
    ),
    "half-division": warning_rule(
        "{what} a value that can be 0, because its epsilon rounds to 0 in half "
        "precision{end}{library}.",
        "Use an epsilon of at least 1e-4, or float32.",
    ),
    "half-carry": warning_rule(
        "A carry adds up in {dtype}, and loses what is small beside it{library}.",
        "{cure}",
    ),
    "full-matmul": Rule(
        "note",
        "A matrix product runs in {dtype} while others are half precision{library}.",
        "Cast both operands if its time matters.",
    ),
    # Rules of a whole program.
    "half-parameters": error_rule(
        "The parameters are {dtype} ({count}{first}), so small updates round to "
        "nothing{library}.",
        "Keep float32 parameters and cast them inside the loss, wrap the optimizer in "
        "with_half_storage (and pass its opt_state), or, if they are frozen, "
        "differentiate the trained ones alone (in NNX by "
        "transform=optimizer.value_and_grad).",
    ),
    "half-loss": warning_rule(
        "The loss is returned in {dtype}{library}.",
        "Cast to float32 before the last mean.",
    ),
}

FLOAT16_MAX = 65504
_LONG = 4096
_UNKNOWN_EXTENT = 2**31 - 1  # of int32 and wider
_COMPARISONS = words("eq ge gt le lt ne")
_COLLECTIVES = ("psum", "reduce_scatter", "all_reduce", "unreduced_psum")
_EXPONENTIALS = words("exp exp2 expm1 log log1p pow cumlogsumexp")
_OVERFLOWING = words("exp exp2 expm1 pow")
_LARGEST_EXPONENT = 11
_DIGITS = {"float16": "three digits", "bfloat16": "two digits"}
_HARM = {"float16": "overflows at 65,504", "bfloat16": "keeps two digits"}

# Functions of jax.nn that handle large arguments themselves.
_SAFE_FUNCTIONS = words(
    "celu elu gelu hard_silu hard_swish log_sigmoid mish relu selu sigmoid silu "
    "soft_sign softplus sparse_plus squareplus swish"
)
_NOT_ZERO = {"div": 1, "rsqrt": 0, "log": 0, "sqrt": 0}  # positions of operands
_FIRST_INDEX = {"dynamic_slice": 1, "dynamic_update_slice": 2}
_LONG_BACKWARD_LOOP = 64
_SHARED = (
    "Cast what the iterations share to half precision inside the loop, and a parameter "
    "that is stored so to float32, once outside of it."
)

LARGEST = "Use jnp.finfo({}).min or .max"  # in place of what becomes infinite
BACKWARD = " (backward)"  # after the line of what is wrong in the backward pass alone
Values = dict[str, Any]  # for the text of a rule


def found_at(rule: str, place: Place, **values: object) -> Finding:
    """Returns the finding of a rule at a line, which names a library's line too."""
    library = f" (in {place.library})" if place.library else ""
    return finding(RULES, rule, place.where, library=library, **values)


def findings_of(equation: Equation) -> Iterator[Finding]:
    """Applies all rules of one operation to an equation."""
    # Transposing creates no square and no exp; a user's backward rule may.
    for rule, check in (_BACKWARD if equation.backward else _FORWARD).items():
        for values in check(equation):
            yield _found(equation, rule, **values)


def _found(equation: Equation, rule: str, **values: object) -> Finding:
    found = found_at(rule, equation.place(), **{"dtype": equation.result, **values})
    return found._replace(where=found.where + BACKWARD * equation.backward)


def _half_sum(equation: Equation) -> Iterator[Values]:
    count, narrows, dtype = _count_in_half(equation), equation.narrows, equation.result
    if count < _LONG:
        return
    how, harm = "accumulates", f"{_HARM[dtype]} and drops small terms"
    if narrows:
        how, harm = "comes back", _HARM[dtype]
    is_error = count >= FLOAT16_MAX and (dtype == "float16" or not narrows)
    level = "error" if is_error else "warning"
    cure = "Sum with dtype=jnp.float32, and keep the result in float32."
    if equation.backward:
        cure = "Broadcast the smaller operand in float32, then cast it."
        if equation.place().library:  # whose code a user cannot change
            level = "note"
    yield {"level": level, "count": count, "how": how, "harm": harm, "cure": cure}


def _count_in_half(equation: Equation) -> float:
    """Returns how many entries an equation adds up, or casts the sum of, in half."""
    if equation.narrows:
        # A gradient that is summed in float32 and rounded once is right.
        return 0 if equation.backward else equation.ins[0].summed
    if not is_half(equation.source):
        return 0
    if equation.name == "add":
        return facts.summed_in_half(*equation.ins)
    return facts.entries_added(equation.eqn)


def _half_collective(equation: Equation) -> Iterator[Values]:
    dtypes = [*filter(is_half, map(dtype_name, equation.eqn.invars))]
    if dtypes and equation.name.startswith(_COLLECTIVES):
        yield {"dtype": dtypes[0]}


def _half_integers(equation: Equation) -> Iterator[Values]:
    if not (equation.casts or equation.name == "iota"):
        yield from _half_indices(equation)
        return
    (fact,) = equation.ins or facts.transfer(equation)
    limit = facts.DISTINCT_INTEGERS.get(equation.result, math.inf)
    is_many = limit < fact.bounds.magnitude < _UNKNOWN_EXTENT
    # The points of linspace are not integers.
    counts = fact.maker == "iota" and "linspace" not in equation.place().calls
    are_integers = counts or facts.is_integer(equation.source)
    if is_many and are_integers and fact.bounds.single is None:
        what = f"Integers up to {fact.bounds.magnitude:,.0f} are cast to"
        yield {"what": what, "limit": limit}


def _half_indices(equation: Equation) -> Iterator[Values]:
    for dtype, entries in _indexed(equation):
        limit = facts.DISTINCT_INTEGERS.get(dtype, math.inf)
        if limit < entries:
            what = f"Indices among {entries:,} entries were"
            yield {"what": what, "dtype": dtype, "limit": limit}


def _indexed(equation: Equation) -> Iterator[tuple[str, int]]:
    """Yields half dtypes of indices, and how many entries those choose among."""
    name, ins, eqn = equation.name, equation.ins, equation.eqn
    numbers = eqn.params.get("dimension_numbers")
    axes = getattr(numbers, "scatter_dims_to_operand_dims", ())
    if axes := getattr(numbers, "start_index_map", axes):
        sizes = [shape(eqn.invars[0])[axis] for axis in axes]
        halves = ins[1].rounded_in
        if len(halves) != len(axes):  # which index is of which axis is not known
            halves, sizes = (facts.first_half(ins[1:2]),), [min(sizes)]
        yield from zip(halves, sizes, strict=True)
    elif name in _FIRST_INDEX:
        halves = [facts.first_half([fact]) for fact in ins[_FIRST_INDEX[name] :]]
        yield from zip(halves, shape(eqn.invars[0]), strict=True)
    elif name in _COMPARISONS:
        for index, count in (ins, ins[::-1]):  # as in `jax.nn.one_hot`
            if count.maker == "iota":
                yield facts.first_half([index]), int(count.bounds.high) + 1


def _half_square(equation: Equation) -> Iterator[Values]:
    exponent = _exponent(equation) if equation.result == "float16" else 0
    if exponent < 1:
        return
    overflows = equation.ins[0].bounds.magnitude > FLOAT16_MAX ** (1 / exponent)
    if overflows and not _is_safe(equation.place()):
        what = {1: "variance", 2: "square"}.get(exponent, f"power of {exponent}")
        largest = math.ceil(65520 ** (1 / max(exponent, 2)))
        yield {"what": what, "largest": largest}


def _exponent(equation: Equation) -> int:
    """Returns the exponent of a power of one value; 1 for a variance, else 0."""
    if equation.narrows:  # `jnp.var` divides a float32 sum of squares
        divides = equation.ins[0].maker == "div" and not equation.backward
        return int(divides and "_var" in equation.place().calls)
    if equation.name == "integer_pow":
        return equation.eqn.params["y"]
    same = equation.name == "mul" and equation.ins[0] is equation.ins[1]
    return 2 if same or equation.name == "square" else 0


def _half_exp(equation: Equation) -> Iterator[Values]:
    name, dtype = equation.name, equation.result
    if name not in _EXPONENTIALS or not is_half(dtype) or _is_safe(equation.place()):
        return
    (x, *_) = equation.ins  # perhaps a difference from the maximum
    bounded = x.maker == "sub" or x.bounds.high <= _LARGEST_EXPONENT
    harm = _DIGITS[dtype]
    if dtype == "float16" and name in _OVERFLOWING and not bounded:
        harm += " and overflows at 65,504"
    yield {"name": name.capitalize(), "harm": harm}


def _is_safe(place: Place) -> bool:
    return any(call.rpartition(".")[2] in _SAFE_FUNCTIONS for call in place.calls)


def _half_constant(equation: Equation) -> Iterator[Values]:
    dtype = equation.result
    if not equation.casts or not is_half(dtype):
        return
    constant = equation.ins[0].constant
    if facts.is_lost(constant, dtype):
        held, what = facts.rounded(constant, dtype), f"The constant {constant:.6g}"
        cure = LARGEST.format(dtype) if held else "Use a constant of at least 1e-4"
        yield {"what": what, "held": f"{held:g}", "cure": cure}


def _half_division(equation: Equation) -> Iterator[Values]:
    name, ins = equation.name, equation.ins
    is_inverse = name == "pow" and ins[1].bounds.high < 0
    is_inverse |= name == "integer_pow" and equation.eqn.params["y"] < 0
    at = 0 if is_inverse else _NOT_ZERO.get(name)
    if at is not None and ins[at].epsilon == 0 and ins[at].bounds.may_be_zero:
        what = "Division by" if name == "div" else f"{name.capitalize()} of"
        end = "; the gradient of sqrt is infinite there" if name == "sqrt" else ""
        yield {"what": what, "end": end}


_BACKWARD: dict[str, Callable[[Equation], Iterator[Values]]] = {
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
    carry: Var, growth: Growth, loop: Loop, backward: bool
) -> Iterator[Finding]:
    """Finds a carry of a loop that accumulates in half precision by an addition."""
    # In the backward pass carries are gradients of values that all iterations share.
    least, dtype = _LONG_BACKWARD_LOOP if backward else 2, dtype_name(carry)
    is_short = loop.trips is not None and loop.trips < least  # None: a while loop
    if not is_short and growth and is_half(dtype):
        cure = "Keep the carry in float32, and add float32 values."
        cure = _SHARED if backward else cure
        yield _found(growth[0], "half-carry", dtype=dtype, cure=cure)


def full_matmuls(equations: Iterable[Equation]) -> Iterator[Finding]:
    """Finds products in float32 while others are half precision."""
    pairs = [(e, facts.operand_dtypes(e.eqn)) for e in equations if facts.flops(e.eqn)]
    wide = [(e, dtype) for e, dtype in pairs if not facts.is_narrow(dtype)]
    for equation, dtype in wide if len(wide) < len(pairs) else ():
        # A solve, or its derivative, needs the precision.
        if not (stays_float32(equation.eqn) or equation.place().in_linalg):
            yield _found(equation, "full-matmul", dtype=dtype)
