"""What JAX's operations are to `autocast`.

Which products become half precision, and how they run; which operations only move
entries, are cheap, or are linear; and identities with derivatives of their own.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _jaxpr
from ._dot_general import is_zero, sum_of_terms, wide_dot_general
from ._jaxpr import PRODUCTS, is_literal, variables, words

_NOT_REACHED = (
    "constants as operands (pass parameters as arguments), keep_float32 around them, "
    "or a call around them that cannot be read"
)
_DEFAULT = lax.Precision.DEFAULT  # whatever the setting is

# Linear operations on one array that only move its entries.
MOVES = words("copy reshape rev sharding_constraint squeeze transpose")
# Operations whose derivative reads no floating-point operand: they are linear in these.
_LINEAR = MOVES | words("""
    add add_any broadcast_in_dim concatenate conj convert_element_type dynamic_slice
    gather imag name neg optimization_barrier pad pbroadcast pvary real reduce_sum
    reshard select_n slice split stop_gradient sub
""")
# What makes another parameter of one.
SCALINGS = _LINEAR | words("div dynamic_slice mul")
# What costs less to compute again than to keep. A gather may not: over devices, as of
# the rows of a table, it communicates.
_CHEAP = _LINEAR - {"gather"} | words("""
    abs acos acosh and argmax argmin asin asinh atan atan2 atanh bitcast_convert_type
    cbrt ceil clamp cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
    integer_pow iota is_finite le lgamma log log1p logistic lt max min mul ne nextafter
    not or population_count pow reduce_and reduce_max reduce_min reduce_or
    reduce_precision reduce_prod rem round rsqrt shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square tan tanh xor
""")
# Rows longer than that, as of a vocabulary, are in no kernel of a GPU as a whole.
_LONGEST_ROW = 16384
# Of `jax.lax.scaled_dot` and `jax.nn.scaled_matmul`.
_SCALED_PRODUCTS = words("scaled_dot scaled_matmul_wrapper")
CALLS = words("closed_call jit")
HALF_DTYPES = words("bfloat16 float16")


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or convolution. Equal ones are traced once."""

    likeness: Any  # what equal products share
    # What moves the entries of its operands, and the product, of the operands before
    # that and what else it reads.
    jaxpr: Any = dataclasses.field(compare=False)
    moves: int  # equations for the first operand; the others are for the second
    # Whether a float32 operand of a matrix product is computed from arguments alone: it
    # has a float32 gradient. The transposes of other products take operands of one
    # dtype.
    wide_sides: tuple[bool, ...]
    dtype: Any  # that of an operand, where it is not `autocast`'s
    scope: Any = dataclasses.field(compare=False)  # as in a `Unit`

    @property
    def result(self) -> Any:
        """The variable that it makes."""
        return self.jaxpr.outvars[0]

    def run(self, dtype: Any, *values: jax.Array, wide: int | None = None) -> jax.Array:
        """The product in half precision; only the operand `wide` stays float32."""
        *moves, eqn = self.jaxpr.eqns
        pair = [x if i == wide else x.astype(dtype) for i, x in enumerate(values[:2])]
        for i, move in enumerate(moves):
            side = int(i >= self.moves)
            (pair[side],) = _jaxpr.evaluate(move, [pair[side]])
        if wide is None:
            params = {"precision": None, "preferred_element_type": dtype}
            (result,) = _jaxpr.evaluate(eqn, [*pair, *values[2:]], **params)
        else:
            numbers = eqn.params["dimension_numbers"]
            sharding = eqn.params.get("out_sharding")
            result = wide_dot_general(*pair, numbers, dtype, _DEFAULT, sharding)
        return result.astype(jnp.float32)

    def tangent(self, dtype: Any) -> Callable[..., jax.Array]:
        """A function to its half-precision tangent, of those of operands by side."""

        def term(side: int, *values: jax.Array) -> jax.Array:
            wide = side if self.wide_sides[side] else None
            return self.run(dtype, *values, wide=wide)

        @jax.jit
        def tangent(values: Sequence[Any], live: dict[int, jax.Array]) -> jax.Array:
            return sum_of_terms(term, values, live).astype(dtype)

        return tangent


class Fate(enum.Enum):
    """What becomes of a product."""

    BECOMES_HALF = enum.auto()
    IS_HALF = enum.auto()  # as traced
    # The others stay as they are.
    OTHER_DTYPE = enum.auto()
    OWN_PRECISION = "a precision of their own"
    IS_SUM = (
        "nothing to do for a matrix unit (sums, outer products; put autocast around "
        "jax.vmap, not within it)"
    )


def fate(eqn: Any, is_parameter: Callable[[Any], bool] = lambda v: True) -> Fate:
    """What becomes of a product, before it is asked whether its name is to be kept.

    `is_parameter`: whether a matrix is one of the program, so that a vector times it is
    one row of a batch. Without it, whether the product may become half precision.
    """
    operands = {_jaxpr.dtype_name(v) for v in eqn.invars[:2]}
    result = _jaxpr.dtype_name(eqn.outvars[0])
    half = operands.intersection(HALF_DTYPES)
    if half == operands or result in HALF_DTYPES:
        return Fate.IS_HALF
    if (operands - half) | {result} != {"float32"}:
        return Fate.OTHER_DTYPE
    if {*jax.tree.leaves(eqn.params.get("precision"))} - {_DEFAULT}:
        return Fate.OWN_PRECISION
    return Fate.BECOMES_HALF if _has_work(eqn, is_parameter) else Fate.IS_SUM


def _has_work(eqn: Any, is_parameter: Callable[[Any], bool]) -> bool:
    """Whether a product has work for a matrix unit, by itself or as one row of many.

    Not if it contracts nothing or is of two vectors, for each index of the batch.
    """
    if eqn.primitive.name != "dot_general":
        return True
    contracting, batch = eqn.params["dimension_numbers"]
    left, right = eqn.invars[:2]
    if math.prod(_jaxpr.shape(left)[d] for d in contracting[0]) == 1:
        return False
    own = [
        (left, _own_sizes(left, contracting[0], batch[0])),
        (right, _own_sizes(right, contracting[1], batch[1])),
    ]
    matrices = [v for v, sizes in own if sizes]
    if len(matrices) == 2:  # also of one row, unless there is one for each index
        is_row = all(math.prod(sizes) == 1 for _, sizes in own)
        return not (is_row and batch[0])
    return any(map(is_parameter, matrices))


def _own_sizes(v: Any, contracting: Any, batch: Any) -> list[int]:
    """Sizes of the dimensions of an operand that its product has, but the batch's."""
    shape = _jaxpr.shape(v)
    return [shape[d] for d in range(len(shape)) if d not in (*contracting, *batch)]


def looks_up_rows(eqn: Any) -> bool:
    """Whether an equation takes several vectors of a table, as an embedding does.

    They are data, which many positions share; matrices, as of experts, are weights.
    """
    if eqn.primitive.name != "gather":
        return False
    is_several = math.prod(_jaxpr.shape(eqn.invars[1])[:-1]) > 1
    return is_several and len(eqn.params["dimension_numbers"].offset_dims) == 1


def becomes_half(eqn: Any) -> bool:
    """Whether an equation is a product that may become half precision."""
    return eqn.primitive.name in PRODUCTS and fate(eqn) is Fate.BECOMES_HALF


def stays_float32(eqn: Any) -> bool:
    """Whether `autocast` leaves a product float32 on purpose."""
    found = fate(eqn, lambda v: False)
    return found not in (Fate.BECOMES_HALF, Fate.IS_HALF)


def has_products(eqn: Any) -> bool:
    """Whether nested jaxprs hold products that become half precision."""
    parts = _jaxpr.subjaxprs(eqn)
    return any(becomes_half(inner) for p in parts for inner in _jaxpr.equations(p))


def holds_half_products(eqn: Any) -> bool:
    """Whether an equation is or holds a product that is half precision as traced."""
    parts = _jaxpr.subjaxprs(eqn)
    nested = (inner for part in parts for inner in _jaxpr.equations(part))
    products = (e for e in (eqn, *nested) if e.primitive.name in PRODUCTS)
    return any(fate(e) is Fate.IS_HALF for e in products)


def why_float32(jaxpr: Any) -> str:
    """Why no product of a program becomes half precision; "" if some are already."""
    reasons: dict[str, None] = {}
    for eqn in _jaxpr.equations(jaxpr):
        if eqn.primitive.name in _SCALED_PRODUCTS:
            reasons["scales of their own"] = None
        if eqn.primitive.name not in PRODUCTS:
            continue
        found = fate(eqn, lambda v: False)
        if found is Fate.IS_HALF:
            return ""
        reason = str(found.value)
        if found is Fate.OTHER_DTYPE:
            dtypes = {_jaxpr.dtype_name(v) for v in (*eqn.invars[:2], eqn.outvars[0])}
            reason = "dtype " + " and ".join(sorted(dtypes))
        elif found is Fate.BECOMES_HALF:
            reason = _NOT_REACHED
        reasons[reason] = None
    return "they have " + "; ".join(reasons) if reasons else "there is none"


def is_sum(eqn: Any) -> bool:
    """Whether a product is of vectors, or contracts nothing."""
    return not _has_work(eqn, lambda v: False)


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
    exponents = softmaxes_of(island)
    wanted = {*island.outvars}.difference(softmaxes)
    wanted.update(exponents[v][0] for v in softmaxes)
    found: list[Any] = []
    for eqn in reversed(island.eqns):
        inputs = variables(eqn.invars)
        live = [v for v in inputs if v in active]
        if wanted.isdisjoint(eqn.outvars) or eqn.primitive.name == "stop_gradient":
            continue
        wanted.update(inputs)
        if live:
            found += _read(eqn, live)
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


def softmaxes_of(island: Any) -> dict[Any, tuple[Any, tuple[int, ...]]]:
    """The exponents and the axes of the softmaxes of an island, by their results."""
    maker = {v: eqn for eqn in island.eqns for v in eqn.outvars}

    def made_by(v: Any, *names: str) -> Any:
        eqn = None if is_literal(v) else maker.get(v)
        return eqn if eqn is not None and eqn.primitive.name in names else None

    found: dict[Any, tuple[Any, tuple[int, ...]]] = {}
    for eqn in island.eqns:
        if eqn.primitive.name != "div":
            continue
        total = eqn.invars[1]
        while broadcast := made_by(total, "broadcast_in_dim", "reshape"):
            total = broadcast.invars[0]
        exp, total = made_by(eqn.invars[0], "exp"), made_by(total, "reduce_sum")
        if exp and total and total.invars[0] is eqn.invars[0]:
            found[eqn.outvars[0]] = exp.invars[0], tuple(total.params["axes"])
    return found


def small_sums(island: Any) -> list[Any]:
    """Results of sums and the like that are an eighth of their operand or smaller.

    They are kept from the forward pass, except sums of rows that a kernel may hold: a
    GPU has one kernel for a norm or softmax, which breaks at a sum that is known.
    """
    found = []
    for eqn in (eqn for eqn in island.eqns if "axes" in eqn.params):
        (result,), shape = eqn.outvars, _jaxpr.shape(eqn.invars[0])
        is_row = (*eqn.params["axes"],) == (len(shape) - 1,)
        fits = is_row and shape[-1] <= _LONGEST_ROW
        is_small = _jaxpr.size(eqn.invars[0]) >= 8 * _jaxpr.size(result)
        if is_small and not fits and _jaxpr.is_float32(result):
            found.append(result)
    return found


def with_cotangent_of_its_dtype(x: Any) -> Any:
    """`x`, whatever dtype the rule of a `custom_vjp` that reads it returns.

    JAX passes on a float32 cotangent of a half-precision array as it is.
    """
    is_half = getattr(x, "dtype", None) in (jnp.float16, jnp.bfloat16)
    return x.astype(jnp.float32).astype(x.dtype) if is_half else x


@jax.jit
def kept_apart(x: jax.Array) -> jax.Array:
    return _on_gpu(lax.optimization_barrier, x)


def _on_gpu(fun: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return lax.platform_dependent(x, cuda=fun, rocm=fun, default=lambda x: x)


# The second array, which is what the first should be, with the first one's derivative.
with_value = jax.custom_jvp(lambda _, value: value)
with_value.defjvp(lambda both, t: (with_value(*both), t[0]), symbolic_zeros=True)

no_tangent = jax.custom_derivatives.SymbolicZero.from_primal_value


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def softmax_from(exponents: Any, result: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """`result`, which is the softmax of the exponents and gives their derivative."""
    return result


@functools.partial(softmax_from.defjvp, symbolic_zeros=True)
def _softmax_rule(axes: tuple[int, ...], primals: Any, tangents: Any) -> Any:
    # Derivatives of this one are of the exponents too.
    result, tangent = softmax_from(*primals, axes), tangents[0]
    if is_zero(tangent):
        return result, no_tangent(result)
    # XLA:GPU has one kernel for what begins with a reduction of the rows.
    p = _on_gpu(lambda x: x - 0 * jnp.max(x, axes, keepdims=True), result)
    product = p * tangent
    # Rounded probabilities do not add up to 1. Divided by their sum, a constant added
    # to the cotangent changes nothing, as in the exact derivative.
    mean = jnp.sum(product, axes, keepdims=True) / jnp.sum(p, axes, keepdims=True)
    # Not a difference, of which jax 0.8.0 makes a wrong gradient on a CPU.
    return result, product + p * -mean
