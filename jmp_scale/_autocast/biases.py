"""Sums of a product and a bias, whose gradients are rounded once on a GPU.

In `z = x @ w + b` and `y = gelu(z)`, the gradient of z is read by the bias's sum in
float32 and, cast, by two products. XLA:GPU does not compute an expensive function
twice: it writes the float32 gradient to memory and reads it back. So the gradient is
rounded before both, and the bias adds the numbers that its weight's gradient
multiplies, in float32. Where no expensive function returns as many elements, XLA fuses
all three anyway, and the rounding would cost an MLP with relu 7 % of the bytes. On a
TPU it always fuses them: there it would cost 5 to 7 % of the cycles.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax import lax

from .. import _jaxpr
from .._jaxpr import Jaxpr, JaxprEqn
from .derivatives import Replacement, on_gpu

_EXPENSIVE = _jaxpr.words("""
    atan2 cbrt cos digamma erf erf_inv erfc exp exp2 expm1 lgamma log log1p logistic
    pow rsqrt sin sqrt tan tanh
""")
# Between a product and its bias.
BETWEEN = _jaxpr.REARRANGES | {"convert_element_type", "name"}


def sizes_of_expensive(jaxpr: Jaxpr) -> set[int]:
    """Returns the sizes of results of expensive functions, also within calls."""
    return {
        _jaxpr.size(v)
        for eqn in jaxpr.eqns
        for each in (eqn, *_jaxpr.equations_within(eqn))
        for v in each.outvars
        if _jaxpr.name_of(each) in _EXPENSIVE
    }


def with_rounding(eqn: JaxprEqn, dtype: np.dtype) -> JaxprEqn:
    """Returns the sum, whose gradient is rounded to a dtype on a GPU."""
    return eqn.replace(primitive=_SUM, params={"dtype": dtype})


def _sum(x: jax.Array, y: jax.Array, *, dtype: np.dtype) -> jax.Array:
    return with_rounded_gradient(dtype, lax.add(x, y))


_SUM = Replacement("add", _sum)  # planned like any sum


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def with_rounded_gradient(dtype: np.dtype, x: jax.Array) -> jax.Array:
    """Returns `x`, whose gradient is rounded to a dtype on a GPU."""
    return x


@with_rounded_gradient.defjvp
def _rule(dtype: np.dtype, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    def rounded(t: jax.Array) -> jax.Array:
        # Without the barrier XLA leaves the rounding out.
        return lax.optimization_barrier(t.astype(dtype)).astype(t.dtype)

    return with_rounded_gradient(dtype, *primals), on_gpu(rounded, *tangents)
