"""Multiplying trees by the loss scale, in float32 or wider."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ._marks import LOSS_SCALE, TRACED
from ._tree import is_inexact, promote_to_float32

T = TypeVar("T")

# Flax's name for float8 scales and maxima of the last steps (google/flax#3623).
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"


def multiply(function: str, tree: T, s: jax.Array, *, inverse: bool = False) -> T:
    """`tree` times S, f32[], or times 1/S: as `DynamicLossScale.scale` says."""
    TRACED.add(LOSS_SCALE)
    if jnp.shape(s) != ():
        raise ValueError(
            f"{function}: expected a scalar loss_scale, got one of shape "
            f"{jnp.shape(s)}; vmap {function} over it, or adjust one loss scale once "
            "with all_finite of all gradients"
        )

    def times(x: jax.Array) -> jax.Array:
        factor = s.astype(x.dtype)
        # Not a quotient: XLA:CPU keeps a copy of the gradients (test_performance).
        return x * (1 / factor if inverse else factor)

    def multiply_leaf(leaf: Any) -> jax.Array:
        # Before the product: a float16 loss of 3 times S = 2^15 is infinite.
        x = jnp.asarray(promote_to_float32(leaf))
        if not jnp.iscomplexobj(x):
            return times(x)
        # Part by part: the complex product (inf + 0j) * (S + 0j) has NaNs
        # (test_a_complex_leaf_keeps_its_imaginary_part_and_an_infinity_makes_no_nan).
        return lax.complex(times(x.real), times(x.imag))

    return map_gradients(multiply_leaf, tree)


def widen_gradients(tree: T) -> T:
    """Casts gradients narrower than 32 bits to float32; all other leaves pass."""
    return map_gradients(promote_to_float32, tree)


def map_gradients(fun: Callable[[Any], Any], tree: T) -> T:
    """`map_inexact`, except below a key `_overwrite_with_gradient`, at any depth.

    What JAX's transforms return for that collection of Flax's float8 layers are not
    gradients: they are the next values of its scales, which were never multiplied by
    S. Divided by S they are wrong by that factor, and another model is trained without
    any error (test_float8_scales_come_back_as_the_transform_gave_them).
    """

    def map_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
        names = (getattr(key, "key", None) for key in path)
        if not is_inexact(leaf) or OVERWRITE_WITH_GRADIENT in names:
            return leaf
        return fun(leaf)

    return jax.tree_util.tree_map_with_path(map_leaf, tree)
