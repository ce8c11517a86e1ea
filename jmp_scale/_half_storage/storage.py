"""`with_half_storage`: parameters and moving averages of any optimizer in bfloat16.

A parameter is the rounding of a float32 value, which the optimizer updates:

    x       = joined(parameter, remainder)      f32, exact
    x       = x + update                        as `inner` computes it, in float32
    updates = rounded(x) - parameter            so that `optax.apply_updates` rounds
    remainder of x and its rounding             or none, if x is rounded stochastically

Rounded to nearest, an average stands still where a step moves it by less than a 512th
of itself: Adam's `nu` with b2 = 0.999 cannot decay. Rounded stochastically, it moves in
the mean:

    average = f32(stored)                       exact
    average = b * average + (1 - b) * g         as `inner` computes it, in float32
    stored  = one of the two bfloat16 neighbors, the nearer one more often

Sources: Transformer Engine and Megatron-LM keep bfloat16 remainders in PyTorch
(`store_param_remainders`); stochastic rounding: Gupta et al., "Deep Learning with
Limited Numerical Precision", 2015, section 2.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_flatten_with_path

from .._mesh import refuse_unreduced
from .._policy import holds_half
from .._state import (
    HalfStorageState,
    checked_optimizer,
    find_half_storage,
    find_loss_scale_states,
    is_nothing,
    started,
)
from .._tree import find_nodes, is_inexact, leaves_by_name, promote_to_float32
from .._types import KeyPath, Leaf, PyTree
from .._validation import described, key_words, require_bool
from . import bfloat16
from .parameters import check_pairs, is_bfloat16, join

_NAME = "with_half_storage"
# Averages draw from another stream of random bits than parameters.
_STREAM = 0x68616C66


def with_half_storage(
    inner: optax.GradientTransformation,
    *,
    averages: Collection[str] = (),
    remainders: bool = True,
    key: jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an Optax optimizer: parameters and moving averages stored in bfloat16.

    `inner` updates float32 values, whose rounding the bfloat16 parameters are. The
    state keeps the remainders, so training is that of `inner` on float32 parameters,
    bit for bit, given the same gradients. With AdamW a parameter takes 14 bytes in
    place of 16 (value, state and gradient), 12 without remainders, and 4 less with
    `averages=("mu", "nu")`.

    Put it inside `with_loss_scale`, and clipping, `MultiSteps` and schedules into it.
    Apply its updates by `optax.apply_updates`; `equinox.apply_updates` does not round.
    A value above the largest bfloat16 becomes infinite, as in a cast. A value that
    falls below 2^-15 of itself in one step may miss its last digits. Derivatives are
    those of `inner` on float32 values, as if nothing were rounded.

    Averages are rounded stochastically after each step, right in the mean and the same
    on all devices, so the first step is that of `inner`, bit for bit. Their noise
    stays, without a bias. On a CPU it costs time, and memory while a leaf is updated.

    Args:
      inner: any Optax optimizer or chain, without a loss scale.
      averages: fields of Optax's states whose arrays are stored in bfloat16, such as
        `("mu", "nu")` of Adam, `("trace",)` of SGD: one array for each parameter,
        float32 or narrower, with at least one axis. Name only decaying averages: a sum,
        a maximum or a copy of the parameters does not average its noise out.
      remainders: whether the state keeps what bfloat16 parameters lack. If not, new
        values are rounded up or down at random, right in the mean.
      key: a PRNG key, typed or raw, for `averages` and for `remainders=False`. Its
        first 64 bits become a Threefry key: others depend on the layout. Members of a
        `vmap` round alike unless their states get keys of their own; `shard_map` needs
        one for each part of a divided array.

    Returns:
      A transformation with state `HalfStorageState`. Its `update` takes gradients of
      any dtype, needs `params`, and returns float32 updates for bfloat16 leaves.

    Raises:
      TypeError: an argument or a state of another type, parameters that are not arrays.
      ValueError: no key where one is needed, or several; from `init`, nothing to store
        in bfloat16, float16 parameters, a name in `averages` that no field has, an
        average that `inner` subtracts from another (a centered RMSprop), or a
        `with_loss_scale` or `with_half_storage` within; from `update`, other parameters
        than those of `init`, a state of other arguments, or `unreduced` gradients.

    Examples:
      >>> import jax, jax.numpy as jnp, jmp_scale, optax
      >>> params = jnp.bfloat16(1)
      >>> tx = jmp_scale.with_half_storage(optax.sgd(2.0**-9))
      >>> state = tx.init(params)
      >>> for _ in range(2):  # a bfloat16 below 1 has steps of 2^-8
      ...     updates, state = tx.update(jnp.bfloat16(1), state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(params, jmp_scale.full_parameters(params, state))
      1 0.9980469
      0.996094 0.99609375
      >>> tx = jmp_scale.with_half_storage(
      ...     optax.adamw(1e-3), averages=("mu", "nu"), key=jax.random.key(0)
      ... )
      >>> tx.init({"w": jnp.ones((4, 2))}).inner_state[0].nu["w"].dtype
      dtype(bfloat16)
    """
    inner = checked_optimizer(_NAME, inner)
    if isinstance(averages, str) or not all(isinstance(x, str) for x in averages):
        raise TypeError(
            f"{_NAME}: expected averages to be names of fields, got {averages!r}; "
            'write averages=("mu", "nu")'
        )
    require_bool(_NAME, "remainders", remainders)
    words = None if key is None else key_words(_NAME, key)
    is_random = bool(averages) or not remainders
    if is_random and words is None:
        raise ValueError(
            f"{_NAME}: expected a key for stochastic rounding (of averages, and of "
            "parameters with remainders=False), got None; write key=jax.random.key(0)"
        )
    words = words if is_random else None
    storage = _HalfStorage(inner, frozenset(averages), bool(remainders), words)
    return optax.GradientTransformationExtraArgs(
        storage.init,
        storage.update,  # pyright: ignore[reportArgumentType]
    )


class _Array(NamedTuple):
    """A leaf of an optimizer's state, and the parameter that it belongs to, if any."""

    path: KeyPath  # in the state
    value: Leaf
    field: str | None  # with one array for each parameter; None if it is not in one
    owner: KeyPath  # the parameter's path


@dataclasses.dataclass(frozen=True)
class _HalfStorage:
    inner: optax.GradientTransformationExtraArgs
    averages: frozenset[str]
    remainders: bool
    words: jax.Array | None  # of the key; None if nothing is rounded stochastically

    def init(self, params: optax.Params) -> HalfStorageState:
        inner_state = started(_NAME, self.inner, jax.tree.map(join, params))
        if find_loss_scale_states(inner_state) or find_half_storage(inner_state):
            raise ValueError(
                f"{_NAME}: expected an optimizer without a loss scale and without half "
                f"storage within, got one with them; write with_loss_scale({_NAME}("
                "optimizer))"
            )
        if jax.tree.leaves(params):  # optax.partition knows groups without any
            self._check_parameters(params)
            self._check_averages(inner_state, params)

        def zeros(p: Leaf) -> jax.Array | None:
            keeps = self.remainders and is_bfloat16(p)
            return jnp.zeros_like(p, jnp.int16) if keeps else None

        return HalfStorageState(
            self._map_averages(lambda x: x.astype(jnp.bfloat16), inner_state, params),
            remainders=jax.tree.map(zeros, params),
            rounding_key=None if self.words is None else jnp.copy(self.words),
        )

    def update(
        self,
        updates: optax.Updates,
        state: HalfStorageState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, HalfStorageState]:
        self._check_arguments(state, params)
        refuse_unreduced(_NAME, updates)
        full = jax.tree.map(join, params, state.remainders)
        inner_state = self._map_averages(promote_to_float32, state.inner_state, params)
        grads, extra_args = promote_to_float32((updates, extra_args))
        out, inner_state = self.inner.update(grads, inner_state, full, **extra_args)
        # An update may be None or masked, also for a whole subtree.
        out, structure = jax.tree.flatten(out, is_leaf=is_nothing)
        next_key, keys = None, [None] * len(out)
        if self.words is not None:
            key = jax.random.wrap_key_data(state.rounding_key, impl="threefry2x32")
            next_key, *of_leaves = jax.random.split(key, len(out) + 1)
            next_key = jax.random.key_data(next_key)
            if self.averages:
                inner_state = self._rounded(inner_state, params, key)
            keys = keys if self.remainders else of_leaves
        trees = map(structure.flatten_up_to, (params, full, state.remainders))
        pairs = list(map(_rounded_update, out, *trees, keys))
        updates = structure.unflatten(update for update, _ in pairs)
        remainders = structure.unflatten(rest for _, rest in pairs)
        return updates, HalfStorageState(inner_state, remainders, next_key)

    def _is_average(self, x: _Array) -> bool:
        is_float32 = getattr(x.value, "dtype", None) == jnp.float32
        is_narrow = is_float32 or holds_half(x.value)
        return x.field in self.averages and is_narrow and x.value.ndim > 0

    def _map_averages(
        self, fun: Callable[[jax.Array], jax.Array], state: PyTree, params: PyTree
    ) -> optax.OptState:
        if not self.averages:
            return state
        arrays, structure = _arrays_of(state, params)
        return structure.unflatten(
            fun(x.value) if self._is_average(x) else x.value for x in arrays
        )

    def _rounded(
        self, inner_state: optax.OptState, params: PyTree, key: jax.Array
    ) -> optax.OptState:
        """Rounds averages to a neighboring bfloat16, which is never infinite.

        A word of 32 bits serves two averages of a parameter, because Threefry takes a
        GPU as much time as the bytes that are saved.
        """
        arrays, structure = _arrays_of(inner_state, params)
        leaves = [x.value for x in arrays]
        places: dict[tuple[KeyPath, tuple[int, ...]], list[int]] = {}
        for i, x in enumerate(arrays):
            # The optimizer itself may have rounded it, by Optax's `mu_dtype`.
            if self._is_average(x) and not is_bfloat16(x.value):
                places.setdefault((x.owner, x.value.shape), []).append(i)
        pairs = [x[i : i + 2] for x in places.values() for i in range(0, len(x), 2)]
        keys = jax.random.split(jax.random.fold_in(key, _STREAM), len(pairs))
        largest = float(jnp.finfo(jnp.bfloat16).max)
        for pair, own in zip(pairs, keys, strict=True):
            word = jax.random.bits(own, leaves[pair[0]].shape, jnp.uint32)
            for half, i in enumerate(pair):
                noise = bfloat16.noise_of(word >> (16 * half))
                x = promote_to_float32(leaves[i])
                x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
                leaves[i] = bfloat16.rounded(x, noise).astype(jnp.bfloat16)
        return structure.unflatten(leaves)

    def _check_parameters(self, params: optax.Params) -> None:
        leaves = leaves_by_name(params)
        dtypes = {name: str(getattr(p, "dtype", "")) for name, p in leaves.items()}
        for name in [name for name, dtype in dtypes.items() if dtype == "float16"]:
            raise ValueError(
                f"{_NAME}: expected bfloat16 parameters, got {name or 'params'} of "
                "float16: with its remainder it takes 6 bytes, where a float32 "
                "parameter takes 4; store it in bfloat16, or in float32"
            )
        if not self.averages and "bfloat16" not in dtypes.values():
            raise ValueError(
                f"{_NAME}: expected bfloat16 parameters or names of averages, got "
                "neither, so nothing would be stored in bfloat16; cast parameters to "
                'bfloat16, or write averages=("mu", "nu")'
            )

    def _check_averages(self, inner_state: optax.OptState, params: PyTree) -> None:
        arrays = _arrays_of(inner_state, params)[0]
        found = [x for x in arrays if self._is_average(x)]
        missing = self.averages - {x.field for x in found}
        if missing:
            named = [x for x in arrays if x.field and is_inexact(x.value)]
            fields = {f"{x.field} ({x.value.dtype})" for x in named}
            raise ValueError(
                f"{_NAME}: expected a state with float32 arrays called "
                f"{sorted(missing)}, one for each parameter, got one with "
                f"{', '.join(sorted(fields)) or 'no such fields'}; pass the names of "
                "its averages, or leave this optimizer as it is"
            )
        for path, node in find_nodes(_subtracts_averages, inner_state):
            if any(x.path[: len(path)] == path for x in found):
                raise ValueError(
                    f"{_NAME}: expected averages that the optimizer does not subtract "
                    f"from each other, got mu and nu of a {type(node).__name__} (a "
                    "centered RMSprop): it divides by sqrt(nu - mu**2), which is NaN "
                    "where rounding makes nu the smaller one; do not name its "
                    "averages, or use rmsprop(centered=False)"
                )

    def _check_arguments(self, state: HalfStorageState, params: PyTree) -> None:
        if not isinstance(state, HalfStorageState):
            raise TypeError(
                f"{_NAME}: expected the HalfStorageState that init returns, got "
                f"{described(state)}; jmp_scale.checkpoints.restore makes it of the "
                "state of a plain optimizer"
            )
        if params is None:
            raise ValueError(
                f"{_NAME}: expected the parameters, got None; write "
                "update(grads, state, params)"
            )
        keeps_more = not self.remainders and bool(jax.tree.leaves(state.remainders))
        if (state.rounding_key is None) != (self.words is None) or keeps_more:
            raise ValueError(
                f"{_NAME}: expected the state of one with the same averages= and "
                "remainders=, got that of another; write "
                "tx.init(params)._replace(inner_state=state.inner_state)"
            )
        leaves, kept = leaves_by_name(params), leaves_by_name(state.remainders)
        check_pairs(_NAME, leaves, kept, has_all=self.remainders)


def _arrays_of(state: optax.OptState, params: PyTree) -> tuple[list[_Array], PyTree]:
    """Returns the leaves of a state, each with its parameter, and their structure.

    A path in the state ends with that of the parameter, which is cut off first: a
    parameter may itself be called "mu".
    """
    params = params.fast if isinstance(params, optax.LookaheadParams) else params
    owners = {path for path, _ in tree_flatten_with_path(params)[0]}
    pairs, structure = tree_flatten_with_path(state)
    arrays = []
    for path, value in pairs:
        starts = (i for i in range(len(path) + 1) if path[i:] in owners)
        start = next(starts, 0)
        field = getattr(path[start - 1], "name", None) if start else None
        arrays.append(_Array(path, value, field, path[start:]))
    return arrays, structure


def _subtracts_averages(node: PyTree) -> bool:
    """Whether a node is the state of `optax.scale_by_stddev`, which has two types."""
    return type(node).__name__.startswith("ScaleByRStdDev")


def _rounded_update(
    update: Leaf, p: Leaf, full: Leaf, remainder: PyTree, key: jax.Array | None
) -> tuple[PyTree, PyTree]:
    """Returns the update to the rounding of the new value, and the remainder."""
    if is_nothing(update) or not is_bfloat16(p):
        return update, remainder
    noise = None
    if key is not None:
        noise = bfloat16.noise_of(jax.random.bits(key, p.shape, jnp.uint16))
    x, old = (full + update).astype(jnp.float32), join(p)
    update = bfloat16.change(bfloat16.rounded(x, noise), old)
    # The cast of `optax.apply_updates` itself: XLA:TPU makes one kernel of both.
    made = (old + update).astype(p.dtype)
    return update, bfloat16.remainder(x, made) if key is None else None
