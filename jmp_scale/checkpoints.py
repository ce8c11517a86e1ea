"""Checkpoints from before loss scaling, or from before a guard against spikes.

A checkpoint of a state with a loss scale needs nothing from this module: S and its
counter are named leaves, which Orbax, `flax.serialization` and pickle save and restore
like all others. Period, bounds and other arguments come from the code that restores.

For an Optax state from before loss scaling, one line is enough. Restore into the state
of the wrapped optimizer, and put that into the new state:

```python
restored = load({"params": params, "opt_state": opt_state.inner_state})
opt_state = opt_state._replace(inner_state=restored["opt_state"])
```

`restore_without_loss_scale` does the same at any depth, also for a `TrainState` and
for `nnx.state(optimizer)`, and checks that nothing is missing. `restore_without_guard`
takes a checkpoint that has a loss scale, but no `SpikeGuard`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ._loss_scale import find_loss_scale_states, is_loss_scale_state
from ._tree import is_data

T = TypeVar("T")


def restore_without_loss_scale(load: Callable[[Any], Any], state: T) -> T:
    """Restores a checkpoint from before the optimizer was wrapped in `with_loss_scale`.

    Everything comes from disk except the loss scale, its flags and counts and the
    guard, which are those of `state`. Nothing is written.

    Args:
      load: reads the checkpoint into a template, with whatever wrote it: for Orbax
        `lambda template: ocp.load(path, template)`, for Flax
        `lambda template: flax.serialization.from_bytes(template, data)`. The template
        is `state` as it was before: each `LossScaleState` in it is replaced by its
        `inner_state`. A `load` that ignores it may return nested dicts and lists with
        the same names.
      state: the new state, as the training code creates it, with a loss scale at any
        depth: an Optax state, a `TrainState`, `nnx.state(optimizer)`, or a tree of
        these. Its other leaves may be abstract (`jax.ShapeDtypeStruct`, with the
        sharding to restore to).

    Returns:
      A tree like `state`, of arrays only.

    Raises:
      ValueError: `state` has no loss scale or an abstract one; the checkpoint has other
        leaves than the template (it is foreign, incomplete, or already has a loss
        scale), or leaves of another shape or dtype, or leaves that were not read
        (Orbax's partial restore leaves a `ShapeDtypeStruct`). Whatever `load` raises
        passes through.

    Examples:
      >>> import jax, jax.numpy as jnp, jmp_scale, optax
      >>> from jmp_scale.checkpoints import restore_without_loss_scale
      >>> params = {"w": jnp.ones(2)}
      >>> saved = optax.adam(0.1).init(params)
      >>> tx = jmp_scale.with_loss_scale(
      ...     optax.adam(0.1), jmp_scale.DynamicLossScale(2.0**15))
      >>> opt_state = restore_without_loss_scale(lambda _: saved, tx.init(params))
      >>> float(opt_state.loss_scale.loss_scale)
      32768.0
    """
    return _restore("restore_without_loss_scale", load, state, _inner, _with_inner)


def restore_without_guard(load: Callable[[Any], Any], state: T) -> T:
    """Restores a checkpoint with a loss scale from before the optimizer had a guard.

    Everything comes from disk, S and its counter included, except the statistics of
    the guard and whatever else the checkpoint does not know. These are those of
    `state`: the guard begins with its warm-up. Nothing is written.

    Checkpoints of jmp_scale 0.1.0, whose states had neither a guard nor the fields
    `applied`, `nonfinite_losses` and `spikes`, are read as well, also into a state
    without a guard.

    Args:
      load: reads the checkpoint into a template: see `restore_without_loss_scale`. It
        is called once more, with a template of that older form, if the first call
        raises or returns other leaves.
      state: the new state, as the training code creates it.

    Returns:
      A tree like `state`, of arrays only.

    Raises:
      ValueError: as `restore_without_loss_scale`, also for a checkpoint without a loss
        scale. Whatever `load` raises passes through.

    Examples:
      >>> import jax, jax.numpy as jnp, jmp_scale, optax
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
    function = "restore_without_guard"
    try:
        return _restore(function, load, state, _without_guard, _with_fields)
    except Exception as error:
        try:
            # The older form comes second, and its error is only a note: most
            # checkpoints are not of 0.1.0, and the first error is about the form that
            # was expected (test_a_foreign_checkpoint_is_not_one_without_a_guard).
            return _restore(function, load, state, _first_form, _with_fields)
        except Exception as older_error:
            error.add_note(
                f"Read as one of jmp_scale 0.1.0 it fails too: {older_error}"
            )
            raise error from None


def _restore(
    function: str,
    load: Callable[[Any], Any],
    state: T,
    form: Callable[[Any], Any],
    merge: Callable[[Any, Any], Any],
) -> T:
    """`state`, with what `load` reads into a template of an older form.

    Args:
      function: the name of the caller, for errors.
      load: reads the checkpoint into the template.
      state: the new state.
      form: makes the older form of a loss-scale state.
      merge: puts what was restored into a loss-scale state.
    """
    if not find_loss_scale_states(state):
        raise ValueError(
            f"{function}: state has no loss scale; expected the new state, whose "
            "optimizer is wrapped in with_loss_scale"
        )
    template = jax.tree.map(
        lambda x: form(x) if is_loss_scale_state(x) else x,
        state,
        is_leaf=is_loss_scale_state,
    )
    # Matched by name: a loader that ignores the template returns dicts with sorted
    # keys, whose leaves are in another order
    # (test_a_loader_without_a_template_may_return_plain_dicts).
    restored = _like(function, template, load(_pruned(template)))
    state = jax.tree.map(
        lambda x, old: merge(x, old) if is_loss_scale_state(x) else old,
        state,
        restored,
        is_leaf=is_loss_scale_state,
    )
    # What is not on disk keeps its value of `state`, which must be one: an abstract S
    # fails only in the first compiled step, far from here
    # (test_an_abstract_loss_scale_is_refused).
    leaves = _named_leaves(state)
    abstract = [path for path, leaf in leaves.items() if _is_abstract(leaf)]
    if abstract:
        raise ValueError(
            f"{function}: the loss scale of state is abstract: {_listed(abstract)}; "
            "expected one with values, as tx.init returns it"
        )
    return state


_NOTHING = object()  # where a mapping of NNX has no entry, since it would hold no array


def _inner(node: Any) -> Any:
    if isinstance(node, Mapping):
        return node.get("inner_state", _NOTHING)  # SGD has no state
    return node.inner_state


def _with_inner(node: Any, inner_state: Any) -> Any:
    if inner_state is _NOTHING:
        return node
    return _with_fields(node, {"inner_state": inner_state})


class _FirstForm(NamedTuple):
    """The state of `with_loss_scale` in jmp_scale 0.1.0."""

    loss_scale: Any
    inner_state: Any
    grads_finite: Any
    skipped: Any
    skipped_in_a_row: Any


def _first_form(node: Any) -> Any:
    # A mapping of NNX lacks the fields that hold no array
    # (test_an_nnx_checkpoint_without_a_guard_is_restored).
    names = _FirstForm._fields
    if isinstance(node, Mapping):
        return type(node)({name: node[name] for name in names if name in node})  # pyright: ignore[reportCallIssue]
    return _FirstForm(*(getattr(node, name) for name in names))


def _without_guard(node: Any) -> Any:
    if isinstance(node, Mapping):
        return type(node)({name: node[name] for name in node if name != "guard"})  # pyright: ignore[reportCallIssue]
    return node._replace(guard=None)


def _with_fields(node: Any, fields: Any) -> Any:
    fields = fields if isinstance(fields, Mapping) else fields._asdict()
    fields = {name: value for name, value in fields.items() if name != "guard"}
    if isinstance(node, Mapping):
        return type(node)({**node, **fields})  # pyright: ignore[reportCallIssue]
    return node._replace(**fields)


def _pruned(tree: Any) -> Any:
    """`tree` without the entries that are nothing: a loader would look for them."""

    def has_nothing(x: Any) -> bool:
        return isinstance(x, Mapping) and any(v is _NOTHING for v in x.values())

    def prune(x: Any) -> Any:
        if not has_nothing(x):
            return x
        return type(x)({k: _pruned(v) for k, v in x.items() if v is not _NOTHING})

    return jax.tree.map(prune, tree, is_leaf=has_nothing)


def _like(function: str, template: Any, restored: Any) -> Any:
    """The leaves of `restored` in the structure of `template`, matched by name."""
    wanted, got = _named_leaves(template), _named_leaves(restored)
    data = {path for path, leaf in wanted.items() if _is_data(leaf)}
    missing, foreign = data - got.keys(), got.keys() - wanted.keys()
    # Orbax's partial restore leaves the template's own ShapeDtypeStruct in place of
    # what it did not read
    # (test_leaves_that_a_partial_restore_left_abstract_never_reach_the_user).
    unread = {
        path
        for path in data & got.keys()
        if not _is_data(got[path]) or _is_abstract(got[path])
    }
    if missing or foreign or unread:
        older = (
            "loss scaling" if function == "restore_without_loss_scale" else "a guard"
        )
        raise ValueError(
            f"{function}: expected a checkpoint from before {older}, got\n"
            f"  missing in the checkpoint: {_listed(missing)}\n"
            f"  only in the checkpoint:    {_listed(foreign)}\n"
            f"  named but not read:        {_listed(unread)}\n"
            f"One that is not from before {older} is restored into the state as it is, "
            "without this function."
        )
    leaves = [
        _checked(function, path, got[path], leaf) if path in data else leaf
        for path, leaf in wanted.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by path, in order; tuples with names, dicts and lists as on disk."""

    def name(key: Any) -> str:
        # A dict's key, a list's index and a tuple's field name are all strings on disk.
        return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))

    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(map(name, path)): leaf for path, leaf in paths}


def _checked(function: str, path: str, value: Any, like: Any) -> Any:
    shapes = (jnp.shape(value), jnp.shape(like))
    # A Python number has no dtype that could differ. JAX gives it one with the first
    # step.
    python_number = not hasattr(value, "dtype") or not hasattr(like, "dtype")
    if shapes[0] != shapes[1] or not (python_number or value.dtype == like.dtype):
        raise ValueError(
            f"{function}: {path} has shape {shapes[0]} and dtype "
            f"{getattr(value, 'dtype', type(value))} in the checkpoint, but "
            f"{shapes[1]} and {getattr(like, 'dtype', type(like))} in state"
        )
    # NumPy arrays cannot be donated, and float64 scalars are another type for `jit`
    # (test_an_old_flax_checkpoint_is_restored_too).
    return jnp.asarray(value) if isinstance(value, (np.ndarray, np.generic)) else value


def _is_data(leaf: Any) -> bool:
    # Functions, which an Equinox model has as leaves, are not saved.
    return is_data(leaf) or _is_abstract(leaf)


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _listed(paths: Iterable[str]) -> str:
    paths = sorted(paths)
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return ", ".join(paths[:5]) + more or "none"
