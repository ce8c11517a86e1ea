"""Finds which extra arguments an Optax optimizer accepts, by inspecting its parts."""

import contextlib
import inspect
from typing import Any

import jax
import optax

from .._types import Function

ExtraArgs = dict[str, Any]  # keyword arguments of `update` after the parameters
Keywords = tuple[frozenset[str], ...]  # a set for each part of an optimizer


def takes_value(keywords: Keywords, value: object, extra_args: ExtraArgs) -> bool:
    """Whether the loss is passed to `inner`; its signature may refuse it, as SAM's."""
    if value is None:
        if "loss" in extra_args and not any("loss" in taken for taken in keywords):
            raise TypeError(
                "with_loss_scale: expected the loss as value=, got loss=, which inner "
                "does not accept; write update(grads, state, params, value=loss)"
            )
        return False
    is_refused = any(not taken & {"", "value"} for taken in keywords)
    # If one part needs it and another refuses it, Optax raises its own error.
    return not is_refused or any("value" in taken for taken in keywords)


def keywords_of(update: Function, seen: set[int] | None = None) -> Keywords:
    """Returns the keywords of each function that extra arguments of `update` reach.

    "" in a set means that the function accepts further keywords. A wrapper (a chain, a
    mask) forwards them to functions in its closure; Optax's functions ignore them; any
    other function may use a `loss`.
    """
    function = inspect.unwrap(update)
    seen = set() if seen is None else seen
    if id(function) in seen:
        return ()
    seen.add(id(function))
    parameters = _parameters(function)
    names = frozenset(p.name for p in parameters)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        return (names,)
    held = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            held.append(cell.cell_contents)
    found: list[frozenset[str]] = []
    transformation = optax.GradientTransformation
    for leaf in jax.tree.leaves(held, is_leaf=lambda x: isinstance(x, transformation)):
        if isinstance(leaf, optax.GradientTransformationExtraArgs):
            found += keywords_of(leaf.update, seen)
        elif inspect.isroutine(leaf) and _is_update(leaf):
            found += keywords_of(leaf, seen)
    is_optax = (getattr(function, "__module__", None) or "").startswith("optax.")
    others = set() if is_optax or found else {"loss"}
    return (names | {""} | others, *found)


def _is_update(function: Function) -> bool:
    """Whether a function has the parameters of an Optax update with extra arguments."""
    parameters = _parameters(function)
    if len(parameters) < 4:
        return False
    params, last = parameters[2], parameters[-1]
    has_params = params.name == "params" or params.default is None
    return has_params and last.kind in (last.KEYWORD_ONLY, last.VAR_KEYWORD)


def _parameters(function: Function) -> list[inspect.Parameter]:
    with contextlib.suppress(TypeError, ValueError):  # without a signature
        return list(inspect.signature(function).parameters.values())
    return []
