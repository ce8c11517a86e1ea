"""Names of types, for annotations that say which of many things a value is.

Types that JAX or Optax export are used from there: `jax.Array`, `ArrayLike`,
`DTypeLike`, `optax.Params`, `optax.Updates`, `optax.OptState`.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

PyTree: TypeAlias = Any  # a container of any structure, or a leaf alone
Leaf: TypeAlias = Any  # of a pytree: an array, a number, or an object without data
Arrays: TypeAlias = Sequence[jax.Array]
Scalar: TypeAlias = jax.Array  # of shape ()
Flag: TypeAlias = jax.Array  # bool[]
Function: TypeAlias = Callable[..., Any]  # of a user, with arguments of any types
KeyPath: TypeAlias = jax.tree_util.KeyPath
Mesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh
