"""Checkpoints from before what the state now has.

Others need nothing from this module: S and its counter are restored like all leaves.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp

from ._half_storage.parameters import (
    check_magnitudes,
    full_parameters,
    remainders,
    split,
)
from ._state import (
    find_half_states,
    find_loss_scale_states,
    is_half_state,
    is_loss_scale_state,
)
from ._tree import is_data, leaves_by_name, listed, with_arrays
from ._types import Leaf, PyTree

T = TypeVar("T")
Form = Callable[[PyTree], PyTree]  # of a state, as it was once


def restore_without_loss_scale(load: Callable[[PyTree], PyTree], state: T) -> T:
    """Restores a checkpoint from before the optimizer was wrapped in `with_loss_scale`.

    The loss scale, its flags, counts and guard come from `state`, all else from disk.

    Args:
      load: reads the checkpoint into a template, with whatever wrote it: for Orbax
        `lambda template: ocp.load(path, template)`. The template is `state` with each
        `LossScaleState` replaced by its `inner_state`. Dicts with its names will do.
      state: the new state, with a loss scale at any depth: a `TrainState`, an
        `nnx.state(optimizer)`, ... Other leaves may be `jax.ShapeDtypeStruct`s.

    Returns:
      A tree like `state`, of arrays only.

    Raises:
      ValueError: `state` has no loss scale or an abstract one; the checkpoint has other
        leaves than the template (as one with a loss scale has), of another shape or
        dtype, or some that were not read (Orbax's partial restore).

    Examples:
      >>> import jax.numpy as jnp, jmp_scale, optax
      >>> from jmp_scale.checkpoints import restore_without_loss_scale
      >>> params = {"w": jnp.ones(2)}
      >>> saved = optax.adam(0.1).init(params)
      >>> tx = jmp_scale.with_loss_scale(optax.adam(0.1), jmp_scale.DynamicLossScale())
      >>> opt_state = restore_without_loss_scale(lambda _: saved, tx.init(params))
      >>> float(opt_state.loss_scale.loss_scale)
      32768.0
    """
    name = "restore_without_loss_scale"
    return _with_values(name, _restore(name, load, state, [_inner_state]))


def restore_older(load: Callable[[PyTree], PyTree], state: T) -> T:
    """Restores a checkpoint from before the optimizer had a guard.

    As `restore_without_loss_scale`, but only the guard, which warms up again, comes
    from `state`; S and all else come from disk. A checkpoint that has the guard is
    restored whole: `load` gets the form with a guard first, and without one if it
    raises a `ValueError`, `TypeError` or `KeyError`.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale, optax
      >>> from jmp_scale.checkpoints import restore_older
      >>> saved = jmp_scale.with_loss_scale(optax.adam(0.1)).init(jnp.ones(2))
      >>> guard = jmp_scale.SpikeGuard()
      >>> tx = jmp_scale.with_loss_scale(optax.adam(0.1), guard=guard)
      >>> state = restore_older(lambda template: saved, tx.init(jnp.ones(2)))
      >>> state.guard
      SpikeGuard()
    """
    name = "restore_older"
    return _with_values(
        name, _restore(name, load, state, [lambda node: node, _without_guard])
    )


def restore_without_half_parameters(
    load: Callable[[PyTree], PyTree], params: PyTree, opt_state: PyTree
) -> tuple[PyTree, PyTree]:
    """Restores a checkpoint of float32 parameters into half-precision ones, exactly.

    Args:
      load: as in `restore_without_loss_scale`; the template is the pair
        `without_half_parameters(params, opt_state)`.
      params: new half-precision parameters, for their structure, shapes and dtypes.
        They may be `jax.ShapeDtypeStruct`s, as all leaves of `opt_state` except a loss
        scale and a key.
      opt_state: the new state, with that of `with_half_parameters` at any depth.

    Returns:
      `(params, opt_state)`, all from disk except a key for stochastic rounding.

    Raises:
      ValueError: the checkpoint has other leaves than the template, or of other types;
        a key or a loss scale that is not on disk is abstract.
    """
    function = "restore_without_half_parameters"
    template = full_parameters(params, opt_state), opt_state
    full, opt_state = _restore(function, load, template, [_inner_state], is_half_state)
    leaves, structure = jax.tree.flatten(opt_state)
    numbers = jax.tree.unflatten(structure, range(len(leaves)))
    values, likes = (leaves_by_name(with_arrays(tree)) for tree in (full, params))
    for name, i in remainders(function, numbers).items():
        leaves[i] = split(values[name], likes[name])[1]
    params = jax.tree.map(lambda x, like: split(x, like)[0], full, params)
    return _with_values(function, (params, jax.tree.unflatten(structure, leaves)))


def without_half_parameters(params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
    """Float32 parameters, and the state that `inner` alone has with them, exactly.

    Args:
      params: half-precision parameters.
      opt_state: the state of `with_half_parameters` after the same step, at any depth.
    """
    inner = _in_form(opt_state, is_half_state, _inner_state)
    return full_parameters(params, opt_state), inner


def _restore(
    function: str,
    load: Callable[[PyTree], PyTree],
    state: T,
    forms: Iterable[Form],
    is_new: Callable[[PyTree], bool] = is_loss_scale_state,
) -> T:
    """`state` with what is on disk in the first of the `forms` that fits."""
    if is_new is is_loss_scale_state and not find_loss_scale_states(state):
        cure = "pass that of an optimizer wrapped in with_loss_scale"
        raise ValueError(f"{function}: state has no loss scale; {cure}")
    leaves, structure = jax.tree.flatten(state)
    numbers = jax.tree.unflatten(structure, range(len(leaves)))
    errors = []
    for form in forms:
        # The leaves' numbers in the form on disk: loaders that ignore the template
        # sort by name, so what is read finds its place by its name there.
        numbered = _in_form(numbers, is_new, form)
        places = leaves_by_name(numbered)
        like = {name: leaves[i] for name, i in places.items()}
        try:
            saved = leaves_by_name(load(jax.tree.map(leaves.__getitem__, numbered)))
            found = _checked(saved, like)
            break
        except (KeyError, TypeError, ValueError) as error:
            errors.append(error)
    else:
        reasons = "\n".join(dict.fromkeys(map(str, errors)))
        message = f"{function}: the checkpoint is not as expected:\n{reasons}"
        raise ValueError(message) from errors[0]
    for name, leaf in found.items():
        leaves[places[name]] = leaf
    return jax.tree.unflatten(structure, leaves)


def _with_values(function: str, state: T) -> T:
    """`state`, of which nothing is abstract: that would fail only in the first step."""
    names = leaves_by_name(state).items()
    abstract = [name for name, x in names if isinstance(x, jax.ShapeDtypeStruct)]
    if abstract:
        raise ValueError(
            f"{function}: expected a state with values for all that is not on disk, "
            f"got jax.ShapeDtypeStructs at {listed(abstract)}; pass the loss scale, or "
            "the rounding_key, of a state that tx.init returns"
        )
    for _, half_state in find_half_states(state):
        check_magnitudes(function, remainders(function, half_state), {})
    return state


def _in_form(tree: PyTree, is_new: Callable[[PyTree], bool], form: Form) -> PyTree:
    """`tree` with each new state in a form that it had once."""

    # NNX leaves out an entry that holds no array, as the inner state of SGD.
    def is_empty(x: Leaf) -> bool:
        return isinstance(x, Mapping) and is_new(x) and form(x) is None

    def has_empty(x: Leaf) -> bool:
        return isinstance(x, Mapping) and any(map(is_empty, x.values()))

    def in_form(x: PyTree) -> PyTree:
        if is_new(x):
            return form(x)
        if not has_empty(x):
            return x
        rest = {name: entry for name, entry in x.items() if not is_empty(entry)}
        return _in_form(type(x)(rest), is_new, form)

    return jax.tree.map(in_form, tree, is_leaf=lambda x: is_new(x) or has_empty(x))


def _inner_state(node: PyTree) -> PyTree:
    is_mapping = isinstance(node, Mapping)
    return node.get("inner_state") if is_mapping else node.inner_state


def _without_guard(node: PyTree) -> PyTree:
    if not isinstance(node, Mapping):
        return node._replace(guard=None)
    fields = {name: x for name, x in node.items() if name != "guard"}  # as NNX leaves
    return type(node)(fields)  # pyright: ignore[reportCallIssue]


def _checked(saved: PyTree, like: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """The arrays of `saved`, which have the names, shapes and dtypes of `like`."""
    # The functions among an Equinox model's leaves are not saved.
    data = {name: x for name, x in like.items() if is_data(x) or hasattr(x, "dtype")}
    # Orbax's partial restore leaves a ShapeDtypeStruct for what it did not read.
    missing = {name for name in data if not is_data(saved.get(name))}
    foreign = saved.keys() - like.keys()
    if missing or foreign:
        raise ValueError(
            "expected a checkpoint of the older state, got\n"
            f"  missing or not read:    {listed(missing)}\n"
            f"  only in the checkpoint: {listed(foreign)}\n"
            "One like state itself is restored into the state as it is, by load(state)"
        )
    return {name: _array(name, saved[name], x) for name, x in data.items()}


def _array(name: str, value: Leaf, like: Leaf) -> Leaf:
    dtype, expected = (getattr(x, "dtype", None) for x in (value, like))
    # A Python number has no dtype before the first step.
    differs = None not in (dtype, expected) and dtype != expected
    if differs or jnp.shape(value) != jnp.shape(like):
        raise ValueError(
            f"{name} has shape {jnp.shape(value)} and dtype {dtype or type(value)} in "
            f"the checkpoint, but {jnp.shape(like)} and {expected or type(like)} in "
            "state"
        )
    # NumPy arrays cannot be donated, and Python numbers are another type for `jit`.
    is_array = isinstance(value, jax.Array) or expected is None
    return value if is_array else jnp.asarray(value, expected)
