"""Products of half-precision numbers, whose gradients of weights are float32."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Of a GPU's matrix units: half-precision operands, float32 sums and results.
ALGORITHMS = {
    "float16": lax.DotAlgorithmPreset.F16_F16_F32,
    "bfloat16": lax.DotAlgorithmPreset.BF16_BF16_F32,
}


class Dtypes(NamedTuple):
    """Half-precision dtypes of the products in the forward and the backward pass."""

    forward: Any
    backward: Any


def product(
    multiply: Callable[[jax.Array, jax.Array, Any], list[jax.Array]],
    operands: Sequence[jax.Array],
    copies: Sequence[jax.Array | None],
    weights: Sequence[bool],
    dtypes: Dtypes,
) -> list[jax.Array]:
    """A product of two float32 arrays in half precision, with float32 results.

    With h the cast to half precision, the product is h(x) h(w), and its derivative
    h(dx) h(w) + h(x) dw, if w is a weight. Transposed, the second term is a product of
    half-precision numbers with a float32 result: the gradient of w is not rounded to
    half precision and does not overflow there, and over devices it is summed in
    float32. It is a derivative like any other, in all of JAX's modes.

    Args:
      multiply: `(lhs, rhs, dtype)` computes the product, or several arrays that hold
        its entries, in a half-precision dtype. One operand may be float32, as dw is.
      operands: both operands.
      copies: their casts to half precision, which the backward pass keeps. Where one is
        None the operand is kept as it is, and cast again.
      weights: which operands have float32 gradients.
      dtypes: of the products.

    Returns:
      What `multiply` returns, in float32.
    """

    @jax.custom_jvp
    def run(operands: Any, copies: Any) -> Any:
        lhs, rhs = (x.astype(dtypes.forward) for x in _kept(operands, copies))
        return _widened(multiply(lhs, rhs, dtypes.forward))

    def rule(primals: Any, tangents: Any) -> Any:
        # A copy's tangent is the operand's once more.
        live = {s: t for s, t in enumerate(tangents[0]) if not is_zero(t)}

        def tangent(kept: Any, live: dict[int, Any]) -> Any:
            terms = []
            for side, moved in live.items():
                pair = [x.astype(dtypes.backward) for x in kept]
                pair[side] = moved if weights[side] else moved.astype(dtypes.backward)
                terms.append(multiply(pair[0], pair[1], dtypes.backward))
            return _widened(
                [x[0] + x[1] if x[1:] else x[0] for x in zip(*terms, strict=True)]
            )

        if any(weights) or None in primals[1] or dtypes.forward != dtypes.backward:
            # Nothing in it is kept, casts and half-precision weights above all.
            tangent = jax.checkpoint(tangent, prevent_cse=False)
        return run(*primals), tangent(_kept(*primals), live)

    run.defjvp(rule, symbolic_zeros=True)
    return run([*operands], [*copies])


@functools.partial(jax.jit, static_argnames=("dimensions", "out_sharding", "dtype"))
def wide_dot_general(
    lhs: jax.Array, rhs: jax.Array, dimensions: Any, out_sharding: Any, dtype: Any
) -> jax.Array:
    """A matrix product of a half-precision and a float32 array, cast to half precision.

    Its transpose is a product of half-precision numbers with a float32 result: on an
    NVIDIA GPU by the algorithm of that name, elsewhere as a float32 product, which a
    TPU computes in the same number of passes.

    Args:
      lhs: an array.
      rhs: an array.
      dimensions: as `jax.lax.dot_general` takes them.
      out_sharding: the same.
      dtype: of the result.
    """

    def dot(precision: Any, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        product = lax.dot_general(
            lhs,
            rhs,
            dimensions,
            precision=precision,
            preferred_element_type=jnp.float32,
            out_sharding=out_sharding,
        )
        return product.astype(dtype)

    # Decided when the program is lowered, which may be for another machine.
    with_algorithm = functools.partial(dot, ALGORITHMS[jnp.dtype(dtype).name])
    plain = functools.partial(dot, None)
    return lax.platform_dependent(lhs, rhs, cuda=with_algorithm, default=plain)


def _kept(operands: Any, copies: Any) -> list[jax.Array]:
    pairs = zip(operands, copies, strict=True)
    return [x if copy is None else copy for x, copy in pairs]


def _widened(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [x.astype(jnp.float32) for x in arrays]


def is_zero(tangent: Any) -> bool:
    """Whether a tangent is zero in itself, as that of what is not differentiated."""
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)
