"""The rules of `precision_report` for single operations.

Each function yields findings about one equation, from the facts of its inputs.
docs/precision.md has the table of the rules, with programs and remedies.
"""

import math
import re
from collections.abc import Iterator

from jax.extend.core import Var

from ..._jaxpr import SAME_ENTRIES, Loop, dtype_name, is_literal, size, words
from ..._policy import is_half
from .._source import Place
from .equation import Equation, Fact, Finding, Severity
from .facts import entries_added, is_inner_product, is_lost, rounded

FLOAT16_MAX = 65504
_LONG = 4096
_EXPONENTIALS = words("exp exp2 expm1 log log1p pow cumlogsumexp")
_OVERFLOWING = words("exp exp2 expm1 pow")
_LARGEST_EXPONENT = 11
_CONVOLUTION = re.compile(r"_?conv(?!ert)", re.IGNORECASE)

# Functions of jax.nn that handle large arguments themselves.
_SAFE_FUNCTIONS = words(
    "celu elu gelu hard_silu hard_swish log_sigmoid mish relu selu sigmoid silu "
    "soft_sign softplus sparse_plus squareplus swish"
)
_CASTS = words("array asarray astype _astype convert_element_type _ScalarMeta.__call__")
# Frames between a user's call and a method of an array, or a tree map.
_PASS_ON = words("meth <genexpr> tree_map map")
_CASTERS = words("jax jmp jmp_scale optax")
_NOT_ZERO = {"div": 1, "rsqrt": 0, "log": 0, "sqrt": 0}  # positions of operands
_LONG_BACKWARD_LOOP = 64
_ADDITIONS = ("add", "add_any", "sub")
_SLICE_GRADIENTS = words("dynamic_update_slice pad scatter scatter-add")


def faults(equation: Equation) -> Iterator[Finding]:
    """Applies all rules to an equation."""
    yield from _half_sum(equation)
    # Transposing creates no square and no exp; a user's backward rule may.
    yield from _half_square(equation)
    yield from _half_exp(equation)
    if not equation.backward:
        yield from _half_constant(equation)
        yield from _half_division(equation)


def _half_sum(equation: Equation) -> Iterator[Finding]:
    if not is_half(equation.result):
        return
    # A product with ones accumulates in float32, like all matrix products.
    comes_back = equation.narrows or equation.name == "dot_general"
    count = equation.ins[0].summed if equation.narrows else _summed_in_half(equation)
    if count < _LONG:
        return
    harms = ["overflows at 65,504"] if equation.result == "float16" else []
    wrong = count >= FLOAT16_MAX and (harms or not comes_back)
    severity: Severity = "error" if wrong else "warning"
    cure = "sum with dtype=jnp.float32 and keep the result in float32"
    how = "comes back" if comes_back else "accumulates"
    if not comes_back:
        harms.append("drops small terms")
    if equation.backward and not comes_back:
        cure = "broadcast the smaller operand in float32, then cast it"
        # A user cannot change this inside a convolution of Flax or Equinox.
        place = equation.place()
        if place.library and any(map(_CONVOLUTION.match, place.calls)):
            severity = "note"
    harm = " and ".join(harms) or "keeps two digits"
    what = f"a sum of {count:,.0f} entries {how} in {equation.result}, which {harm}"
    yield equation.finding("half-sum", severity, f"{what}; {cure}")


def _summed_in_half(equation: Equation) -> float:
    count = entries_added(equation.eqn) if is_half(equation.source) else 0
    if equation.name != "dot_general":
        return count
    factors = [abs(f.single) for f in equation.ins if f.single is not None]
    return count * min(*factors, 1.0) if factors else 0


def _half_square(equation: Equation) -> Iterator[Finding]:
    if equation.result != "float16":
        return
    if equation.narrows:
        what, times = "a square comes back", 2
        squared = equation.ins[0].squared and equation.ins[0].high > FLOAT16_MAX
        # If the user wrote the cast, the mean square may well be in range.
        if not squared or equation.backward or _is_cast_by_user(equation.place()):
            return
    else:
        times = _power_of_one_value(equation)
        what = f"a {'square' if times == 2 else f'power of {times}'} is computed"
        if equation.source != "float16" or times < 2:
            return
        in_range = equation.ins[0].magnitude <= FLOAT16_MAX ** (1 / times)
        if in_range or _is_safe(equation.place()):
            return
    largest = math.ceil(65520 ** (1 / times))
    message = (
        f"{what} in float16, which overflows for entries of {largest} and more; cast "
        "to float32 first and keep the result there"
    )
    yield equation.finding("half-square", "warning", message)


def _is_cast_by_user(place: Place) -> bool:
    """Whether the user wrote a cast, in contrast to one inside a library function."""
    if not place.packages <= _CASTERS:
        return False
    calls = [call.rpartition("<locals>.")[2] for call in place.calls]
    named = [call for call in calls if call not in _PASS_ON]
    return bool(named) and (named[-1] in _CASTS or "cast" in named[-1])


def _power_of_one_value(equation: Equation) -> int:
    """Returns the exponent if an operation is a power of one value, else 0."""
    if equation.name == "integer_pow":
        return equation.eqn.params["y"]
    same = len(equation.ins) > 1 and equation.ins[0] is equation.ins[1]
    # A vector with itself is squared; a Gram matrix is a product.
    inner = equation.name == "dot_general" and same and is_inner_product(equation.eqn)
    square = inner or equation.name == "square" or (equation.name == "mul" and same)
    return 2 if square else 0


def _half_exp(equation: Equation) -> Iterator[Finding]:
    in_half = equation.name in _EXPONENTIALS and is_half(equation.result)
    if not in_half or _is_safe(equation.place()):
        return
    digits = "three" if equation.result == "float16" else "two"
    maker = equation.ins[0].maker
    shifted = maker is not None and maker.name == "sub"  # perhaps by the maximum
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
    if not is_half(equation.result):
        return
    constant = (
        equation.ins[0].extreme if equation.name == "convert_element_type" else 0.0
    )
    if is_lost(constant, equation.result):
        held = rounded(constant, equation.result)
        becomes = "0" if held == 0 else "infinite" if held > 0 else "minus infinity"
        what = f"the constant {constant:.6g} becomes {becomes} in {equation.result}"
        cure = f"use jnp.finfo({equation.result}).min or .max"
        if held == 0:
            cure = "use a constant of at least 1e-4"
    elif equation.name == "div" and equation.ins[1].single == 0:
        what, cure = f"the divisor is 0 in {equation.result}", "use one that it holds"
    else:
        return
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
    carry: Var, start: Fact, out: Fact, loop: Loop, backward: bool
) -> Iterator[Finding]:
    """Finds a carry of a loop that accumulates in half precision.

    It accumulates if each iteration computes `a * carry + b` with a number `a` and a
    `b` that does not depend on the carry. The state of an LSTM does not, because its
    factor is an array, nor does a residual stream `x + f(x)`.

    `start` and `out` are the facts of the carry before and after an iteration.
    """
    # In the backward pass carries are gradients of values that all iterations share.
    least = _LONG_BACKWARD_LOOP if backward else 2
    is_short = loop.trips is not None and loop.trips < least  # None: a while loop
    if is_short or not is_half(dtype_name(carry)):
        return
    equation = _last_addition(carry, start, out)
    if equation is None:
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
    yield equation.finding("half-carry", "warning", message, carry)


def _last_addition(carry: Var, start: Fact, out: Fact) -> Equation | None:
    """Returns the last addition to a carry; None if more is done to it than that."""
    last, fact = None, out
    while fact is not start:
        equation = fact.maker
        if equation is None:
            return None
        inputs = [f for f in equation.ins if carry in f.carries]
        if len(inputs) != 1 or not _adds_or_scales(equation, inputs[0]):
            return None
        if equation.name in _ADDITIONS:
            last = last or equation
        (fact,) = inputs
    return last


def _adds_or_scales(equation: Equation, fact: Fact) -> bool:
    """Whether an operation adds to an input, moves it, or takes it times a number."""
    if equation.name in SAME_ENTRIES or equation.name == "neg":
        return True
    pairs = zip(equation.eqn.invars, equation.ins, strict=True)
    others = [(v, f) for v, f in pairs if f is not fact]
    if equation.name in _ADDITIONS:
        # A gradient of `x[i]` is added to other elements each time.
        makers = [f.maker.name for _, f in others if f.maker]
        return _SLICE_GRADIENTS.isdisjoint(makers)
    # A decay rate is one number, whereas a gate has the size of the state.
    is_array = size(equation.eqn.outvars[0]) > 1
    numbers = [is_literal(v) or (size(v) == 1 and is_array) for v, _ in others]
    return equation.name == "mul" and all(numbers)
