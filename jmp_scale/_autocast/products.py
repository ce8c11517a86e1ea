"""Products: which become half precision and how they run; which calls hold some."""

import dataclasses
import enum
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .. import _jaxpr
from .._jaxpr import (
    CALLS,
    CHEAP,
    PRODUCTS,
    SCALED_PRODUCTS,
    Atom,
    Jaxpr,
    JaxprEqn,
    NameStack,
    Var,
    variables,
)
from .._policy import is_half
from .dot_general import split_sizes, sum_of_terms, wide_dot_general

_NOT_REACHED = (
    "constants as operands (pass parameters as arguments), keep_float32 around them, "
    "or a call around them that cannot be read"
)
_DEFAULT = lax.Precision.DEFAULT  # whatever the setting is


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or convolution. Equal ones are traced once."""

    key: Hashable  # equal for equal products
    # Equations that move the operands' entries, then the product. The first two inputs
    # are the operands.
    jaxpr: Jaxpr = dataclasses.field(compare=False)
    moves: int  # equations for the first operand; the others are for the second
    # Whether a float32 operand of a matrix product is computed from arguments alone: it
    # has a float32 gradient. The transposes of other products take operands of one
    # dtype.
    wide_sides: tuple[bool, ...]
    dtype: str | None  # that of an operand, where it is not `autocast`'s
    scope: NameStack = dataclasses.field(compare=False)  # as in a `Unit`

    @property
    def result(self) -> Var:
        """The variable that it makes."""
        return self.jaxpr.eqns[-1].outvars[0]

    def moved(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """The operands, their entries where the product reads them."""
        pair = [*operands]
        for i, move in enumerate(self.jaxpr.eqns[:-1]):
            side = int(i >= self.moves)
            (pair[side],) = _jaxpr.evaluate(move, [pair[side]])
        return pair

    def run(
        self, dtype: DTypeLike, *values: jax.Array, wide: int | None = None
    ) -> jax.Array:
        """The product in half precision; only the operand `wide` stays float32."""
        operands = enumerate(values[:2])
        pair = self.moved([x if i == wide else x.astype(dtype) for i, x in operands])
        eqn = self.jaxpr.eqns[-1]
        if wide is None:
            params = {"precision": None, "preferred_element_type": dtype}
            (result,) = _jaxpr.evaluate(eqn, [*pair, *values[2:]], **params)
        else:
            numbers = eqn.params["dimension_numbers"]
            sharding = eqn.params.get("out_sharding")
            result = wide_dot_general(*pair, numbers, dtype, _DEFAULT, sharding)
        return result.astype(jnp.float32)

    def tangent(self, dtype: DTypeLike) -> Callable[..., jax.Array]:
        """A function to its half-precision tangent, of those of operands by side."""

        def term(side: int, *values: jax.Array) -> jax.Array:
            wide = side if self.wide_sides[side] else None
            return self.run(dtype, *values, wide=wide)

        @jax.jit
        def tangent(
            values: Sequence[jax.Array], live: dict[int, jax.Array]
        ) -> jax.Array:
            return sum_of_terms(term, values, live).astype(dtype)

        return tangent


class Fate(enum.Enum):
    """The fate of a product: it becomes half precision, is so already, or stays."""

    BECOMES_HALF = "float32 operands"
    IS_HALF = "half precision as traced"
    OTHER_DTYPE = "another dtype"
    OWN_PRECISION = "a precision of their own"
    IS_SUM = (
        "nothing to do for a matrix unit (sums, outer products; give one row of data "
        "an axis of one, and put autocast around jax.vmap, not within it)"
    )
    IS_CONSTANT = "constants as operands"
    IS_EXEMPT = "keep_float32 around them"


def fate(
    eqn: JaxprEqn,
    *,
    is_parameter: Callable[[Var], bool] = lambda v: True,
    is_number: Callable[[Var], bool] = lambda v: False,
    is_exempt: Callable[[JaxprEqn], bool] = lambda eqn: False,
) -> Fate:
    """The fate of a product: the plan, the warning and the report ask this.

    Where nothing is known of the program around it, the product is assumed to become
    half precision if it can.

    Args:
      eqn: a product, of `PRODUCTS`.
      is_parameter: whether a matrix is one of the program's parameters, so that a
        vector times it is one row of a batch.
      is_number: whether an operand is made of integers and constants alone.
      is_exempt: whether a name keeps the product float32. Asked last, because names
        note which products they met.
    """
    operands = {_jaxpr.dtype_name(v) for v in eqn.invars[:2]}
    result = _jaxpr.dtype_name(eqn.outvars[0])
    half = {*filter(is_half, operands)}
    if half == operands or is_half(result):
        return Fate.IS_HALF
    if (operands - half) | {result} != {"float32"}:
        return Fate.OTHER_DTYPE
    if {*jax.tree.leaves(eqn.params.get("precision"))} - {_DEFAULT}:
        return Fate.OWN_PRECISION
    if not has_matrix_work(eqn, is_parameter):
        return Fate.IS_SUM
    if all(map(is_number, variables(eqn.invars[:2]))):
        return Fate.IS_CONSTANT
    return Fate.IS_EXEMPT if is_exempt(eqn) else Fate.BECOMES_HALF


def has_matrix_work(
    eqn: JaxprEqn, is_parameter: Callable[[Var], bool] = lambda v: False
) -> bool:
    """Whether a product has work for a matrix unit, by itself or as one row of many.

    Not if it contracts nothing or is of two vectors, for each index of the batch.
    """
    if eqn.primitive.name != "dot_general":
        return True
    numbers = eqn.params["dimension_numbers"]
    operands = eqn.invars[:2]
    sizes = split_sizes([_jaxpr.shape(v) for v in operands], numbers)
    if math.prod(sizes[0].contracted) == 1:
        return False
    matrices = [v for v, each in zip(operands, sizes, strict=True) if each.own]
    if len(matrices) == 2:  # also of one row, unless there is one for each index
        is_row = all(math.prod(each.own) == 1 for each in sizes)
        is_batched = bool(numbers[1][0])
        return not (is_row and is_batched)
    return any(is_parameter(v) for v in variables(matrices))


def looks_up_rows(eqn: JaxprEqn) -> bool:
    """Whether an equation takes several vectors of a table, as an embedding does.

    They are data, which many positions share; matrices, as of experts, are weights.
    """
    if eqn.primitive.name != "gather":
        return False
    is_several = math.prod(_jaxpr.shape(eqn.invars[1])[:-1]) > 1
    return is_several and len(eqn.params["dimension_numbers"].offset_dims) == 1


def becomes_half(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product that may become half precision."""
    return eqn.primitive.name in PRODUCTS and fate(eqn) is Fate.BECOMES_HALF


def stays_float32(eqn: JaxprEqn) -> bool:
    """Whether `autocast` leaves a product float32 on purpose."""
    found = fate(eqn, is_parameter=lambda v: False)
    return found not in (Fate.BECOMES_HALF, Fate.IS_HALF)


def has_products(eqn: JaxprEqn) -> bool:
    """Whether nested jaxprs hold products that become half precision."""
    return any(map(becomes_half, _jaxpr.equations_within(eqn)))


def reads_half(eqn: JaxprEqn) -> bool:
    """Whether an equation reads arrays in half precision."""
    return any(is_half(_jaxpr.dtype_name(v)) for v in eqn.invars)


def holds_half_products(eqn: JaxprEqn) -> bool:
    """Whether an equation is or holds a product that is half precision as traced."""
    equations = (eqn, *_jaxpr.equations_within(eqn))
    products = (e for e in equations if e.primitive.name in PRODUCTS)
    return any(fate(e) is Fate.IS_HALF for e in products)


def is_half_product(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product that reads or gives half precision as traced."""
    atoms = [*eqn.invars[:2], *eqn.outvars[:1]]
    has_half = any(is_half(_jaxpr.dtype_name(v)) for v in atoms)
    return eqn.primitive.name in PRODUCTS and has_half


def why_float32(jaxpr: _jaxpr.Program) -> str:
    """Why no product of a program becomes half precision; "" if some are already."""
    reasons: dict[str, None] = {}
    for eqn in _jaxpr.equations(jaxpr):
        if eqn.primitive.name in SCALED_PRODUCTS:
            reasons["scales of their own"] = None
        if eqn.primitive.name not in PRODUCTS:
            continue
        found = fate(eqn, is_parameter=lambda v: False)
        if found is Fate.IS_HALF:
            return ""
        reasons[_reason(eqn, found)] = None
    return "they have " + "; ".join(reasons) if reasons else "there is none"


def _reason(eqn: JaxprEqn, found: Fate) -> str:
    if found is Fate.OTHER_DTYPE:
        atoms = [*eqn.invars[:2], eqn.outvars[0]]
        return "dtype " + " and ".join(sorted({_jaxpr.dtype_name(v) for v in atoms}))
    return _NOT_REACHED if found is Fate.BECOMES_HALF else str(found.value)


def is_cheap(eqn: JaxprEqn) -> bool:
    """Whether an equation costs less to compute again than to keep."""
    bodies, name = _jaxpr.subjaxprs(eqn), _jaxpr.name_of(eqn)
    if _jaxpr.has_effects(eqn):
        return False
    if name == "reshard":  # to another mesh it is a border between units
        return mesh_of(eqn.invars[0]) == mesh_of(eqn.outvars[0])
    if not bodies:
        return name in CHEAP
    return (name in CALLS or name == "custom_jvp_call") and all(
        is_cheap(inner) for body in bodies for inner in _jaxpr.bare(body).eqns
    )


def mesh_of(atom: Atom) -> Any:
    """The mesh of an array; JAX has no public type for an abstract one."""
    aval: Any = atom.aval
    return aval.sharding.mesh
