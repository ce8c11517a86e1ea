"""`metrics`: finds loss-scale states in a pytree, and returns their scalars."""

import jax
import jax.numpy as jnp
from jax import lax

from ..._mesh import refuse_unreduced
from ..._scaling.finite import finite_and_norm
from ..._scaling.loss_scale import LossScale, number_of
from ..._state import START, LossScaleState, fields_of, find_loss_scale_states
from ..._tree import is_inexact, with_arrays
from ..._types import PyTree


def metrics(
    opt_state: PyTree,
    grads: PyTree = None,
    *,
    params: PyTree = None,
    updates: PyTree = None,
) -> dict[str, jax.Array]:
    """Returns scalars for any logger, without waiting for the device.

    Use it in the train step, or after it, to log the loss scale and the skipped steps.
    Compatible with `jit`, `vmap` and `lax.scan`.

    Args:
      opt_state: state of `with_loss_scale`, at any depth of any pytree.
      grads: unscaled gradients of the step.
      params: parameters before the step; with `updates`.
      updates: the optimizer's updates of these, of the same structure and shapes.

    Returns:
      A dictionary of scalars. If there are several states, the name of each number of
      a state starts with its path, as in "['generator'].loss_scale".

      - `loss_scale` f32[], S of the next step; missing if S is constant and the state
        is a mapping of Flax.
      - the flags, bool[], and counters, i32[], of `LossScaleState`, by their names.
      - `grad_norm` f32[], with `grads`: the Euclidean norm over all inexact leaves,
        infinite if one of them is not finite.
      - `lost_entries` f32[], with `updates`: the share of the nonzero updates that
        rounding loses, because the rounded sum is the parameter: below about 2^-9 of
        the parameter in bfloat16, 2^-12 in float16, 2^-25 in float32.
      - `lost_magnitude` f32[]: the same share of the sum of the updates' magnitudes.

    Raises:
      ValueError: there is no such state in `opt_state`; `params` and `updates` differ
        in structure.
    """
    states = find_states("metrics", opt_state)
    scalars = {}
    for path, state in states:
        prefix = f"{path}." if len(states) > 1 else ""
        s = number_of(state.loss_scale)
        if s is not None:
            scalars[f"{prefix}loss_scale"] = jnp.asarray(s, jnp.float32)
        for name in START:
            scalars[prefix + name] = jnp.asarray(getattr(state, name))
    return scalars | numbers_of_step(grads, params, updates)


def find_states(
    function: str, tree: PyTree, name: str = "opt_state"
) -> list[tuple[str, LossScaleState]]:
    """Returns path and state of each `with_loss_scale`, without its `inner_state`."""
    states = find_loss_scale_states(tree)
    if not states:
        raise ValueError(
            f"{function}: found no state of with_loss_scale in {name}; wrap the "
            "optimizer in it"
        )
    return [(jax.tree_util.keystr(path), _plain_state(node)) for path, node in states]


def _plain_state(node: PyTree) -> LossScaleState:
    # Mappings that Flax makes of states contain no configuration: `loss_scale` is then
    # S alone or None, and `guard` a mapping of its statistics.
    fields = fields_of(node)
    loss_scale = fields.get("loss_scale")
    if not isinstance(loss_scale, LossScale):
        loss_scale = (loss_scale or {}).get("loss_scale")
    # NNX omits a guard of None.
    fields = {"guard": None, **fields, "loss_scale": loss_scale, "inner_state": None}
    return LossScaleState(**with_arrays(fields))


def numbers_of_step(
    grads: PyTree, params: PyTree, updates: PyTree
) -> dict[str, jax.Array]:
    """Returns the numbers of `metrics` that what is given allows."""
    numbers = {}
    if grads is not None:
        refuse_unreduced("global norm", grads)  # that of the parts is another
        numbers["grad_norm"] = finite_and_norm(grads)[1]
    if updates is not None:
        sums = jax.tree.leaves(jax.tree.map(_sums, params, updates))
        lost, total = jnp.sum(jnp.stack([jnp.zeros((2, 2)), *sums]), 0)
        shares = jnp.where(total > 0, lost / total, 0)
        numbers["lost_entries"], numbers["lost_magnitude"] = shares
    return numbers


def _sums(param: PyTree, update: PyTree) -> jax.Array | None:
    """Returns rows of the lost updates and of all: number, sum of magnitudes."""
    if not is_inexact(param) or jnp.iscomplexobj(param):
        return None
    param = jnp.asarray(param)
    wide = jnp.float64 if param.dtype.itemsize == 8 else jnp.float32
    moved = (param.astype(wide) + update.astype(wide)).astype(param.dtype)
    # Bits are compared, because XLA may remove a cast and a cast back.
    integer = f"uint{8 * param.dtype.itemsize}"
    before, after = (lax.bitcast_convert_type(x, integer) for x in (param, moved))
    moves = update != 0
    lost = moves & ((after == before) | ((after | before) << 1 == 0))  # 0 and -0
    rows = []
    for chosen in (lost, moves):
        size = jnp.sum(jnp.where(chosen, jnp.abs(update).astype(jnp.float32), 0))
        # Integers are counted first: a float32 count stops at 2^24.
        count = jnp.sum(chosen, dtype=jnp.uint32).astype(jnp.float32)
        rows.append(jnp.stack([count, size]))
    return jnp.stack(rows)
