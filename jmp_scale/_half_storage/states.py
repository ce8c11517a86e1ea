"""Any Optax optimizer whose moving averages are stored in bfloat16.

Rounded to nearest, an average stands still where a step moves it by less than a 512th
of itself: Adam's `nu` with b2 = 0.999 cannot decay. Rounded stochastically it moves in
the mean, and later steps average the noise out:

    average = f32(stored)              exact
    average = b * average + (1 - b) * x    as the optimizer does
    stored  = one of the two bfloat16 neighbors, the nearer one more often

Source: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015, section 2.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_flatten_with_path

from .._mesh import refuse_unreduced
from .._policy import holds_half
from .._state import (
    HalfStateState,
    checked_optimizer,
    find_loss_scale_states,
    find_rounded_states,
    started,
)
from .._tree import promote_to_float32
from .._types import KeyPath, Leaf, PyTree
from .._validation import described, key_words
from .formats import BFLOAT16

# Noise apart from that of `with_half_parameters` with the same key.
_STREAM = 0x68616C66
_Owner = KeyPath  # the key path of a parameter


def with_half_state(
    inner: optax.GradientTransformation,
    *,
    key: jax.Array,
    names: Collection[str] = ("mu", "nu", "trace"),
) -> optax.GradientTransformationExtraArgs:
    """Wraps an Optax optimizer: its moving averages take 2 bytes an entry.

    Use it when optimizer states fill the memory: AdamW then stores 4 bytes less a
    parameter. `inner` runs on float32 averages; these are rounded stochastically to
    bfloat16 afterwards, right in the mean and the same on all devices. The state is
    rounded and not the update, so the first step is that of `inner`, bit for bit.

    Put it inside `with_loss_scale`, and inside or around `with_half_parameters`. One
    key may serve both. On a CPU it costs time, and memory while a leaf is updated.

    Args:
      inner: any Optax optimizer or chain, without a loss scale.
      key: a PRNG key, typed or raw, whose first 64 bits become a Threefry key: others
        depend on the layout. `shard_map` needs one for each part of a divided array.
      names: fields of the states of Optax whose arrays are rounded, one for each
        parameter: float32 or narrower, with at least one axis. Name only decaying
        averages. A sum, a maximum or a copy of the parameters, as `z` of
        `optax.contrib.schedule_free`, does not average its noise out.

    Returns:
      A transformation with state `HalfStateState`.

    Raises:
      TypeError: an argument or a state of another type, parameters that are not arrays.
      ValueError: several keys; from `init`, no array has one of the `names`, or `inner`
        contains a `with_loss_scale` or another `with_half_state`; from `update`,
        `unreduced` gradients.

    Examples:
      >>> import jax, jax.numpy as jnp, jmp_scale, optax
      >>> params = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
      >>> tx = jmp_scale.with_half_state(optax.adamw(1e-3), key=jax.random.key(0))
      >>> state = tx.init(params)
      >>> updates, state = tx.update(params, state, params)
      >>> state.inner_state[0].nu["w"].dtype
      dtype(bfloat16)
    """
    inner = checked_optimizer("with_half_state", inner)
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"with_half_state: expected names to be names of fields, got {names!r}; "
            'write names=("mu", "nu")'
        )
    words = key_words("with_half_state", key)
    wrapper = _Wrapper(inner, words, frozenset(names))
    return optax.GradientTransformationExtraArgs(
        wrapper.init,
        wrapper.update,  # pyright: ignore[reportArgumentType]
    )


@dataclasses.dataclass(frozen=True)
class _Wrapper:
    inner: optax.GradientTransformationExtraArgs
    words: jax.Array
    names: frozenset[str]

    def init(self, params: optax.Params) -> HalfStateState:
        state = started("with_half_state", self.inner, params)
        if find_loss_scale_states(state) or find_rounded_states(state):
            raise ValueError(
                "with_half_state: expected an optimizer without a loss scale and "
                "without half states within, got one with them; write "
                "with_loss_scale(with_half_state(optimizer))"
            )
        leaves, structure, owners = self._averages(state, params)
        if all(owner is None for owner in owners):
            found = tree_flatten_with_path(state)[0]
            paths = [path for path, x in found if _is_narrow(x)]
            fields = {k.name for path in paths for k in path if hasattr(k, "name")}
            raise ValueError(
                "with_half_state: expected a state with float32 arrays called "
                f"{sorted(self.names)}, one for each parameter, got one with "
                f"{', '.join(sorted(fields)) or 'no fields'}; pass its averages as "
                "names, or leave this optimizer as it is"
            )
        pairs = zip(leaves, owners, strict=True)
        cast = [x if owner is None else x.astype(jnp.bfloat16) for x, owner in pairs]
        return HalfStateState(structure.unflatten(cast), jnp.copy(self.words))

    def update(
        self,
        updates: optax.Updates,
        state: HalfStateState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, HalfStateState]:
        if not isinstance(state, HalfStateState):
            raise TypeError(
                "with_half_state: expected the HalfStateState that init returns, got "
                f"{described(state)}; of a plain optimizer's state, with "
                "new = tx.init(params), make new._replace(inner_state="
                "optax.tree.cast_like(state, new.inner_state))"
            )
        refuse_unreduced("with_half_state", updates)
        known = updates, params  # an update may lack what its parameter has
        leaves, structure, owners = self._averages(state.inner_state, *known)
        pairs = zip(leaves, owners, strict=True)
        wide = [x if owner is None else promote_to_float32(x) for x, owner in pairs]
        out, new = self.inner.update(
            updates, structure.unflatten(wide), params, **extra_args
        )
        leaves, structure, owners = self._averages(new, *known)
        key = jax.random.wrap_key_data(state.rounding_key, impl="threefry2x32")
        rounded = _rounded(leaves, owners, jax.random.fold_in(key, _STREAM))
        next_key = jax.random.key_data(jax.random.split(key, 1)[0])
        return out, HalfStateState(structure.unflatten(rounded), next_key)

    def _averages(
        self, state: optax.OptState, *trees: PyTree
    ) -> tuple[list[Leaf], PyTree, list[_Owner | None]]:
        """Leaves of a state, its structure, and of which parameter each is an average.

        A path in the state ends with that of the parameter, which is cut off first: a
        parameter may itself be called "mu". A leaf that is no average has no owner.
        """
        parameters = set()
        for tree in trees:
            tree = tree.fast if isinstance(tree, optax.LookaheadParams) else tree
            parameters |= {path for path, _ in tree_flatten_with_path(tree)[0]}
        pairs, structure = tree_flatten_with_path(state)
        owners = []
        for path, x in pairs:
            starts = (i for i in range(len(path) + 1) if path[i:] in parameters)
            start = next(starts, 0)
            field = getattr(path[start - 1], "name", None) if start else None
            is_average = field in self.names and _is_narrow(x)
            owners.append(path[start:] if is_average else None)
        return [x for _, x in pairs], structure, owners


def _is_narrow(x: Leaf) -> bool:
    is_float = getattr(x, "dtype", None) == jnp.float32 or holds_half(x)
    return is_float and x.ndim > 0


def _rounded(
    leaves: Sequence[Leaf], owners: Sequence[_Owner | None], key: jax.Array
) -> list[Leaf]:
    """Rounds averages to a neighboring bfloat16, which is never infinite.

    A word of 32 bits serves two averages of a parameter, because Threefry takes a GPU
    as much time as the bytes that are saved.
    """
    rounded, places = list(leaves), {}
    for i, (x, owner) in enumerate(zip(leaves, owners, strict=True)):
        # Those that the optimizer itself has rounded stay, as by Optax's `mu_dtype`.
        if owner is not None and x.dtype != jnp.bfloat16:
            places.setdefault((owner, x.shape), []).append(i)
    pairs = [
        found[i : i + 2] for found in places.values() for i in range(0, len(found), 2)
    ]
    keys = jax.random.split(key, len(pairs)) if pairs else []
    largest = float(jnp.finfo(jnp.bfloat16).max)
    for pair, own in zip(pairs, keys, strict=True):
        word = jax.random.bits(own, leaves[pair[0]].shape, jnp.uint32)
        for half, i in enumerate(pair):
            noise = BFLOAT16.noise(word >> (16 * half))
            x = promote_to_float32(leaves[i])
            x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
            rounded[i] = BFLOAT16.rounded(x, noise).astype(jnp.bfloat16)
    return rounded
