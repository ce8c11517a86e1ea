"""One training step as each library's documentation writes it.

Every function takes the loss `(params, batch) -> loss`, an Optax optimizer and the
parameters, and returns `(carry, step)` with `step(carry, batch) -> (carry, loss)`.
Gradients are those of a loss scaled by 2^15, except in the step without scaling. Those
of jmp and Flax take other arguments of their loss scale, too, for `correctness.py`.
"""

import functools
import importlib.util
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

import jmp_scale

SCALE = 2.0**15


def unscaled(loss_fn, tx, params):
    return _without_skip(jax.value_and_grad(loss_fn), tx, params)


def _without_skip(grad_fn, tx, params):
    def step(carry, batch):
        params, opt_state = carry
        loss, grads = grad_fn(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return (params, tx.init(params)), step


def jmp(loss_fn, tx, params, s=SCALE, **options):
    import jmp

    loss_scale = jmp.DynamicLossScale(jnp.float32(s), counter=jnp.int32(0), **options)
    return (params, tx.init(params), loss_scale), _verbs(jmp, loss_fn, tx)


def jmp_scale_verbs(loss_fn, tx, params):
    """The step of jmp's README, with this library under its name."""
    loss_scale = jmp_scale.DynamicLossScale(SCALE)
    return (params, tx.init(params), loss_scale), _verbs(jmp_scale, loss_fn, tx)


def flax(loss_fn, tx, params, s=SCALE, **options):
    from flax.training.dynamic_scale import DynamicScale

    def step(carry, batch):
        params, opt_state, dynamic_scale = carry
        value_and_grad = dynamic_scale.value_and_grad(loss_fn)
        dynamic_scale, finite, loss, grads = value_and_grad(params, batch)
        updates, new_state = tx.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)

        def keep(new, old):
            return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

        kept = keep(new_params, params), keep(new_state, opt_state)
        return (*kept, dynamic_scale), loss

    scale = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(s), **options)
    return (params, tx.init(params), scale), step


def mpx(loss_fn, tx, params):
    """The body of `filter_value_and_grad`; `loss_fn` does the cast to float16."""
    import mpx

    def step(carry, batch):
        params, opt_state, scaling = carry
        loss, grads = jax.value_and_grad(mpx.scaled(loss_fn, scaling))(params, batch)
        finite = mpx.all_finite(grads)
        scaling = scaling.adjust(finite)
        loss, grads = scaling.unscale(loss), scaling.unscale(grads)
        params, opt_state = mpx.optimizer_update(params, tx, opt_state, grads, finite)
        return (params, opt_state, scaling), loss

    scaling = mpx.DynamicLossScaling(
        jnp.float32(SCALE), min_loss_scaling=jnp.float32(1), counter=jnp.int32(0)
    )
    return (params, tx.init(params), scaling), step


def apply_if_finite(loss_fn, tx, params):
    """Optax has no scale of its own: a constant one is unscaled before."""
    loss_scale = jmp_scale.StaticLossScale(SCALE)
    grad_fn = jmp_scale.value_and_grad(loss_fn, loss_scale)
    return _without_skip(grad_fn, optax.apply_if_finite(tx, 1000), params)


def with_loss_scale(loss_fn, tx, params, *, guard=None):
    loss_scale = jmp_scale.DynamicLossScale(SCALE)
    tx = jmp_scale.with_loss_scale(tx, loss_scale, guard=guard)

    def step(carry, batch):
        params, opt_state = carry
        value_and_grad = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)
        loss, grads = value_and_grad(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return (optax.apply_updates(params, updates), opt_state), loss

    return (params, tx.init(params)), step


def _verbs(library, loss_fn, tx):
    def step(carry, batch):
        params, opt_state, loss_scale = carry
        scaled = jax.value_and_grad(lambda *args: loss_scale.scale(loss_fn(*args)))
        loss, grads = scaled(params, batch)
        loss, grads = loss_scale.unscale(loss), loss_scale.unscale(grads)
        finite = library.all_finite(grads)
        loss_scale = loss_scale.adjust(finite)
        updates, new_state = tx.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        params, opt_state = library.select_tree(
            finite, (new_params, new_state), (params, opt_state)
        )
        return (params, opt_state, loss_scale), loss

    return step


PEERS = {
    "unscaled": unscaled,
    "jmp": jmp,
    "flax DynamicScale": flax,
    "mpx": mpx,
    "optax.apply_if_finite": apply_if_finite,
    "jmp_scale verbs": jmp_scale_verbs,
    "with_loss_scale": with_loss_scale,
    "with_loss_scale, guard": functools.partial(
        with_loss_scale, guard=jmp_scale.SpikeGuard()
    ),
}


def installed(peers: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those of `peers` that can run here, and the others."""
    modules = {"jmp": "jmp", "flax DynamicScale": "flax", "mpx": "mpx"}
    found = {p: importlib.util.find_spec(modules.get(p, "jmp_scale")) for p in peers}
    missing = [peer for peer in peers if found[peer] is None]
    return [peer for peer in peers if peer not in missing], missing
