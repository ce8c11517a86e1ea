"""Products: which become half precision and how they run; which calls hold some."""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .. import _jaxpr
from .._jaxpr import PRODUCTS, Atom, Jaxpr, JaxprEqn, NameStack, Var, variables
from .._policy import is_half
from .._types import Arrays
from .derivatives import CAST, ByPosition
from .dot_general import by_platform, own_dimensions, wide_dot_general
from .rounding import widened

_DEFAULT = lax.Precision.DEFAULT


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or convolution. Equal ones are traced once."""

    key: Hashable  # equal for equal products
    # Equations that move the operands' entries, then the product. The first two inputs
    # are the operands.
    jaxpr: Jaxpr = dataclasses.field(compare=False)
    moves: int  # equations for the first operand; the others are for the second
    # Whether the gradient of an operand is float32: that of a float32 operand of a
    # matrix product which is computed from arguments alone. The transposes of other
    # products take operands of one dtype.
    float32_grads: tuple[bool, ...]
    dtype: str | None  # that of an operand, where it is not `autocast`'s
    # The scopes in which all its equations were, which they no longer name.
    scope: NameStack = dataclasses.field(compare=False)
    has_float32_result: bool = False  # in the forward pass

    @property
    def equation(self) -> JaxprEqn:
        """The product itself."""
        return self.jaxpr.eqns[-1]

    @property
    def operands(self) -> list[Var]:
        """The variables of both operands, before their entries are moved."""
        return self.jaxpr.invars[:2]

    @property
    def result(self) -> Var:
        """The variable of its result."""
        return self.equation.outvars[0]

    def moved(self, operands: Arrays) -> list[jax.Array]:
        """Moves the entries of the operands to where the product reads them."""
        pair = [*operands]
        for i, move in enumerate(self.jaxpr.eqns[:-1]):
            side = int(i >= self.moves)
            (pair[side],) = _jaxpr.evaluate(move, [pair[side]])
        return pair

    def forward(self, dtype: DTypeLike, *values: jax.Array) -> jax.Array:
        """Computes the product of the forward pass."""
        pair = self.moved([x.astype(dtype) for x in values[:2]])
        result = "float32" if self.has_float32_result else dtype
        # Policies of checkpoints look for JAX's own products here.
        return _multiply(self.equation, [*pair, *values[2:]], result)

    def tangent(self, dtype: DTypeLike) -> Callable[..., jax.Array]:
        """Returns a function from the operands' tangents, by side, to the product's."""

        def term(side: int, *values: jax.Array) -> jax.Array:
            is_wide, operands = self.float32_grads[side], enumerate(values[:2])
            pair = self.moved(
                [x if is_wide and i == side else x.astype(dtype) for i, x in operands]
            )
            if not is_wide:
                eqn = by_platform(self.equation)
                return _multiply(eqn, [*pair, *values[2:]], dtype)
            params = self.equation.params
            dimensions, sharding = params["dimension_numbers"], params["out_sharding"]
            return widened(wide_dot_general(*pair, dimensions, dtype, sharding))

        def tangent(values: Arrays, live: ByPosition) -> jax.Array:
            return sum_of_terms(term, values, live).astype(dtype)

        tangent.__name__ = CAST
        return jax.jit(tangent)


def _multiply(eqn: JaxprEqn, values: Arrays, result: DTypeLike) -> jax.Array:
    """Evaluates a product, whose result has this dtype before it is cast to float32."""
    params = {"precision": None, "preferred_element_type": result}
    taken = {k: x for k, x in params.items() if k in eqn.params}
    return widened(*_jaxpr.evaluate(eqn, values, **taken))


def sum_of_terms(
    term: Callable[..., jax.Array], values: Arrays, live: ByPosition
) -> jax.Array:
    """Returns the tangent of a product, a sum of terms with one tangent each."""
    terms = [term(i, *values[:i], t, *values[i + 1 :]) for i, t in live.items()]
    return functools.reduce(jnp.add, terms)


class Fate(enum.Enum):
    """The fate of a product: it becomes half precision, is so already, or stays."""

    BECOMES_HALF = enum.auto()
    IS_HALF = enum.auto()  # as traced: both operands, or the result
    STAYS = enum.auto()


def never(_: object) -> bool:
    """Returns False: nothing is known of a product alone."""
    return False


def fate(
    eqn: JaxprEqn,
    *,
    is_parameter: Callable[[Var], bool] = lambda v: True,
    is_constant: Callable[[Var], bool] = never,
    is_exempt: Callable[[JaxprEqn], bool] = never,
) -> Fate:
    """Decides the fate of a product in a program, or alone.

    A product stays as it is if its dtypes are not float32, if it has a precision of its
    own, or if a matrix unit gains nothing. A vector times a matrix that `is_parameter`
    is one row of a batch. An operand that `is_constant` is computed from integers and
    constants alone. `is_exempt`, whether a name keeps the product float32, is asked
    last: it may note which products there are.
    """
    operands = {_jaxpr.dtype_name(v) for v in eqn.invars[:2]}
    result = _jaxpr.dtype_name(eqn.outvars[0])
    half = {*filter(is_half, operands)}
    if half == operands or is_half(result):
        return Fate.IS_HALF
    precisions = {*jax.tree.leaves(eqn.params.get("precision"))}
    stays = (
        (operands - half) | {result} != {"float32"}
        or not precisions <= {_DEFAULT}
        or not has_matrix_work(eqn, is_parameter)
        or all(map(is_constant, variables(eqn.invars[:2])))
        or is_exempt(eqn)
    )
    return Fate.STAYS if stays else Fate.BECOMES_HALF


def has_matrix_work(eqn: JaxprEqn, is_parameter: Callable[[Var], bool]) -> bool:
    """Whether a product has work for a matrix unit, by itself or as one row of many.

    Not if it contracts nothing or is of two vectors, for each index of the batch. Sizes
    prove it; that a vector is one row of a batch is a guess, and either fate is right.
    """
    sizes = matrix_sizes(eqn)
    if sizes is None:
        return True
    if math.prod(sizes[0].contracted) == 1:
        return False
    matrices = [v for v, each in zip(eqn.invars[:2], sizes, strict=True) if each.own]
    if len(matrices) == 2:  # also of one row, unless there is one for each index
        is_row = all(math.prod(each.own) == 1 for each in sizes)
        is_batched = bool(eqn.params["dimension_numbers"][1][0])
        return not (is_row and is_batched)
    return any(is_parameter(v) for v in variables(matrices))


class OperandSizes(NamedTuple):
    """Sizes of an operand's dimensions, except those of the batch."""

    own: list[int]  # the result has them too
    contracted: list[int]


def matrix_sizes(eqn: JaxprEqn) -> list[OperandSizes] | None:
    """Returns the sizes of a matrix product's operands; None for other products."""
    if _jaxpr.name_of(eqn) != "dot_general":
        return None
    found, numbers = [], eqn.params["dimension_numbers"]
    for v, contracted, batch in zip(eqn.invars, *numbers, strict=True):
        shape = _jaxpr.shape(v)
        own = [shape[d] for d in own_dimensions(len(shape), contracted, batch)]
        found.append(OperandSizes(own, [shape[d] for d in contracted]))
    return found


def becomes_half(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product that may become half precision."""
    return _jaxpr.name_of(eqn) in PRODUCTS and fate(eqn) is Fate.BECOMES_HALF


def stays_float32(eqn: JaxprEqn) -> bool:
    """Whether `autocast` leaves a product float32 on purpose."""
    return fate(eqn, is_parameter=never) is Fate.STAYS


def has_products(eqn: JaxprEqn) -> bool:
    """Whether nested jaxprs hold products that become half precision."""
    return any(map(becomes_half, _jaxpr.equations_within(eqn)))


def is_cheap(eqn: JaxprEqn) -> bool:
    """Whether an equation is elementwise, a sum or a move, or a call of such ones."""
    bodies, name = _jaxpr.subjaxprs(eqn), _jaxpr.name_of(eqn)
    if _jaxpr.has_effects(eqn):
        return False
    if name == "reshard":
        return mesh_of(eqn.invars[0]) == mesh_of(eqn.outvars[0])
    if not bodies:
        return name in _jaxpr.CHEAP
    inner = (each for body in bodies for each in _jaxpr.bare(body).eqns)
    is_call = name in _jaxpr.CALLS or name == "custom_jvp_call"
    return is_call and all(map(is_cheap, inner))


def looks_up_rows(eqn: JaxprEqn) -> bool:
    """Whether an equation takes several vectors of a table, as an embedding does.

    Rows that an argument chooses, such as tokens, are data, because many positions
    share them. Matrices that are looked up, such as those of experts, are weights. A
    shape says so, because either is right: gradients of data are added in half.
    """
    if _jaxpr.name_of(eqn) != "gather":
        return False
    is_several = math.prod(_jaxpr.shape(eqn.invars[1])[:-1]) > 1
    return is_several and len(eqn.params["dimension_numbers"].offset_dims) == 1


def mesh_of(atom: Atom) -> Any:
    """Returns the mesh of an array; JAX has no public type for an abstract one."""
    aval: Any = atom.aval
    return aval.sharding.mesh
