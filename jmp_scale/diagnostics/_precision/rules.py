"""The rules of `precision_report` for single operations.

Each function yields findings about one equation, from the facts of its inputs.
docs/precision.md has the table of the rules, with programs and remedies.
"""

import math
from collections.abc import Iterator

from jax.extend.core import Var

from ..._jaxpr import Loop, dtype_name, words
from ..._policy import is_half
from .._source import Place
from .equation import Equation, Finding, Severity, is_integer
from .facts import entries_added, is_lost, rounded, transfer

FLOAT16_MAX = 65504
_LONG = 4096
_DISTINCT_INTEGERS = {"float16": 2048, "bfloat16": 256}
_UNKNOWN_EXTENT = 2**31 - 1  # of int32 and wider
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


def faults(equation: Equation) -> Iterator[Finding]:
    """Applies all rules to an equation."""
    yield from _half_sum(equation)
    yield from _half_collective(equation)
    # Transposing creates no square and no exp; a user's backward rule may.
    yield from _half_square(equation)
    yield from _half_exp(equation)
    if not equation.backward:
        yield from _half_constant(equation)
        yield from _half_integers(equation)
        yield from _half_division(equation)


def _half_sum(equation: Equation) -> Iterator[Finding]:
    if not is_half(equation.result):
        return
    comes_back = equation.narrows
    count = equation.ins[0].summed if comes_back else 0
    if is_half(equation.source):
        count = entries_added(equation.eqn)
    # A gradient that is summed in float32 and rounded once is right.
    if count < _LONG or (comes_back and equation.backward):
        return
    harms = ["overflows at 65,504"] if equation.result == "float16" else []
    wrong = count >= FLOAT16_MAX and (harms or not comes_back)
    severity: Severity = "error" if wrong else "warning"
    cure = "sum with dtype=jnp.float32 and keep the result in float32"
    how = "comes back" if comes_back else "accumulates"
    if not comes_back:
        harms.append("drops small terms")
    if equation.backward:
        cure = "broadcast the smaller operand in float32, then cast it"
        if equation.place().library:  # whose code a user cannot change
            severity = "note"
    harm = " and ".join(harms) or "keeps two digits"
    what = f"a sum of {count:,.0f} entries {how} in {equation.result}, which {harm}"
    yield equation.finding("half-sum", severity, f"{what}; {cure}")


def _half_collective(equation: Equation) -> Iterator[Finding]:
    halves = [v for v in equation.eqn.invars if is_half(dtype_name(v))]
    if not halves or not equation.name.startswith(_COLLECTIVES):
        return
    message = (
        f"a sum over devices in {dtype_name(halves[0])} rounds at each addition; cast "
        "to float32 before the collective, or use sum_gradients"
    )
    yield equation.finding("half-collective", "warning", message, halves[0])


def _half_integers(equation: Equation) -> Iterator[Finding]:
    if equation.name not in ("iota", "convert_element_type"):
        return
    (fact,) = equation.ins or transfer(equation)
    limit = _DISTINCT_INTEGERS.get(equation.result, math.inf)
    if fact.single is not None or not limit < fact.magnitude < _UNKNOWN_EXTENT:
        return
    # The points of linspace are not integers.
    counts = fact.maker == "iota" and "linspace" not in equation.place().calls
    if not counts and not is_integer(equation.source):
        return
    message = (
        f"integers up to {fact.magnitude:,.0f} are cast to {equation.result}, which "
        f"tells them apart only up to {limit:,}; keep them integers or compute in "
        "float32"
    )
    yield equation.finding("half-integers", "error", message)


def _half_square(equation: Equation) -> Iterator[Finding]:
    exponent = _exponent(equation) if equation.result == "float16" else 0
    if exponent < 1 or equation.ins[0].magnitude <= FLOAT16_MAX ** (1 / exponent):
        return
    if _is_safe(equation.place()):
        return
    what = {1: "variance", 2: "square"}.get(exponent, f"power of {exponent}")
    largest = math.ceil(65520 ** (1 / max(exponent, 2)))
    message = (
        f"a {what} is computed in float16, which overflows for entries of {largest} "
        "and more; cast to float32 first and keep the result there"
    )
    yield equation.finding("half-square", "warning", message)


def _exponent(equation: Equation) -> int:
    """Returns the exponent of a power of one value; 1 for a variance, else 0."""
    if equation.narrows:  # `jnp.var` divides a float32 sum of squares
        divides = equation.ins[0].maker == "div" and not equation.backward
        return int(divides and "_var" in equation.place().calls)
    if equation.name == "integer_pow":
        return equation.eqn.params["y"]
    same = equation.name == "mul" and equation.ins[0] is equation.ins[1]
    return 2 if same or equation.name == "square" else 0


def _half_exp(equation: Equation) -> Iterator[Finding]:
    in_half = equation.name in _EXPONENTIALS and is_half(equation.result)
    if not in_half or _is_safe(equation.place()):
        return
    digits = "three" if equation.result == "float16" else "two"
    shifted = equation.ins[0].maker == "sub"  # perhaps by the maximum
    bounded = shifted or equation.ins[0].high <= _LARGEST_EXPONENT
    overflows = (
        equation.result == "float16" and equation.name in _OVERFLOWING and not bounded
    )
    harm = " and overflows at 65,504" if overflows else ""
    what = f"{equation.name} in {equation.result} keeps {digits} digits{harm}"
    yield equation.finding(
        "half-exp", "warning", f"{what}; cast its argument to float32"
    )


def _is_safe(place: Place) -> bool:
    return any(call.rpartition(".")[2] in _SAFE_FUNCTIONS for call in place.calls)


def _half_constant(equation: Equation) -> Iterator[Finding]:
    if equation.name != "convert_element_type" or not is_half(equation.result):
        return
    constant = equation.ins[0].extreme
    if not is_lost(constant, equation.result):
        return
    held = rounded(constant, equation.result)
    becomes = "0" if held == 0 else "infinite" if held > 0 else "minus infinity"
    what = f"the constant {constant:.6g} becomes {becomes} in {equation.result}"
    cure = f"use jnp.finfo({equation.result}).min or .max"
    if held == 0:
        cure = "use a constant of at least 1e-4"
    message = f"{what}; {cure}, or compute this in float32"
    yield equation.finding("half-constant", "error", message)


def _half_division(equation: Equation) -> Iterator[Finding]:
    is_inverse = equation.name == "pow" and equation.ins[1].high < 0
    is_inverse |= equation.name == "integer_pow" and equation.eqn.params["y"] < 0
    at = 0 if is_inverse else _NOT_ZERO.get(equation.name)
    if (
        at is None
        or equation.ins[at].epsilon != 0.0
        or not equation.ins[at].may_be_zero
    ):
        return
    what = "division by" if equation.name == "div" else f"{equation.name} of"
    infinite = (
        "; the gradient of sqrt is infinite there" if equation.name == "sqrt" else ""
    )
    message = (
        f"{what} a value that can be 0, because its epsilon rounds to 0 in half "
        f"precision{infinite}; use an epsilon of at least 1e-4, or float32"
    )
    yield equation.finding("half-division", "warning", message, equation.eqn.invars[at])


def half_carry(
    carry: Var, addition: Equation | None, loop: Loop, backward: bool
) -> Iterator[Finding]:
    """Finds a carry of a loop that accumulates in half precision by an addition.

    The state of an LSTM does not accumulate, because its factor is an array, nor does a
    residual stream `x + f(x)`.
    """
    # In the backward pass carries are gradients of values that all iterations share.
    least = _LONG_BACKWARD_LOOP if backward else 2
    is_short = loop.trips is not None and loop.trips < least  # None: a while loop
    if is_short or addition is None or not is_half(dtype_name(carry)):
        return
    times = f"{loop.trips:,} iterations" if loop.trips else "each iteration"
    cure = "keep the carry in float32 and add float32 values"
    if backward:
        cure = (
            "cast what the iterations share to half precision inside the loop, and a "
            "parameter that is stored so to float32, once outside of it"
        )
    message = (
        f"a carry adds up in {dtype_name(carry)} over {times} and loses what is small "
        f"beside it; {cure}"
    )
    yield addition.finding("half-carry", "warning", message, carry)
