"""Evaluates jaxprs equation by equation."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .._types import Leaf
from .read import Atom


def evaluate(eqn: JaxprEqn, values: Sequence[Leaf], **params: Any) -> list[jax.Array]:
    """Evaluates an equation with these operands; `params` replace its own.

    It follows `jax.core.eval_jaxpr`, which would need a jaxpr for each equation.
    """
    bound = eqn.primitive.get_bind_params({**eqn.params, **params})
    functions, bound = bound if isinstance(bound, tuple) else ((), bound)  # jax 0.8
    where = eqn.source_info
    name_stack = source_info_util.current_name_stack() + where.name_stack
    context = source_info_util.user_context(where.traceback, name_stack=name_stack)
    with context, eqn.ctx.manager:
        results = eqn.primitive.bind(*functions, *values, **bound)
    return list(results) if eqn.primitive.multiple_results else [results]


def evaluate_all(
    jaxpr: Jaxpr,
    inputs: Sequence[Leaf],
    consts: Sequence[Leaf] = (),
    change: Callable[[Var, jax.Array], jax.Array] = lambda var, value: value,
) -> list[jax.Array]:
    """Evaluates a bare jaxpr equation by equation, and returns its outputs.

    `change` maps a variable and its computed value to the value to use.
    """
    arguments = [*consts, *inputs]
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], arguments, strict=True))
    for eqn in jaxpr.eqns:
        results = evaluate(eqn, [value_of(atom, values) for atom in eqn.invars])
        for var, value in zip(eqn.outvars, results, strict=True):
            values[var] = change(var, value)
    return results_of(jaxpr, values)


def results_of(jaxpr: Jaxpr, values: Mapping[Var, jax.Array]) -> list[jax.Array]:
    """Returns the outputs of a jaxpr from the values of its variables."""
    return [
        jnp.asarray(v.val) if isinstance(v, Literal) else values[v]
        for v in jaxpr.outvars
    ]


def value_of(atom: Atom, values: Mapping[Var, jax.Array]) -> jax.Array:
    """Returns the value of a literal or of a variable."""
    return atom.val if isinstance(atom, Literal) else values[atom]


def scope(name_stack: source_info_util.NameStack) -> AbstractContextManager[None]:
    """Returns a context that adds these name scopes to operations."""
    current = source_info_util.current_name_stack()
    return source_info_util.set_name_stack(current + name_stack)
