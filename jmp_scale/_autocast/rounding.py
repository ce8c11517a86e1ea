"""Results of products in float32, rounded alike for both passes."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from .._jaxpr import OwnPrimitive


def widened(x: jax.Array) -> jax.Array:
    """Casts to float32 what a product returned in half precision.

    XLA:CPU leaves out the rounding of a bfloat16 result where it fuses the readers. The
    forward pass would then sum other logits than those that the backward pass reads:
    with logits of 100 the gradient of a loss is off by half.
    """
    wide = x.astype(jnp.float32)
    return round_p.bind(wide) if x.dtype == jnp.bfloat16 else wide


# The primitive rounds on a CPU. Elsewhere it is nothing, so that programs stay as they
# are: a kernel writes the result of a product as it was rounded.
round_p = OwnPrimitive("reduce_precision")


def _round(x: jax.Array) -> jax.Array:
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


round_p.def_impl(_round)
round_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(round_p, lambda _, x: [x])
_ON_CPU = mlir.lower_fun(_round, multiple_results=False)
mlir.register_lowering(round_p, _ON_CPU, platform="cpu")
ad.deflinear2(round_p, lambda cotangent, _: [cotangent])
batching.defvectorized(round_p)
