"""Which extra arguments an Optax optimizer takes, by the signatures of its parts."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import optax

Keywords = tuple[frozenset[str], ...]

# What people call the loss, where `update` calls it `value`.
_NAMES_OF_A_LOSS = ("loss", "loss_value", "losses", "val", "values")
# Of a function that may use any keyword.
_ANY = frozenset({"", *_NAMES_OF_A_LOSS})


def takes_value(keywords: Keywords, value: Any, extra_args: dict[str, Any]) -> bool:
    """Whether `inner` is given the loss, whose signature may refuse it (SAM's)."""
    if value is None:
        for name in _NAMES_OF_A_LOSS:
            if name in extra_args and not any(name in taken for taken in keywords):
                raise TypeError(
                    f"with_loss_scale: expected the loss as value=, got {name}=, "
                    "which inner does not take; write "
                    "update(grads, state, params, value=loss)"
                )
        return False
    is_refused = any(not taken & {"", "value"} for taken in keywords)
    # Where a part needs it beside one that refuses it, the error is that of Optax.
    return not is_refused or any("value" in taken for taken in keywords)


def keywords_of(update: Any, seen: set[int] | None = None) -> Keywords:
    """The keywords of each function at which extra arguments of `update` arrive.

    A wrapper (a chain, a mask, a partition) hands on any keyword, so the functions that
    it holds are asked too. "" is among the keywords if it takes others as well: Optax's
    own functions drop those, and of another's any name of a loss may be used.

    What a wrapper holds is read from its closure. Where its `update` is a method of a
    class, the parts are attributes, which are not found: it counts as one function.
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
    within = list(_updates_within(function))
    is_optax = (getattr(function, "__module__", None) or "").startswith("optax.")
    found = [names | ({""} if is_optax or within else _ANY)]
    for part in within:
        found += keywords_of(part, seen)
    return tuple(found)


def _updates_within(function: Any) -> Iterator[Any]:
    held = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty one
            held.append(cell.cell_contents)
    transformation = optax.GradientTransformation
    for leaf in jax.tree.leaves(held, is_leaf=lambda x: isinstance(x, transformation)):
        if isinstance(leaf, optax.GradientTransformationExtraArgs):
            yield leaf.update
        elif inspect.isroutine(leaf) and _is_update(leaf):
            yield leaf


def _is_update(function: Any) -> bool:
    parameters = _parameters(function)
    if len(parameters) < 4:
        return False
    _, state, params, *_, last = parameters
    has_extra_args = last.kind in (last.KEYWORD_ONLY, last.VAR_KEYWORD)
    has_params = params.name == "params" or params.default is None
    return has_extra_args and state.default is state.empty and has_params


def _parameters(function: Any) -> list[inspect.Parameter]:
    with contextlib.suppress(TypeError, ValueError):  # not written in Python
        return list(inspect.signature(function).parameters.values())
    return []
