"""Matrix products and convolutions: which become half precision, and how they run."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _jaxpr
from ._dot_general import wide_dot_general
from ._jaxpr import PRODUCTS

_HALF = "half precision"  # no reason to stay float32
_DEFAULT = lax.Precision.DEFAULT  # whatever the setting is


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or convolution. Equal ones, as of equal layers, are traced once.

    Attributes:
      likeness: what equal products share.
      jaxpr: what moves the entries of its operands, and the product, of the operands
        before that and what else it reads.
      moves: how many equations are for the first operand; the others for the second.
      weights: for each operand of a matrix product, whether its gradient is computed in
        float32, because it is computed from arguments alone. The transposes of other
        products take operands of one dtype.
      scope: the scopes in which its equations were, which they no longer name.
    """

    likeness: Any
    jaxpr: Any = dataclasses.field(compare=False)
    moves: int
    weights: tuple[bool, ...]
    scope: Any = dataclasses.field(compare=False)

    @property
    def result(self) -> Any:
        """The variable that it makes."""
        return self.jaxpr.outvars[0]

    def run(self, dtype: Any, *values: jax.Array, wide: int | None = None) -> jax.Array:
        """The product in half precision; only the operand `wide` stays float32."""
        *moves, eqn = self.jaxpr.eqns
        pair = [x if i == wide else x.astype(dtype) for i, x in enumerate(values[:2])]
        for i, move in enumerate(moves):
            side = int(i >= self.moves)
            (pair[side],) = _jaxpr.evaluate(move, [pair[side]])
        if wide is None:
            params = {"precision": None, "preferred_element_type": dtype}
            (result,) = _jaxpr.evaluate(eqn, [*pair, *values[2:]], **params)
        else:
            numbers = eqn.params["dimension_numbers"]
            sharding = eqn.params.get("out_sharding")
            result = wide_dot_general(*pair, numbers, dtype, _DEFAULT, sharding)
        return result.astype(jnp.float32)

    def tangent(
        self, dtype: Any, values: Sequence[Any], live: dict[int, jax.Array]
    ) -> jax.Array:
        """Its tangent in half precision, for tangents of operands by side."""
        terms = [
            self.run(
                dtype,
                *(t if i == side else x for i, x in enumerate(values)),
                wide=side if self.weights[side] else None,
            )
            for side, t in live.items()
        ]
        return functools.reduce(jnp.add, terms).astype(dtype)


def becomes_half(eqn: Any) -> bool:
    """Whether an equation is a product that becomes half precision."""
    return eqn.primitive.name in PRODUCTS and _reason(eqn) is None


def stays_float32(eqn: Any) -> bool:
    """Whether a product of no half precision is one that gains nothing from it."""
    return _reason(eqn) not in (None, _HALF)


def has_product(jaxpr: Any) -> bool:
    """Whether a program holds a product that becomes half precision."""
    return any(map(becomes_half, _jaxpr.equations(jaxpr)))


def why_float32(jaxpr: Any) -> str:
    """Why no product of a program becomes half precision; "" if some are already."""
    products = [e for e in _jaxpr.equations(jaxpr) if e.primitive.name in PRODUCTS]
    reasons = dict.fromkeys(_reason(e) or "kept, or unreadable" for e in products)
    if _HALF in reasons:
        return ""
    return "they have " + ", ".join(reasons) if reasons else "there is none"


def _reason(eqn: Any) -> str | None:
    """Why a product stays float32; None if it becomes half precision."""
    dtypes = {_jaxpr.dtype_name(v) for v in (*eqn.invars[:2], eqn.outvars[0])}
    if not dtypes.isdisjoint(("float16", "bfloat16")):
        return _HALF
    if dtypes != {"float32"}:
        return "dtype " + " and ".join(sorted(dtypes))
    if {*jax.tree.leaves(eqn.params.get("precision"))} - {_DEFAULT}:
        return "a precision of their own"
    if is_sum(eqn):
        return "nothing to do for a matrix unit (sums, outer products)"
    return None


def is_sum(eqn: Any) -> bool:
    """Whether a matrix unit has nothing to do, for each index of the batch.

    One operand is a vector, or nothing is contracted: positions times frequencies.
    """
    if eqn.primitive.name != "dot_general":
        return False
    sizes = []
    dimensions = eqn.params["dimension_numbers"]
    for v, contracting, batch in zip(eqn.invars, *dimensions, strict=True):
        shape = v.aval.shape
        own = {*range(len(shape))}.difference(contracting, batch)
        sizes += [math.prod(shape[d] for d in dims) for dims in (own, contracting)]
    return 1 in sizes  # which may be symbolic: not 1
