"""Checkpoints from before what the state now has.

Others need nothing from this module: S and its counter are restored like all leaves.
"""

import functools
from collections.abc import Callable, Mapping
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
    if not find_loss_scale_states(state):
        cure = "pass that of an optimizer wrapped in with_loss_scale"
        raise ValueError(f"{name}: state has no loss scale; {cure}")
    state = _restore(name, load, state, is_loss_scale_state, _inner_state)
    return _with_values(name, state)


def restore_older(load: Callable[[PyTree], PyTree], state: T) -> T:
    """Restores a checkpoint from before the optimizer had a guard.

    As `restore_without_loss_scale`, but only the guard, which warms up again, comes
    from `state`. A checkpoint that has the guard is restored whole: `load` gets the
    template with a guard first, and one without if that does not fit, or if it raises a
    `ValueError`, `TypeError` or `KeyError`.
    """
    restore = functools.partial(_restore, "restore_older", load, state)
    try:
        state = restore(is_loss_scale_state, lambda node: node)
    except (KeyError, TypeError, ValueError):
        state = restore(is_loss_scale_state, _without_guard)
    return _with_values("restore_older", state)


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
    full, opt_state = _restore(function, load, template, is_half_state, _inner_state)
    leaves, structure = jax.tree.flatten(opt_state)
    numbers = jax.tree.unflatten(structure, range(len(leaves)))
    values, likes = (leaves_by_name(with_arrays(tree)) for tree in (full, params))
    for name, i in remainders(function, numbers).items():
        leaves[i] = split(values[name], likes[name])[1]
    params = jax.tree.map(lambda x, like: split(x, like)[0], full, params)
    return _with_values(function, (params, jax.tree.unflatten(structure, leaves)))


def without_half_parameters(params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
    """Returns float32 parameters, and the exact state that `inner` alone has with them.

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
    is_new: Callable[[PyTree], bool],
    form: Form,
) -> T:
    """Restores `state` from disk, where each new state in it has another form."""
    leaves, structure = jax.tree.flatten(state)
    # The leaves' numbers in the form on disk: loaders that ignore the template sort by
    # name, so what is read finds its place by its name there.
    numbers = jax.tree.unflatten(structure, range(len(leaves)))
    numbered = _in_form(numbers, is_new, form)
    places = leaves_by_name(numbered)
    saved = leaves_by_name(load(jax.tree.map(leaves.__getitem__, numbered)))
    like = {name: leaves[i] for name, i in places.items()}
    for name, leaf in _checked(function, saved, like).items():
        leaves[places[name]] = leaf
    return jax.tree.unflatten(structure, leaves)


def _with_values(function: str, state: T) -> T:
    """Refuses an abstract `state`, which would fail only in the first step."""
    leaves = leaves_by_name(state)
    abstract = [k for k, x in leaves.items() if isinstance(x, jax.ShapeDtypeStruct)]
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
    """Returns `tree` with each new state in a form that it had once."""

    # NNX leaves out an entry that holds no array, such as the inner state of SGD.
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


def _checked(
    function: str, saved: Mapping[str, Leaf], like: Mapping[str, Leaf]
) -> dict[str, Leaf]:
    """Returns the arrays of `saved`, of the names, shapes and dtypes of `like`."""
    # Orbax's partial restore leaves a ShapeDtypeStruct for what it did not read.
    saved = {k: x for k, x in saved.items() if not isinstance(x, jax.ShapeDtypeStruct)}
    # The functions among an Equinox model's leaves are not saved.
    data = {name: x for name, x in like.items() if is_data(x) or hasattr(x, "dtype")}
    misfits = {k: x for k, x in data.items() if not _fits(saved.get(k), x)}
    wrong = [f"{k} ({_type(saved.get(k))} for {_type(x)})" for k, x in misfits.items()]
    foreign = saved.keys() - like.keys()
    if wrong or foreign:
        raise ValueError(
            f"{function}: expected a checkpoint of the older state, got\n"
            f"  not as in state:        {listed(wrong)}\n"
            f"  only in the checkpoint: {listed(foreign)}\n"
            "One like state itself is restored into the state as it is, by load(state)"
        )
    # NumPy arrays cannot be donated, and Python numbers are another type for `jit`.
    return {
        name: jnp.asarray(saved[name], x.dtype) if hasattr(x, "dtype") else saved[name]
        for name, x in data.items()
    }


def _fits(value: Leaf, like: Leaf) -> bool:
    dtypes = {getattr(x, "dtype", None) for x in (value, like)} - {None}  # of arrays
    return is_data(value) and len(dtypes) < 2 and jnp.shape(value) == jnp.shape(like)


def _type(x: Leaf) -> str:
    if x is None:
        return "nothing"
    return f"{getattr(x, 'dtype', type(x).__name__)}{[*getattr(x, 'shape', ())]}"
