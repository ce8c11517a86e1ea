"""Applies an optimizer's update as a whole, or not at all.

An applied step consists of exactly the operations that the optimizer traces to, which
XLA may fuse differently than without the skip. There are two paths:

- The *plain* path runs the update on gradients that are zero on a skipped step, and
  selects between old and new state afterwards. It is right for all optimizers.
- The *fast* path passes the gradients to the update unmasked, so that nothing waits for
  the finite flag, and selects each state leaf right where it is computed. It is taken
  only if nothing can observe a skipped step before its results are discarded: in
  compiled code without effects, callbacks, runtime checks, branches and loops that wait
  for a condition, and not under `jax_debug_nans`.

Both paths are differentiated like a branch: discarded values have no derivative.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import Jaxpr, Var

from .._jaxpr import WAITS_OR_SHOWS, equations, evaluate_all, is_literal, name_of
from .._tree import is_inexact, map_inexact, select_tree
from .._types import Arrays, Flag, Function, PyTree

S = TypeVar("S")
T = TypeVar("T")
Pairs = list[tuple[Any, jax.Array]]  # output of a jaxpr, and the old leaf
Update = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


def select_step(
    applied: Flag, update: Update, inputs: PyTree, old: PyTree, context: PyTree = ()
) -> tuple[PyTree, PyTree]:
    """Returns updates and new state of an applied step; otherwise -0.0, and the old.

    `update` maps `inputs`, all that may not be finite, and the `old` state to updates
    and a new state. It may close over other values, the `context`.
    """
    leaves = jax.tree.leaves((inputs, old))
    seen = (applied, *leaves, *jax.tree.leaves(context))
    is_traced = any(isinstance(x, Tracer) for x in seen)
    # An eager step has nothing to fuse, and a jaxpr takes arrays only.
    if not is_traced or not all(isinstance(x, jax.Array) for x in leaves):
        return keep(applied, *attempt(applied, update, inputs, old), old)
    # The values that `update` closes over (parameters, a learning rate) become
    # arguments: a `custom_jvp` function must not close over differentiated values.
    closed, types = jax.make_jaxpr(update, return_shape=True)(inputs, old)
    lists = jax.tree.leaves(inputs), jax.tree.leaves(old), closed.consts
    # JAX keeps the step, and so must not find tracers in it (`jax.checking_leaks`).
    inner = closed.jaxpr
    jaxpr = inner.replace(constvars=[], invars=[*inner.constvars, *inner.invars])
    leaves = _step_of_lists(jaxpr)(applied, *lists)
    return jax.tree.unflatten(jax.tree.structure(types), leaves)


def attempt(
    applied: Flag, update: Update, inputs: PyTree, old: PyTree
) -> tuple[PyTree, PyTree]:
    """Runs the update, on zeros if the step is skipped."""
    if _debugs_nans() and not isinstance(applied, Tracer) and not applied:
        # Eagerly, even 0 / 0 would raise.
        updates = jax.eval_shape(lambda: update(inputs, old)[0])
        return jax.tree.map(_negative_zeros, updates), old
    return update(unless(applied, inputs, jnp.zeros_like), old)


def keep(applied: Flag, updates: T, new: S, old: S) -> tuple[T, S]:
    """Returns updates and new state; on a skipped step, -0.0 and the old state.

    Adding -0.0 to a parameter changes no bit of it, whereas 0.0 would turn -0.0 into
    0.0.
    """
    types = {jax.typeof(x): x for x in jax.tree.leaves(updates)}
    zeros = {kind: _negative_zeros(x) for kind, x in types.items()}
    zeros = jax.tree.map(lambda x: zeros[jax.typeof(x)], updates)
    return select_tree(applied, updates, zeros), select_tree(applied, new, old)


def unless(applied: Flag, tree: T, other: Callable[[PyTree], PyTree]) -> T:
    """Returns `tree`; on a skipped step, with `other` applied to each inexact leaf."""
    return map_inexact(lambda x: jnp.where(applied, x, other(x)), tree)


def _negative_zeros(update: PyTree) -> jax.Array:
    if not is_inexact(update):
        return jnp.zeros_like(update)
    return jnp.full_like(update, -np.zeros([], jnp.result_type(update)))


def _step_of_lists(jaxpr: Jaxpr) -> Function:
    """Returns the step as a function of applied, inputs, old state and constants."""
    is_plain = _is_observed(jaxpr)

    # JAX prints the function: `functools.partial` would print the whole jaxpr.
    def step(applied: Flag, inputs: Arrays, old: Arrays, consts: Arrays) -> Arrays:
        if is_plain:
            # With NaNs, a loop that waits for a value to become small would never end.
            inputs = unless(applied, inputs, jnp.zeros_like)
        return _selected(jaxpr, applied, [*consts, *inputs, *old], old, not is_plain)

    def branch(applied: Flag, inputs: Arrays, old: Arrays, consts: Arrays) -> Arrays:
        # Discarded values must not be differentiated either: their derivatives may be
        # infinite, and times 0 this is NaN. So on a skipped step everything that the
        # update reads passes through `stop_gradient`, and the gradients are replaced by
        # 1, because their NaNs would spread to the derivatives of the state.
        inputs = unless(applied, inputs, jnp.ones_like)
        read, consts = unless(applied, (old, consts), lax.stop_gradient)
        return _selected(jaxpr, applied, [*consts, *inputs, *read], old)

    if jaxpr.effects:  # JAX allows no effects in `custom_jvp` functions
        return step
    # `lax.cond` would fail if a `vmap` over steps is differentiated.
    with_derivative = jax.custom_jvp(step)
    with_derivative.defjvp(lambda primals, tangents: jax.jvp(branch, primals, tangents))
    return with_derivative


def _selected(
    jaxpr: Jaxpr, applied: Flag, arguments: Arrays, old: Arrays, at_once: bool = False
) -> list[jax.Array]:
    """Runs the update, and selects each leaf of its state `at_once`, or at the end.

    If a leaf were selected after the update, two kernels would read the old leaf: the
    one that writes the new leaf, and the one that computes the updates. XLA:CPU runs
    them in either order, and so copies every donated leaf first.
    """
    count = len(jaxpr.outvars) - len(old)
    pairs: Pairs = list(zip(jaxpr.outvars[count:], old, strict=True))
    old_of = _old_by_variable(jaxpr, pairs) if at_once else {}

    def select(var: Var, value: jax.Array) -> jax.Array:
        return lax.select(applied, value, old_of[var]) if var in old_of else value

    leaves = evaluate_all(jaxpr, arguments, change=select)
    state = []
    for (var, leaf), new in zip(pairs, leaves[count:], strict=True):
        # A second select would be one more operation in every kernel. If an optimizer
        # returns one value as two leaves, `old_of` holds the old value of only one.
        is_selected = new is leaf or (not is_literal(var) and old_of.get(var) is leaf)
        state.append(new if is_selected else lax.select(applied, new, leaf))
    updates, _ = keep(applied, leaves[:count], (), ())
    return [*updates, *state]


def _old_by_variable(jaxpr: Jaxpr, pairs: Pairs) -> dict[Var, jax.Array]:
    """Returns the old leaf of each output that an equation defines."""
    made = {var for eqn in jaxpr.eqns for var in eqn.outvars}
    # An argument or a literal is none of these. To select scalars later costs nothing.
    return {v: x for v, x in pairs if not is_literal(v) and v in made and x.ndim}


def _is_observed(jaxpr: Jaxpr) -> bool:
    """Whether someone may see the values of a skipped step, or wait for them."""
    names = {*map(name_of, equations(jaxpr))}
    shows = any(part in name for name in names for part in WAITS_OR_SHOWS)
    return shows or bool(jaxpr.effects) or _debugs_nans()


def _debugs_nans() -> bool:
    config: Any = jax.config
    return config.jax_debug_nans or config.jax_debug_infs
