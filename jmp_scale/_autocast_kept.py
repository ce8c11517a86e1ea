"""What of an island the backward pass keeps, and what it computes again.

All that it reads are inputs of the island, kept as the forward pass read them, small
sums, and sums of a residual stream. An operand of a product is made again where that
reads little that the island's own derivative does not read anyway; else it is kept.

One exception: the derivative of a softmax reads the probabilities that the next product
read. To make them again would cost a transformer 8 % of the bytes that it moves.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from . import _jaxpr
from ._jaxpr import variables
from ._operations import read_by_derivative, small_sums, softmaxes_of


class Kept(NamedTuple):
    """What the backward pass keeps of an island, and makes again."""

    again: Collection[Any] = ()  # operands of products that it computes again
    kept: Collection[Any] = ()  # the other operands
    softmaxes: Collection[Any] = ()  # those of the kept ones that the derivative reads
    streams: Collection[Any] = ()  # results, in place of what they are computed from
    inputs: Collection[Any] = ()  # what is read besides these


def choose(
    island: Any,
    operands: Sequence[Any],
    must: Collection[Any],
    streams: Sequence[Any],
    cost: Callable[[Any], int],
) -> Kept:
    """Chooses what the backward pass keeps of an island, a jaxpr of cheap equations.

    Of its results products read `operands`: half-precision copies are kept or made
    again, those in `must` are kept. Later islands read `streams`, as sums of a residual
    stream. `cost`: bytes that the backward pass keeps more if it reads a variable.
    """

    def read(softmaxes: Collection[Any], known: Collection[Any]) -> set[Any]:
        return _sources(island, read_by_derivative(island, softmaxes), known)

    def total(atoms: Collection[Any]) -> int:
        return sum(map(cost, atoms))

    softmaxes = {v for v in softmaxes_of(island) if v in operands}
    if read(softmaxes, ()) == read((), ()):  # the scores are kept anyway
        softmaxes = set()
    known: set[Any] = set()
    for v in streams:
        inputs = read(softmaxes, known)
        if total(read(softmaxes, known | {v})) + cost(v) < total(inputs):
            known.add(v)
    inputs, again = read(softmaxes, known), set[Any]()
    for v in sorted(operands, key=_jaxpr.size, reverse=True):
        more = _sources(island, [v], known) - inputs
        is_kept = v in must or v in softmaxes
        if not is_kept and total(more) < 2 * _jaxpr.size(v):
            again.add(v)
            inputs |= more
    return Kept(again, {*operands} - again, softmaxes, known, inputs)


def _sources(island: Any, atoms: Iterable[Any], given: Collection[Any]) -> set[Any]:
    """The inputs of an island from which values are computed, given some of them."""
    known = {*small_sums(island)}.union(given)
    found = {*variables(atoms)} - known
    for eqn in reversed(island.eqns):
        if not found.isdisjoint(eqn.outvars):
            found.update({*variables(eqn.invars)} - known)
    return found.intersection(island.invars)
