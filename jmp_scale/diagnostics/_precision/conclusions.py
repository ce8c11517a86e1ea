"""The rules that look at a whole program, and the order of what all rules found."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ..._jaxpr import dtype_name, is_literal, shape
from .drafts import Draft, Found
from .facts import is_half, of_atom, rounded
from .matrix_work import flops, is_narrow, is_of_vectors, operand_dtypes
from .program import Line
from .source import Place, line_in, numbers_at, place_of_function, producer
from .walk import Walk

SEVERITIES = ("note", "warning", "error")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def half_parameters(
    gradients: Any, fun: Callable[..., Any], caller: Place
) -> Iterator[Found]:
    """Differentiated arguments in half precision, by the dtypes of the gradients."""
    pairs = jax.tree_util.tree_flatten_with_path(gradients)[0]
    halves = [(jax.tree_util.keystr(path), d) for path, d in pairs if is_half(d)]
    if not halves:
        return
    path, dtype = halves[0]
    count = f"{len(halves)} arrays" if halves[1:] else "an array"
    first = f", {path}" if path else ""
    message = (
        f"the parameters are {dtype} ({count}{first}), so that small updates round to "
        "nothing; keep float32 parameters and cast them inside the loss"
    )
    draft = Draft("half-parameters", "error", message, dtype, ())
    yield Found(draft, place_of_function(fun, caller), "", False, -1)


def half_loss(
    forward: Walk, program: Any, dtype: str, fun: Callable[..., Any], caller: Place
) -> Iterator[Found]:
    """A loss in half precision, at the line of the function that makes it."""
    if not is_half(dtype):
        return
    digits = "three" if dtype == "float16" else "two"
    overflow = " and cannot exceed 65,504" if dtype == "float16" else ""
    message = (
        f"the loss leaves the function in {dtype}, where it keeps {digits} digits"
        f"{overflow}; cast to float32 before the last mean"
    )
    draft = Draft("half-loss", "warning", message, dtype, ())
    eqn, _ = producer(program, 0, caller)
    place = line_in(eqn, fun) or place_of_function(fun, caller)
    orders = [visit.order for visit in forward.visits if visit.eqn is eqn]
    name = "" if eqn is None else eqn.primitive.name
    yield Found(draft, place, name, False, max(orders, default=forward.clock))


def without_cast_of_loss(
    found: list[Found], program: Any, loss_dtype: str, caller: Place
) -> list[Found]:
    """Leaves the cast of the loss itself to `half-loss`, which says more about it."""
    if not is_half(loss_dtype):
        return found
    line = producer(program, 0, caller)[1][:2]
    return [f for f in found if not (f.draft.narrowing and f.place[:2] == line)]


def overflowing_constants(forward: Walk, lines: set[Line]) -> Iterator[Found]:
    """Numbers that were infinite in half precision before they came into the trace."""
    for visit in forward.visits:
        name = visit.eqn.primitive.name
        infinite = [
            atom
            for atom in visit.eqn.invars
            if is_literal(atom)
            and is_half(dtype_name(atom))
            and of_atom(atom).magnitude == math.inf
        ]
        if not infinite or name in _COMPARISONS:
            continue
        dtype, place = dtype_name(infinite[0]), visit.place()
        # JAX does not cast again what it has traced before: then only the source shows
        # the number.
        written = any(math.isinf(rounded(n, dtype)) for n in numbers_at(place))
        if written or place[:2] in lines:
            draft = _infinite_constant(dtype)
            yield Found(draft, place, name, visit.backward, visit.order)


def overflowing_casts(forward: Walk, lines: set[Line]) -> Iterator[Found]:
    """The lines that made a constant infinite before it came into the trace."""
    # The trace says where such a constant is used, not where it was made; and where it
    # is the argument of a nested jaxpr, as of jnp.where, no operation uses it there.
    for dtype in forward.infinite_constants:
        for line in lines - {(None, None)}:
            orders = [v.order for v in forward.visits if v.place()[:2] == line]
            order = min(orders, default=-1)
            yield Found(_infinite_constant(dtype), Place(*line), "", False, order)


def _infinite_constant(dtype: str) -> Draft:
    message = (
        f"a constant becomes infinite in {dtype}; use jnp.finfo({dtype}).min or .max, "
        "or compute this in float32"
    )
    return Draft("half-constant", "error", message, dtype, ())


def full_matmuls(backward: Walk) -> Iterator[Found]:
    """Matrix products in float32, if there are others in half precision."""
    products = [visit for visit in backward.visits if flops(visit.eqn)]
    if not any(is_narrow(visit.eqn) for visit in products):
        return
    for visit in products:
        eqn = visit.eqn
        if is_narrow(eqn) or is_of_vectors(eqn):
            continue
        dtypes = " x ".join(operand_dtypes(eqn))
        message = (
            f"a matrix product runs in {dtypes} while others are half precision; cast "
            "both operands if its time matters"
        )
        draft = Draft("full-matmul", "note", message, "float32", shape(eqn.outvars[0]))
        name = eqn.primitive.name
        yield Found(draft, visit.place(), name, visit.backward, visit.order)


def without_safe_roots(found: list[Found]) -> list[Found]:
    """Drops a root whose epsilon is lost where something divides by it elsewhere."""
    roots: dict[int, set[Any]] = {}
    divisions: dict[int, set[Any]] = {}
    for f in found:
        if f.draft.rule == "half-division":
            kind = roots if f.primitive == "sqrt" else divisions
            kind.setdefault(f.cause, set()).add(f.place[:2])

    def says_nothing_new(f: Found) -> bool:
        at_root = f.place[:2] in roots.get(f.cause, ())
        elsewhere = divisions.get(f.cause, set()) - roots.get(f.cause, set())
        return f.draft.rule == "half-division" and at_root and bool(elsewhere)

    return [f for f in found if not says_nothing_new(f)]


def without_repetitions(found: list[Found], forward: Walk) -> list[Found]:
    """Drops what a derivative rule repeats of the function that it is the rule of."""
    ruled = forward.ruled
    return [f for f in found if f.draft.rule not in ruled.get(f.place[:2], ())]


def in_order(found: list[Found], forward: Walk) -> list[Found]:
    """One finding for each line and rule, in the order of the forward pass."""
    groups: dict[Any, list[Found]] = {}
    for f in found:
        groups.setdefault((*f.place[:2], f.draft.rule), []).append(f)
    merged = [_merged(group) for group in groups.values()]
    if any(f.backward for f in merged):
        orders: dict[Line, int] = {}
        for visit in forward.visits:
            orders.setdefault(visit.place()[:2], visit.order)
        merged = [
            f._replace(order=orders.get(f.place[:2], forward.clock))
            if f.backward
            else f
            for f in merged
        ]
    return sorted(merged, key=lambda f: f.order)


def _merged(group: list[Found]) -> Found:
    worst = max(group, key=lambda f: SEVERITIES.index(f.draft.severity))
    backward = all(f.backward for f in group)
    order = min(f.order for f in group if f.backward == backward)
    return worst._replace(backward=backward, order=order)
