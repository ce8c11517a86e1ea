"""`with_half_storage`: parameters and moving averages of any optimizer in bfloat16.

A parameter is the rounding of a float32 value, which the optimizer updates:

    x       = joined(parameter, remainder)      f32, exact
    x       = x + update                        as `inner` computes it, in float32
    updates = rounded(x) - parameter            so that `optax.apply_updates` rounds
    remainder of x and its rounding             or none, if x is rounded stochastically

An average of b * average + (1 - b) * g is stored as one of the two bfloat16 neighbors,
the nearer one more often, so it moves in the mean. Rounded to nearest it stands still
where a step moves it by less than a 512th of itself, as Adam's `nu` does.

Sources: Transformer Engine and Megatron-LM keep bfloat16 remainders in PyTorch
(`store_param_remainders`); stochastic rounding: Gupta et al., "Deep Learning with
Limited Numerical Precision", 2015, section 2.
"""

import dataclasses
from collections.abc import Callable, Collection, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path

from .. import _state
from .._mesh import refuse_unreduced
from .._policy import holds_half
from .._state import HalfStorageState
from .._tree import find_nodes, is_inexact, leaves_by_name, promote_to_float32
from .._types import KeyPath, PyTree
from .._validation import described
from . import bfloat16
from .parameters import check_pairs, is_bfloat16, join

_NAME = "with_half_storage"


def with_half_storage(
    inner: optax.GradientTransformation,
    *,
    averages: Collection[str] = (),
    remainders: bool = True,
    key: jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an Optax optimizer: parameters and moving averages stored in bfloat16.

    `inner` updates float32 values, whose rounding the bfloat16 parameters are. The
    state keeps the remainders, so given the same gradients training is that of `inner`
    on float32 parameters: in every bit, or except for the last bits where XLA fuses
    the optimizer (Adam) otherwise. With AdamW a parameter takes 14 bytes in place of 16
    (value, state and gradient), 12 without remainders, and 4 less with
    `averages=("mu", "nu")`.

    Put it inside `with_loss_scale`, and clipping, `MultiSteps` and schedules into it.
    Apply its updates by `optax.apply_updates`; `equinox.apply_updates` does not round.
    A value above the largest bfloat16 becomes infinite. A value that falls below 2^-15
    of itself in one step may miss its last digits. Derivatives are those of float32.

    Args:
      inner: any Optax optimizer or chain, without a loss scale.
      averages: fields of Optax's states that are stored in bfloat16, such as
        `("mu", "nu")` of Adam, `("trace",)` of SGD: one array for each parameter, at
        most float32, with at least one axis. They are rounded stochastically after each
        step; a sum, a maximum or a copy of the parameters would collect the noise.
      remainders: whether the state keeps what bfloat16 parameters lack. If not, new
        values are rounded stochastically.
      key: a PRNG key, typed or raw, for `averages` and for `remainders=False`; its
        first 64 bits become a Threefry key. Members of a `vmap` round alike unless
        their states get keys of their own, as do the parts of an array in `shard_map`.

    Returns:
      A transformation with state `HalfStorageState`. Its `update` takes gradients of
      any dtype, needs `params`, and returns float32 updates for bfloat16 leaves.

    Raises:
      TypeError: `inner` or a state is of another type.
      ValueError: no key where one is needed; from `init`, nothing to store in bfloat16,
        float16 parameters, a name that no field has, an average that `inner` subtracts
        from another (a centered RMSprop), a wrapper of this library within; from
        `update`, other parameters or arguments than of `init`, `unreduced` gradients.
    """
    inner = _state.checked_optimizer(_NAME, inner)
    if isinstance(averages, str) or not isinstance(averages, Collection):
        raise TypeError(
            f"{_NAME}: expected averages to be a tuple of names, got {averages!r}; "
            'write averages=("mu", "nu")'
        )
    words = None
    if averages or not remainders:
        if key is None:
            raise ValueError(
                f"{_NAME}: expected a key for stochastic rounding (of averages, and of "
                "parameters with remainders=False), got None; write "
                "key=jax.random.key(0)"
            )
        is_typed = jnp.issubdtype(getattr(key, "dtype", int), jax.dtypes.prng_key)
        if jnp.ndim(key) != (0 if is_typed else 1):
            raise TypeError(
                f"{_NAME}: expected one PRNG key, got {described(key)}; write "
                "key=jax.random.key(0)"
            )
        words = jax.random.key_data(key)[:2]
    storage = _HalfStorage(inner, frozenset(averages), remainders, words)
    return optax.GradientTransformationExtraArgs(
        storage.init,
        storage.update,  # pyright: ignore[reportArgumentType]
    )


@dataclasses.dataclass(frozen=True)
class _HalfStorage:
    inner: optax.GradientTransformationExtraArgs
    averages: frozenset[str]
    remainders: bool
    words: jax.Array | None  # of the key; None if nothing is rounded stochastically

    def init(self, params: optax.Params) -> HalfStorageState:
        inner_state = self.inner.init(promote_to_float32(jax.tree.map(join, params)))
        scaled = _state.find_loss_scale_states(inner_state)
        if scaled or _state.find_half_storage(inner_state):
            raise ValueError(
                f"{_NAME}: expected an optimizer without a loss scale and without half "
                f"storage within, got one with them; write with_loss_scale({_NAME}("
                "optimizer))"
            )
        if jax.tree.leaves(params):  # optax.partition knows groups without any
            self._check_parameters(params)
            self._check_averages(inner_state, params)

        def zeros(p: PyTree) -> jax.Array | None:
            keeps = self.remainders and is_bfloat16(p)
            return jnp.zeros_like(p, jnp.int16) if keeps else None

        return HalfStorageState(
            self._map_averages(lambda x: x.astype(jnp.bfloat16), inner_state, params),
            remainders=jax.tree.map(zeros, params),
            rounding_key=jax.tree.map(jnp.copy, self.words),
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
        full = promote_to_float32(jax.tree.map(join, params, state.remainders))
        inner_state = self._map_averages(promote_to_float32, state.inner_state, params)
        grads, extra_args = promote_to_float32((updates, extra_args))
        out, inner_state = self.inner.update(grads, inner_state, full, **extra_args)
        # An update may be None or masked, also for a whole subtree.
        out, structure = jax.tree.flatten(out, is_leaf=_state.is_nothing)
        next_key, keys = None, [None] * len(out)
        if self.words is not None:
            key = jax.random.wrap_key_data(state.rounding_key, impl="threefry2x32")
            next_key, of_averages, *drawn = jax.random.split(key, 2 + len(out))
            next_key = jax.random.key_data(next_key)
            if self.averages:
                inner_state = self._rounded(inner_state, params, of_averages)
            keys = keys if self.remainders else drawn
        trees = map(structure.flatten_up_to, (params, full, state.remainders))
        pairs = list(map(_rounded_update, out, *trees, keys))
        updates = structure.unflatten(update for update, _ in pairs)
        remainders = structure.unflatten(rest for _, rest in pairs)
        return updates, HalfStorageState(inner_state, remainders, next_key)

    def _averages_of(self, state: PyTree, params: PyTree) -> list["_Place | None"]:
        """Returns the place of each leaf that is stored in bfloat16; None of others."""

        def average(place: _Place) -> _Place | None:
            x = place.leaf
            is_narrow = getattr(x, "dtype", None) == jnp.float32 or holds_half(x)
            is_stored = place.field in self.averages and is_narrow and x.ndim
            return place if is_stored else None

        return list(map(average, _places_of(state, params)))

    def _map_averages(
        self, fun: Callable[[jax.Array], jax.Array], state: PyTree, params: PyTree
    ) -> optax.OptState:
        if not self.averages:
            return state
        leaves, structure = jax.tree.flatten(state)
        pairs = zip(leaves, self._averages_of(state, params), strict=True)
        return structure.unflatten(fun(x) if place else x for x, place in pairs)

    def _rounded(
        self, state: optax.OptState, params: PyTree, key: jax.Array
    ) -> optax.OptState:
        """Rounds averages stochastically.

        A word of 32 bits serves two averages of a parameter, because Threefry takes a
        TPU as much time as the bytes that are saved.
        """
        leaves, structure = jax.tree.flatten(state)
        groups: dict[Hashable, list[int]] = {}
        for i, place in enumerate(self._averages_of(state, params)):
            # The optimizer itself may have rounded it, by Optax's `mu_dtype`.
            if place and not is_bfloat16(leaves[i]):
                groups.setdefault((place.owner, leaves[i].shape), []).append(i)
        pairs = [x[i : i + 2] for x in groups.values() for i in range(0, len(x), 2)]
        for pair, own in zip(pairs, jax.random.split(key, len(pairs)), strict=True):
            word = jax.random.bits(own, leaves[pair[0]].shape, jnp.uint32)
            for half, i in enumerate(pair):
                leaves[i] = _stochastic(leaves[i], word >> (16 * half))
        return structure.unflatten(leaves)

    def _check_parameters(self, params: optax.Params) -> None:
        for name, p in leaves_by_name(params).items():
            if getattr(p, "dtype", None) == jnp.float16:
                raise ValueError(
                    f"{_NAME}: expected bfloat16 parameters, got {name or 'params'} of "
                    "float16: with its remainder it takes 6 bytes, where a float32 "
                    "parameter takes 4; store it in bfloat16, or in float32"
                )
        if not self.averages and not any(map(is_bfloat16, jax.tree.leaves(params))):
            raise ValueError(
                f"{_NAME}: expected bfloat16 parameters or names of averages, got "
                "neither, so nothing would be stored in bfloat16; cast parameters to "
                'bfloat16, or write averages=("mu", "nu")'
            )

    def _check_averages(self, inner_state: optax.OptState, params: PyTree) -> None:
        stored = self._averages_of(inner_state, params)
        missing = self.averages - {place.field for place in stored if place}
        if missing:
            places = _places_of(inner_state, params)
            floats = [x for x in places if x.field and is_inexact(x.leaf)]
            found = {f"{x.field} ({x.leaf.dtype})" for x in floats}
            raise ValueError(
                f"{_NAME}: expected a state with float32 arrays called "
                f"{sorted(missing)}, one for each parameter, got one with "
                f"{', '.join(sorted(found)) or 'no such fields'}; pass the names of "
                "its averages, or leave this optimizer as it is"
            )
        centered = find_nodes(
            lambda node: type(node).__name__.startswith("ScaleByRStdDev"), inner_state
        )
        for _, node in centered:
            if any(self._averages_of(node, params)):
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
        remainders = leaves_by_name(state.remainders)
        check_pairs(_NAME, leaves_by_name(params), remainders, self.remainders)


class _Place(NamedTuple):
    """A leaf of an optimizer's state, and where it belongs."""

    leaf: PyTree
    field: str | None  # with one array for each parameter; None if it is not in one
    owner: KeyPath  # the parameter's path


def _places_of(state: optax.OptState, params: PyTree) -> list[_Place]:
    """Returns the place of each leaf of a state, whose path ends with a parameter's.

    That is cut off first, because a parameter may itself be called "mu".
    """
    params = params.fast if isinstance(params, optax.LookaheadParams) else params
    owners = {path for path, _ in tree_leaves_with_path(params)}
    places = []
    for path, leaf in tree_leaves_with_path(state):
        starts = (i for i in range(len(path) + 1) if path[i:] in owners)
        start = next(starts, 0)
        field = getattr(path[start - 1], "name", None) if start else None
        places.append(_Place(leaf, field, path[start:]))
    return places


def _stochastic(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Rounds to a neighboring bfloat16, which is never infinite."""
    largest = float(jnp.finfo(jnp.bfloat16).max)
    x = promote_to_float32(x)
    x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
    return bfloat16.rounded(x, bits).astype(jnp.bfloat16)


def _rounded_update(
    update: PyTree, p: PyTree, full: PyTree, remainder: PyTree, key: jax.Array | None
) -> tuple[PyTree, PyTree]:
    """Returns the update to the rounding of the new value, and the remainder."""
    if _state.is_nothing(update):
        return update, remainder
    if not is_bfloat16(p):
        is_float8 = full is not p and not holds_half(p)
        return update.astype(p.dtype) if is_float8 else update, remainder
    bits = None if key is None else jax.random.bits(key, p.shape, jnp.uint16)
    x, old = (full + update).astype(jnp.float32), join(p)
    update = bfloat16.change(bfloat16.rounded(x, bits), old)
    # The cast of `optax.apply_updates` itself: XLA:TPU makes one kernel of both.
    made = (old + update).astype(p.dtype)
    return update, bfloat16.remainder(x, made) if key is None else None
