"""A loss and its gradients as a function of S, for the tools that run them again."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._gradients import value_and_grad
from .._loss_scale import DynamicLossScale
from .._tree import named_inexact_leaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Backward:
    """The results of one backward pass, which can leave `jit` with the leaves' names.

    Attributes:
      loss: the unscaled loss, a scalar.
      leaves: the L inexact leaves of the unscaled gradients.
      paths: names of the L leaves, as `jax.tree_util.keystr` writes them. Static.
    """

    loss: Any
    leaves: Any
    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})


def run_backward(
    fun: Callable[..., Any],
    s: Any,
    args: Any,
    argnums: int | Sequence[int],
    has_aux: bool,
) -> Backward:
    """Runs `value_and_grad` at the loss scale `s`, f32[], which may be traced.

    S is a leaf, not configuration, so that a sweep over S is one compilation.
    """
    # Not a StaticLossScale, whose S is configuration and cannot be traced: a sweep
    # would compile once for each S
    # (test_calibration_is_the_same_in_jit_and_vmap_and_compiles_the_loss_once).
    loss_scale = DynamicLossScale(
        jnp.asarray(s, jnp.float32), min_loss_scale=0, max_loss_scale=2.0**126
    )
    value, grads = value_and_grad(fun, loss_scale, argnums, has_aux)(*args)
    paths, leaves = named_inexact_leaves(grads)
    return Backward(value[0] if has_aux else value, leaves, paths)


def split_arrays(
    args: tuple[Any, ...],
) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays among the leaves of `args`, and a function that puts such arrays back.

    Everything else (Python numbers, strings, functions) stays static.
    """
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
