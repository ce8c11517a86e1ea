"""What a forward pass writes to NNX variables, and how it is put back."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ._tree import is_data, is_inexact

# The leaves of variables: by the variable's path in the nodes, then by the leaf's path
# in the variable, since a variable may hold any pytree.
Leaves = Mapping[tuple[Any, ...], Mapping[Any, Any]]


def graph_nodes(args: Any) -> list[Any]:
    """The modules and lone variables among the arguments, in whatever containers."""

    def is_node(x: Any) -> bool:
        return isinstance(x, (nnx.Pytree, nnx.Variable))

    return [x for x in jax.tree.leaves(args, is_leaf=is_node) if is_node(x)]


def values_of(nodes: Sequence[Any]) -> Leaves:
    """The leaves of all that one forward pass may write and the next one reads.

    Not the variables themselves, nor their values: the forward pass may write to a dict
    or a list in place.
    """
    return {
        path: dict(jax.tree_util.tree_leaves_with_path(variable))
        for path, variable in _variables(nodes)
    }


def written_since(nodes: Sequence[Any], before: Leaves) -> Leaves:
    """The part of `before` that was written to since.

    A leaf that nothing wrote to is the same object after `nnx.value_and_grad`, in a
    compiled function too: parameters cost no select, and nobody keeps their old values.
    """
    written = {}
    for path, leaves in values_of(nodes).items():
        old = before.get(path, {})
        if leaves.keys() != old.keys() or any(old[p] is not leaves[p] for p in old):
            written[path] = old
    return written


def put_back(keep: jax.Array, nodes: Sequence[Any], written: Leaves) -> None:
    """Gives the written variables their values of before, unless `keep`, a bool[]."""
    selected = []
    for path, variable in _variables(nodes):
        if path in written:
            leaves, treedef = jax.tree_util.tree_flatten_with_path(variable)
            leaves = [_select(keep, x, written[path].get(p)) for p, x in leaves]
            selected.append((path, jax.tree.unflatten(treedef, leaves)))
    if selected:
        nnx.update(list(nodes), nnx.from_flat_state(selected))


def _variables(nodes: Sequence[Any]) -> Any:
    # Plain arrays among the attributes of a module are in the state as well.
    state = nnx.state(list(nodes), nnx.Not(nnx.Intermediate))
    return nnx.to_flat_state(state)


def _select(keep: jax.Array, new: Any, old: Any) -> Any:
    """`new` if `keep`, else `old`, or else the finite entries of `new` and zeros."""
    if new is old or not is_data(new):
        return new
    if is_data(old) and jnp.shape(old) == jnp.shape(new):
        dtype, old_dtype = jax.typeof(new).dtype, jax.typeof(old).dtype
        if not any(jnp.issubdtype(d, jax.dtypes.extended) for d in (dtype, old_dtype)):
            old = jnp.asarray(old).astype(dtype)
        if jax.typeof(old).dtype == dtype:
            return jnp.where(keep, new, old)
    if is_inexact(new):
        # There is nothing to go back to, and a NaN in a statistic would never leave it
        # (test_what_the_forward_pass_makes_or_lets_grow_stays_and_is_finite_...).
        return jnp.where(keep | jnp.isfinite(new), new, jnp.zeros_like(new))
    return new
