"""Any Optax optimizer on float32 values, of which the model holds the rounding.

A bfloat16 is the upper half of a float32, so its optimizer keeps the lower half:

    bits(x) = bits(parameter) * 2^16 + remainder, remainder in [-2^15, 2^15)
    q       = (bits(x) + 2^15) >> 16, the next parameter: x to nearest, ties up
    updates = float32(q) - float32(parameter), so that `optax.apply_updates` makes q

All else in float32: `x` is what the optimizer updates. A float16 has another exponent;
its remainder is the float32 `x - q`. Transformer Engine's FusedAdam and Megatron-LM
(`store_param_remainders`) keep bfloat16 remainders in PyTorch.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ._state import find_loss_scale_states, with_arrays
from ._tree import leaves_by_name, promote_to_float32

_HALF = (jnp.bfloat16, jnp.float16)
_LARGEST = float(jnp.finfo(jnp.float32).max)
_FLOAT16 = jnp.finfo(jnp.float16)


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

    The model holds bfloat16 or float16 parameters. `inner` sees and updates float32
    values, whose rounding they are. What the rounding cuts off is kept in the state, in
    2 bytes for a bfloat16 parameter: parameter and remainder are the float32 value, bit
    for bit. So training is that of `inner` on float32 parameters, given the same
    gradients. Leaves of other dtypes (float32, float8, integers) pass as they are.

    With a `key` nothing is kept: the new values are rounded up or down at random, to
    the next half-precision numbers, such that the mean is right. Values that need no
    rounding stay. The random bits do not depend on devices or layouts.

    Put it inside `with_loss_scale`, and into it what belongs into an optimizer:
    clipping, `MultiSteps`, schedules, `partition`. Only the updates that it returns may
    be applied, unchanged, by `optax.apply_updates`: nothing may follow in a chain. That
    of Equinox does not round: apply them to the arrays of `equinox.partition`.

    Rounding is to nearest, ties up, for bfloat16, and a float32 value above the largest
    finite bfloat16 becomes infinite, as in a cast. In float16 such a value becomes
    65,504, and the remainder keeps the rest. Where a value falls to less than 2^-15 of
    the old one in one step, it may miss some last digits. The rounding has no
    derivative.

    Args:
      inner: any Optax optimizer or chain, without a loss scale.
      key: a PRNG key, typed or raw, for stochastic rounding. Its first 64 bits are used
        as a Threefry key: other generators depend on the layout. Under `shard_map`
        with divided parameters, fold the axis index into `rounding_key` after `init`.

    Returns:
      A transformation with state `HalfParametersState`, whose
      `update(updates, state, params, **extra_args)` takes gradients of any dtype. Its
      updates of half-precision parameters are float32: cast to less, they would lose
      digits. Extra arguments go to `inner` (`grad` as float32).

    Raises:
      TypeError: `inner` is not an Optax optimizer, or `key` not a single PRNG key.
      ValueError: `inner` contains a `with_loss_scale` or another `with_half_parameters`
        (from `init`); `update` without `params`, or of parameters that differ from
        those of `init` in structure, shape or dtype.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale, optax
      >>> tx = jmp_scale.with_half_parameters(optax.sgd(1.0))
      >>> params = jnp.bfloat16(1.0)
      >>> state = tx.init(params)
      >>> for _ in range(4):  # updates of 2^-10, a quarter of a bfloat16's digit
      ...     updates, state = tx.update(jnp.bfloat16(-(2.0**-10)), state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(params, jmp_scale.full_parameters(params, state))
      1 1.0009766
      1 1.0019531
      1 1.0029297
      1.00781 1.0039062
    """
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            "with_half_parameters: expected inner to be an "
            f"optax.GradientTransformation, got {inner!r}; of an optax.MultiSteps pass "
            "its gradient_transformation()"
        )
    inner = optax.with_extra_args_support(inner)
    words = None if key is None else _words(key)

    def init(params: optax.Params) -> HalfParametersState:
        inner_state = inner.init(jax.tree.map(_to_float32, params))
        _refuse_nesting(inner_state)
        if words is None:
            return HalfParametersState(inner_state, jax.tree.map(_zeros, params), None)
        nothing = jax.tree.map(lambda _: None, params)
        return HalfParametersState(inner_state, nothing, jnp.copy(words))

    def update(
        updates: optax.Updates,
        state: HalfParametersState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[Any, HalfParametersState]:
        _check_arguments(state, params)
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
        remainder = state.remainder
        if next_key is None:
            remainder = jax.tree.map(_remainder, params, changes, values)
        return updates, HalfParametersState(inner_state, remainder, next_key)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore


def full_parameters(params: Any, opt_state: Any) -> Any:
    """The float32 values of half-precision parameters, for evaluation and averages.

    Args:
      params: the parameters, as the optimizer's `init` got them.
      opt_state: the optimizer's state after the same step, with the state of
        `with_half_parameters` at any depth: of `with_loss_scale`, of a Flax
        `TrainState`, `nnx.state(optimizer)`.

    Returns:
      A tree like `params`, with float32 leaves in place of float16 and bfloat16 ones:
      the exact values, or the parameters cast to float32 where the state keeps no
      remainder of them.

    Raises:
      ValueError: the remainders in `opt_state` are those of other parameters.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale, optax
      >>> params = {"w": jnp.bfloat16(1.0)}
      >>> tx = jmp_scale.with_half_parameters(optax.sgd(0.001))
      >>> updates, opt_state = tx.update(params, tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> jmp_scale.full_parameters(params, opt_state)
      {'w': Array(0.999, dtype=float32)}
    """
    remainders = {}
    for _, state in find_half_states(opt_state):
        fields = state if isinstance(state, Mapping) else state._asdict()
        remainders |= leaves_by_name(with_arrays(fields.get("remainder")))
    leaves = leaves_by_name(with_arrays(params))
    for name, remainder in remainders.items():
        _check_pair(f"full_parameters: {name}", leaves.get(name), remainder)
    joined = [_join(leaf, remainders.get(name)) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(params), joined)


def split(x: Any, like: Any) -> tuple[Any, Any]:
    """A float32 value as a parameter of the dtype of `like`, and its remainder."""
    if not _is_half(like):
        return x, None
    p = _nearest(x, like.dtype).astype(like.dtype)
    return p, _remainder(p, -0.0, x)


def find_half_states(tree: Any) -> list[tuple[Any, Any]]:
    """(key path, node) of every state of `with_half_parameters` in a pytree."""
    nodes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_half_state)[0]
    return [(path, node) for path, node in nodes if is_half_state(node)]


def is_half_state(node: Any) -> bool:
    """Whether a node is a `HalfParametersState`, or what NNX or a state dict made."""
    if isinstance(node, Mapping):
        names = set(node)  # NNX leaves out what is None
        own = {"remainder", "rounding_key"}
        return bool(names & own) and names <= set(HalfParametersState._fields)
    return isinstance(node, HalfParametersState)


def is_nothing(x: Any) -> bool:
    """Whether it stands for a leaf or a subtree without an update."""
    return x is None or isinstance(x, optax.MaskedNode)


def _words(key: Any) -> jax.Array:
    data = key
    if jnp.issubdtype(getattr(key, "dtype", jnp.float32), jax.dtypes.prng_key):
        data = jax.random.key_data(key)
    is_key = getattr(data, "dtype", None) == jnp.uint32
    if not is_key or np.shape(data) not in ((2,), (4,)):
        raise TypeError(
            f"with_half_parameters: expected key to be a single PRNG key, got {key!r}; "
            "write key=jax.random.key(0)"
        )
    return jnp.asarray(data)[:2]


def _refuse_nesting(inner_state: Any) -> None:
    if find_loss_scale_states(inner_state):
        raise ValueError(
            "with_half_parameters: expected an optimizer without a loss scale, got one "
            "with with_loss_scale within; write with_loss_scale(with_half_parameters("
            "...)), so that a skipped step keeps the remainders"
        )
    if find_half_states(inner_state):
        raise ValueError(
            "with_half_parameters: expected an optimizer of float32 parameters, got "
            "one with with_half_parameters within; wrap once, next to with_loss_scale"
        )


def _check_arguments(state: Any, params: Any) -> None:
    if params is None or not isinstance(state, HalfParametersState):
        given = f"{type(state).__name__}, {type(params).__name__}"
        error = ValueError if params is None else TypeError
        raise error(
            "with_half_parameters: expected update(grads, state, params) with the "
            "HalfParametersState that init returns and the parameters, got "
            f"update(grads, {given})"
        )
    if state.rounding_key is None:
        leaves = leaves_by_name(params)
        for name, remainder in leaves_by_name(state.remainder).items():
            _check_pair(f"with_half_parameters: {name}", leaves.get(name), remainder)


def _check_pair(where: str, param: Any, remainder: Any) -> None:
    dtype = jnp.bfloat16 if remainder.dtype == jnp.int16 else jnp.float16
    expected = f"{jnp.dtype(dtype)}{list(jnp.shape(remainder))}"
    got = "none"
    if hasattr(param, "dtype"):
        got = f"{param.dtype}{list(jnp.shape(param))}"
    if got != expected:
        raise ValueError(
            f"{where or '(the whole tree)'}: expected a parameter {expected}, of which "
            f"the state holds a remainder, got {got}; pass the parameters that init "
            "got, as optax.apply_updates makes them (equinox.apply_updates does not "
            "round)"
        )


def _is_half(p: Any) -> bool:
    return getattr(p, "dtype", None) in _HALF


def _to_float32(p: Any) -> Any:
    return jnp.asarray(p).astype(jnp.float32) if _is_half(p) else p


def _zeros(p: Any) -> jax.Array | None:
    if not _is_half(p):
        return None
    return jnp.zeros_like(p, jnp.int16 if p.dtype == jnp.bfloat16 else jnp.float32)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _join(p: Any, remainder: Any) -> Any:
    """The float32 value of a parameter and its remainder."""
    x = _to_float32(p)
    if remainder is None:
        return x
    if p.dtype == jnp.float16:
        return jnp.where(remainder == 0, x, x + remainder)  # of -0.0 + 0.0 the sign
    bits = _bits(x)
    # Below a zero, as of a pruned weight, there are NaNs.
    low = jnp.maximum(remainder.astype(jnp.int32), -(bits & 0x7FFFFFFF))
    return _float(bits + low)


def _moved(update: Any, params: Any, full: Any) -> Any:
    if is_nothing(update) or not _is_half(params):
        return full
    return (full + update).astype(jnp.float32)


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
    old = _to_float32(p)
    # The difference of two finite numbers may be infinite, and that of two infinite
    # ones NaN. Added to a zero, `new` keeps its sign.
    difference = jnp.clip(new - old, -_LARGEST, _LARGEST)
    return jnp.where(jnp.isfinite(new) & (old != 0), difference, new)


def _update(update: Any, change: Any) -> Any:
    return update if is_nothing(update) or change is None else change


def _remainder(p: Any, change: Any, x: Any) -> Any:
    """What `optax.apply_updates` leaves of `x`."""
    if change is None:
        return None
    if p.dtype == jnp.float16:
        made = _nearest(_to_float32(p) + change, p.dtype)
        return jnp.where(jnp.isfinite(made), x - made, 0)
    # The cast of apply_updates itself: XLA:TPU makes one kernel of both. Its bits, as
    # XLA may leave out a cast and a cast back.
    made = (_to_float32(p) + change).astype(p.dtype)
    made_bits = lax.bitcast_convert_type(made, jnp.int16).astype(jnp.int32) << 16
    low = jnp.clip(_bits(x) - made_bits, -(2**15), 2**15 - 1)
    return low.astype(jnp.int16)


def _nearest(x: jax.Array, dtype: Any) -> jax.Array:
    """The nearest number of a half-precision dtype, as float32."""
    if dtype == jnp.bfloat16:
        rounded = _float((_bits(x) + 2**15) & -(2**16))
        return jnp.where(jnp.isnan(x), x, rounded)
    # lax.reduce_precision would make subnormal numbers zero. Instead the last digit of
    # the sum is float16's: 2^-10 of x's power of two, or 2^-24.
    largest = float(_FLOAT16.max)
    inside = jnp.clip(x, -largest, largest)
    power = _float(_bits(inside) & 0x7F800000)
    large = jnp.maximum(power, float(_FLOAT16.tiny)) * (1.5 * 2**13)
    rounded = jnp.copysign((inside + large) - large, x)
    return jnp.where(jnp.isfinite(x), rounded, x)


def _stochastic(x: jax.Array, dtype: Any, key: jax.Array) -> jax.Array:
    """One of the two nearest numbers of a half-precision dtype, at random."""
    digits = 16 if dtype == jnp.bfloat16 else 13  # beyond the dtype's
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.int32)
    noise &= 2**digits - 1
    size, offset = jnp.abs(x), 0.0
    if dtype == jnp.float16:
        # All subnormal numbers and the sum have the same last digit.
        tiny = float(_FLOAT16.tiny)
        offset = jnp.where(size < tiny, tiny, 0.0)
    bits = _bits(size + offset)
    largest = float(jnp.finfo(dtype).max)
    rounded = jnp.minimum(_float((bits + noise) & -(2**digits)) - offset, largest)
    return jnp.where(jnp.isfinite(x), jnp.copysign(rounded, x), x)
