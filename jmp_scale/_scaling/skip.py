"""The skip: an optimizer's update that happens as a whole, or not at all.

An applied step is the optimizer's own: the operations that it traces to, each as it is.
XLA may fuse and contract them in another way than without the skip, which can change
the last bits of a result. Two paths, which differ by no more than that:

- The *plain* path runs the update on gradients that are zero on a skipped step, and
  selects between old and new state afterwards. It is right under everything.
- The *fast* path gives the update the gradients as they came, so that nothing waits for
  the flag: a norm that clips the gradients reads them in the pass of the finite check.
  What follows from a NaN is dropped. Leaves of the state are selected where they arise.

The fast path is taken only where nothing can see a skipped step before it is dropped:
in compiled code without effects, callbacks, runtime checks, branches and loops that
wait for a condition, and not under `jax_debug_nans`. `checkify` does not look into it.
The derivatives of both paths are those of a branch: what is dropped has none.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from .._jaxpr import WAITS_OR_SHOWS, equations, evaluate_all, is_literal
from .._tree import is_inexact, map_inexact, select_tree


def select_step(
    applied: jax.Array,
    update: Callable[[Any, Any], tuple[Any, Any]],
    inputs: Any,
    old: Any,
    context: Any = (),
    is_good: Callable[[Any], jax.Array] | None = None,
) -> tuple[jax.Array, Any, Any]:
    """Runs an optimizer's update, and keeps its old state unless `applied`.

    `update` takes `inputs`, what may not be finite (gradients, the loss), and `old`; it
    returns updates and a new state of the types of `old`. `context` is what else it
    depends on (parameters), `is_good` a last look at the updates. Returns `(applied,
    updates, state)`. Updates of a skipped step are -0.0, which added to a parameter
    changes no bit of it; 0.0 would turn -0.0 into 0.0.
    """
    leaves = jax.tree.leaves((inputs, old))
    seen = (applied, *leaves, *jax.tree.leaves(context))
    is_traced = any(isinstance(x, Tracer) for x in seen)
    has_arrays_only = all(isinstance(x, jax.Array) for x in leaves)
    if _debugs_nans() and has_arrays_only and not is_traced and not applied:
        # Op by op even 0 / 0 would raise (test_debug_nans_is_quiet_on_a_skipped_step).
        updates = jax.eval_shape(lambda: update(inputs, old)[0])
        return applied, jax.tree.map(_negative_zeros, updates), old
    # Eagerly there is nothing to fuse; a jaxpr takes arrays only; and a last look at
    # the updates comes before the state can be selected.
    if is_good is not None or not (is_traced and has_arrays_only):
        updates, new = update(unless(applied, inputs, jnp.zeros_like), old)
        applied = applied if is_good is None else applied & is_good(updates)
        new = select_tree(applied, new, old)
        return applied, _or_negative_zeros(applied, updates), new

    # What `update` closes over (parameters, a learning rate) is passed as an argument:
    # a function with a rule of its own may not close over what is differentiated.
    closed, types = jax.make_jaxpr(update, return_shape=True)(inputs, old)
    lists = jax.tree.leaves(inputs), jax.tree.leaves(old), closed.consts
    leaves = _step_of_lists(closed)(applied, *lists)
    return applied, *jax.tree.unflatten(jax.tree.structure(types), leaves)


def unless(applied: jax.Array, tree: Any, other: Callable[[Any], Any]) -> Any:
    """`tree`, or what `other` makes of each inexact leaf on a skipped step."""
    return map_inexact(lambda x: jnp.where(applied, x, other(x)), tree)


def _or_negative_zeros(applied: jax.Array, updates: Any) -> Any:
    types = {jax.typeof(x): x for x in jax.tree.leaves(updates)}
    zeros = {kind: _negative_zeros(x) for kind, x in types.items()}
    zeros = jax.tree.map(lambda x: zeros[jax.typeof(x)], updates)
    return select_tree(applied, updates, zeros)


def _negative_zeros(update: Any) -> Any:
    if not is_inexact(update):
        return jnp.zeros_like(update)
    return jnp.full_like(update, -np.zeros([], jnp.result_type(update)))


def _step_of_lists(closed: Any) -> Callable[..., list[Any]]:
    """The step as a function of applied, inputs, old state and constants."""

    def select_last(
        applied: Any, inputs: Any, old: Any, read: Any, consts: Any
    ) -> list[Any]:
        """The step that reads the state `read`, and selects at the end."""
        leaves = evaluate_all(closed.jaxpr, [*inputs, *read], consts)
        count = len(leaves) - len(old)
        new = select_tree(applied, leaves[count:], old)
        return [*_or_negative_zeros(applied, leaves[:count]), *new]

    def plain(applied: Any, inputs: Any, old: Any, consts: Any) -> list[Any]:
        # A loop that waits for a NaN to become small never ends.
        inputs = unless(applied, inputs, jnp.zeros_like)
        return select_last(applied, inputs, old, old, consts)

    def branch(applied: Any, inputs: Any, old: Any, consts: Any) -> list[Any]:
        # What is dropped must not be differentiated either: its derivative may be
        # infinite, and times 0 it is NaN. So all that the update reads is constant on a
        # skipped step, and gradients, whose NaN would reach the state's, are 1.
        inputs = unless(applied, inputs, jnp.ones_like)
        read, consts = unless(applied, (old, consts), lax.stop_gradient)
        return select_last(applied, inputs, old, read, consts)

    # Not a partial function, whose text is all of the jaxpr: JAX writes it out.
    def fast(applied: Any, inputs: Any, old: Any, consts: Any) -> list[Any]:
        return _fast(closed.jaxpr, applied, inputs, old, consts)

    step = plain if _is_plain_only(closed) else _hidden_from_checkify(fast)
    if closed.effects:  # which JAX does not allow in functions with rules of their own
        return step
    # Not lax.cond, which fails where a map over steps is differentiated.
    with_derivative = jax.custom_jvp(step)
    with_derivative.defjvp(lambda primals, tangents: jax.jvp(branch, primals, tangents))
    return with_derivative


def _fast(jaxpr: Any, applied: Any, inputs: Any, old: Any, consts: Any) -> list[Any]:
    """The step of a jaxpr, with each leaf of the state selected where it is computed.

    If it is selected after the update, two kernels read the old leaf: the one that
    writes the new leaf, and the one that computes the updates. XLA:CPU runs them in
    either order, and so copies every donated leaf first.
    """
    count = len(jaxpr.outvars) - len(old)
    made = {var for eqn in jaxpr.eqns for var in eqn.outvars}
    old_of = {}
    for var, leaf in zip(jaxpr.outvars[count:], old, strict=True):
        # A result of the jaxpr may be an argument or a literal, which no equation
        # defines. Scalars cost nothing if they are selected afterwards.
        if not is_literal(var) and var in made and leaf.ndim:
            old_of[var] = leaf

    def select(var: Any, value: Any) -> Any:
        return lax.select(applied, value, old_of[var]) if var in old_of else value

    leaves = evaluate_all(jaxpr, [*inputs, *old], consts, select)
    state = []
    for var, new, leaf in zip(jaxpr.outvars[count:], leaves[count:], old, strict=True):
        # A select of a selected leaf would be one more operation in every kernel. Of a
        # value that an optimizer returns as two leaves, `old_of` has one old leaf only.
        is_selected = new is leaf or (not is_literal(var) and old_of.get(var) is leaf)
        state.append(new if is_selected else jnp.where(applied, new, leaf))
    return [*_or_negative_zeros(applied, leaves[:count]), *state]


def _hidden_from_checkify(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun` as a single primitive: `checkify.nan_checks` would stop at each skip."""
    hidden = jax.custom_batching.custom_vmap(fun)

    @hidden.def_vmap
    def _(axis_size: int, in_batched: Any, *args: Any) -> tuple[Any, Any]:
        in_axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched)
        out = jax.vmap(fun, in_axes=tuple(in_axes))(*args)
        return out, jax.tree.map(lambda _: True, out)

    return hidden


def _is_plain_only(closed: Any) -> bool:
    if _debugs_nans() or closed.effects:
        return True
    names = {eqn.primitive.name for eqn in equations(closed)}
    return any(part in name for name in names for part in WAITS_OR_SHOWS)


def _debugs_nans() -> bool:
    config: Any = jax.config
    return config.jax_debug_nans or config.jax_debug_infs
