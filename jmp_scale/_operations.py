"""What JAX's operations are to `autocast`.

Which products become half precision, and how they run; which operations only move
entries, are cheap, or are linear; and identities with derivatives of their own.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _jaxpr
from ._dot_general import has_vector, is_zero, sum_of_terms, wide_dot_general
from ._jaxpr import PRODUCTS, is_literal, variables, words

_HALF = "half precision"  # no reason to stay float32
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
# What costs less to compute again than to keep.
_CHEAP = _LINEAR | words("""
    abs acos acosh and argmax argmin asin asinh atan atan2 atanh bitcast_convert_type
    cbrt ceil clamp cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
    integer_pow iota is_finite le lgamma log log1p logistic lt max min mul ne nextafter
    not or population_count pow reduce_and reduce_max reduce_min reduce_or
    reduce_precision reduce_prod rem round rsqrt shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square tan tanh xor
""")
# Rows longer than that, as of a vocabulary, are in no kernel of a GPU as a whole.
_LONGEST_ROW = 16384
CALLS = words("closed_call jit")


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or convolution. Equal ones are traced once."""

    likeness: Any  # what equal products share
    # What moves the entries of its operands, and the product, of the operands before
    # that and what else it reads.
    jaxpr: Any = dataclasses.field(compare=False)
    moves: int  # equations for the first operand; the others are for the second
    # Whether an operand of a matrix product is computed from arguments alone: it has a
    # float32 gradient. The transposes of other products take operands of one dtype.
    weights: tuple[bool, ...]
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
            wide = side if self.weights[side] else None
            return self.run(dtype, *values, wide=wide)

        @jax.jit
        def tangent(values: Sequence[Any], live: dict[int, jax.Array]) -> jax.Array:
            return sum_of_terms(term, values, live).astype(dtype)

        return tangent


def becomes_half(eqn: Any) -> bool:
    """Whether an equation is a product that becomes half precision."""
    return eqn.primitive.name in PRODUCTS and _reason(eqn) is None


def stays_float32(eqn: Any) -> bool:
    """Whether a product of no half precision is one that gains nothing from it."""
    return _reason(eqn) not in (None, _HALF)


def has_products(eqn: Any) -> bool:
    """Whether nested jaxprs hold products that become half precision."""
    parts = _jaxpr.subjaxprs(eqn)
    return any(becomes_half(inner) for p in parts for inner in _jaxpr.equations(p))


def why_float32(jaxpr: Any) -> str:
    """Why no product of a program becomes half precision; "" if some are already."""
    products = [e for e in _jaxpr.equations(jaxpr) if e.primitive.name in PRODUCTS]
    reasons = dict.fromkeys(_reason(e) or _NOT_REACHED for e in products)
    if _HALF in reasons:
        return ""
    return "they have " + "; ".join(reasons) if reasons else "there is none"


def _reason(eqn: Any) -> str | None:
    """Why a product stays float32; None if it becomes half precision."""
    dtypes = {_jaxpr.dtype_name(v) for v in (*eqn.invars[:2], eqn.outvars[0])}
    if not dtypes.isdisjoint(("float16", "bfloat16")):
        return _HALF
    if dtypes != {"float32"}:
        return "dtype " + " and ".join(sorted(dtypes))
    if {*jax.tree.leaves(eqn.params.get("precision"))} - {_DEFAULT}:
        return "a precision of their own"
    if is_sum(eqn):
        around = "of jax.vmap(autocast(f)), put autocast around the vmap"
        return f"nothing to do for a matrix unit (sums, outer products; {around})"
    return None


def is_sum(eqn: Any) -> bool:
    """Whether a matrix unit has nothing to do, for each index of the batch."""
    if eqn.primitive.name != "dot_general":
        return False
    shapes = [v.aval.shape for v in eqn.invars]
    return has_vector(shapes, eqn.params["dimension_numbers"])


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


@jax.jit
def kept_apart(x: jax.Array) -> jax.Array:
    return _on_gpu(lax.optimization_barrier, x)


def _on_gpu(fun: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return lax.platform_dependent(x, cuda=fun, rocm=fun, default=lambda x: x)


# The second array, which is what the first should be, with the first one's derivative.
with_value = jax.custom_jvp(lambda _, value: value)
with_value.defjvp(lambda primals, t: (primals[1], t[0]), symbolic_zeros=True)

no_tangent = jax.custom_derivatives.SymbolicZero.from_primal_value


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def softmax_from(exponents: Any, result: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """`result`, which is the softmax of the exponents and gives their derivative."""
    return result


@functools.partial(softmax_from.defjvp, symbolic_zeros=True)
def _softmax_rule(axes: tuple[int, ...], primals: Any, tangents: Any) -> Any:
    result, tangent = primals[1], tangents[0]
    if is_zero(tangent):
        return result, no_tangent(result)
    # XLA:GPU has one kernel for what begins with a reduction of the rows.
    p = _on_gpu(lambda x: x - 0 * jnp.max(x, axes, keepdims=True), result)
    product = p * tangent
    return result, product + p * -jnp.sum(product, axes, keepdims=True)
