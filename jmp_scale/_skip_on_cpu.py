"""An optimizer's update in the form in which XLA:CPU moves the fewest bytes.

XLA:CPU copies a state that is selected after the update. So the update is evaluated
equation by equation, as the optimizer writes it, and each leaf of the state is selected
where it is computed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core


def evaluate_selecting(
    applied: jax.Array, jaxpr: Any, consts: list[Any], inputs: list[Any], old: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Evaluates an update, and selects each leaf of its state where it is computed.

    Two kernels read a leaf of the old state if it is selected after the update: the one
    that writes the new leaf, and the one that computes the updates. XLA:CPU runs them
    in either order, and so copies every donated leaf first. Here what follows reads
    the selected leaf: the new one on a finite step, and on a skipped step an old one,
    of which nothing is kept. TPU and GPU compilers make one kernel of it in any case.

    Args:
      applied: bool[], whether the step is applied.
      jaxpr: the update; its last outputs are the new state.
      consts: its constants.
      inputs: its arguments.
      old: the leaves of the old state, in the order of the new ones.

    Returns:
      (updates, leaves of the selected state).
    """
    # A result of the jaxpr may be an argument or a literal, which no equation defines.
    count = len(jaxpr.outvars) - len(old)
    made = {var for equation in jaxpr.eqns for var in equation.outvars}
    old_of = {
        var: leaf
        for var, leaf in zip(jaxpr.outvars[count:], old, strict=True)
        # Scalars cost nothing if they are selected afterwards, as all else is.
        if _is_var(var) and var in made and leaf.ndim
    }
    values = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True)
    )
    for equation in jaxpr.eqns:
        results = _evaluate(jaxpr, equation, values)
        for var, value in zip(equation.outvars, results, strict=True):
            values[var] = (
                jnp.where(applied, value, old_of[var]) if var in old_of else value
            )

    leaves = [_value(var, values) for var in jaxpr.outvars]
    state = []
    for var, new, leaf in zip(jaxpr.outvars[count:], leaves[count:], old, strict=True):
        # A select of a selected leaf would be one more operation in every kernel.
        # `old_of` has one old leaf for each variable. Where an optimizer returns one
        # value as two leaves, the other is selected here, from its own old leaf
        # (test_two_leaves_of_one_new_value_keep_an_old_value_each).
        is_selected = new is leaf or (_is_var(var) and old_of.get(var) is leaf)
        state.append(new if is_selected else jnp.where(applied, new, leaf))
    return leaves[:count], state


def _evaluate(jaxpr: Any, equation: Any, values: dict[Any, Any]) -> list[Any]:
    """The results of one equation, computed as a jaxpr of its own."""
    invars = [v for v in equation.invars if _is_var(v)]
    # Not `primitive.bind` with the equation's parameters: what has a jaxpr among them
    # (custom_jvp_call, of jax.nn.relu) binds functions in its place.
    alone = jaxpr.replace(
        constvars=[], invars=invars, outvars=equation.outvars, eqns=[equation]
    )
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))(*[values[v] for v in invars])


def _value(var: Any, values: dict[Any, Any]) -> Any:
    return values[var] if _is_var(var) else jnp.asarray(var.val)


def _is_var(var: Any) -> bool:
    return not isinstance(var, core.Literal)
