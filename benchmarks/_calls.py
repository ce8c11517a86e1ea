"""Single functions of each library, for the rows of `correctness.py`.

Every function here returns a dictionary from the libraries that have such a thing to
how it is called; all of one kind have one signature.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _loops import MAX_CONSECUTIVE_ERRORS

import jmp_scale

VERBS = ("jmp", "mpx", "jmp_scale")  # have jmp's functions


def verb(name):
    """Library -> its function of that name, looked up when it is called."""

    def of(library):
        return lambda *args: getattr(importlib.import_module(library), name)(*args)

    return {library: of(library) for library in VERBS}


def flax_scale(**kwargs: Any):
    from flax.training.dynamic_scale import DynamicScale

    return DynamicScale(**kwargs)


def loss_scales(s):
    """() -> a loss scale that starts at `s`, made as in the library's documentation"""

    def mpx():
        import mpx

        floor = jnp.ones((), jnp.float32)
        return mpx.DynamicLossScaling(jnp.float32(s), min_loss_scaling=floor)

    return {
        "jmp": lambda: verb("DynamicLossScale")["jmp"](jnp.asarray(s)),
        "flax": lambda: flax_scale(scale=s),
        "mpx": mpx,
        "jmp_scale": lambda: jmp_scale.DynamicLossScale(s),
    }


def float16_loss_scales():
    """() -> a loss scale that starts at 2^15 in float16, as jmp's README makes it"""
    s, make = jnp.float16(2.0**15), verb("DynamicLossScale")
    return {name: lambda name=name: make[name](s) for name in ("jmp", "jmp_scale")}


def steps():
    """(() -> a loss scale, loss scale -> that after a finite step)"""

    def adjusted(loss_scale):
        return loss_scale.adjust(jnp.array(True))

    def flax(dynamic_scale):
        return dynamic_scale.value_and_grad(lambda w: w * w)(jnp.float32(1))[0]

    makers = loss_scales(2.0**15).items()
    return {name: (make, flax if name == "flax" else adjusted) for name, make in makers}


def wrappers():
    """An Optax optimizer -> one that skips."""
    return {
        "optax": lambda tx: optax.apply_if_finite(tx, MAX_CONSECUTIVE_ERRORS),
        "jmp_scale": jmp_scale.with_loss_scale,
    }


def gradients():
    """(loss, w, S, axis name or None) -> unscaled gradient, averaged over the axis"""

    def jmp(loss_fn, w, s):
        loss_scale = loss_scales(s)["jmp"]()
        return loss_scale.unscale(jax.grad(lambda w: loss_scale.scale(loss_fn(w)))(w))

    def mpx(loss_fn, w, s):
        import mpx

        scaling = loss_scales(s)["mpx"]()
        return scaling.unscale(jax.grad(mpx.scaled(loss_fn, scaling))(w))

    def ours(loss_fn, w, s):
        return jmp_scale.grad(loss_fn, jmp_scale.DynamicLossScale(s))(w)

    def flax(loss_fn, w, s, axis_name=None):
        return flax_scale(scale=s).value_and_grad(loss_fn, axis_name=axis_name)(w)[3]

    def averaged(grad_fn):
        def grad(loss_fn, w, s, axis_name=None):
            grad = grad_fn(loss_fn, w, s)
            return grad if axis_name is None else jax.lax.pmean(grad, axis_name)

        return grad

    others = {"jmp": jmp, "mpx": mpx, "jmp_scale": ours}
    return {name: averaged(fun) for name, fun in others.items()} | {"flax": flax}


def float16_losses():
    """() -> the unscaled loss of a step whose loss is 3 in float16, at S = 2^15"""
    made = loss_scales(2.0**15)

    def loss_fn(w):
        return (3 * w).astype(jnp.float16)

    def by_verbs(name):
        loss_scale = made[name]()
        return loss_scale.unscale(loss_scale.scale(loss_fn(jnp.float32(1))))

    def flax():
        return made["flax"]().value_and_grad(loss_fn)(jnp.float32(1))[2]

    return {name: lambda name=name: by_verbs(name) for name in VERBS} | {"flax": flax}


def adjusted_over_examples():
    """x of each example -> S after one step with the gradients of w * x"""
    one = jnp.float32(1)

    def by_verbs(library, name):
        def step(xs):
            grad = gradients()[library]
            grads = jax.vmap(lambda x: grad(lambda w: w * x, one, 8.0))(xs)
            finite = verb("all_finite")[library](grads)
            return getattr(loss_scales(8.0)[library]().adjust(finite), name)

        return step

    def flax(xs):
        scale = flax_scale(scale=8.0)
        step = jax.vmap(lambda x: scale.value_and_grad(lambda w: w * x)(one)[0])
        return step(xs).scale

    return {
        "jmp": by_verbs("jmp", "loss_scale"),
        "flax": flax,
        "mpx": by_verbs("mpx", "loss_scaling"),
        "jmp_scale": by_verbs("jmp_scale", "loss_scale"),
    }


def traces_of_four_steps():
    """() -> how often a step is traced"""

    def counted(name):
        make, adjust = steps()[name]
        traces = []

        def step(loss_scale):
            traces.append(loss_scale)
            return adjust(loss_scale)

        jit = jax.jit
        if name == "mpx":  # an Equinox module, jitted as its documentation does
            jit = importlib.import_module("equinox").filter_jit
        jitted, loss_scale = jit(step), make()
        for _ in range(4):
            loss_scale = jitted(loss_scale)
        return len(traces)

    return {name: lambda name=name: counted(name) for name in loss_scales(8.0)}


def flags_of_replicas():
    """x of each device -> whether it applies the step with the gradient of w * x.

    No axis is named.
    """

    def flax(x):
        return flax_scale().value_and_grad(lambda w: w * x)(jnp.float32(1))[1]

    def optax_(x):
        tx = wrappers()["optax"](optax.sgd(1.0))
        return tx.update(x, tx.init(x), x)[1].last_finite

    checks = verb("all_finite") | {"flax": flax, "optax": optax_}
    return {name: jax.pmap(check) for name, check in checks.items()}


def serialized_by_flax():
    """() -> (S before, S after `flax.serialization`), where users train with Flax"""

    def through(fresh, used, name):
        from flax import serialization

        restored = serialization.from_bytes(fresh, serialization.to_bytes(used))
        return getattr(used, name), getattr(restored, name)

    def adjusted(library):
        import jmp_scale.linen  # noqa: F401, registers the loss scales

        fresh = loss_scales(2.0**15)[library]()
        return through(fresh, fresh.adjust(jnp.array(False)), "loss_scale")

    return {
        "jmp": lambda: adjusted("jmp"),
        "flax": lambda: through(
            flax_scale(), flax_scale(scale=jnp.float32(4)), "scale"
        ),
        "jmp_scale": lambda: adjusted("jmp_scale"),
    }
