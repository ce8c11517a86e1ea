"""The skip: an optimizer's update that happens as a whole, or not at all.

An applied step is the optimizer's own: the operations that it traces to, each as it is.
XLA may still fuse and contract them in another way than without the skip, which changes
a last bit here and there. Two paths, which differ no more than that:

- The *plain* path runs the update on gradients that are zero on a skipped step, and
  selects between old and new state afterwards. It is right under everything.
- The *fast* path gives the update the gradients as they came, so that nothing waits for
  the flag: a norm that clips the gradients reads them in the pass of the finite check.
  What follows from a NaN is dropped. On a CPU the state is also selected without a
  copy (`_skip_on_cpu`).

The fast path is taken only where nothing can see a skipped step before it is dropped:
in compiled code without effects, callbacks, runtime checks, branches and loops that
wait for a condition, and not under `jax_debug_nans`. `checkify` does not look into it.
The derivatives of both paths are those of a branch: what is dropped has none.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend import core

from ._skip_on_cpu import evaluate_selecting
from ._tree import is_inexact, map_inexact, select_tree

# Primitives that wait for a condition, or that show their operands to the host.
_PLAIN_ONLY = (
    "while",
    "cond",
    "check",
    "callback",
    "ffi_call",
    "custom_call",
    "pallas",
)


def update_or_keep(
    applied: jax.Array,
    update: Callable[[Any, Any], tuple[Any, Any]],
    inputs: Any,
    old: Any,
    *,
    context: Any = (),
    is_good: Callable[[Any], jax.Array] | None = None,
) -> tuple[jax.Array, Any, Any]:
    """Runs an optimizer's update, and keeps its old state unless `applied`.

    Args:
      applied: bool[], whether the step is applied.
      update: takes `inputs` and `old`, returns `(updates, new state)`. The new state
        has the structure, shapes and dtypes of `old`.
      inputs: pytree of what may not be finite: gradients, the loss.
      old: the state before the step.
      context: what else `update` depends on, such as the parameters.
      is_good: if given, a last look at the updates: the step is skipped unless it
        returns True.

    Returns:
      `(applied, updates, state)`. On a skipped step the updates are -0.0, which added
      to a parameter changes no bit of it; 0.0 would turn -0.0 into 0.0.
    """
    leaves = jax.tree.leaves((inputs, old))
    seen = (applied, *leaves, *jax.tree.leaves(context))
    is_traced = any(isinstance(x, Tracer) for x in seen)
    has_arrays_only = all(isinstance(x, jax.Array) for x in leaves)
    has_interface = hasattr(core, "ClosedJaxpr") and hasattr(core, "jaxpr_as_fun")
    if _debugs_nans() and has_arrays_only and not is_traced and not applied:
        # Op by op even 0 / 0 would raise, as in a clipped gradient of zero
        # (test_debug_nans_is_quiet_on_a_skipped_step).
        updates = jax.eval_shape(lambda: update(inputs, old)[0])
        return applied, jax.tree.map(_negative_zeros, updates), old
    # Eagerly there is nothing to fuse; a jaxpr takes arrays only
    # (test_a_state_with_leaves_that_are_not_arrays_is_kept); and a last look at the
    # updates comes before the state can be selected
    # (test_an_overflow_in_a_gradient_function_of_the_optimizer_is_skipped).
    if is_good is not None or not (is_traced and has_arrays_only and has_interface):
        updates, new = update(zero_unless(applied, inputs), old)
        applied = applied if is_good is None else applied & is_good(updates)
        return applied, *_selected(applied, updates, new, old)

    # What `update` closes over (parameters, a learning rate) becomes constants of the
    # jaxpr. They are arguments below: a function with a rule of its own may not close
    # over values that are differentiated
    # (test_derivatives_of_a_skipped_step_are_those_of_a_branch).
    closed, types = jax.make_jaxpr(update, return_shape=True)(inputs, old)
    leaves = _update_leaves(closed)(
        applied, jax.tree.leaves(inputs), jax.tree.leaves(old), closed.consts
    )
    return applied, *jax.tree.unflatten(jax.tree.structure(types), leaves)


def zero_unless(applied: jax.Array, tree: Any) -> Any:
    """A tree whose inexact leaves are zero unless `applied`."""
    return map_inexact(lambda x: jnp.where(applied, x, jnp.zeros_like(x)), tree)


def _selected(applied: jax.Array, updates: Any, new: Any, old: Any) -> tuple[Any, Any]:
    return _or_negative_zeros(applied, updates), select_tree(applied, new, old)


def _or_negative_zeros(applied: jax.Array, updates: Any) -> Any:
    return select_tree(applied, updates, jax.tree.map(_negative_zeros, updates))


def _negative_zeros(update: Any) -> Any:
    zeros = jnp.zeros_like(update)
    return -zeros if is_inexact(update) else zeros


def _update_leaves(closed: Any) -> Callable[..., list[Any]]:
    """The step as a function of applied, inputs, old state and constants: lists."""
    is_plain = _is_plain_only(closed)

    def evaluate(inputs: list[Any], old: list[Any], consts: list[Any]) -> Any:
        leaves = core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, consts))(
            *inputs, *old
        )
        leaves = [jnp.asarray(leaf) for leaf in leaves]  # jax 0.8 gives literals too
        count = len(leaves) - len(old)
        return leaves[:count], leaves[count:]

    def late(applied: Any, inputs: Any, old: Any, consts: Any) -> list[Any]:
        updates, new = evaluate(inputs, old, consts)
        updates, new = _selected(applied, updates, new, old)
        return [*updates, *new]

    def early(applied: Any, inputs: Any, old: Any, consts: Any) -> list[Any]:
        updates, state = evaluate_selecting(
            applied, closed.jaxpr, consts, [*inputs, *old], old
        )
        return [*_or_negative_zeros(applied, updates), *state]

    def fast(applied: Any, inputs: Any, old: Any, consts: Any) -> list[Any]:
        return lax.platform_dependent(
            applied, inputs, old, consts, cpu=early, default=late
        )

    def step(applied: Any, inputs: Any, old: Any, consts: Any) -> list[Any]:
        # Zeros in place of NaN, for what the optimizer itself would notice: a loop that
        # waits for a NaN to become small never ends
        # (test_a_loop_that_waits_for_a_condition_ends_on_a_skipped_step).
        if is_plain:
            return late(applied, zero_unless(applied, inputs), old, consts)
        return _hidden_from_checkify(fast)(applied, inputs, old, consts)

    def branch(applied: Any, inputs: Any, old: Any, consts: Any) -> list[Any]:
        # What is dropped must not be differentiated either: its derivative may be
        # infinite, and times 0 it is NaN. So all that the update reads is constant on a
        # skipped step (test_an_infinite_derivative_of_what_is_dropped_is_not_seen). The
        # gradients are 1 there: NaN in them is NaN in the derivatives of the state
        # (test_derivatives_of_a_mapped_skipped_step_are_finite).
        def constant_unless(x: Any) -> Any:
            return jnp.where(applied, x, lax.stop_gradient(x))

        inputs = map_inexact(lambda x: jnp.where(applied, x, jnp.ones_like(x)), inputs)
        updates, new = evaluate(
            inputs, *map_inexact(constant_unless, (list(old), list(consts)))
        )
        updates, new = _selected(applied, updates, new, old)
        return [*updates, *new]

    if closed.effects:  # which JAX does not allow in functions with rules of their own
        return step
    # Selects rather than lax.cond, which fails where a map over steps is differentiated
    # (test_a_map_over_steps_that_some_members_skip_has_a_derivative).
    with_derivative = jax.custom_jvp(step)
    with_derivative.defjvp(lambda primals, tangents: jax.jvp(branch, primals, tangents))
    return with_derivative


def _hidden_from_checkify(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun` as a single primitive, so that checkify does not report its NaNs.

    Otherwise `checkify.nan_checks` would stop a training at each skipped step
    (test_checkify_is_quiet_on_a_skipped_step).
    """
    hidden = jax.custom_batching.custom_vmap(fun)

    @hidden.def_vmap
    def _(axis_size: int, in_batched: Any, *args: Any) -> tuple[Any, Any]:
        del axis_size
        in_axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched)
        out = jax.vmap(fun, in_axes=tuple(in_axes))(*args)
        return out, jax.tree.map(lambda _: True, out)

    return hidden


def _is_plain_only(closed: Any) -> bool:
    if _debugs_nans() or closed.effects:
        return True
    # By parts of names: there are io_callback, pure_callback and debug_callback, and a
    # kernel of Pallas is pallas_call
    # (test_pure_callbacks_see_a_state_of_one_piece_too).
    names = {equation.primitive.name for equation in equations(closed.jaxpr)}
    return any(part in name for name in names for part in _PLAIN_ONLY)


def _debugs_nans() -> bool:
    config: Any = jax.config
    return config.jax_debug_nans or config.jax_debug_infs


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of the jaxprs within them included."""
    for equation in jaxpr.eqns:
        yield equation
        parts = jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns"))
        for part in parts:
            if hasattr(part, "eqns"):
                yield from equations(part)
