"""What JAX's operations are to `autocast`: which move, are cheap, are linear."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from . import _jaxpr
from ._jaxpr import is_literal, variables, words

# Linear operations on one array that only move its entries.
MOVES = words("copy copy_p reshape rev sharding_constraint squeeze transpose")
# What costs less to compute again than to keep.
_CHEAP = MOVES | words("""
    abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh
    bitcast_convert_type broadcast_in_dim cbrt ceil clamp concatenate conj
    convert_element_type cos cosh digamma div dynamic_slice eq erf erf_inv erfc exp exp2
    expm1 floor gather ge gt imag integer_pow iota is_finite le lgamma log log1p
    logistic lt max min mul name ne neg nextafter not optimization_barrier or pad
    pbroadcast pcast population_count pow pvary real reduce_and reduce_max reduce_min
    reduce_or reduce_precision reduce_prod reduce_sum rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh slice split sqrt
    square stop_gradient sub tan tanh xor
""")
# Operations whose derivative reads no floating-point operand: they are linear in these.
_LINEAR = words("""
    add add_any broadcast_in_dim concatenate conj convert_element_type copy copy_p
    dynamic_slice gather imag name neg optimization_barrier pad pbroadcast pcast pvary
    real reduce_sum reshape reshard rev select_n sharding_constraint slice split squeeze
    stop_gradient sub transpose
""")
# Rows longer than that, as of a vocabulary, are in no kernel of a GPU as a whole.
_LONGEST_ROW = 16384
CALLS = words("closed_call core_call jit pjit")


def is_cheap(eqn: Any) -> bool:
    """Whether an equation costs less to compute again than to keep."""
    bodies, name = _jaxpr.subjaxprs(eqn), eqn.primitive.name
    if eqn.effects:
        return False
    if name == "reshard":  # to another mesh it is a border between units
        return eqn.invars[0].aval.sharding.mesh == eqn.outvars[0].aval.sharding.mesh
    if not bodies:
        return name in _CHEAP
    return (name in CALLS or name == "custom_jvp_call") and all(
        is_cheap(inner) for body in bodies for inner in _jaxpr.open_jaxpr(body)[0].eqns
    )


def reached_by(jaxpr: Any, inputs: Iterable[Any]) -> set[Any]:
    """Floating-point variables with a tangent, if these inputs have one."""
    found = {*inputs}
    for eqn in jaxpr.eqns:
        stops = eqn.primitive.name == "stop_gradient"
        if not stops and not found.isdisjoint(variables(eqn.invars)):
            found.update(v for v in eqn.outvars if _jaxpr.is_floating(v))
    return found


def read_by_derivative(island: Any, softmaxes: Collection[Any] = ()) -> list[Any]:
    """Variables whose values the derivative reads, besides results of `softmaxes`."""
    active = reached_by(island, filter(_jaxpr.is_floating, island.invars))
    wanted = _with_cotangent(island, softmaxes)
    found: list[Any] = []
    for eqn in island.eqns:
        live = [v for v in variables(eqn.invars) if v in active]
        if live and not wanted.isdisjoint(eqn.outvars):
            found += _read(eqn, live)
    return found


def _with_cotangent(island: Any, softmaxes: Collection[Any]) -> set[Any]:
    """Variables through which the derivative goes, if from softmaxes to exponents."""
    exponents = {s.exponents for v, s in softmaxes_of(island).items() if v in softmaxes}
    wanted = {v for v in island.outvars if v not in softmaxes} | exponents
    for eqn in reversed(island.eqns):
        passes = not wanted.isdisjoint(eqn.outvars)
        if passes and eqn.primitive.name != "stop_gradient":
            wanted.update(variables(eqn.invars))
    return wanted


def _read(eqn: Any, live: Sequence[Any]) -> list[Any]:
    """Operands whose values the derivative of an equation reads."""
    name = eqn.primitive.name
    if name in _LINEAR:
        return [v for v in eqn.invars if not _jaxpr.is_floating(v)]
    if name == "mul":
        left, right = eqn.invars
        return [other for v, other in ((left, right), (right, left)) if v in live]
    if name == "div" and eqn.invars[1] not in live:
        return [eqn.invars[1]]
    return [*eqn.invars]


class Softmax(NamedTuple):
    """Exponentials over their sum: the variable of the exponents, and the axes."""

    exponents: Any
    axes: tuple[int, ...]


def softmaxes_of(island: Any) -> dict[Any, Softmax]:
    """The softmaxes of an island, by their results."""
    maker = {v: eqn for eqn in island.eqns for v in eqn.outvars}

    def made_by(v: Any, *names: str) -> Any:
        eqn = None if is_literal(v) else maker.get(v)
        return eqn if eqn is not None and eqn.primitive.name in names else None

    found: dict[Any, Softmax] = {}
    for eqn in island.eqns:
        if eqn.primitive.name != "div":
            continue
        total = eqn.invars[1]
        while broadcast := made_by(total, "broadcast_in_dim", "reshape"):
            total = broadcast.invars[0]
        exp, total = made_by(eqn.invars[0], "exp"), made_by(total, "reduce_sum")
        if exp and total and total.invars[0] is eqn.invars[0]:
            exponents = Softmax(exp.invars[0], tuple(total.params["axes"]))
            found[eqn.outvars[0]] = exponents
    return found


def small_sums(island: Any) -> list[Any]:
    """Results of sums and the like that are an eighth of their operand or smaller.

    They are kept from the forward pass, but for sums of rows that a kernel may hold: a
    GPU has one kernel for a norm or softmax, which breaks at a sum that is known.
    """
    return [
        eqn.outvars[0]
        for eqn in island.eqns
        if "axes" in eqn.params
        and _jaxpr.is_float32(eqn.outvars[0])
        and _jaxpr.size(eqn.invars[0]) >= 8 * _jaxpr.size(eqn.outvars[0])
        and not _is_row(eqn)
    ]


def _is_row(eqn: Any) -> bool:
    shape = _jaxpr.shape(eqn.invars[0])
    return (*eqn.params["axes"],) == (len(shape) - 1,) and shape[-1] <= _LONGEST_ROW
