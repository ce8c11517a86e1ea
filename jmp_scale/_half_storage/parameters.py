"""Any Optax optimizer on float32 values, of which the model holds the rounding.

A bfloat16 is the upper half of a float32, so its optimizer keeps the lower half:

    bits(x) = bits(parameter) * 2^16 + remainder, remainder in [-2^15, 2^15)
    q       = (bits(x) + 2^15) >> 16, the next parameter: x to nearest, ties up
    updates = float32(q) - float32(parameter), so that `optax.apply_updates` makes q

The remainder of a float16 is the float32 `x - q`. Transformer Engine and Megatron-LM
keep bfloat16 remainders in PyTorch (`store_param_remainders`).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from .._mesh import refuse_unreduced
from .._policy import holds_half
from .._state import (
    HalfParametersState,
    checked_optimizer,
    find_half_states,
    find_loss_scale_states,
    is_nothing,
    started,
)
from .._tree import leaves_by_name, listed, promote_to_float32, with_arrays
from .._types import Leaf, PyTree
from .._validation import described, key_words
from .formats import FORMATS, format_of, misfits


def with_half_parameters(
    inner: optax.GradientTransformation, *, key: jax.Array | None = None
) -> optax.GradientTransformationExtraArgs:
    """Wraps an Optax optimizer: parameters in half precision lose no update.

    `inner` updates float32 values, whose rounding the parameters are; the state keeps
    the rest. So training is that of `inner` on float32 parameters, bit for bit, given
    the same gradients. With a `key` nothing is kept: new values are rounded up or down
    at random, right in the mean and the same on all devices.

    Put it inside `with_loss_scale`, and clipping, `MultiSteps` and schedules into it.
    Apply its updates by `optax.apply_updates`; `equinox.apply_updates` does not round.
    A value above the largest bfloat16 becomes infinite as in a cast, one above the
    largest float16 becomes that. A value that falls below 2^-15 of itself in one step
    may miss its last digits. The rounding has no derivative.

    Args:
      inner: any Optax optimizer or chain, without a loss scale.
      key: a PRNG key, typed or raw, whose first 64 bits become a Threefry key: others
        depend on the layout. `shard_map` needs one for each part of a divided array.

    Returns:
      A transformation with state `HalfParametersState`. Its `update` takes gradients of
      any dtype, needs `params`, and returns float32 updates for half-precision leaves.

    Raises:
      TypeError: an argument or a state of another type, parameters that are not arrays.
      ValueError: `inner` contains a `with_loss_scale` or another `with_half_parameters`
        (from `init`); several keys; `update` without `params`, with others than
        those of `init`, with the state of another `key`, or `unreduced` gradients.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale, optax
      >>> params = jnp.bfloat16(1)
      >>> tx = jmp_scale.with_half_parameters(optax.sgd(2.0**-9))
      >>> state = tx.init(params)
      >>> for _ in range(2):  # a bfloat16 below 1 has steps of 2^-8
      ...     updates, state = tx.update(jnp.bfloat16(1), state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(params, jmp_scale.full_parameters(params, state))
      1 0.9980469
      0.996094 0.99609375
    """
    inner = checked_optimizer("with_half_parameters", inner)
    words = None if key is None else key_words("with_half_parameters", key)

    def init(params: optax.Params) -> HalfParametersState:
        full = jax.tree.map(_join, params)
        inner_state = started("with_half_parameters", inner, full)
        if find_loss_scale_states(inner_state) or find_half_states(inner_state):
            raise ValueError(
                "with_half_parameters: expected an optimizer without a loss scale and "
                "without half parameters within, got one with them; write "
                "with_loss_scale(with_half_parameters(optimizer))"
            )
        remainder = jax.tree.map(_zeros if words is None else lambda _: None, params)
        rounding_key = None if words is None else jnp.copy(words)
        return HalfParametersState(inner_state, remainder, rounding_key)

    def update(
        updates: PyTree,
        state: HalfParametersState,
        params: PyTree = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, HalfParametersState]:
        _check_arguments(state, params, words)
        refuse_unreduced("with_half_parameters", updates)
        full = jax.tree.map(_join, params, state.remainder)
        grads, extra_args = promote_to_float32((updates, extra_args))
        out, inner_state = inner.update(grads, state.inner_state, full, **extra_args)
        # An update may be None or masked, also for a whole subtree.
        out, structure = jax.tree.flatten(out, is_leaf=is_nothing)
        next_key, keys = None, [None] * len(out)
        if words is not None:
            key = jax.random.wrap_key_data(state.rounding_key, impl="threefry2x32")
            next_key, *keys = jax.random.split(key, len(out) + 1)
            next_key = jax.random.key_data(next_key)
        trees = map(structure.flatten_up_to, (params, full, state.remainder))
        pairs = list(map(_rounded_update, out, *trees, keys))
        updates = structure.unflatten(update for update, _ in pairs)
        remainder = structure.unflatten(rest for _, rest in pairs)
        return updates, HalfParametersState(inner_state, remainder, next_key)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore


def full_parameters(params: PyTree, opt_state: PyTree) -> PyTree:
    """Returns the float32 values of half-precision parameters, for evaluation.

    Args:
      params: the parameters, as the optimizer's `init` got them, or their
        `jax.ShapeDtypeStruct`s, which gives those of the values.
      opt_state: the state after the same step, with that of `with_half_parameters` at
        any depth: of `with_loss_scale`, a `TrainState`, `nnx.state(optimizer)`.

    Returns:
      A tree like `params`, with NNX's variables: the exact values, or casts to float32
      where the state keeps no remainder. Leaves of other dtypes pass.

    Raises:
      ValueError: the remainders are not those of these parameters, or of two
        optimizers; outside of `jit`, a float16 remainder is larger than half a digit.
    """
    if find_half_states(params) and not find_half_states(opt_state):
        raise ValueError(
            "full_parameters: expected the parameters, then the optimizer's state, got "
            "the state first; write full_parameters(params, opt_state)"
        )
    kept = remainders("full_parameters", opt_state)
    leaves = leaves_by_name(with_arrays(params))
    _check_pairs("full_parameters", leaves, kept)
    check_magnitudes("full_parameters", kept, leaves)
    joined = [_join(leaf, kept.get(name)) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(params), joined)


def split(x: Leaf, like: Leaf) -> tuple[PyTree, PyTree]:
    """Splits a float32 value into a parameter of `like`'s dtype and its remainder."""
    if not holds_half(like):
        return x, None
    half = format_of(like)
    made = half.rounded(x).astype(half.dtype)
    return made, half.remainder(x, made)


def remainders(function: str, tree: PyTree) -> dict[str, PyTree]:
    """Finds the remainders in a pytree, by the names of their parameters."""
    found: dict[str, PyTree] = {}
    for _, state in find_half_states(tree):
        fields = state if isinstance(state, Mapping) else state._asdict()
        own = leaves_by_name(with_arrays(fields.get("remainder")))
        for name in sorted(found.keys() & own.keys()):
            raise ValueError(
                f"{function}: expected one remainder of parameter {name or 'params'}, "
                "got those of two optimizers (a GAN's?); pass the state of the "
                "optimizer that updates these parameters"
            )
        found |= own
    return found


def _check_arguments(
    state: HalfParametersState, params: PyTree, words: jax.Array | None
) -> None:
    if not isinstance(state, HalfParametersState):
        raise TypeError(
            "with_half_parameters: expected the HalfParametersState that init returns, "
            f"got {described(state)}; jmp_scale.checkpoints."
            "restore_without_half_parameters makes it of a plain optimizer's state"
        )
    if params is None:
        raise ValueError(
            "with_half_parameters: expected the parameters, got None; write "
            "update(grads, state, params)"
        )
    if (state.rounding_key is None) != (words is None):
        kind, other = ("without", "with") if words is None else ("with", "without")
        raise ValueError(
            f"with_half_parameters: expected the state of one {kind} key=, got that of "
            f"one {other} key=; write "
            "tx.init(params)._replace(inner_state=state.inner_state)"
        )
    leaves, kept = leaves_by_name(params), leaves_by_name(state.remainder)
    _check_pairs("with_half_parameters", leaves, kept, has_all=words is None)


def _check_pairs(
    function: str,
    params: Mapping[str, PyTree],
    remainders: Mapping[str, PyTree],
    has_all: bool = False,
) -> None:
    """Raises an error unless remainders and parameters belong together."""
    dtypes = {half.remainder_dtype: name for name, half in FORMATS.items()}
    expected = {k: f"{dtypes[x.dtype]}{list(x.shape)}" for k, x in remainders.items()}
    missing = {name for name, p in params.items() if has_all and holds_half(p)}
    for name in sorted(missing | expected.keys()):
        p: Leaf = params.get(name)
        got = f"{p.dtype}{list(p.shape)}" if hasattr(p, "dtype") else "none"
        wanted = expected.get(name, "float32")
        if got != wanted:
            raise ValueError(
                f"{function}: expected parameter {name or 'params'} to be {wanted}, by "
                f"the remainders in the state, got {got}; params has {listed(params)}; "
                "pass all parameters as init got them, and the state of their own "
                "optimizer, and apply updates by optax.apply_updates "
                "(equinox.apply_updates does not cast back)"
            )


def check_magnitudes(
    function: str, remainders: Mapping[str, PyTree], params: Mapping[str, PyTree]
) -> None:
    """Refuses remainders that a float16 cannot have, where they can be read.

    Those of a bfloat16 are integers, which a loader such as Orbax casts to float32
    without a word, if it restores into a float16 model.
    """
    for name, remainder in remainders.items():
        p = params.get(name)
        is_array = isinstance(remainder, (jax.Array, np.ndarray))
        is_abstract = isinstance(p, (Tracer, jax.ShapeDtypeStruct))
        if is_abstract or isinstance(remainder, Tracer) or not is_array:
            continue
        if remainder.dtype == jnp.float32 and misfits(jnp.asarray(remainder), p):
            raise ValueError(
                f"{function}: expected a remainder of parameter {name or 'params'} of "
                "at most half a digit of a float16, got larger ones; pass parameters "
                "and state of one step, and restore a checkpoint into parameters of "
                "the saved dtype (to change it, take full_parameters of these)"
            )


def _zeros(p: Leaf) -> jax.Array | None:
    return jnp.zeros_like(p, format_of(p).remainder_dtype) if holds_half(p) else None


def _join(p: Leaf, remainder: PyTree = None) -> Leaf:
    """Returns the float32 value of a half-precision parameter and its remainder."""
    if not holds_half(p):
        return p
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in (p, remainder)):
        sharding = getattr(p, "sharding", None)
        return jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=sharding)
    x = jnp.asarray(p).astype(jnp.float32)
    return x if remainder is None else format_of(p).joined(x, remainder)


def _rounded_update(
    update: Leaf, p: Leaf, full: Leaf, remainder: PyTree, key: jax.Array | None
) -> tuple[PyTree, PyTree]:
    """Returns the update to the rounding of the new value, and the remainder."""
    if is_nothing(update) or not holds_half(p):
        return update, remainder
    half, noise = format_of(p), None
    if key is not None:
        noise = half.noise(jax.random.bits(key, p.shape, jnp.uint16))
    x, old = (full + update).astype(jnp.float32), _join(p)
    new = half.rounded(x, noise)
    # Two infinite ones differ by NaN. Added to a zero, `new` keeps its sign.
    change = jnp.where(jnp.isfinite(new) & (old != 0), new - old, new)
    # The cast of `optax.apply_updates` itself: XLA:TPU makes one kernel of both.
    made = (old + change).astype(p.dtype)
    return change, half.remainder(x, made) if key is None else None
