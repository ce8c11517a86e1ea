"""The values that others were made of, for the rules that look beyond one operation.

A product's rounding is harmless until what comes next amplifies it: a difference that
cancels, an angle's turns, an inverse.
"""

import dataclasses
import math
from collections.abc import Sequence

from ... import _jaxpr as jaxprs
from ..._autocast.operations import is_half_product
from ..._jaxpr import SAME_ENTRIES, JaxprEqn, dtype_name, shape, size
from ..._policy import is_half

_SUMS = jaxprs.words("add add_any concatenate mul pad scatter select_n sub")


@dataclasses.dataclass(frozen=True, slots=True)
class Lineage:
    # Stands for the value whose entries these are, moved or cast; 0 if unknown.
    value: int = 0
    # Values whose half-precision product it is, scaled or in a sum; 0 for those of a
    # product entry by entry.
    factors: frozenset[int] = frozenset()
    norms: frozenset[int] = frozenset()  # values of whose squares it is a sum
    rounded: bool = False  # whether it has entries of a half-precision product
    parameters: bool = False  # whether it is made of parameters and numbers alone

    def cancels(self, other: "Lineage") -> bool:
        """Whether a sum of two values is of a product and its operands' squares."""
        return bool(self.factors & other.norms or self.norms & other.factors)


NOTHING = Lineage()


def is_inner_product(eqn: JaxprEqn) -> bool:
    """Whether a product is of vectors, for each index of the batch."""
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    return len(contracted) + len(batch) == len(shape(eqn.invars[0]))


def entries_added(eqn: JaxprEqn) -> int:
    """How many entries an equation adds up into one; 0 if it is no sum."""
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
            # Some cell receives at least this many of the updates.
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
    return [e.primitive.name for e in jaxprs.equations_within(eqn)] == ["add"]


def lineage_of(eqn: JaxprEqn, ins: Sequence[Lineage]) -> Lineage:
    """The lineage of the output of an equation without nested jaxprs."""
    name = eqn.primitive.name
    first, second = (*ins, NOTHING, NOTHING)[:2]
    if name in SAME_ENTRIES:
        return first
    same = first.value == second.value != 0
    inner = name == "dot_general" and same and is_inner_product(eqn)
    square = name == "square" or eqn.params.get("y") == 2 or (name == "mul" and same)
    if square or inner:
        return Lineage(norms=frozenset({first.value}), rounded=first.rounded)
    if is_half_product(eqn):
        factors = frozenset({first.value, second.value})
        return Lineage(factors=factors, rounded=True)
    if name in jaxprs.PRODUCTS or name.startswith(("reduce", "cum")):
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
        factors |= {0}  # of positions and frequencies: angles
    return Lineage(0, factors, norms, rounded)
