"""A matrix product whose gradients are summed over devices in float32."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _mesh

DimensionNumbers = tuple[
    tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
]


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    **options: Any,
) -> jax.Array:
    """`jax.lax.dot_general`, whose backward pass gives float32 before it rounds.

    Where a batch or a weight is sharded under `jit`, each device computes a part of a
    weight's gradient, and XLA puts the all-reduce that adds the parts right behind the
    matrix product. In half precision the sum of N parts can overflow where no part
    does, and rounds once per addition. Here the parts are float32, and so is the
    all-reduce (or reduce-scatter); their sum is rounded once. It costs bytes: those
    gradients cross the wire in 4 bytes per entry rather than 2.

    The operands of all products stay in half precision, as tensor cores want them. A
    float32 product of half operands (`preferred_element_type=float32`) has a float32
    cotangent, which is kept as it is, as in `jax.lax.dot_general`.

    For Flax's `Dense(..., dot_general=)` and `MultiHeadDotProductAttention`, or in
    place of `lax.dot_general`. A bias is not a matrix product: its gradient is still
    summed in its own dtype. With float32 operands nothing changes. Only reverse-mode
    derivatives are defined.

    Args:
      lhs: an array.
      rhs: an array.
      dimension_numbers: `((lhs contracting, rhs contracting), (lhs batch, rhs batch))`.
      precision: as in `jax.lax.dot_general`, for the backward pass too.
      preferred_element_type: dtype of the result; default that of the operands.
      **options: what else `jax.lax.dot_general` takes, for the product itself.

    Returns:
      The product, as `jax.lax.dot_general` gives it, bit for bit.

    Examples:
      >>> import jax, jax.numpy as jnp, jmp_scale
      >>> x = jnp.ones((4, 3), jnp.float16)
      >>> w = jnp.ones((3, 2), jnp.float16)
      >>> dims = (((1,), (0,)), ((), ()))
      >>> grad = jax.grad(lambda w: jmp_scale.dot_general(x, w, dims).sum())(w)
      >>> grad.dtype, float(grad[0, 0])
      (dtype('float16'), 4.0)
    """
    contracting, batch = dimension_numbers
    static = (
        tuple(tuple(map(int, part)) for part in (*contracting, *batch)),
        tuple(precision) if isinstance(precision, list) else precision,
        preferred_element_type,
        tuple(sorted(options.items())),
    )
    return _product(static, lhs, rhs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(static: Any, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    (left, right, left_batch, right_batch), precision, dtype, options = static
    return lax.dot_general(
        lhs,
        rhs,
        ((left, right), (left_batch, right_batch)),
        precision=precision,
        preferred_element_type=dtype,
        **dict(options),
    )


def _forward(static: Any, lhs: jax.Array, rhs: jax.Array) -> Any:
    return _product(static, lhs, rhs), (lhs, rhs)


def _backward(static: Any, operands: Any, cotangent: jax.Array) -> Any:
    lhs, rhs = operands
    dimensions, precision, _, _ = static
    of_lhs, of_rhs, of_out = _labels(lhs.ndim, rhs.ndim, dimensions)

    def gradient(other: jax.Array, labels: Any, operand: jax.Array, own: Any) -> Any:
        product = jnp.einsum(
            *(cotangent, of_out, other, labels, own),
            precision=precision,
            preferred_element_type=_at_least_float32(cotangent, operand),
            out_sharding=_mesh.explicit_sharding(operand),
        )
        return _mesh.sum_where_equal(product, operand).astype(operand.dtype)

    # The cotangent of a float32 product is float32, whatever the operands are.
    with jax.numpy_dtype_promotion("standard"):
        return gradient(rhs, of_rhs, lhs, of_lhs), gradient(lhs, of_lhs, rhs, of_rhs)


_product.defvjp(_forward, _backward)


def _at_least_float32(*arrays: jax.Array) -> Any:
    return jnp.result_type(jnp.float32, *(x for x in arrays if x.dtype.itemsize >= 4))


def _labels(lhs_ndim: int, rhs_ndim: int, dimensions: Any) -> tuple[list[int], ...]:
    """A number for each dimension of lhs, rhs and their product, as for einsum."""
    left, right, left_batch, right_batch = dimensions
    fresh = itertools.count(lhs_ndim)
    of_lhs = list(range(lhs_ndim))
    shared = dict(zip((*right, *right_batch), (*left, *left_batch), strict=True))
    of_rhs = [shared[d] if d in shared else next(fresh) for d in range(rhs_ndim)]
    own = [label for d, label in enumerate(of_lhs) if d not in (*left, *left_batch)]
    others = [label for d, label in enumerate(of_rhs) if d not in shared]
    return of_lhs, of_rhs, [*left_batch, *own, *others]
