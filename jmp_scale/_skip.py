"""A skip that copies no optimizer state: each leaf is selected where it is defined.

The only module that reads a jaxpr.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core

from ._tree import select_tree


def update_or_keep(
    finite: jax.Array, update: Callable[[], tuple[Any, Any]], old: Any
) -> tuple[Any, Any]:
    """Runs an optimizer's update, and keeps its old state unless `finite`.

    The result is that of `select_tree(finite, new, old)` after the update. Compiled, that makes XLA copy
    every donated leaf of `old`, since two kernels read it in no order: the one that writes the new leaf,
    and the one that computes the updates. So the update is traced here, and evaluated again with a
    select right after each equation that defines a leaf of the new state. All that follows reads the
    selected value, which is the new one on a finite step, and is dropped on a skipped step.

    Args:
      finite: bool[], whether the step is applied.
      update: takes nothing and returns `(updates, new state)`.
      old: the state before the step.

    Returns:
      `(updates, state)`: the updates as they came, the state selected.

    Raises:
      ValueError: the new state differs from `old` in structure, shape or dtype.
    """
    is_compiled = isinstance(finite, Tracer)
    is_traceable = all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(old))
    has_interface = all(
        hasattr(core, name) for name in ("ClosedJaxpr", "Literal", "jaxpr_as_fun")
    )
    if not (is_compiled and is_traceable and has_interface):
        updates, new = update()
        return updates, select_tree(finite, new, old)

    closed, types = jax.make_jaxpr(update, return_shape=True)()
    outvars = closed.jaxpr.outvars
    old_leaves, treedef = jax.tree.flatten(old)
    state_vars = outvars[len(outvars) - len(jax.tree.leaves(types[1])) :]
    old_of = _selected_early(closed.jaxpr, state_vars, old_leaves)

    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for equation in closed.jaxpr.eqns:
        for var, value in _evaluate(closed.jaxpr, equation, values):
            values[var] = (
                jnp.where(finite, value, old_of[var]) if var in old_of else value
            )

    leaves = [v.val if isinstance(v, core.Literal) else values[v] for v in outvars]
    updates, new = jax.tree.unflatten(jax.tree.structure(types), leaves)
    if old_of:  # a leaf that is selected already stands on both sides of the last select, and passes it
        is_selected = [
            _is_var(v) and old_of.get(v) is x
            for v, x in zip(state_vars, old_leaves, strict=True)
        ]
        new_leaves = jax.tree.leaves(new)
        pairs = zip(is_selected, new_leaves, old_leaves, strict=True)
        old = jax.tree.unflatten(
            treedef, [x if selected else y for selected, x, y in pairs]
        )
    return updates, select_tree(finite, new, old)


def _selected_early(
    jaxpr: Any, state_vars: list[Any], old_leaves: list[Any]
) -> dict[Any, jax.Array]:
    """The old leaf for each variable of `jaxpr` that is to be selected where it is defined.

    Not the scalars: Adam divides by 1 - b1^count, and must not see the count 0 of a skipped first step.
    And nothing if there is a loop that waits for a condition: on a mixture of old and new values it
    might not end.
    """
    if len(state_vars) != len(old_leaves) or _has_while(jaxpr):
        return {}
    defined = {id(var) for equation in jaxpr.eqns for var in equation.outvars}
    return {
        var: old
        for var, old in zip(state_vars, old_leaves, strict=True)
        if id(var) in defined
        and old.ndim
        and (old.shape, old.dtype) == (var.aval.shape, var.aval.dtype)
    }


def _is_var(var: Any) -> bool:
    return not isinstance(var, core.Literal)


def _evaluate(jaxpr: Any, equation: Any, values: dict[Any, Any]) -> Any:
    """(variable, value) of each result of one equation, computed as a jaxpr of its own."""
    invars = [v for v in equation.invars if _is_var(v)]
    alone = jaxpr.replace(
        constvars=[], invars=invars, outvars=equation.outvars, eqns=[equation]
    )
    results = core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))(
        *[values[v] for v in invars]
    )
    return zip(equation.outvars, results, strict=True)


def _has_while(jaxpr: Any) -> bool:
    for equation in jaxpr.eqns:
        parts = jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns"))
        if equation.primitive.name == "while" or any(
            _has_while(p) for p in parts if hasattr(p, "eqns")
        ):
            return True
    return False
