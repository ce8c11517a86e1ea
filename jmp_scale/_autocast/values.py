"""The values of a program's variables, stored arrays included."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._jaxpr import Var, dtype_of, is_float32
from .derivatives import with_value
from .provenance import Reading


class Stored(NamedTuple):
    """An array that is stored in half precision: two arrays.

    So gradients are added in float32. In a loop nothing reads `wide`: XLA drops it.
    """

    wide: jax.Array  # float32: it has the gradient
    half: jax.Array  # what products read
    is_constant: bool = False  # of a loop, whose iterations do not read `wide`

    @classmethod
    def of(cls, x: jax.Array) -> "Stored":
        """Returns a half-precision array whose gradients are added in float32."""
        return cls(x.astype(jnp.float32), x)

    def as_constant(self) -> "Stored":
        """Returns the array as each iteration of a loop reads it."""
        return Stored(self.wide, jax.lax.stop_gradient(self.half), True)

    def read(self, dtype: np.dtype) -> jax.Array:
        """Returns the value, for one reader or for all that read float32."""
        wide = self.wide.astype(dtype)
        return with_value(wide, self.half.astype(dtype)) if self.is_constant else wide

    @property
    def copy(self) -> jax.Array:
        """The residual of products, of which second derivatives are taken."""
        return self.read(self.half.dtype) if self.is_constant else self.half


class Values(dict[Var, Any]):
    """The values so far of a program's variables, and how the program is read."""

    def __init__(self, reading: Reading, inputs: Mapping[Var, Any]) -> None:
        super().__init__()
        self.reading = reading
        self.stored: dict[Var, Stored] = {}
        self.casts: dict[tuple[Var, np.dtype], jax.Array] = {}
        for v, x in inputs.items():
            self.put(v, x)

    def __missing__(self, v: Var) -> jax.Array:
        value = self.stored[v].read(dtype_of(v))
        if is_float32(v):  # JAX adds up its cotangents in float32
            self[v] = value
        return value

    def put(self, v: Var, x: jax.Array | Stored) -> None:
        """Adds the value of a variable."""
        if isinstance(x, Stored):
            self.stored[v] = x
        else:
            self[v] = x

    def cast(self, v: Var, dtype: np.dtype) -> jax.Array:
        """Returns the cast of a value to a dtype, which all readers share."""
        if (v, dtype) not in self.casts:
            self.casts[v, dtype] = self[v].astype(dtype)
        return self.casts[v, dtype]
