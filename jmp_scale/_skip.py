"""The skip: an optimizer's update that happens as a whole, or not at all.

Two paths give the same result, bit for bit:

- The *plain* path runs the update on gradients that are zero on a skipped step, and
  selects between old and new state afterwards. It is right under everything.
- The *fast* path does not let the update wait for the flag: each non-finite entry is
  zeroed by itself. A norm that clips the gradients then reads them in the same pass as
  the finite check. On a CPU the state is also selected without a copy
  (`_copy_free_select`).

The fast path is taken only where nothing can see a skipped step before it is dropped:
in compiled code without effects, callbacks, runtime checks, branches and loops that wait
for a condition, and not under `jax_debug_nans`. The derivatives of both are those of a
branch: what is dropped has none.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend import core

from ._copy_free_select import select_where_computed
from ._tree import is_inexact, map_inexact, select_tree

# What waits for a condition, or lets the host see the values that it is given.
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
      update: takes `inputs` and `old`, returns `(updates, new state)`. The new state has
        the structure, shapes and dtypes of `old`.
      inputs: pytree of what may not be finite: gradients, the loss.
      old: the state before the step.
      context: what else `update` depends on, such as the parameters.
      is_good: if given, a last look at the updates: the step is skipped unless it
        returns True.

    Returns:
      `(applied, updates, state)`. On a skipped step the updates are -0.0, which added to
      a parameter changes no bit of it; 0.0 would turn -0.0 into 0.0.
    """
    leaves = jax.tree.leaves((inputs, old))
    seen = (applied, *leaves, *jax.tree.leaves(context))
    is_traced = any(isinstance(x, Tracer) for x in seen)
    has_arrays_only = all(isinstance(x, jax.Array) for x in leaves)
    has_interface = hasattr(core, "ClosedJaxpr") and hasattr(core, "jaxpr_as_fun")
    if _debugs_nans() and has_arrays_only and not is_traced and not applied:
        # Op by op even 0 / 0 would raise, as in a clipped gradient of zero.
        updates = jax.eval_shape(lambda: update(inputs, old)[0])
        return applied, jax.tree.map(_negative_zeros, updates), old
    if is_good is not None or not (is_traced and has_arrays_only and has_interface):
        updates, new = update(zero_unless(applied, inputs), old)
        applied = applied if is_good is None else applied & is_good(updates)
        return applied, *_selected(applied, updates, new, old)

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
    """The step as a function of lists of arrays: applied, inputs, old state, constants."""
    is_plain = _is_plain_only(closed)

    def evaluate(inputs: list[Any], old: list[Any], consts: list[Any]) -> Any:
        leaves = core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, consts))(
            *inputs, *old
        )
        count = len(leaves) - len(old)
        return leaves[:count], leaves[count:]

    def late(applied: Any, inputs: Any, old: Any, consts: Any) -> list[Any]:
        updates, new = evaluate(inputs, old, consts)
        updates, new = _selected(applied, updates, new, old)
        return [*updates, *new]

    def early(applied: Any, inputs: Any, old: Any, consts: Any) -> list[Any]:
        updates, state = select_where_computed(
            applied, closed.jaxpr, consts, [*inputs, *old], old
        )
        return [*_or_negative_zeros(applied, updates), *state]

    def step(applied: Any, inputs: Any, old: Any, consts: Any) -> list[Any]:
        if is_plain:
            return late(applied, zero_unless(applied, inputs), old, consts)
        # Without this a clipped NaN is seen by jax.debug_nans and checkify's checks.
        safe = [zero_unless(jnp.isfinite(x), x) for x in inputs]
        return lax.platform_dependent(
            applied, safe, old, consts, cpu=early, default=late
        )

    def branch(applied: Any, inputs: Any, old: Any, consts: Any) -> list[Any]:
        # Under vmap this becomes a select, whose derivative is 0 times that of the
        # branch not taken: NaN for many an optimizer at a gradient of 0, hence 1.
        inputs = map_inexact(lambda x: jnp.where(applied, x, jnp.ones_like(x)), inputs)

        def run() -> list[Any]:
            updates, new = evaluate(inputs, old, consts)
            return [*updates, *new]

        def keep() -> list[Any]:
            updates = jax.eval_shape(run)
            updates = updates[: len(updates) - len(old)]
            return [*map(_negative_zeros, updates), *old]

        return lax.cond(applied, run, keep)

    if closed.effects:  # which JAX does not allow in functions with rules of their own
        return step
    with_derivative = jax.custom_jvp(step)
    with_derivative.defjvp(lambda primals, tangents: jax.jvp(branch, primals, tangents))
    return with_derivative


def _is_plain_only(closed: Any) -> bool:
    if _debugs_nans() or closed.effects:
        return True
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
