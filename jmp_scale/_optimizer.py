"""One call of the wrapped optimizer, with what it is given and what it returns."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from . import _mesh
from ._skip import zero_unless
from ._tree import is_inexact, map_inexact, widen


def guarded(
    applied: jax.Array, updates: Any, value: Any, extra_args: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What may not be finite, and the other arguments, whose functions are guarded."""
    inputs = {"updates": widen(updates)}
    if value is not None:
        inputs["value"] = jnp.asarray(value)
    if "grad" in extra_args:
        inputs["grad"] = widen(extra_args["grad"])
    others = {k: v for k, v in extra_args.items() if k != "grad"}
    for name in ("value_fn", "grad_fn", "obj_fn"):
        if callable(others.get(name)):
            others[name] = _zero_fn_unless(applied, others[name])
    return inputs, others


def runner(
    inner: optax.GradientTransformationExtraArgs,
    params: Any,
    extra_args: dict[str, Any],
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """`inner.update` as a function of what may not be finite and of its state."""

    def call(inputs: dict[str, Any], state: Any) -> tuple[Any, Any]:
        given = dict(inputs)
        updates = given.pop("updates")
        try:
            return inner.update(updates, state, params, **extra_args, **given)
        except TypeError as error:
            # `value` is this library's own argument: an optimizer of another signature
            # (optax.contrib.sam) must not fail because of it.
            if "unexpected keyword argument 'value'" not in str(error):
                raise
            refusal = error
        given.pop("value")
        try:
            return inner.update(updates, state, params, **extra_args, **given)
        except TypeError as error:
            if "missing" in str(error) and "'value'" in str(error):
                raise TypeError(_REFUSED_VALUE.format(refusal=refusal)) from error
            raise

    def run(inputs: dict[str, Any], state: Any) -> tuple[Any, Any]:
        try:
            new_updates, new_state = call(inputs, state)
        except TypeError:
            # Branches and loops demand one dtype (optax.novograd's), and the state has
            # that of the parameters.
            narrow = _narrowed(inputs["updates"], params)
            if narrow is None:
                raise
            new_updates, new_state = call(inputs | {"updates": narrow}, state)
        if params is not None:
            new_updates = _cast_like(new_updates, params)
        return new_updates, _state_like(new_state, state)

    return run


_REFUSED_VALUE = (
    "with_loss_scale: expected all parts of inner to take value= or none to need it, "
    "got one that refuses it ({refusal}) beside one that needs it; chain the first as "
    "optax.GradientTransformation(part.init, part.update), to which optax.chain gives "
    "no extra arguments"
)


def _narrowed(updates: Any, params: Any) -> Any:
    """The updates in the dtypes of the parameters; None if that changes nothing."""
    # optax.lookahead takes a pair of parameters, and hands one of them on.
    while isinstance(params, optax.LookaheadParams):
        params = params.fast
    if params is None:
        return None
    try:
        narrow = _cast_like(updates, params)
    except ValueError:  # of another structure: the optimizer's own error says more
        return None
    return None if _dtypes(narrow) == _dtypes(updates) else narrow


def _zero_fn_unless(applied: jax.Array, fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, with values and gradients of zero unless `applied`."""

    def constant_unless(x: Any) -> Any:
        # Otherwise the gradient is 0 times that of `fun`: NaN where that is not finite.
        return jnp.where(applied, x, jax.lax.stop_gradient(x))

    def zero_fn(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_inexact(constant_unless, (args, kwargs))
        return zero_unless(applied, fun(*args, **kwargs))

    return zero_fn


def _cast_like(tree: Any, like: Any) -> Any:
    def cast_leaf(x: Any, y: Any) -> Any:
        castable = is_inexact(x) and is_inexact(y)
        return jnp.asarray(x).astype(jnp.result_type(y)) if castable else x

    def is_nothing(x: Any) -> bool:
        return x is None or isinstance(x, optax.MaskedNode)

    return jax.tree.map(cast_leaf, tree, like, is_leaf=is_nothing)


def _dtypes(tree: Any) -> list[Any]:
    return [jnp.result_type(leaf) for leaf in jax.tree.leaves(tree)]


def _state_like(new: Any, old: Any) -> Any:
    """A new state with the dtypes and shardings of the old one.

    Raises:
      ValueError: another difference, which names the leaf.
    """
    structures = jax.tree.structure(new), jax.tree.structure(old)
    if structures[0] != structures[1]:
        raise ValueError(
            "with_loss_scale: expected inner to keep the structure of its state, got\n"
            f"  from update: {structures[0]}\n  from init:   {structures[1]}"
        )
    new = jax.tree.map(_mesh.reshard_like, _cast_like(new, old), old)
    pairs = jax.tree_util.tree_flatten_with_path(new)[0]
    for (path, x), y in zip(pairs, jax.tree.leaves(old), strict=True):
        if x is y or not (hasattr(x, "dtype") and hasattr(y, "dtype")):
            continue
        # As JAX takes them: a NumPy float64 is a float32 to it, unless x64 is on.
        types = (jax.typeof(v) for v in (x, y))
        got, expected = (f"{t.dtype}{list(t.shape)}" for t in types)
        if got != expected:
            leaf = jax.tree_util.keystr(path)
            raise ValueError(
                "with_loss_scale: expected inner to keep the types of its state, but "
                f"leaf {leaf} is {expected} after init and {got} after update; "
                "initialize it with parameters of a floating-point dtype"
            )
    return new
