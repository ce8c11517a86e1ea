"""Sums of a product and a bias, whose gradients are rounded once on a GPU.

In `z = x @ w + b` and `y = gelu(z)`, the gradient of z is read by the bias's sum in
float32 and, cast, by two products. XLA:GPU does not compute an expensive function
twice: it writes the float32 gradient to memory and reads it back. So the gradient is
rounded before both, and the bias adds the numbers that its weight's gradient
multiplies, in float32. Where no expensive function is near, XLA fuses all three anyway,
and on a TPU it always does: there the rounding would cost 5 to 7 % of the cycles.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from .. import _jaxpr
from .._jaxpr import Jaxpr, JaxprEqn, Var, variables
from .derivatives import on_gpu
from .products import is_cheap

_EXPENSIVE = _jaxpr.words("""
    atan2 cbrt cos digamma erf erf_inv erfc exp exp2 expm1 lgamma log log1p logistic
    pow rsqrt sin sqrt tan tanh
""")
# Between a product and its bias.
MOVES = _jaxpr.REARRANGES | {"convert_element_type", "name"}


def is_bias_sum(
    eqn: JaxprEqn, is_product: Callable[[Var], bool], is_repeated: Callable[[Var], bool]
) -> bool:
    """Whether an equation adds an array that is repeated to the result of a product.

    A bias is repeated before, or has axes of length 1 for larger ones of the result.
    """
    if eqn.primitive.name != "add" or not _jaxpr.is_float32(eqn.outvars[0]):
        return False
    size = _jaxpr.size(eqn.outvars[0])
    pair = variables(eqn.invars)
    return any(
        is_product(a) and (_jaxpr.size(b) < size or is_repeated(b))
        for a, b in zip(pair, pair[::-1], strict=True)
        if len(pair) == 2
    )


def read_by_expensive(jaxpr: Jaxpr) -> set[Var]:
    """Returns the variables whose gradients an expensive function enters.

    One reads them before a product or a reduction does, or they are multiplied by what
    one returns, as in a gate.
    """
    eqns = [eqn for eqn in jaxpr.eqns if not _ends_kernel(eqn)]
    made: set[Var] = set()  # from results of expensive functions, of their size
    for eqn in eqns:
        if _is_expensive(eqn) or any(v in made for v in _of_its_size(eqn)):
            made.update(eqn.outvars)
    found: set[Var] = set()
    for eqn in reversed(eqns):
        inputs = _of_its_size(eqn)
        is_gate = eqn.primitive.name in ("mul", "div") and any(
            v in made for v in inputs
        )
        adds_streams = eqn.primitive.name == "add" and len({*inputs}) == 2
        is_read = not adds_streams and not found.isdisjoint(eqn.outvars)
        if _is_expensive(eqn) or is_gate or is_read:
            found.update(inputs)
    return found


def _of_its_size(eqn: JaxprEqn) -> list[Var]:
    """Returns the operands that have as many elements as the result."""
    size = _jaxpr.size(eqn.outvars[0]) if eqn.outvars else 0
    return [v for v in variables(eqn.invars) if _jaxpr.size(v) == size]


def _ends_kernel(eqn: JaxprEqn) -> bool:
    return not is_cheap(eqn) or eqn.primitive.name.startswith("reduce_")


def _is_expensive(eqn: JaxprEqn) -> bool:
    within: Iterable[JaxprEqn] = (eqn, *_jaxpr.equations_within(eqn))
    return any(each.primitive.name in _EXPENSIVE for each in within)


class _RoundGradient(Primitive):
    """An identity in a program that `autocast` reads; JAX sees what it binds."""

    def bind(self, x: jax.Array, *, dtype: np.dtype) -> jax.Array:
        return with_rounded_gradient(dtype, x)


_round_p = _RoundGradient("round_gradient")


def rounding_of(eqn: JaxprEqn, before: Var, dtype: np.dtype) -> JaxprEqn:
    """Returns the equation that rounds the gradient of a sum `before` it is read."""
    params = {"dtype": dtype}
    return eqn.replace(primitive=_round_p, invars=[before], params=params)


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
