"""Arrays that are stored in half precision, and float32 sums of their cotangents.

JAX adds up the cotangents of an array in its own dtype: in half precision the gradient
of a weight that is read many times, as in a loop, loses most of what it is made of. So
such an array becomes two, of which a reader takes the value of one and gives its
cotangent to the other one.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jaxpr
from .._jaxpr import JaxprEqn
from .._policy import is_half
from .linear import with_value


class Stored(NamedTuple):
    """An array in half precision, whose cotangents are added up in float32."""

    sums: jax.Array  # float32: its cotangent is the sum, its value is never read
    half: jax.Array


Value = jax.Array | Stored


def stored(x: jax.Array) -> Value:
    """Wraps a half-precision array, whose cotangents are then added up in float32."""
    # It is not that of a stopped `x`, because an argument would be saved twice.
    return Stored(x.astype(jnp.float32), x) if is_half(x.dtype) else x


def array_of(value: Value) -> jax.Array:
    """Returns the array that one reader reads."""
    if isinstance(value, Stored):
        return with_value(value.sums.astype(value.half.dtype), value.half)
    return value


def places_of(values: Sequence[Value]) -> tuple[int, ...]:
    """Returns the positions of arrays that are stored in half precision."""
    return tuple(i for i, x in enumerate(values) if isinstance(x, Stored))


def looked_up(eqn: JaxprEqn, values: Sequence[Any]) -> Stored:
    """Gathers from a stored array; the rows are stored in half precision too."""
    source, *indices = values
    indices = [*map(array_of, indices)]
    sums, half = (_jaxpr.evaluate(eqn, [x, *indices])[0] for x in source)
    return Stored(sums, half)


def loops_that_add_up(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Finds loops that read arrays in half precision in each iteration.

    Put back as traced, they add up the cotangents of these arrays in half precision.
    """
    for each in (eqn, *_jaxpr.equations_within(eqn)):
        loop = _jaxpr.loop_of(each)
        # A `while` has a gradient only within a function that has its own.
        if loop is None or (each is eqn and loop.trips is None):
            continue
        constants = each.invars[loop.offset : loop.offset + loop.consts]
        if any(is_half(_jaxpr.dtype_name(v)) for v in constants):
            yield each
