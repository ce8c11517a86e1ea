"""The scalars of a loss-scale state, wherever it stands."""

from typing import Any

import jax
import jax.numpy as jnp

from .._loss_scale import number_of
from .._tree import is_inexact, widen


def metrics(opt_state: Any, grads: Any = None) -> dict[str, jax.Array]:
    """Scalars for any logger, which stay on the device until they are asked for.

    Compatible with `jit`, `vmap` and `lax.scan`: return them from the train step, and convert them (with
    `float`, or `jax.device_get` for all at once) only at the steps that are logged.

    Args:
      opt_state: state of `with_loss_scale`, at any depth of any pytree (a Flax `TrainState`, a tuple with
        the parameters).
      grads: true gradients of the step, if their norm is wanted.

    Returns:
      `loss_scale` f32[] (of the next step), `skipped` and `skipped_in_a_row` i32[], `grads_finite` bool[],
      and with `grads` `grad_norm` f32[]: the Euclidean norm over all inexact leaves, unscaled. Where there
      are several states each name but `grad_norm` starts with the path of its state, as in
      "['generator'].loss_scale".

    Raises:
      ValueError: there is no such state in `opt_state`.

    Example:
      >>> import jax.numpy as jnp, jmp_scale, optax
      >>> from jmp_scale import diagnostics
      >>> tx = jmp_scale.with_loss_scale(optax.sgd(0.1), jmp_scale.DynamicLossScale())
      >>> scalars = diagnostics.metrics(tx.init(jnp.ones(2)), grads=jnp.array([3.0, 4.0]))
      >>> {name: scalar.item() for name, scalar in scalars.items()}
      {'loss_scale': 32768.0, 'skipped': 0, 'skipped_in_a_row': 0, 'grads_finite': True, 'grad_norm': 5.0}
    """
    states = find_states("metrics", opt_state)
    scalars = {}
    for path, state in states:
        prefix = f"{path}." if len(states) > 1 else ""
        scalars[f"{prefix}loss_scale"] = jnp.asarray(
            number_of(state.loss_scale), jnp.float32
        )
        for name in ("skipped", "skipped_in_a_row", "grads_finite"):
            scalars[prefix + name] = jnp.asarray(getattr(state, name))
    if grads is not None:
        scalars["grad_norm"] = _norm(grads)
    return scalars


def find_states(function: str, tree: Any) -> list[tuple[str, Any]]:
    """Paths and states of `with_loss_scale`, found by their fields, so that Optax need not be imported.

    Raises:
      ValueError: there is none; the message names `function`.
    """

    def is_state(node: Any) -> bool:
        return hasattr(node, "skipped_in_a_row") and hasattr(node, "loss_scale")

    pairs = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_state)[0]
    states = [
        (jax.tree_util.keystr(path), node) for path, node in pairs if is_state(node)
    ]
    if not states:
        raise ValueError(
            f"{function}: found no state of with_loss_scale in opt_state; wrap the optimizer in it"
        )
    return states


def _norm(grads: Any) -> jax.Array:
    squares = [
        jnp.sum(jnp.square(jnp.abs(leaf)))
        for leaf in jax.tree.leaves(widen(grads))
        if is_inexact(leaf)
    ]
    return jnp.sqrt(
        sum((s.astype(jnp.float32) for s in squares), start=jnp.zeros([], jnp.float32))
    )
