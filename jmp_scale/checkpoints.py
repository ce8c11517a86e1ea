"""Checkpoints from before the optimizer's state had all that it has now.

Others need nothing from this module: S and its counter are restored like all leaves.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp

from . import _pytree, _state
from ._half_storage.parameters import (
    full_parameters,
    is_bfloat16,
    join,
    refuse_states,
    remainders,
    split,
)
from ._tree import is_data, leaves_by_name, type_name, with_arrays
from ._types import PyTree
from ._validation import require_callable

T = TypeVar("T")
# What loaders raise for another template: Equinox a RuntimeError, or at a file's end.
_LOAD_ERRORS = (EOFError, KeyError, RuntimeError, TypeError, ValueError)


def restore(load: Callable[[PyTree], PyTree], state: T) -> T:
    """Restores a checkpoint into `state`, also one that lacks some of its parts.

    It may be from before the optimizer had its `SpikeGuard`, its loss scale or its half
    storage. `load` gets a template of each form that `state` may once have had, the
    newest first, until one fits. What is not on disk comes from `state`. Float32
    parameters from before `with_half_storage` become bfloat16 parameters and
    remainders, exactly, and averages are rounded.

    Args:
      load: reads the checkpoint into a template, with whatever wrote it: for Orbax
        `lambda template: ocp.load(path, template)`. Dicts with the names of the
        template will do. A form does not fit if `load` raises an error, or returns
        other names, shapes or dtypes (floats of a loss scale or a guard are cast).
      state: the new state: a `TrainState`, `(params, opt_state)`,
        `nnx.state((model, optimizer))`, ... It must hold the parameters if
        `with_half_storage` keeps their remainders. Leaves may be
        `jax.ShapeDtypeStruct`s if they are on disk.

    Returns:
      A tree like `state`, of arrays; what is abstract and not on disk stays so.

    Raises:
      TypeError: `load` is not a function.
      ValueError: no form fits, with the first difference of each.
    """
    cure = "write restore(lambda template: ocp.load(path, template), state)"
    require_callable("restore", load, cure)
    errors = {}
    for missing in _forms(state):
        name = f"without {' and '.join(missing)}" if missing else "as state is"
        try:
            return _restored(load, state, missing)
        except _OtherFormError as error:
            errors[name] = error
    raise ValueError(
        "restore: expected a checkpoint of state or of an older form of it, got one "
        "that differs from each, first in:"
        + "".join(f"\n  {name}: {error}" for name, error in errors.items())
    ) from errors["as state is"].__cause__


def without_half_storage(params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
    """Returns float32 parameters, and the state that `inner` alone has with them.

    Parameters are exact, and averages are float32 again. So is what `inner` itself
    stores in bfloat16, as Optax does by `mu_dtype`, if the state has a key.

    Args:
      params: bfloat16 parameters.
      opt_state: the state of `with_half_storage` after the same step, at any depth.

    Raises:
      ValueError: `params` holds the state of an optimizer, or other parameters than
        those of `opt_state`.
    """
    refuse_states("without_half_storage", params)

    def plain(node: PyTree) -> PyTree:
        is_stored = jax.tree.leaves(_state.fields_of(node).get("rounding_key"))
        inner_state = _inner_state(node)
        return jax.tree.map(_widened, inner_state) if is_stored else inner_state

    inner = _replaced(opt_state, _state.is_half_storage, plain)
    return full_parameters(params, opt_state), inner


class _OtherFormError(Exception):
    """A checkpoint is of another form than the template."""


def _forms(state: PyTree) -> list[tuple[str, ...]]:
    """Returns the parts that a checkpoint may lack together, the newest form first."""
    scaled = [_state.fields_of(x) for _, x in _state.find_loss_scale_states(state)]
    forms: list[tuple[str, ...]] = [()]
    if any(jax.tree.leaves(fields.get("guard")) for fields in scaled):
        forms.append(("guard",))
    if scaled:
        forms.append(("loss scale",))
    if _state.find_half_storage(state):
        forms += [("half storage", *missing) for missing in forms]
    return forms


def _restored(
    load: Callable[[PyTree], PyTree], state: T, missing: tuple[str, ...]
) -> T:
    """Restores a state from a checkpoint without these parts."""
    try:
        form = _Form(state, missing)
        saved = load(jax.tree.map(form.on_disk.__getitem__, form.numbers))
    except _LOAD_ERRORS as error:
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        raise _OtherFormError(first_line[:200]) from error
    saved = leaves_by_name(saved)
    # The pure dicts of NNX leave out the variables.
    trees = form.numbers, with_arrays(form.numbers)
    named = map(leaves_by_name, trees)
    places = max(named, key=lambda names: len(names.keys() & saved.keys()))
    for name in sorted(saved.keys() - places.keys()):
        raise _OtherFormError(f"{name} is {_type(saved[name])}, expected nothing")
    restored = [*form.leaves]
    for name, i in places.items():
        # The functions among an Equinox model's leaves are not saved.
        if is_data(form.on_disk[i]) or hasattr(form.on_disk[i], "dtype"):
            restored[i], remainder = form.read(name, saved.get(name), i)
            if i in form.remainder_of:
                restored[form.remainder_of[i]] = remainder
    return jax.tree.unflatten(form.structure, restored)


class _Form:
    """A state without some of its parts; leaves go by their numbers in the state."""

    def __init__(self, state: PyTree, missing: tuple[str, ...]) -> None:
        self.leaves, self.structure = jax.tree.flatten(state)
        numbers = jax.tree.unflatten(self.structure, range(len(self.leaves)))
        # The tree on disk: what is read finds its leaf by its name there.
        self.numbers = numbers
        for part in missing:
            is_half = part == "half storage"
            is_new = _state.is_half_storage if is_half else _state.is_loss_scale_state
            old = _without_guard if part == "guard" else _inner_state
            self.numbers = _replaced(self.numbers, is_new, old)
        # Of S and guards, which may be of another dtype there.
        self.may_round: dict[int, bool] = {}
        for _, node in _state.find_loss_scale_states(numbers):
            for field in ("loss_scale", "guard"):
                own = jax.tree.leaves(_state.fields_of(node).get(field))
                self.may_round |= dict.fromkeys(own, field == "guard")
        self.on_disk, self.remainder_of = self.leaves, {}
        if "half storage" in missing:
            self.on_disk = [_widened(x) for x in self.leaves]
            self.remainder_of = _remainders_by_parameter(numbers, self.leaves)

    def read(self, name: str, value: PyTree, i: int) -> tuple[PyTree, PyTree]:
        """Returns a value like a leaf of the state, and the remainder of its rounding.

        Raises:
          _OtherFormError: the value is of another type than the leaf.
        """
        leaf, like = self.leaves[i], self.on_disk[i]
        if is_data(value) and i in self.may_round:
            value = _pytree.cast(value, like, self.may_round[i])
        # An array that `inner` itself stores in bfloat16 is so on disk, too.
        if not (_fits(value, like) or _fits(value, leaf)):
            raise _OtherFormError(f"{name} is {_type(value)}, expected {_type(like)}")
        if not hasattr(leaf, "dtype"):
            return value, None  # a Python number, which `jit` tells from an array
        if like is leaf:
            return jnp.asarray(value, leaf.dtype), None  # NumPy's cannot be donated
        return split(jnp.asarray(value, jnp.float32))


def _remainders_by_parameter(numbers: PyTree, leaves: list[PyTree]) -> dict[int, int]:
    """Returns the number of each remainder among the leaves, by its parameter's."""
    kept = remainders("restore", numbers)
    outside = _replaced(numbers, _state.is_half_storage, lambda _: None)
    places = leaves_by_name(with_arrays(outside))

    def are_parameters(prefix: str) -> bool:
        found = [places.get(prefix + name) for name in kept]
        return all(i is not None and is_bfloat16(leaves[i]) for i in found)

    first = next(iter(kept), "")
    ends = {name.removesuffix(first) for name in places if name.endswith(first)}
    prefixes = list(filter(are_parameters, ends)) if kept else [""]
    if len(prefixes) != 1:
        raise ValueError(
            "expected one tree with the bfloat16 parameters of the remainders, got "
            f"those at {sorted(prefixes)}; pass (params, opt_state)"
        )
    return {places[prefixes[0] + name]: i for name, i in kept.items()}


def _replaced(
    tree: PyTree, is_new: Callable[[PyTree], bool], old: Callable[[PyTree], PyTree]
) -> PyTree:
    """Returns `tree` with each new state replaced by its older form."""

    # NNX leaves out an entry that holds no array, such as the inner state of SGD.
    def is_empty(x: PyTree) -> bool:
        return isinstance(x, Mapping) and is_new(x) and old(x) is None

    def has_empty(x: PyTree) -> bool:
        return isinstance(x, Mapping) and any(map(is_empty, x.values()))

    def replace(x: PyTree) -> PyTree:
        if is_new(x):
            return old(x)
        if not has_empty(x):
            return x
        rest = {name: entry for name, entry in x.items() if not is_empty(entry)}
        return _replaced(type(x)(rest), is_new, old)

    return jax.tree.map(replace, tree, is_leaf=lambda x: is_new(x) or has_empty(x))


def _inner_state(node: PyTree) -> PyTree:
    return _state.fields_of(node).get("inner_state")


def _without_guard(node: PyTree) -> PyTree:
    if not isinstance(node, Mapping):
        return node._replace(guard=None)
    fields = {name: x for name, x in node.items() if name != "guard"}  # as NNX leaves
    return type(node)(fields)  # pyright: ignore[reportCallIssue]


def _widened(x: PyTree) -> PyTree:
    return join(x) if is_bfloat16(x) else x


def _fits(value: PyTree, like: PyTree) -> bool:
    dtypes = {getattr(x, "dtype", None) for x in (value, like)} - {None}  # of arrays
    return is_data(value) and len(dtypes) < 2 and jnp.shape(value) == jnp.shape(like)


def _type(x: PyTree) -> str:
    # Orbax's partial restore leaves a ShapeDtypeStruct for what it did not read.
    is_read = not (x is None or isinstance(x, jax.ShapeDtypeStruct))
    return type_name(x) if is_read else "nothing"
