"""Identities with derivatives of their own, of which `autocast` makes gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._dot_general import is_zero


@jax.jit
def kept_apart(x: jax.Array) -> jax.Array:
    apart = lax.optimization_barrier
    return lax.platform_dependent(x, cuda=apart, rocm=apart, default=lambda x: x)


# The second array, which is what the first should be, with the first one's derivative.
with_value = jax.custom_jvp(lambda _, value: value)
with_value.defjvp(lambda primals, t: (primals[1], t[0]), symbolic_zeros=True)

no_tangent = jax.custom_derivatives.SymbolicZero.from_primal_value


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def softmax_from(exponents: Any, result: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """`result`, which is the softmax of the exponents and gives their derivative."""
    del exponents, axes
    return result


@functools.partial(softmax_from.defjvp, symbolic_zeros=True)
def _softmax_rule(axes: tuple[int, ...], primals: Any, tangents: Any) -> Any:
    result, tangent = primals[1], tangents[0]
    if is_zero(tangent):
        return result, no_tangent(result)
    # XLA:GPU has one kernel for what begins with a reduction of the rows.
    alike = functools.partial(_less_nothing, axes=axes)
    p = lax.platform_dependent(result, cuda=alike, rocm=alike, default=lambda x: x)
    product = p * tangent
    return result, product + p * -jnp.sum(product, axes, keepdims=True)


def _less_nothing(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return x - 0 * jnp.max(x, axes, keepdims=True)
