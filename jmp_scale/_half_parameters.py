"""Any Optax optimizer on float32 values, of which the model holds the rounding.

A bfloat16 is the upper half of a float32, so its optimizer keeps the lower half:

    bits(x) = bits(parameter) * 2^16 + remainder, remainder in [-2^15, 2^15)
    q       = (bits(x) + 2^15) >> 16, the next parameter: x to nearest, ties up
    updates = float32(q) - float32(parameter), so that `optax.apply_updates` makes q

The remainder of a float16 is the float32 `x - q`. Transformer Engine and Megatron-LM
keep bfloat16 remainders in PyTorch (`store_param_remainders`).
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import optax
from jax import lax

from ._state import find_loss_scale_states, with_arrays
from ._tree import leaves_by_name, promote_to_float32

_HALF = (jnp.bfloat16, jnp.float16)
_bits = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
_float = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.float32)


class HalfParametersState(NamedTuple):
    """State of `with_half_parameters`.

    Attributes:
      inner_state: state of the wrapped optimizer, of float32 parameters.
      remainder: what the parameters lack, a tree of their structure: int16 for a
        bfloat16 leaf, float32 for a float16 one, None for all others, and with a key.
      rounding_key: u32[2], the key of the next step's rounding, or None.
    """

    inner_state: Any
    remainder: Any
    rounding_key: Any


jax.export.register_namedtuple_serialization(
    HalfParametersState, serialized_name="jmp_scale.HalfParametersState"
)


def with_half_parameters(
    inner: optax.GradientTransformation, *, key: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Wraps an Optax optimizer: parameters in half precision lose no update.

    `inner` updates float32 values, whose rounding the bfloat16 or float16 parameters
    are; the state keeps the rest. So training is that of `inner` on float32 parameters,
    bit for bit, given the same gradients. Leaves of other dtypes pass as they are.

    With a `key` nothing is kept: new values are rounded up or down at random, right in
    the mean and the same on all devices. What needs no rounding stays.

    Put it inside `with_loss_scale`, and clipping, `MultiSteps` and schedules into it.
    Apply its updates as they are, by `optax.apply_updates`; `equinox.apply_updates`
    does not round. A value above the largest bfloat16 becomes infinite as in a cast,
    above the largest float16 that. A value that falls below 2^-15 of itself in one step
    may miss its last digits. The rounding has no derivative.

    Args:
      inner: any Optax optimizer or chain, without a loss scale.
      key: a PRNG key, typed or raw, whose first 64 bits become a Threefry key: others
        depend on the layout. `shard_map` needs one for each part of a divided array.

    Returns:
      A transformation with state `HalfParametersState`. Its `update` takes gradients of
      any dtype, needs `params`, and returns float32 updates for half-precision leaves.
      Extra arguments go to `inner`.

    Raises:
      TypeError: `inner` is not an Optax optimizer.
      ValueError: `inner` contains a `with_loss_scale` or another `with_half_parameters`
        (from `init`); `update` without `params`, or with others than those of `init`.

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
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            "with_half_parameters: expected inner to be an "
            f"optax.GradientTransformation, got {inner!r}; pass the optimizer first"
        )
    inner = optax.with_extra_args_support(inner)
    words = None if key is None else jax.random.key_data(key)[:2]

    def init(params: optax.Params) -> HalfParametersState:
        inner_state = inner.init(jax.tree.map(_to_float32, params))
        if find_loss_scale_states(inner_state) or find_half_states(inner_state):
            raise ValueError(
                "with_half_parameters: expected an optimizer without a loss scale and "
                "without half parameters within, got one with them; write "
                "with_loss_scale(with_half_parameters(optimizer))"
            )
        if words is None:
            return HalfParametersState(inner_state, jax.tree.map(_zeros, params), None)
        nothing = jax.tree.map(lambda _: None, params)
        return HalfParametersState(inner_state, nothing, jnp.copy(words))

    def update(
        updates: Any, state: HalfParametersState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, HalfParametersState]:
        if params is None:
            raise ValueError(
                "with_half_parameters: expected the parameters, got None; write "
                "update(grads, state, params)"
            )
        _check_pairs("with_half_parameters", params, state.remainder)
        full = jax.tree.map(_join, params, state.remainder)
        if "grad" in extra_args:
            extra_args["grad"] = promote_to_float32(extra_args["grad"])
        grads = promote_to_float32(updates)
        out, inner_state = inner.update(grads, state.inner_state, full, **extra_args)
        # An update may be None or masked, also for a whole subtree: that stays.
        values = jax.tree.map(_moved, out, params, full, is_leaf=is_nothing)
        next_key, keys = _split_key(state.rounding_key, params)
        changes = jax.tree.map(_change, params, values, keys)
        updates = jax.tree.map(_update, out, changes, is_leaf=is_nothing)
        remainder = jax.tree.map(_remainder, params, values, changes, keys)
        return updates, HalfParametersState(inner_state, remainder, next_key)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore


def full_parameters(params: Any, opt_state: Any) -> Any:
    """The float32 values of half-precision parameters, for evaluation and averages.

    Args:
      params: the parameters, as the optimizer's `init` got them.
      opt_state: the state after the same step, with that of `with_half_parameters` at
        any depth: of `with_loss_scale`, a `TrainState`, `nnx.state(optimizer)`.

    Returns:
      A tree like `params`: the exact values, or casts to float32 where the state keeps
      no remainder. Leaves of other dtypes pass.

    Raises:
      ValueError: the remainders in `opt_state` are those of other parameters.
    """
    params, remainders = with_arrays(params), {}
    for _, state in find_half_states(opt_state):
        fields = state if isinstance(state, Mapping) else state._asdict()
        remainders |= leaves_by_name(with_arrays(fields.get("remainder")))
    _check_pairs("full_parameters", params, remainders)
    leaves = leaves_by_name(params).items()
    joined = [_join(leaf, remainders.get(name)) for name, leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(params), joined)


def split(x: Any, like: Any) -> tuple[Any, Any]:
    """A float32 value as a parameter of the dtype of `like`, and its remainder."""
    p = _nearest(x, like.dtype).astype(like.dtype) if _is_half(like) else x
    return p, _remainder(p, x, -0.0, None)


def find_half_states(tree: Any) -> list[tuple[Any, Any]]:
    """(key path, node) of every state of `with_half_parameters` in a pytree."""
    nodes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_half_state)[0]
    return [(path, node) for path, node in nodes if is_half_state(node)]


def is_half_state(node: Any) -> bool:
    """Whether a node is a `HalfParametersState`, or what NNX or a state dict made."""
    if isinstance(node, Mapping):
        names = set(node)  # NNX leaves out what is None
        own = not names.isdisjoint({"remainder", "rounding_key"})
        return own and names <= set(HalfParametersState._fields)
    return isinstance(node, HalfParametersState)


def is_nothing(x: Any) -> bool:
    """Whether it stands for a leaf or a subtree without an update."""
    return x is None or isinstance(x, optax.MaskedNode)


def _check_pairs(function: str, params: Any, remainders: Any) -> None:
    leaves = leaves_by_name(params)
    for name, remainder in leaves_by_name(remainders).items():
        dtype = "bfloat16" if remainder.dtype == jnp.int16 else "float16"
        expected, got = f"{dtype}{list(remainder.shape)}", "none"
        if hasattr(leaves.get(name), "dtype"):
            got = f"{leaves[name].dtype}{list(leaves[name].shape)}"
        if got != expected:
            raise ValueError(
                f"{function}: expected parameter {name or 'params'} to be {expected}, "
                f"of which the state holds a remainder, got {got}; pass those "
                "that optax.apply_updates makes (equinox's does not round)"
            )


def _is_half(p: Any) -> bool:
    return getattr(p, "dtype", None) in _HALF


def _to_float32(p: Any) -> Any:
    return jnp.asarray(p).astype(jnp.float32) if _is_half(p) else p


def _zeros(p: Any) -> jax.Array | None:
    dtype = jnp.int16 if getattr(p, "dtype", None) == jnp.bfloat16 else jnp.float32
    return jnp.zeros_like(p, dtype) if _is_half(p) else None


def _join(p: Any, remainder: Any) -> Any:
    """The float32 value of a parameter and its remainder."""
    x = _to_float32(p)
    if remainder is None:
        return x
    if p.dtype == jnp.float16:
        return jnp.where(remainder == 0, x, x + remainder)  # of -0.0 + 0.0 the sign
    # Below a zero, as of a pruned weight, there are NaNs.
    low = jnp.maximum(remainder.astype(jnp.int32), -(_bits(x) & 0x7FFFFFFF))
    return _float(_bits(x) + low)


def _moved(update: Any, params: Any, full: Any) -> Any:
    is_same = is_nothing(update) or not _is_half(params)
    return full if is_same else (full + update).astype(jnp.float32)


def _update(update: Any, change: Any) -> Any:
    return update if is_nothing(update) or change is None else change


def _split_key(rounding_key: Any, params: Any) -> tuple[Any, Any]:
    """The key of the next step, and one for each leaf, None without a key."""
    if rounding_key is None:
        return None, jax.tree.map(lambda _: None, params)
    structure = jax.tree.structure(params)
    key = jax.random.wrap_key_data(rounding_key, impl="threefry2x32")
    next_key, *keys = jax.random.split(key, structure.num_leaves + 1)
    return jax.random.key_data(next_key), jax.tree.unflatten(structure, keys)


def _change(p: Any, x: Any, key: Any) -> Any:
    """What takes a parameter to the rounding of `x`; None for other leaves."""
    if not _is_half(p):
        return None
    new = _nearest(x, p.dtype) if key is None else _stochastic(x, p.dtype, key)
    old, largest = _to_float32(p), float(jnp.finfo(jnp.float32).max)
    # The difference of two finite numbers may be infinite, and that of two infinite
    # ones NaN. Added to a zero, `new` keeps its sign.
    difference = jnp.clip(new - old, -largest, largest)
    return jnp.where(jnp.isfinite(new) & (old != 0), difference, new)


def _remainder(p: Any, x: Any, change: Any, key: Any) -> Any:
    """What `optax.apply_updates` leaves of `x`; None for others, and with a key."""
    if not _is_half(p) or key is not None:
        return None
    made = _to_float32(p) + change
    if p.dtype == jnp.float16:
        made = _nearest(made, p.dtype)
        return jnp.where(jnp.isfinite(made), x - made, 0)
    # The cast of apply_updates itself: XLA:TPU makes one kernel of both. Its bits, as
    # XLA may leave out a cast and a cast back.
    made = lax.bitcast_convert_type(made.astype(p.dtype), jnp.int16)
    low = _bits(x) - (made.astype(jnp.int32) << 16)
    return jnp.clip(low, -(2**15), 2**15 - 1).astype(jnp.int16)


def _nearest(x: jax.Array, dtype: Any) -> jax.Array:
    """The nearest number of a half-precision dtype, as float32."""
    if dtype == jnp.bfloat16:
        return jnp.where(jnp.isnan(x), x, _float((_bits(x) + 2**15) & -(2**16)))
    # lax.reduce_precision would make subnormal numbers zero. Instead the last digit of
    # the sum is float16's: 2^-10 of x's power of two, or 2^-24.
    inside = jnp.clip(x, -65504.0, 65504.0)
    large = jnp.maximum(_float(_bits(inside) & 0x7F800000), 2.0**-14) * (1.5 * 2**13)
    rounded = jnp.copysign((inside + large) - large, x)
    return jnp.where(jnp.isfinite(x), rounded, x)


def _stochastic(x: jax.Array, dtype: Any, key: jax.Array) -> jax.Array:
    """One of the two nearest numbers of a half-precision dtype, at random."""
    digits = 16 if dtype == jnp.bfloat16 else 13  # beyond the dtype's
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.int32)
    size, offset = jnp.abs(x), 0.0
    if dtype == jnp.float16:  # its subnormal numbers have one last digit, as this sum
        offset = jnp.where(size < 2.0**-14, 2.0**-14, 0.0)
    bits = _bits(size + offset) + (noise & (2**digits - 1))
    rounded = _float(bits & -(2**digits)) - offset
    rounded = jnp.minimum(rounded, float(jnp.finfo(dtype).max))
    return jnp.where(jnp.isfinite(x), jnp.copysign(rounded, x), x)
