"""The backward pass of a loss as a function of S, for the tools that run it again."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._loss_scale import DynamicLossScale


def any_loss_scale(s: Any) -> DynamicLossScale:
    """A loss scale of any S, known only on the device, so that a sweep is one compilation."""
    return DynamicLossScale(
        jnp.asarray(s, jnp.float32), min_loss_scale=0, max_loss_scale=2.0**126
    )


def split_arrays(args: tuple[Any, ...]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays among the leaves of `args`, and the function that puts such arrays in their places."""
    leaves, treedef = jax.tree.flatten(args)
    places = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, (jax.Array, np.ndarray, np.generic))
    ]

    def rejoin(arrays: list[Any]) -> Any:
        new_leaves = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            new_leaves[place] = array
        return jax.tree.unflatten(treedef, new_leaves)

    return [leaves[place] for place in places], rejoin
