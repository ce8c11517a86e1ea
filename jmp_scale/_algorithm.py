"""`dot_general` with an algorithm of a GPU, which other machines compute without it.

JAX lowers each branch of `lax.platform_dependent` for all platforms of a program, and a
CPU refuses such an algorithm. So these products are a primitive, of the same name and
parameters, that each platform lowers in its own way; its rules are JAX's.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.extend.core.primitives
from jax.interpreters import ad, batching, mlir

from . import _jaxpr

_JAXS = jax.extend.core.primitives.dot_general_p
_OWN = jax.extend.core.Primitive("dot_general")


def by_algorithm(fun: Callable[..., jax.Array], *args: Any) -> jax.Array:
    """`fun` of arrays, in which the algorithms of products hold on a GPU alone."""
    inner, consts = _jaxpr.open_jaxpr(jax.make_jaxpr(fun)(*args))
    equations = [
        eqn.replace(primitive=_OWN) if eqn.primitive is _JAXS else eqn
        for eqn in inner.eqns
    ]
    (result,) = _jaxpr.evaluate_all(inner.replace(eqns=equations), args, consts)
    return result


def _plain(*operands: jax.Array, **params: Any) -> jax.Array:
    return _JAXS.bind(*operands, **{**params, "precision": None})


def _transposed(cotangent: jax.Array, *operands: Any, **params: Any) -> jax.Array:
    """The gradient of the one operand that is not known."""
    side = int(hasattr(operands[0], "dtype"))
    unknown = ad.UndefinedPrimal(operands[side].aval)

    def rule(cotangent: jax.Array, other: jax.Array) -> jax.Array:
        pair = (other, unknown) if side else (unknown, other)
        return ad.primitive_transposes[_JAXS](cotangent, *pair, **params)[side]

    return by_algorithm(rule, cotangent, operands[1 - side])


def _batched(operands: Any, axes: Any, **params: Any) -> tuple[jax.Array, int]:
    def product(*operands: jax.Array) -> jax.Array:
        return _JAXS.bind(*operands, **params)

    return by_algorithm(jax.vmap(product, axes), *operands), 0


_OWN.def_impl(_plain)
_OWN.def_abstract_eval(
    lambda *avals, **params: _JAXS.abstract_eval(*avals, **params)[0]
)
mlir.register_lowering(_OWN, mlir.lower_fun(_plain, multiple_results=False))
mlir.register_lowering(
    _OWN, mlir.lower_fun(_JAXS.bind, multiple_results=False), platform="cuda"
)
ad.defbilinear(_OWN, _transposed, _transposed)
batching.primitive_batchers[_OWN] = _batched
