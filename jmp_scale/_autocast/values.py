"""The values of a program's variables, stored arrays included.

An array that is stored in half precision is two arrays here: a float32 one, to which
gradients flow and which nothing reads, and the stored one, which everything reads. So
gradients are added in float32, and no float32 copy of the array is made for it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._jaxpr import Var, dtype_of, is_float32
from .derivatives import with_value
from .provenance import Reading


class Stored(NamedTuple):
    """An array that is stored in half precision."""

    wide: jax.Array  # float32: it has the gradient, and XLA drops its value
    half: jax.Array  # has the value, and no gradient

    @classmethod
    def of(cls, x: jax.Array) -> "Stored":
        """Returns a half-precision array whose gradients are added in float32."""
        return cls(x.astype(jnp.float32), jax.lax.stop_gradient(x))

    def read(self, dtype: np.dtype) -> jax.Array:
        """Returns the value, for one reader or for all that read float32."""
        return with_value(self.wide.astype(dtype), self.half.astype(dtype))


class Values(dict[Var, Any]):
    """The values so far of a program's variables, and how the program is read."""

    def __init__(self, reading: Reading) -> None:
        super().__init__()
        self.reading = reading
        self.stored: dict[Var, Stored] = {}
        self.casts: dict[tuple[Var, np.dtype], jax.Array] = {}

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
            stored = self.stored.get(v)
            if stored and stored.half.dtype == dtype:
                self.casts[v, dtype] = stored.read(dtype)
            else:
                self.casts[v, dtype] = self[v].astype(dtype)
        return self.casts[v, dtype]
