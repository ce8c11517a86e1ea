"""Products in half precision, whose gradients are summed in float32."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from .. import _jaxpr

# Algorithms of a GPU's matrix units: half-precision operands, float32 sums and results.
ALGORITHMS = {
    "float16": lax.DotAlgorithmPreset.F16_F16_F32,
    "bfloat16": lax.DotAlgorithmPreset.BF16_BF16_F32,
}


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def wide_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimensions: lax.DotDimensionNumbers,
    dtype: DTypeLike,
    out_sharding: Any = None,
) -> jax.Array:
    """Multiplies a half-precision and a float32 array, and casts to `dtype`.

    Its transpose is a product of half-precision numbers with a float32 result: by the
    algorithm of that name on an NVIDIA GPU, elsewhere a float32 product, which takes a
    TPU no more passes. So the float32 array's gradient is not rounded, does not
    overflow, and over devices it is summed in float32.
    """

    def dot(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        product = lax.dot_general(
            lhs,
            rhs,
            dimensions,
            precision=ALGORITHMS[jnp.dtype(dtype).name],
            preferred_element_type=jnp.float32,
            out_sharding=out_sharding,
        )
        return product.astype(dtype)

    return _by_algorithm(dot, lhs, rhs)


# An algorithm of a GPU must hold on a GPU alone, but JAX lowers each branch of
# `lax.platform_dependent` for all platforms of a program, and a CPU refuses such an
# algorithm. So these products are a primitive, of the same name and parameters, that
# each platform lowers in its own way; its rules are JAX's.
_JAXS = jax.extend.core.primitives.dot_general_p
_OWN = jax.extend.core.Primitive("dot_general")


def _by_algorithm(fun: Callable[..., jax.Array], *args: jax.Array) -> jax.Array:
    """Runs `fun`, in which the algorithms of products hold on a GPU alone."""
    inner, consts = _jaxpr.open_jaxpr(jax.make_jaxpr(fun)(*args))
    own = [e.replace(primitive=_OWN) if e.primitive is _JAXS else e for e in inner.eqns]
    (result,) = _jaxpr.evaluate_all(inner.replace(eqns=own), args, consts)
    return result


def _plain(*operands: jax.Array, **params: Any) -> jax.Array:
    return _JAXS.bind(*operands, **{**params, "precision": None})


def _on_gpu(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    # XLA:GPU makes a sum of a product with a vector, and refuses the algorithm there.
    sizes = split_sizes((lhs.shape, rhs.shape), params["dimension_numbers"])
    # A size may be symbolic: not 1.
    counts = [math.prod(part) for each in sizes for part in each]
    return (_plain if 1 in counts else _JAXS.bind)(lhs, rhs, **params)


class OperandSizes(NamedTuple):
    """Sizes of an operand's dimensions, except those of the batch."""

    own: list[int]  # the result has them too
    contracted: list[int]


def split_sizes(
    shapes: Sequence[Sequence[int]], dimension_numbers: lax.DotDimensionNumbers
) -> list[OperandSizes]:
    """Returns the sizes of both operands of a matrix product."""
    found = []
    for shape, contracted, batch in zip(shapes, *dimension_numbers, strict=True):
        others = {*range(len(shape))}.difference(contracted, batch)
        own = [shape[d] for d in sorted(others)]
        found.append(OperandSizes(own, [shape[d] for d in contracted]))
    return found


def _transposed(cotangent: jax.Array, *operands: Any, **params: Any) -> jax.Array:
    """Returns the gradient of the one operand that is not known."""
    side = int(hasattr(operands[0], "dtype"))
    unknown = ad.UndefinedPrimal(operands[side].aval)

    def rule(cotangent: jax.Array, other: jax.Array) -> jax.Array:
        pair = (other, unknown) if side else (unknown, other)
        return ad.primitive_transposes[_JAXS](cotangent, *pair, **params)[side]

    return _by_algorithm(rule, cotangent, operands[1 - side])


def _batched(
    axis: Any, operands: Any, axes: Any, **params: Any
) -> tuple[jax.Array, int | None]:
    if all(each is None for each in axes):
        return _OWN.bind(*operands, **params), None
    product = functools.partial(_JAXS.bind, **params)
    return _by_algorithm(jax.vmap(product, axes), *operands), 0


_OWN.def_impl(_plain)
_OWN.def_effectful_abstract_eval(_JAXS.abstract_eval)
mlir.register_lowering(_OWN, mlir.lower_fun(_plain, multiple_results=False))
_ON_GPU = mlir.lower_fun(_on_gpu, multiple_results=False)
mlir.register_lowering(_OWN, _ON_GPU, platform="cuda")
ad.defbilinear(_OWN, _transposed, _transposed)
batching.fancy_primitive_batchers[_OWN] = _batched
