"""What of an island the backward pass keeps, and what it computes again.

All that it reads are inputs of the island, kept as the forward pass read them, and small
sums. An operand of a product is made again where that reads little that the island's own
derivative does not read anyway; else the operand is kept.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from . import _jaxpr
from ._jaxpr import is_literal, words

# Operations whose derivative reads no floating-point operand: they are linear in these.
_LINEAR = words("""
    add add_any broadcast_in_dim concatenate conj convert_element_type copy copy_p
    dynamic_slice gather imag name neg optimization_barrier pad pbroadcast pcast pvary
    real reduce_sum reshape reshard rev select_n sharding_constraint slice split squeeze
    stop_gradient sub transpose
""")
# Rows longer than that, as of a vocabulary, are in no kernel of a GPU as a whole.
_LONGEST_ROW = 16384


def made_again(
    island: Any,
    operands: Sequence[Any],
    must: Collection[Any],
    cost: Callable[[Any], int],
) -> tuple[set[Any], set[Any]]:
    """Chooses which results of an island the backward pass computes again.

    Args:
      island: a jaxpr of cheap equations.
      operands: its results that products read, of which half-precision copies are kept
        or made again.
      must: those that are kept in any case.
      cost: bytes that the backward pass keeps more if it reads an input of the island.

    Returns:
      The results that are made again, and the inputs that are kept.
    """
    inputs = {*_sources(island, _read_by_the_derivative(island))}
    again: set[Any] = set()
    for v in sorted(operands, key=_jaxpr.size, reverse=True):
        more = _sources(island, [v]) - inputs
        if v not in must and sum(map(cost, more)) < 2 * _jaxpr.size(v):
            again.add(v)
            inputs |= more
    return again, inputs


def small_sums(island: Any) -> dict[Any, bool]:
    """Results of sums and the like that are an eighth of their operand or smaller.

    They are kept from the forward pass. The value tells whether it is a sum of rows that
    a kernel may hold: a GPU has one kernel for softmax, which breaks at a sum that is
    known.
    """
    return {
        eqn.outvars[0]: _is_row(eqn)
        for eqn in island.eqns
        if "axes" in eqn.params
        and _jaxpr.dtype_name(eqn.outvars[0]) == "float32"
        and _jaxpr.size(eqn.invars[0]) >= 8 * _jaxpr.size(eqn.outvars[0])
    }


def _is_row(eqn: Any) -> bool:
    shape = _jaxpr.shape(eqn.invars[0])
    return (*eqn.params["axes"],) == (len(shape) - 1,) and shape[-1] <= _LONGEST_ROW


def _sources(island: Any, atoms: Iterable[Any]) -> set[Any]:
    """The inputs of an island from which values are computed, given its small sums."""
    maker = {v: eqn for eqn in island.eqns for v in eqn.outvars}
    known = {v for v, is_row in small_sums(island).items() if not is_row}
    found: set[Any] = set()
    todo = [*atoms]
    while todo:
        v = todo.pop()
        if is_literal(v) or v in found or v in known:
            continue
        found.add(v)
        todo += maker[v].invars if v in maker else []
    return found.intersection(island.invars)


def _read_by_the_derivative(island: Any) -> list[Any]:
    """Variables whose values the derivative of an island reads."""
    active = {v for v in island.invars if _jaxpr.is_floating(v)}
    found: list[Any] = []
    for eqn in island.eqns:
        live = [v for v in eqn.invars if not is_literal(v) and v in active]
        if live:
            found += _read(eqn, live)
            active.update(v for v in eqn.outvars if _jaxpr.is_floating(v))
    return found


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
