"""Checkpoints from before loss scaling, a guard, or half-precision parameters.

A checkpoint of a state with a loss scale needs nothing from this module: S and its
counter are saved and restored like all other leaves. Period, bounds and other arguments
come from the code that restores.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ._half_parameters import full_parameters, is_half_state, split
from ._state import find_loss_scale_states, is_loss_scale_state
from ._tree import is_data, leaves_by_name

T = TypeVar("T")


def restore_without_loss_scale(load: Callable[[Any], Any], state: T) -> T:
    """Restores a checkpoint from before the optimizer was wrapped in `with_loss_scale`.

    The loss scale, its flags, counts and guard come from `state`, all else from disk.

    Args:
      load: reads the checkpoint into a template, with whatever wrote it: for Orbax
        `lambda template: ocp.load(path, template)`. The template is `state` with each
        `LossScaleState` replaced by its `inner_state`. A `load` that ignores it may
        return nested dicts and lists with the same names.
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
    return _restore("loss_scale", load, state)


def restore_without_guard(load: Callable[[Any], Any], state: T) -> T:
    """Restores a checkpoint with a loss scale from before the optimizer had a guard.

    As `restore_without_loss_scale`, but only the guard, which warms up again, comes
    from `state`; S and all else come from disk.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale, optax
      >>> from jmp_scale.checkpoints import restore_without_guard
      >>> params, loss_scale = jnp.ones(2), jmp_scale.DynamicLossScale(2.0**15)
      >>> before = jmp_scale.with_loss_scale(optax.adam(0.1), loss_scale)
      >>> _, saved = before.update(params * jnp.inf, before.init(params))
      >>> tx = jmp_scale.with_loss_scale(
      ...     optax.adam(0.1), loss_scale, guard=jmp_scale.SpikeGuard())
      >>> opt_state = restore_without_guard(lambda _: saved, tx.init(params))
      >>> float(opt_state.loss_scale.loss_scale), int(opt_state.skipped)
      (16384.0, 1)
    """
    return _restore("guard", load, state)


def restore_without_half_parameters(
    load: Callable[[Any], Any], params: Any, opt_state: Any
) -> tuple[Any, Any]:
    """Restores a checkpoint of float32 parameters into half-precision ones, exactly.

    Args:
      load: as in `restore_without_loss_scale`; the template is the pair
        `without_half_parameters(params, opt_state)`.
      params: new half-precision parameters, for their structure, shapes and dtypes.
      opt_state: the new state, with that of `with_half_parameters` at any depth.

    Returns:
      `(params, opt_state)`, all from disk except a key for stochastic rounding.

    Raises:
      ValueError: the checkpoint has other leaves than the template, or of other types.
    """
    template = without_half_parameters(params, opt_state)
    saved, leaves = leaves_by_name(load(template)), leaves_by_name(template)
    leaves |= _checked("restore_without_half_parameters", saved, leaves)
    full, inner = jax.tree.unflatten(jax.tree.structure(template), leaves.values())
    halves = jax.tree.map(lambda x, like: split(x, like)[0], full, params)
    likes, full = leaves_by_name(params), leaves_by_name(full)

    def rebuilt(node: Any, inner: Any) -> Any:
        if not is_half_state(node):
            return inner
        names = leaves_by_name(node.remainder)
        remainder = [split(full[name], likes[name])[1] for name in names]
        remainder = jax.tree.unflatten(jax.tree.structure(node.remainder), remainder)
        return node._replace(inner_state=inner, remainder=remainder)

    return halves, jax.tree.map(rebuilt, opt_state, inner, is_leaf=is_half_state)


def without_half_parameters(params: Any, opt_state: Any) -> tuple[Any, Any]:
    """Float32 parameters, and the state that `inner` alone has with them, exactly.

    Args:
      params: half-precision parameters.
      opt_state: the state of `with_half_parameters` after the same step, at any depth.
    """

    def inner(node: Any) -> Any:
        return node.inner_state if is_half_state(node) else node

    inner_state = jax.tree.map(inner, opt_state, is_leaf=is_half_state)
    return full_parameters(params, opt_state), inner_state


def _restore(without: str, load: Callable[[Any], Any], state: T) -> T:
    function = f"restore_without_{without}"
    if not find_loss_scale_states(state):
        cure = "pass that of an optimizer wrapped in with_loss_scale"
        raise ValueError(f"{function}: state has no loss scale; {cure}")
    leaves, structure = jax.tree.flatten(state)

    # The form on disk, with the leaves' numbers: loaders that ignore the template sort
    # by name, so what is read finds its place by its name there.
    def is_new(x: Any) -> bool:
        entries = x.values() if isinstance(x, Mapping) else ()
        omits = without == "loss_scale" and any(map(_has_nothing, entries))
        return omits or is_loss_scale_state(x)

    numbers = jax.tree.map(
        lambda x: _older(x, without) if is_new(x) else x,
        jax.tree.unflatten(structure, range(len(leaves))),
        is_leaf=is_new,
    )
    saved = leaves_by_name(load(jax.tree.map(leaves.__getitem__, numbers)))
    places = leaves_by_name(numbers)
    like = {name: leaves[i] for name, i in places.items()}
    for name, leaf in _checked(function, saved, like).items():
        leaves[places[name]] = leaf
    state = jax.tree.unflatten(structure, leaves)
    # What is not on disk stays: an abstract S would fail only in the first step.
    names = leaves_by_name(state).items()
    abstract = [name for name, x in names if isinstance(x, jax.ShapeDtypeStruct)]
    if abstract:
        raise ValueError(
            f"{function}: the loss scale of state is abstract: {_listed(abstract)}; "
            "expected one with values, as tx.init returns it"
        )
    return state


def _older(node: Any, without: str) -> Any:
    """A state of `with_loss_scale` as it was without the loss scale or the guard."""
    if not isinstance(node, Mapping):
        return node._replace(guard=None) if without == "guard" else node.inner_state
    if without == "guard":
        rest = {name: x for name, x in node.items() if name != "guard"}
    elif is_loss_scale_state(node):
        return node.get("inner_state", {})
    else:
        rest = {name: x for name, x in node.items() if not _has_nothing(x)}
    return type(node)(rest)  # pyright: ignore[reportCallIssue]


def _has_nothing(node: Any) -> bool:
    """Whether NNX omits the inner state, as with SGD, because it holds no array."""
    is_state = isinstance(node, Mapping) and is_loss_scale_state(node)
    return is_state and "inner_state" not in node


def _checked(function: str, saved: Any, like: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of `saved`, which have the names, shapes and dtypes of `like`."""
    # The functions among an Equinox model's leaves are not saved.
    data = {name: x for name, x in like.items() if is_data(x) or hasattr(x, "dtype")}
    # Orbax's partial restore leaves a ShapeDtypeStruct for what it did not read.
    missing = {name for name in data if not is_data(saved.get(name))}
    foreign = saved.keys() - like.keys()
    if missing or foreign:
        raise ValueError(
            f"{function}: expected a checkpoint of the older state, got\n"
            f"  missing or not read:    {_listed(missing)}\n"
            f"  only in the checkpoint: {_listed(foreign)}\n"
            "One like state itself is restored into the state as it is, by load(state)"
        )
    return {name: _array(function, name, saved[name], x) for name, x in data.items()}


def _array(function: str, name: str, value: Any, like: Any) -> Any:
    dtype, expected = (getattr(x, "dtype", None) for x in (value, like))
    # A Python number has no dtype before the first step.
    differs = None not in (dtype, expected) and dtype != expected
    if differs or jnp.shape(value) != jnp.shape(like):
        raise ValueError(
            f"{function}: {name} has shape {jnp.shape(value)} and dtype "
            f"{dtype or type(value)} in the checkpoint, but {jnp.shape(like)} and "
            f"{expected or type(like)} in state"
        )
    # NumPy arrays cannot be donated, and Python numbers are another type for `jit`.
    is_array = isinstance(value, jax.Array) or expected is None
    return value if is_array else jnp.asarray(value, expected)


def _listed(paths: Iterable[str]) -> str:
    paths = sorted(paths)
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return ", ".join(paths[:5]) + more or "none"
