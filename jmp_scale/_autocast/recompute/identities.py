"""Functions that return what they are given: behind a barrier, or as a softmax."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..dot_general import is_zero
from ..identities import no_tangent


@jax.jit
def kept_apart(x: jax.Array) -> jax.Array:
    return _on_gpu(lax.optimization_barrier, x)


def _on_gpu(fun: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return lax.platform_dependent(x, cuda=fun, rocm=fun, default=lambda x: x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def softmax_from(
    exponents: jax.Array, result: jax.Array, axes: tuple[int, ...]
) -> jax.Array:
    """`result`, which is the softmax of the exponents and gives their derivative."""
    return result


@functools.partial(softmax_from.defjvp, symbolic_zeros=True)
def _softmax_rule(
    axes: tuple[int, ...], primals: tuple[jax.Array, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, Any]:
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
    # A difference here has a wrong gradient on a CPU with jax 0.8.0.
    return result, product + p * -mean
