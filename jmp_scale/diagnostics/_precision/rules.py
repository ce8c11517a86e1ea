"""The rules of `precision_report` that a single operation can break.

Each rule looks at one equation of the traced program and at what is known about its
inputs, and yields a draft for each fault. The table of the rules, with programs and
cures, is docs/precision.md.
"""

import math
from collections.abc import Iterator

from ..._jaxpr import dtype_name, shape, words
from .drafts import Draft, Step
from .facts import Fact, is_half, is_integer, is_wide, power, rounded
from .source import Place
from .sums import half_collective, half_sum

FLOAT16_MAX = 65504
_DISTINCT_INTEGERS = {"float16": 2048, "bfloat16": 256}
_EXPONENTIALS = words("exp exp2 expm1 log log1p pow cumlogsumexp")
_OVERFLOWING = words("exp exp2 expm1 pow")

# Functions of jax.nn that handle the range of their argument themselves.
_SAFE_FUNCTIONS = words(
    "celu elu gelu hard_silu hard_swish log_sigmoid mish relu selu sigmoid silu "
    "soft_sign softplus sparse_plus squareplus swish"
)
_CASTS = words("array asarray astype _astype convert_element_type _ScalarMeta.__call__")
# The methods of an array, and tree maps, are called through these.
_PASS_ON = words("meth <genexpr> tree_map map")
_CASTERS = words("jax jmp jmp_scale optax")


def faults(step: Step) -> Iterator[Draft]:
    """All rules that an equation breaks."""
    yield from half_sum(step)
    yield from half_collective(step)
    # Transposing makes no square and no exp: there they are of a user's backward rule.
    yield from _half_square(step)
    yield from _half_exp(step)
    if step.mechanical:
        return
    yield from _half_constant(step)
    yield from _half_integers(step)
    yield from _half_division(step)
    yield from _round_trip(step)


def is_cast_by_user(place: Place) -> bool:
    """Whether a conversion is one that the user wrote, not one inside a function."""
    if not place.packages <= _CASTERS:
        return False
    calls = [call.rpartition("<locals>.")[2] for call in place.calls]
    while calls and calls[-1] in _PASS_ON:
        calls.pop()
    return bool(calls) and (calls[-1] in _CASTS or "cast" in calls[-1])


def is_narrowed_by_user(step: Step) -> bool:
    """Whether an equation is a cast to half precision that the user wrote."""
    return (
        step.name == "convert_element_type"
        and is_wide(step.source)
        and is_half(step.result)
        and not step.ins[0].only
        and is_cast_by_user(step.place())
    )


def lost_constants(fact: Fact, dtype: str) -> list[float]:
    """The constants among the entries of an array that a half dtype does not hold."""
    return sorted(value for value in fact.values if _is_lost(value, dtype))


def _is_lost(value: float, dtype: str) -> bool:
    if value == 0 or not math.isfinite(value):
        return False
    held = rounded(value, dtype)
    return held == 0 or not math.isfinite(held)


def _half_constant(step: Step) -> Iterator[Draft]:
    if not is_half(step.result):
        return
    if step.name == "convert_element_type":
        lost = lost_constants(step.ins[0], step.result)
        if lost:
            yield _lost(step, lost[0])
    elif step.name in ("add", "sub", "mul", "div"):
        for i, fact in enumerate(step.ins):
            if fact.literal and (math.isinf(fact.high) or math.isinf(fact.low)):
                yield _already_lost(step, "infinite")
            elif fact.literal and fact.high == 0 and step.name == "div" and i == 1:
                yield _already_lost(step, "0")


def _lost(step: Step, value: float) -> Draft:
    held = rounded(value, step.result)
    becomes = "0" if held == 0 else "infinite" if held > 0 else "minus infinity"
    cure = f"use jnp.finfo({step.result}).min or .max, or compute this in float32"
    if held == 0:
        cure = "use a constant of at least 1e-6, or compute this in float32"
    message = f"the constant {value:.6g} becomes {becomes} in {step.result}; {cure}"
    return step.draft("half-constant", "error", message)


def _already_lost(step: Step, state: str) -> Draft:
    message = (
        f"the constant here is {state} in {step.result}; use one that {step.result} "
        "holds, or compute this in float32"
    )
    return step.draft("half-constant", "error", message)


def _half_integers(step: Step) -> Iterator[Draft]:
    if not is_half(step.result):
        return
    if step.name == "iota":
        if "linspace" in step.place().calls:
            return  # its points are no integers, and as exact as half precision is
        fact = step.out
    elif step.name == "convert_element_type":
        fact = step.ins[0]
        # A float32 mask of 0 and -10,000 holds whole numbers, but counts nothing.
        counts = is_wide(step.source) and fact.integral and not fact.only
        if not (is_integer(step.source) or counts):
            return
    else:
        return
    limit = _DISTINCT_INTEGERS[step.result]
    exact = fact.only and all(rounded(v, step.result) == v for v in fact.values)
    if exact or not limit < fact.magnitude < math.inf:
        return
    if lost_constants(fact, step.result):
        return  # reported by half-constant
    message = (
        f"integers up to {fact.magnitude:,.0f} are cast to {step.result}, which tells "
        f"them apart only up to {limit:,}; keep them integers or compute in float32"
    )
    yield step.draft("half-integers", "error", message)


def _half_square(step: Step) -> Iterator[Draft]:
    if step.result != "float16":
        return
    if step.name == "convert_element_type":
        fact = step.ins[0]
        squared = is_wide(step.source) and fact.squared and fact.high > FLOAT16_MAX
        # A cast of the user's own is of a mean square that may well be in range.
        if squared and not is_cast_by_user(step.place()):
            yield _overflowing(step, "a square comes back in", 256, narrowing=True)
        return
    times = _power_of_one_value(step)
    if step.source != "float16" or times < 2:
        return
    result = power(step.ins[0].magnitude, times)
    if result > FLOAT16_MAX and not _is_safe(step.place()):
        what = "a square is" if times == 2 else f"a power of {times} is"
        largest = math.ceil(65520 ** (1 / times))
        yield _overflowing(step, f"{what} computed in", largest)


def _power_of_one_value(step: Step) -> int:
    """How often an operation multiplies a value by itself; 0 if it does not."""
    match step.name:
        case "square":
            return 2
        case "integer_pow":
            return step.eqn.params["y"]
        case "mul" if step.same:
            return 2
        case "dot_general" if step.same:
            # An inner product of a vector with itself; a Gram matrix is a product.
            (contracted, _), (batch, _) = step.eqn.params["dimension_numbers"]
            rank = len(shape(step.eqn.invars[0]))
            return 2 if len(contracted) + len(batch) == rank else 0
    return 0


def _overflowing(step: Step, what: str, largest: int, narrowing: bool = False) -> Draft:
    message = (
        f"{what} float16, which overflows for entries of {largest} and more; cast to "
        "float32 first and keep the result there"
    )
    return step.draft("half-square", "warning", message, narrowing)


def _half_exp(step: Step) -> Iterator[Draft]:
    if step.name not in _EXPONENTIALS or not is_half(step.result):
        return
    if _is_safe(step.place()):
        return
    digits = "three" if step.result == "float16" else "two"
    overflows = step.result == "float16" and step.name in _OVERFLOWING
    harm = " and overflows at 65,504" if overflows else ""
    message = (
        f"{step.name} in {step.result} keeps {digits} digits{harm}; "
        "cast its argument to float32"
    )
    yield step.draft("half-exp", "warning", message)


def _is_safe(place: Place) -> bool:
    return any(call.rpartition(".")[2] in _SAFE_FUNCTIONS for call in place.calls)


def _half_division(step: Step) -> Iterator[Draft]:
    at = _inverted(step)
    if at is None or step.ins[at].guard != 0.0 or not step.ins[at].may_be_zero:
        return
    what = {
        "div": "this divides by",
        "log": "this takes the log of",
        "sqrt": "this takes the root, whose gradient is infinite at 0, of",
    }.get(step.name, "this inverts")
    message = (
        f"{what} a value whose epsilon half precision has lost, so that it may be 0; "
        "use an epsilon of at least 1e-6, or compute this in float32"
    )
    atom = step.eqn.invars[at]
    yield Draft("half-division", "warning", message, dtype_name(atom), shape(atom))


def _inverted(step: Step) -> int | None:
    """Position of the input that must not be 0; None if every input may be."""
    match step.name:
        case "div":
            return 1
        case "rsqrt" | "log":
            return 0
        case "sqrt" if step.ins[0].guarded_at != 0:
            return 0  # the root of relu(x) is meant to start at 0
        case "pow" if step.ins[1].high < 0:
            return 0
        case "integer_pow" if step.eqn.params["y"] < 0:
            return 0
    return None


def _round_trip(step: Step) -> Iterator[Draft]:
    if step.name != "convert_element_type" or not step.ins[0].narrowed:
        return
    if is_half(step.source) and is_wide(step.result) and is_cast_by_user(step.place()):
        # A function that returns half precision does not know what comes after it, and
        # its caller not what came before.
        if step.ins[0].narrowed != step.place().function:
            return
        message = (
            f"a cast from float32 to {step.source} and back, with nothing between, may "
            "be left out by XLA on a GPU; drop both casts, or round with "
            "jax.lax.reduce_precision"
        )
        atom = step.eqn.invars[0]
        yield Draft("round-trip", "warning", message, step.source, shape(atom))
