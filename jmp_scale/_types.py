"""Names of types, for annotations that say which of many things a value is.

Types that JAX or Optax export are used from there: `jax.Array`, `ArrayLike`,
`DTypeLike`, `optax.Params`, `optax.Updates`, `optax.OptState`.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

# A container of any structure, or a leaf: an array, a number, an object without data.
PyTree: TypeAlias = Any
Arrays: TypeAlias = Sequence[jax.Array]
Scalar: TypeAlias = jax.Array  # of shape ()
Flag: TypeAlias = jax.Array  # bool[]
Function: TypeAlias = Callable[..., Any]  # of a user, with arguments of any types
KeyPath: TypeAlias = jax.tree_util.KeyPath
Mesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh
