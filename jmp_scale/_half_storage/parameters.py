"""The float32 values of bfloat16 parameters and of the remainders in a state."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from .._policy import holds_half
from .._state import fields_of, find_half_storage, find_loss_scale_states
from .._tree import leaves_by_name, with_arrays
from .._types import PyTree
from . import bfloat16


def full_parameters(params: PyTree, opt_state: PyTree) -> PyTree:
    """Returns the float32 values of half-precision parameters, for evaluation.

    Args:
      params: the parameters, as the optimizer's `init` got them, or their
        `jax.ShapeDtypeStruct`s, which gives those of the values.
      opt_state: the state after the same step, with that of `with_half_storage` at
        any depth: of `with_loss_scale`, a `TrainState`, `nnx.state(optimizer)`.

    Returns:
      A tree like `params`, with NNX's variables: the exact values, or casts to float32
      where the state keeps no remainder. Leaves of other dtypes pass.

    Raises:
      ValueError: `params` holds the state of an optimizer, or the remainders are not
        those of these parameters, or of two optimizers.
    """
    refuse_states("full_parameters", params)
    lower = remainders("full_parameters", opt_state)
    leaves = leaves_by_name(with_arrays(params))
    check_pairs("full_parameters", leaves, lower)
    joined = [join(leaf, lower.get(name)) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(params), joined)


def refuse_states(function: str, params: PyTree) -> None:
    """Raises an error for arguments in the wrong order."""
    if find_half_storage(params) or find_loss_scale_states(params):
        raise ValueError(
            f"{function}: expected the parameters first, got the state of an "
            f"optimizer; write {function}(params, opt_state)"
        )


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits a float32 value into the nearest bfloat16 and its remainder."""
    made = bfloat16.rounded(x).astype(jnp.bfloat16)
    return made, bfloat16.remainder(x, made)


def remainders(function: str, tree: PyTree) -> dict[str, PyTree]:
    """Finds the remainders in a pytree, by the names of their parameters."""
    found: dict[str, PyTree] = {}
    for _, state in find_half_storage(tree):
        own = leaves_by_name(with_arrays(fields_of(state).get("remainders")))
        if found.keys() & own.keys():
            raise ValueError(
                f"{function}: expected one remainder of each parameter, got those of "
                "two optimizers (a GAN's?); pass the state of the optimizer that "
                "updates these parameters"
            )
        found |= own
    return found


def check_pairs(
    function: str,
    params: Mapping[str, PyTree],
    remainders: Mapping[str, PyTree],
    has_all: bool = False,
) -> None:
    """Raises an error unless remainders and parameters belong together."""
    for name in sorted(params.keys() | remainders.keys()):
        p: PyTree = params.get(name)
        lower = remainders.get(name)
        if lower is None and not (has_all and is_bfloat16(p)):
            continue
        wanted = "float32" if lower is None else f"bfloat16{[*lower.shape]}"
        got = f"{p.dtype}{[*p.shape]}" if hasattr(p, "dtype") else "none"
        if got != wanted:
            raise ValueError(
                f"{function}: expected parameter {name or 'params'} to be {wanted}, by "
                f"the remainders in the state, got {got}; params has {[*params][:5]}; "
                "pass all parameters as init got them, and the state of their own "
                "optimizer, and apply updates by optax.apply_updates "
                "(equinox.apply_updates does not cast back)"
            )


def is_bfloat16(x: PyTree) -> bool:
    """Whether a leaf is a bfloat16 array."""
    return getattr(x, "dtype", None) == jnp.bfloat16


def join(p: PyTree, remainder: PyTree = None) -> PyTree:
    """Returns the float32 value of a half-precision parameter and its remainder."""
    if not holds_half(p):
        return p
    if isinstance(p, jax.ShapeDtypeStruct):
        return p.update(dtype=jnp.float32)
    x = jnp.asarray(p).astype(jnp.float32)
    return x if remainder is None else bfloat16.joined(x, remainder)
