"""Lineages: which values a value was computed from, for rules of several operations.

The rounding of a product is harmless unless a later operation amplifies it: a
difference that cancels, a large angle, an inverse.
"""

import dataclasses
import math
from collections.abc import Sequence

from ... import _jaxpr
from ..._autocast.products import is_partly_half
from ..._jaxpr import SAME_ENTRIES, JaxprEqn, dtype_name, shape, size
from ..._policy import is_half

_SUMS = _jaxpr.words("add add_any concatenate mul pad scatter select_n sub")


@dataclasses.dataclass(frozen=True, slots=True)
class Lineage:
    """The values from which an array was computed, each by a number."""

    # Number of the value with the same elements, moved or cast; 0 if unknown.
    value: int = 0
    # Values whose half-precision matrix product it is, scaled or in a sum; 0 for the
    # values of an elementwise product.
    factors: frozenset[int] = frozenset()
    norms: frozenset[int] = frozenset()  # values of whose squares it is a sum
    rounded: bool = False  # whether it has elements of a half-precision product
    parameters: bool = False  # whether it is computed from parameters and constants

    def cancels(self, other: "Lineage") -> bool:
        """Whether two values are a product and the squares of its operands."""
        return bool(self.factors & other.norms or self.norms & other.factors)


NOTHING = Lineage()


def is_inner_product(eqn: JaxprEqn) -> bool:
    """Whether a product multiplies vectors, for each index of the batch."""
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    return len(contracted) + len(batch) == len(shape(eqn.invars[0]))


def entries_added(eqn: JaxprEqn) -> int:
    """Returns how many elements an equation adds up into one; 0 if it is not a sum."""
    match eqn.primitive.name:
        case "reduce" | "reduce_window" if not _adds(eqn):
            return 0
        case "cumsum":
            return shape(eqn.invars[0])[eqn.params["axis"]]
        case "reduce_window_sum" | "reduce_window":
            return math.prod(eqn.params["window_dimensions"])
        case "reduce_sum" | "reduce":
            return size(eqn.invars[0]) // max(size(eqn.outvars[0]), 1)
        case "scatter-add":
            # Some element receives at least this many updates.
            return size(eqn.invars[2]) // max(size(eqn.invars[0]), 1)
        case "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            return math.prod(shape(eqn.invars[0])[axis] for axis in contracted)
    return 0


def rows_added(eqn: JaxprEqn) -> int:
    """How many rows a scatter adds to those of an array."""
    windows = eqn.params["dimension_numbers"].update_window_dims
    updates = shape(eqn.invars[2])
    return math.prod(n for axis, n in enumerate(updates) if axis not in windows)


def _adds(eqn: JaxprEqn) -> bool:
    return [e.primitive.name for e in _jaxpr.equations_within(eqn)] == ["add"]


def lineage_of(eqn: JaxprEqn, ins: Sequence[Lineage]) -> Lineage:
    """Returns the lineage of the output of an equation without nested jaxprs."""
    name = eqn.primitive.name
    first, second = (*ins, NOTHING, NOTHING)[:2]
    if name in SAME_ENTRIES:
        return first
    same = first.value == second.value != 0
    inner = name == "dot_general" and same and is_inner_product(eqn)
    square = name == "square" or eqn.params.get("y") == 2 or (name == "mul" and same)
    if square or inner:
        return Lineage(norms=frozenset({first.value}), rounded=first.rounded)
    if is_partly_half(eqn):
        factors = frozenset({first.value, second.value})
        return Lineage(factors=factors, rounded=True)
    if name in _jaxpr.PRODUCTS or name.startswith(("reduce", "cum")):
        return Lineage(norms=first.norms if name == "reduce_sum" else frozenset())
    if name in ("div", "neg"):
        return dataclasses.replace(first, value=0)
    rounded = any(x.rounded for x in ins)
    if name not in _SUMS or first.cancels(second):
        return Lineage(rounded=rounded)
    factors = frozenset().union(*(x.factors for x in ins))
    norms = frozenset().union(*(x.norms for x in ins))
    arrays = all(map(shape, eqn.invars))
    if name == "mul" and arrays and is_half(dtype_name(eqn.outvars[0])):
        factors |= {0}  # such as angles, products of positions and frequencies
    return Lineage(0, factors, norms, rounded)
