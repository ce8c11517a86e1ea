"""Finds the carries of a loop that accumulate: running sums and moving averages.

A carry accumulates if each iteration computes `a * carry + b` with a number `a` and a
`b` that does not depend on the carry. The state of an LSTM does not accumulate, because
its factor is an array. A residual stream `x + f(x)` counts only in a solver of very
many steps.
"""

import enum
from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from ... import _jaxpr
from ..._jaxpr import Atom, Loop, dtype_name, fits, shape, size
from ..._policy import is_half
from .facts import Fact

_LINEAR_IN_FIRST = _jaxpr.SAME_ENTRIES | {"neg"}
_SLICE_GRADIENTS = _jaxpr.words("dynamic_update_slice pad scatter scatter-add")
_MORE_THAN_LAYERS = 256
_LONG_BACKWARD_LOOP = 64

# A message, the variable that accumulates in half precision, the equation that adds.
Accumulation = tuple[str, Var, JaxprEqn]


class _Form(enum.IntEnum):
    """How a value in an iteration depends on a carry."""

    CONSTANT = 0  # not at all
    CARRY = 1  # the carry, perhaps times a number
    SUM = 2  # that, plus a value that does not depend on the carry
    OTHER = 3


def half_carries(loop: Loop, backward: bool) -> Iterator[Accumulation]:
    """Finds the carries of a loop that accumulate in half precision."""
    # In the backward pass carries are gradients of values that all iterations share.
    least = _LONG_BACKWARD_LOOP if backward else 2
    # A while loop may have many iterations.
    if loop.trips is not None and loop.trips < least:
        return
    times = "each iteration" if loop.trips is None else f"{loop.trips:,} iterations"
    cure = "keep the carry in float32 and add float32 values"
    if backward:
        cure = (
            "cast what the iterations share to half precision inside the loop, and a "
            "parameter that is stored so to float32, once outside of it"
        )
    inner, _ = _jaxpr.open_jaxpr(loop.body)
    # With more steps of `x + f(x)` than a network has layers, it is a solver.
    solver = (loop.trips or 0) >= _MORE_THAN_LAYERS
    for i, variable in enumerate(loop.carries):
        for half, eqn in _accumulating(inner, variable, [i], solver):
            yield _message("a carry", half, times, cure), half, eqn


def half_states(program: ClosedJaxpr) -> Iterator[Accumulation]:
    """Finds outputs next to the loss that accumulate over the steps of training."""
    inner, _ = _jaxpr.open_jaxpr(program)
    what, cure = "a state that leaves beside the loss", "compute and keep it in float32"
    for argument in inner.invars:
        outputs = enumerate(inner.outvars)
        alike = [i for i, v in outputs if i and shape(v) == shape(argument)]
        floating = dtype_name(argument).startswith(("float", "bfloat"))
        for half, eqn in _accumulating(inner, argument, alike if floating else []):
            yield _message(what, half, "the steps", cure), half, eqn


def _message(what: str, half: Var, times: str, cure: str) -> str:
    adds = f"{what} adds up in {dtype_name(half)} over {times}"
    return f"{adds} and loses what is small beside it; {cure}"


def counted(loop: Loop, index: int, start: Fact) -> Fact | None:
    """Returns the fact of a loop counter in all iterations; None for other carries."""
    inner, _ = _jaxpr.open_jaxpr(loop.body)
    variable, result = loop.carries[index], inner.outvars[index]
    if loop.trips is None or start.single is None or not start.integral:
        return None
    for eqn in inner.eqns:
        if eqn.primitive.name == "add" and eqn.outvars[0] is result:
            this, other = eqn.invars
            if this is variable and _jaxpr.is_literal(other):
                last = start.single + float(other.val) * max(loop.trips - 1, 0)
                low, high = sorted((start.single, last))
                return Fact(low, high, integral=last.is_integer())
    return None


def _accumulating(
    jaxpr: Jaxpr, variable: Var, outputs: list[int], solver: bool = False
) -> Iterator[tuple[Var, JaxprEqn]]:
    """Yields half-precision sums with a variable among the outputs, and additions."""
    made_by = {id(v): eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    forms = _forms(jaxpr, {id(variable): _Form.CARRY}) if outputs else []
    for i in outputs:
        result = jaxpr.outvars[i]
        if id(result) not in made_by or _adds_a_slice(made_by[id(result)], made_by):
            continue
        eqn = made_by.get(id(_uncast(result, made_by)), made_by[id(result)])
        form = forms[i]
        if form is _Form.OTHER and solver and eqn.primitive.name in ("add", "sub"):
            others = [v for v in eqn.invars if _uncast(v, made_by) is not variable]
            form = _Form.SUM if len(others) == 1 else form
        halves = [v for v in (variable, eqn.outvars[0]) if is_half(dtype_name(v))]
        if form is _Form.SUM and halves:
            yield halves[0], eqn


def _forms(jaxpr: Jaxpr, forms: dict[int, _Form]) -> list[_Form]:
    """Returns the forms of a jaxpr's outputs from those of its inputs by `id`."""
    for eqn in jaxpr.eqns:
        ins = [forms.get(id(v), _Form.CONSTANT) for v in eqn.invars]
        if any(ins):
            for v, form in zip(eqn.outvars, _forms_of_results(eqn, ins), strict=True):
                forms[id(v)] = form
    return [forms.get(id(v), _Form.CONSTANT) for v in jaxpr.outvars]


def _forms_of_results(eqn: JaxprEqn, ins: list[_Form]) -> list[_Form]:
    name, outputs = eqn.primitive.name, len(eqn.outvars)
    bodies = _jaxpr.subjaxprs(eqn)
    arguments = ins[1:] if name == "cond" else ins
    readable = name not in ("scan", "while") and (name != "cond" or not ins[0])
    if bodies and readable and all(fits(b, len(arguments), outputs) for b in bodies):
        results = []
        for inner, _ in map(_jaxpr.open_jaxpr, bodies):
            pairs = zip(inner.invars, arguments, strict=True)
            results.append(_forms(inner, {id(v): form for v, form in pairs}))
        return [max(forms) for forms in zip(*results, strict=True)]
    return [_form_of_result(eqn, ins) if outputs == 1 else _Form.OTHER] * outputs


def _form_of_result(eqn: JaxprEqn, ins: list[_Form]) -> _Form:
    if _Form.OTHER in ins:
        return _Form.OTHER
    match eqn.primitive.name:
        case name if name in _LINEAR_IN_FIRST:
            return ins[0]
        case "add" | "sub" | "add_any":
            return _Form.SUM if not all(ins) else max(ins)
        case "mul" if not all(ins) and _is_number(eqn.invars[0 if ins[1] else 1], eqn):
            return max(ins)
        case "div" if not ins[1] and _is_number(eqn.invars[1], eqn):
            return ins[0]
        case "select_n" if not ins[0]:
            return max(ins[1:])
        case "scatter-add" if not any(ins[1:]):
            return _Form.SUM
    return _Form.OTHER


def _is_number(factor: Atom, eqn: JaxprEqn) -> bool:
    # A decay rate is one number, whereas a gate has the size of the state.
    is_scalar = size(factor) == 1 and size(eqn.outvars[0]) > 1
    return is_scalar or _jaxpr.is_literal(factor)


def _adds_a_slice(eqn: JaxprEqn, made_by: dict[int, JaxprEqn]) -> bool:
    """Whether it adds to different elements each time, as the gradient of `x[i]`."""
    makers = [made_by[id(v)] for v in eqn.invars if id(v) in made_by]
    slices = any(maker.primitive.name in _SLICE_GRADIENTS for maker in makers)
    return eqn.primitive.name == "add_any" and slices


def _uncast(atom: Atom, made_by: dict[int, JaxprEqn]) -> Atom:
    """Returns a variable as it was before casts and reshapes."""
    while id(atom) in made_by:
        eqn = made_by[id(atom)]
        if eqn.primitive.name not in _LINEAR_IN_FIRST:
            break
        atom = eqn.invars[0]
    return atom
