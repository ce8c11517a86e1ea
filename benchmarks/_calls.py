"""Single functions of each library, for the rows of `correctness.py`.

Every function here returns a dictionary from the libraries that have such a thing to
how it is called; all of one kind have one signature.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp

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


def steps():
    """(() -> a loss scale, loss scale -> that after a finite step)"""

    def adjusted(loss_scale):
        return loss_scale.adjust(jnp.array(True))

    def flax(dynamic_scale):
        return dynamic_scale.value_and_grad(lambda w: w * w)(jnp.float32(1))[0]

    makers = loss_scales(2.0**15).items()
    return {name: (make, flax if name == "flax" else adjusted) for name, make in makers}


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
