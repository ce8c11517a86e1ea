"""The rules of `precision_report` for single operations.

Each function yields findings about one step, from the facts of its inputs.
docs/precision.md has the table of the rules, with programs and remedies.
"""

import math
import re
from collections.abc import Iterator

from jax.extend.core import Var

from ..._jaxpr import SAME_ENTRIES, Atom, Loop, dtype_name, shape, words
from ..._policy import is_half
from .._source import Place
from .facts import NOTHING, entries_added, is_inner_product, is_lost, rounded, transfer
from .step import Fact, Finding, Form, Severity, Step, is_integer, is_wide

FLOAT16_MAX = 65504
_LONG = 4096
_DISTINCT_INTEGERS = {"float16": 2048, "bfloat16": 256}
_COLLECTIVES = ("psum", "reduce_scatter", "all_reduce", "unreduced_psum")
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
_ANGLES = words("cos sin tan")
_SOLVES = words("cholesky eig eigh lu")
_NOT_ZERO = {"div": 1, "rsqrt": 0, "log": 0, "sqrt": 0}  # positions of operands
_MORE_THAN_LAYERS = 256  # with more steps of `x + f(x)` than that, it is a solver
_LONG_BACKWARD_LOOP = 64


def faults(step: Step) -> Iterator[Finding]:
    """Applies all rules to a step."""
    yield from _half_sum(step)
    yield from _half_collective(step)
    # Transposing creates no square and no exp; a user's backward rule may.
    yield from _half_square(step)
    yield from _half_exp(step)
    if not step.backward:
        yield from _half_constant(step)
        yield from _half_integers(step)
        yield from _half_division(step)
        yield from _round_trip(step)
        yield from _amplified_product(step)


def is_cast_by_user(place: Place) -> bool:
    """Whether the user wrote a cast, in contrast to one inside a library function."""
    if not place.packages <= _CASTERS:
        return False
    calls = [call.rpartition("<locals>.")[2] for call in place.calls]
    named = [call for call in calls if call not in _PASS_ON]
    return bool(named) and (named[-1] in _CASTS or "cast" in named[-1])


def is_narrowed_by_user(step: Step) -> bool:
    """Whether a step is a cast to half precision that the user wrote."""
    return step.narrows and step.ins[0].single is None and is_cast_by_user(step.place())


def _half_sum(step: Step) -> Iterator[Finding]:
    if not is_half(step.result):
        return
    # A product with ones accumulates in float32, like all matrix products.
    comes_back = step.narrows or step.name == "dot_general"
    count = step.ins[0].summed if step.narrows else _summed_in_half(step)
    if count < _LONG:
        yield from _half_rows(step)
        return
    harms = ["overflows at 65,504"] if step.result == "float16" else []
    wrong = count >= FLOAT16_MAX and (harms or not comes_back)
    severity: Severity = "error" if wrong else "warning"
    cure = "sum with dtype=jnp.float32 and keep the result in float32"
    how = "comes back" if comes_back else "accumulates"
    if not comes_back:
        harms.append("drops small terms")
    if step.backward and not comes_back:
        cure = "broadcast the smaller operand in float32, then cast it"
        # A user cannot change this inside a convolution of Flax or Equinox.
        if step.place().library and any(map(_CONVOLUTION.match, step.place().calls)):
            severity = "note"
    harm = " and ".join(harms) or "keeps two digits"
    what = f"a sum of {count:,.0f} entries {how} in {step.result}, which {harm}"
    yield step.finding("half-sum", severity, f"{what}; {cure}")


def _half_rows(step: Step) -> Iterator[Finding]:
    """Finds a table's gradient, whose frequent rows are sums of many cotangents."""
    is_gradient = step.backward and step.name == "scatter-add"
    if not is_gradient or not is_half(step.source):
        return
    windows = step.eqn.params["dimension_numbers"].update_window_dims
    updates = shape(step.eqn.invars[2])
    rows = math.prod(n for axis, n in enumerate(updates) if axis not in windows)
    if rows >= _LONG:
        message = (
            f"the gradient of {rows:,} rows that are looked up is added up in "
            f"{step.result}, where frequent rows lose most of theirs; put autocast "
            "around the loss, or cast the table to float32 before the lookup"
        )
        yield step.finding("half-sum", "warning", message)


def _summed_in_half(step: Step) -> float:
    count = entries_added(step.eqn) if is_half(step.source) else 0
    if step.name != "dot_general":
        return count
    factors = [abs(f.single) for f in step.ins if f.single is not None]
    return count * min(*factors, 1.0) if factors else 0


def _half_collective(step: Step) -> Iterator[Finding]:
    halves = [v for v in step.eqn.invars if is_half(dtype_name(v))]
    if halves and step.name.startswith(_COLLECTIVES):
        dtype = dtype_name(halves[0])
        overflow = " and can overflow" if dtype == "float16" else ""
        cure = "cast to float32 before the collective"
        if step.backward:
            # In shard_map: gradients of parameters that all devices share.
            cure = "make the float32 parameters vary (jax.lax.pcast) before the cast"
        what = f"a sum over devices in {dtype} rounds at each addition{overflow}"
        yield step.finding("half-collective", "warning", f"{what}; {cure}", halves[0])


def _half_square(step: Step) -> Iterator[Finding]:
    if step.result != "float16":
        return
    if step.narrows:
        what, times = "a square comes back", 2
        squared = step.ins[0].squared and step.ins[0].high > FLOAT16_MAX
        # If the user wrote the cast, the mean square may well be in range.
        if not squared or step.backward or is_cast_by_user(step.place()):
            return
    else:
        times = _power_of_one_value(step)
        what = f"a {'square' if times == 2 else f'power of {times}'} is computed"
        if step.source != "float16" or times < 2:
            return
        in_range = step.ins[0].magnitude <= FLOAT16_MAX ** (1 / times)
        if in_range or _is_safe(step.place()):
            return
    largest = math.ceil(65520 ** (1 / times))
    message = (
        f"{what} in float16, which overflows for entries of {largest} and more; cast "
        "to float32 first and keep the result there"
    )
    yield step.finding("half-square", "warning", message)


def _power_of_one_value(step: Step) -> int:
    """Returns the exponent if an operation is a power of one value, else 0."""
    if step.name == "integer_pow":
        return step.eqn.params["y"]
    same = len(step.ins) > 1 and step.ins[0] is step.ins[1]
    # A vector with itself is squared; a Gram matrix is a product.
    inner = step.name == "dot_general" and same and is_inner_product(step.eqn)
    square = inner or step.name == "square" or (step.name == "mul" and same)
    return 2 if square else 0


def _half_exp(step: Step) -> Iterator[Finding]:
    in_half = step.name in _EXPONENTIALS and is_half(step.result)
    if not in_half or _is_safe(step.place()):
        return
    digits = "three" if step.result == "float16" else "two"
    maker = step.ins[0].maker
    shifted = maker is not None and maker.name == "sub"  # perhaps by the maximum
    bounded = shifted or step.ins[0].high <= _LARGEST_EXPONENT
    overflows = step.result == "float16" and step.name in _OVERFLOWING and not bounded
    harm = " and overflows at 65,504" if overflows else ""
    what = f"{step.name} in {step.result} keeps {digits} digits{harm}"
    yield step.finding("half-exp", "warning", f"{what}; cast its argument to float32")


def _is_safe(place: Place) -> bool:
    return any(call.rpartition(".")[2] in _SAFE_FUNCTIONS for call in place.calls)


def _half_constant(step: Step) -> Iterator[Finding]:
    if not is_half(step.result):
        return
    constant = step.ins[0].extreme if step.name == "convert_element_type" else 0.0
    if is_lost(constant, step.result):
        held = rounded(constant, step.result)
        becomes = "0" if held == 0 else "infinite" if held > 0 else "minus infinity"
        what = f"the constant {constant:.6g} becomes {becomes} in {step.result}"
        cure = f"use jnp.finfo({step.result}).min or .max"
        if held == 0:
            cure = "use a constant of at least 1e-4"
    elif step.name == "div" and step.ins[1].single == 0:
        what, cure = f"the divisor is 0 in {step.result}", "use one that it holds"
    else:
        return
    message = f"{what}; {cure}, or compute this in float32"
    yield step.finding("half-constant", "error", message)


def _half_integers(step: Step) -> Iterator[Finding]:
    if not is_half(step.result) or step.name not in ("iota", "convert_element_type"):
        return
    if step.name == "iota":
        (fact,) = transfer(step.eqn, ())
        counts = "linspace" not in step.place().calls  # its points are not integers
    else:
        fact = step.ins[0]
        is_array = is_wide(step.source) and fact.single is None
        counts = is_integer(step.source) or (fact.integral and is_array)
    limit = _DISTINCT_INTEGERS[step.result]
    is_exact = fact.single is not None and rounded(fact.low, step.result) == fact.low
    if not counts or is_exact or not limit < fact.magnitude < math.inf:
        return
    message = (
        f"integers up to {fact.magnitude:,.0f} are cast to {step.result}, which tells "
        f"them apart only up to {limit:,}; keep them integers or compute in float32"
    )
    yield step.finding("half-integers", "error", message)


def _half_division(step: Step) -> Iterator[Finding]:
    is_inverse = step.name == "pow" and step.ins[1].high < 0
    is_inverse |= step.name == "integer_pow" and step.eqn.params["y"] < 0
    at = 0 if is_inverse else _NOT_ZERO.get(step.name)
    if at is None or step.ins[at].epsilon != 0.0 or not step.ins[at].may_be_zero:
        return
    what = "division by" if step.name == "div" else f"{step.name} of"
    infinite = "; the gradient of sqrt is infinite there" if step.name == "sqrt" else ""
    message = (
        f"{what} a value that can be 0, because its epsilon rounds to 0 in half "
        f"precision{infinite}; use an epsilon of at least 1e-4, or float32"
    )
    yield step.finding("half-division", "warning", message, step.eqn.invars[at])


def _round_trip(step: Step) -> Iterator[Finding]:
    if step.name != "convert_element_type" or not is_wide(step.result):
        return
    maker = step.ins[0].maker
    if maker is None or not is_narrowed_by_user(maker):
        return
    # Two casts in different functions are fine: neither knows of the other.
    same = maker.place().function == step.place().function
    if not same or not is_cast_by_user(step.place()):
        return
    message = (
        f"a cast from float32 to {step.source} and back, with nothing between, may be "
        "left out by XLA on a GPU; drop both casts, or round with "
        "jax.lax.reduce_precision"
    )
    yield step.finding("round-trip", "warning", message, step.eqn.invars[0])


def _amplified_product(step: Step) -> Iterator[Finding]:
    """Finds half-precision products whose rounding the next operation amplifies."""
    first, second = (*step.ins, NOTHING, NOTHING)[:2]
    if step.name in ("add", "sub") and first.cancels(second):
        rule = "half-cancellation"
        harm = (
            "a half-precision product is added to squares of its own operands, and "
            "where they cancel, only its rounding is left"
        )
    elif step.name in _ANGLES and first.factors:
        rule = "half-angle"
        harm = f"{step.name} of a half-precision product, which can be radians off"
    elif step.name in _SOLVES and first.rounded:
        rule = "half-solve"
        harm = f"{step.name} enlarges the rounding of a half-precision product"
    else:
        return
    cure = "compute the product in float32 (with autocast: keep_float32)"
    yield step.finding(rule, "warning", f"{harm}; {cure}")


def half_carry(carry: Var, out: Fact, loop: Loop, backward: bool) -> Iterator[Finding]:
    """Finds a carry of a loop that accumulates in half precision.

    It accumulates if each iteration computes `a * carry + b` with a number `a` and a
    `b` that does not depend on the carry. The state of an LSTM does not, because its
    factor is an array. A residual stream `x + f(x)` counts only in a solver.
    """
    # In the backward pass carries are gradients of values that all iterations share.
    least = _LONG_BACKWARD_LOOP if backward else 2
    # A while loop may have many iterations.
    if loop.trips is not None and loop.trips < least:
        return
    form, trips = out.forms.get(carry), loop.trips or 0
    if form is Form.SUM or (form is Form.RESIDUAL and trips >= _MORE_THAN_LAYERS):
        times = f"{trips:,} iterations" if trips else "each iteration"
        cure = "keep the carry in float32 and add float32 values"
        if backward:
            cure = (
                "cast what the iterations share to half precision inside the loop, and "
                "a parameter that is stored so to float32, once outside of it"
            )
        yield from _accumulates(carry, out, "a carry", times, cure)


def half_state(result: Atom, out: Fact) -> Iterator[Finding]:
    """Finds an output next to the loss that accumulates over the steps of training."""
    for argument, form in out.forms.items():
        if form is Form.SUM and shape(argument) == shape(result):
            what = "a state that leaves beside the loss"
            cure = "compute and keep it in float32"
            yield from _accumulates(argument, out, what, "the steps", cure)


def _accumulates(
    carry: Var, out: Fact, what: str, times: str, cure: str
) -> Iterator[Finding]:
    step = out.maker
    while step and (step.name in SAME_ENTRIES or step.name == "neg"):
        step = step.ins[0].maker
    if step is None:
        return
    halves = [v for v in (carry, step.eqn.outvars[0]) if is_half(dtype_name(v))]
    for half in halves[:1]:
        message = (
            f"{what} adds up in {dtype_name(half)} over {times} and loses what is "
            f"small beside it; {cure}"
        )
        yield step.finding("half-carry", "warning", message, half)
