"""The rules for what adds up: sums and collectives in half precision."""

import math
from collections.abc import Iterator
from typing import Any

from ..._jaxpr import dtype_name, open_jaxpr, shape, size, subjaxprs
from .drafts import Draft, Severity, Step
from .facts import is_half, is_wide

_LONG, _ENDLESS = 4096, 65504
_COLLECTIVES = ("psum", "reduce_scatter", "all_reduce", "unreduced_psum")


def half_sum(step: Step) -> Iterator[Draft]:
    """Sums that accumulate in half precision, or come back in it."""
    if not is_half(step.result):
        return
    if step.name == "convert_element_type" and is_wide(step.source):
        if step.ins[0].summed >= _LONG:
            yield _cast_back(step, step.ins[0].summed)
    elif step.name == "dot_general":
        # A product with ones adds up in float32, as all matrix products do.
        count = _summed_by_ones(step) if is_half(step.source) else 0
        if count >= _LONG:
            yield _cast_back(step, count)
    elif is_half(step.source):
        count = _entries_added(step.eqn)
        if count >= _LONG:
            yield _accumulated(step, count)


def half_collective(step: Step) -> Iterator[Draft]:
    """Sums and means over devices in half precision."""
    halves = [v for v in step.eqn.invars if is_half(dtype_name(v))]
    if not halves or not step.name.startswith(_COLLECTIVES):
        return
    dtype = dtype_name(halves[0])
    overflow = " and can overflow" if dtype == "float16" else ""
    cure = "cast to float32 before the collective"
    if step.mechanical:
        # The gradients of parameters that all devices share, in shard_map.
        cure = "make the float32 parameters vary (jax.lax.pcast) before the cast"
    message = f"a sum over devices in {dtype} rounds at each addition{overflow}; {cure}"
    yield Draft("half-collective", "warning", message, dtype, shape(halves[0]))


def _cast_back(step: Step, count: int) -> Draft:
    overflows = step.result == "float16"
    severity: Severity = "error" if count >= _ENDLESS and overflows else "warning"
    harm = "overflows at 65,504" if overflows else "keeps two digits"
    message = (
        f"a sum of {count:,} entries comes back in {step.result}, which {harm}; "
        "sum with dtype=jnp.float32 and keep the result in float32"
    )
    return step.draft("half-sum", severity, message, narrowing=True)


def _accumulated(step: Step, count: int) -> Draft:
    severity: Severity = "error" if count >= _ENDLESS else "warning"
    harm = "overflows at 65,504 and " if step.result == "float16" else ""
    cure = "sum with dtype=jnp.float32 and keep the result in float32"
    if step.mechanical:
        cure = "broadcast the smaller operand in float32, then cast it"
    message = (
        f"a sum of {count:,} entries accumulates in {step.result}, which {harm}drops "
        f"small terms; {cure}"
    )
    return step.draft("half-sum", severity, message)


def _entries_added(eqn: Any) -> int:
    """How many entries an equation adds into one, in the dtype of its operands."""
    match eqn.primitive.name:
        case "cumsum":
            return shape(eqn.invars[0])[eqn.params["axis"]]
        case "reduce_window_sum":
            return math.prod(eqn.params["window_dimensions"])
        case "reduce_window" if _adds(eqn):
            return math.prod(eqn.params["window_dimensions"])
        case "reduce_sum":
            return size(eqn.invars[0]) // max(size(eqn.outvars[0]), 1)
        case "reduce" if _adds(eqn):
            return size(eqn.invars[0]) // max(size(eqn.outvars[0]), 1)
        case "scatter-add":
            # Some cell receives at least this many of the updates.
            return size(eqn.invars[2]) // max(size(eqn.invars[0]), 1)
    return 0


def _adds(eqn: Any) -> bool:
    eqns = [e for body in subjaxprs(eqn) for e in open_jaxpr(body)[0].eqns]
    return [e.primitive.name for e in eqns] == ["add"]


def _summed_by_ones(step: Step) -> int:
    for fact in step.ins:
        if fact.only and len(fact.values) == 1:
            (contracted, _), _ = step.eqn.params["dimension_numbers"]
            length = math.prod(shape(step.eqn.invars[0])[axis] for axis in contracted)
            return int(length * min(abs(next(iter(fact.values))), 1.0))
    return 0
