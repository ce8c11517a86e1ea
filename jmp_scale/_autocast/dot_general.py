"""Products whose gradients multiply half-precision numbers, with float32 results."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType
from jax.typing import DTypeLike

from .. import _cpu, _jaxpr
from .._cpu import Dimensions
from .._jaxpr import JaxprEqn
from .._jaxpr_rewrite import with_products
from .._policy import is_half


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def wide_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimensions: Dimensions,
    dtype: DTypeLike,
    out_sharding: Any = None,
) -> jax.Array:
    """Multiplies a half-precision and a float32 array, and casts to `dtype`.

    Its transpose multiplies half-precision numbers and has a float32 result. So the
    float32 array's gradient is not rounded, does not overflow, and over devices it is
    summed in float32.
    """
    product = functools.partial(
        lax.dot_general,
        dimension_numbers=dimensions,
        preferred_element_type=jnp.float32,
        out_sharding=out_sharding,
    )
    return _lowered_by_platform(product, lhs, rhs).astype(dtype)


# Not all platforms take a product of half-precision numbers with a float32 result, the
# algorithm that a program names, or a transpose behind a product. So such products are
# a primitive, of the same name and parameters, that each platform lowers in its own
# way; its rules are JAX's.
_JAXS = jax.extend.core.primitives.dot_general_p
_OWN = _jaxpr.OwnPrimitive("dot_general")


def by_platform(eqn: JaxprEqn) -> JaxprEqn:
    """Lets each platform lower a matrix product in its own way."""
    return eqn.replace(primitive=_OWN) if eqn.primitive is _JAXS else eqn


def with_precision(eqn: JaxprEqn, setting: str | None) -> JaxprEqn:
    """Sets the precision of products that have none, in an equation and within.

    The algorithm that one names is left out where a platform lacks it: JAX's attention
    names one for float16, with which it does not run on a CPU.
    """
    algorithm = getattr(lax.DotAlgorithmPreset, setting or "", None)

    def change(product: JaxprEqn) -> JaxprEqn:
        params, is_dot = product.params, _jaxpr.name_of(product) == "dot_general"
        is_unset = params.get("precision", 0) is None
        if setting and is_unset and (is_dot or not algorithm):
            level = algorithm or (lax.Precision(setting),) * 2
            product = product.replace(params=params | {"precision": level})
        return by_platform(product) if _names_algorithm(product) else product

    within = eqn, *_jaxpr.equations_within(eqn)
    is_changed = setting or any(map(_names_algorithm, within))
    return with_products(eqn, change) if is_changed else eqn


def _names_algorithm(eqn: JaxprEqn) -> bool:
    return is_algorithm(eqn.params.get("precision"))


def is_algorithm(precision: object) -> bool:
    """Whether a product names an algorithm as its precision."""
    return isinstance(precision, (lax.DotAlgorithm, lax.DotAlgorithmPreset))


def _lowered_by_platform(fun: Any, *args: jax.Array) -> jax.Array:
    """Runs `fun`, whose products each platform lowers in its own way."""
    inner, consts = _jaxpr.open_jaxpr(jax.make_jaxpr(fun)(*args))
    own = inner.replace(eqns=[*map(by_platform, inner.eqns)])
    (result,) = _jaxpr.evaluate_all(own, args, consts)
    return result


def own_dimensions(
    ndim: int, contracted: Sequence[int], batch: Sequence[int]
) -> list[int]:
    """Returns the dimensions of an operand that the result has, too."""
    return sorted({*range(ndim)}.difference(contracted, batch))


def _transposed(cotangent: jax.Array, *operands: Any, **params: Any) -> jax.Array:
    """Returns the gradient of the one operand that is not known."""
    side = int(hasattr(operands[0], "dtype"))
    known, unknown = operands[1 - side], operands[side].aval
    if unknown.dtype == jnp.float32 and is_half(known.dtype):
        # It comes from a half-precision result, and is cast back to it.
        cotangent = cotangent.astype(known.dtype)

    def jaxs(cotangent: jax.Array, known: jax.Array) -> jax.Array:
        missing = ad.UndefinedPrimal(unknown)
        pair = (known, missing) if side else (missing, known)
        return ad.primitive_transposes[_JAXS](cotangent, *pair, **params)[side]

    def in_order(cotangent: jax.Array, known: jax.Array) -> jax.Array:
        return _product_in_order(cotangent, known, unknown, side, params)

    is_explicit = AxisType.Explicit in unknown.sharding.mesh.axis_types
    return _lowered_by_platform(jaxs if is_explicit else in_order, cotangent, known)


def _product_in_order(
    cotangent: jax.Array, known: jax.Array, unknown: Any, side: int, params: Any
) -> jax.Array:
    """Multiplies in the order in which the result needs no transpose, if there is one.

    A CPU's matrix units take no transpose behind a product, and JAX's own rule always
    has one for the gradient of `w` in `x @ w`.
    """
    (contracted, of_known), (batch, known_batch) = (
        (pair[side], pair[1 - side]) for pair in params["dimension_numbers"]
    )
    count = len(batch)
    own = own_dimensions(unknown.ndim, contracted, batch)
    own_of_known = own_dimensions(known.ndim, of_known, known_batch)
    # The cotangent has dimensions of the batch, of the left operand, of the right one.
    first = count + (0 if side else len(own))
    summed = range(first, first + len(own_of_known))
    inner = [contracted[i] for i in np.argsort(of_known)]
    of_cotangent = (*summed,), (*range(count),)
    of_other = (*own_of_known,), (*known_batch,)
    axes = [*batch, *inner, *own]
    pair = known, cotangent
    numbers = [*zip(of_other, of_cotangent, strict=True)]
    if axes != sorted(axes):
        axes = [*batch, *own, *inner]
        pair, numbers = pair[::-1], [each[::-1] for each in numbers]
    precision, dtype = params["precision"], params["preferred_element_type"]
    found = lax.dot_general(*pair, (numbers[0], numbers[1]), precision, dtype)
    return lax.transpose(found, np.argsort(axes)).astype(unknown.dtype)


def _batched(operands: Any, axes: Any, **params: Any) -> tuple[jax.Array, int]:
    product = functools.partial(_JAXS.bind, **params)
    return _lowered_by_platform(jax.vmap(product, axes), *operands), 0


def _plain(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Multiplies as an accelerator does, where numbers of two dtypes are float32."""
    if lhs.dtype != rhs.dtype:
        lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    return _JAXS.bind(lhs, rhs, **params)


def _on_cpu(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Multiplies without the algorithm that a program names: a CPU has none."""
    if is_algorithm(params["precision"]):
        params["precision"] = None
    return _cpu.multiply(lhs, rhs, **params)


_OWN.def_impl(_on_cpu)
_OWN.def_effectful_abstract_eval(_JAXS.abstract_eval)
mlir.register_lowering(_OWN, mlir.lower_fun(_plain, multiple_results=False))
_ON_CPU = mlir.lower_fun(_on_cpu, multiple_results=False)
mlir.register_lowering(_OWN, _ON_CPU, platform="cpu")
ad.defbilinear(_OWN, _transposed, _transposed)
batching.primitive_batchers[_OWN] = _batched
