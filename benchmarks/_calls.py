"""Single functions of each library, for the rows of `correctness.py`.

Every function here returns a dictionary from the libraries that have such a thing to
how it is called; all of one kind have one signature.
"""

import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _loops import MAX_CONSECUTIVE_ERRORS, TRAIN

import jmp_scale


def loss_scales(s: float) -> dict[str, Callable[[], Any]]:
    """() -> a loss scale that starts at `s`, made as in the library's documentation"""

    def jmp():
        import jmp

        return jmp.DynamicLossScale(jnp.asarray(s))

    def flax():
        from flax.training.dynamic_scale import DynamicScale

        return DynamicScale(scale=s)

    def mpx():
        import mpx

        return mpx.DynamicLossScaling(
            jnp.float32(s), min_loss_scaling=jnp.ones((), jnp.float32)
        )

    return {
        "jmp": jmp,
        "flax": flax,
        "mpx": mpx,
        "jmp_scale": lambda: jmp_scale.DynamicLossScale(s),
    }


def float16_loss_scales() -> dict[str, Callable[[], Any]]:
    """() -> a loss scale that starts at 2^15 in float16, as jmp's README makes it"""

    def jmp():
        import jmp

        return jmp.DynamicLossScale(jnp.float16(2.0**15))

    return {
        "jmp": jmp,
        "jmp_scale": lambda: jmp_scale.DynamicLossScale(jnp.float16(2.0**15)),
    }


def steps() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """(() -> a loss scale, loss scale -> that after a finite step)"""

    def adjusted(loss_scale):
        return loss_scale.adjust(jnp.array(True))

    def flax(dynamic_scale):
        return dynamic_scale.value_and_grad(lambda w: w * w)(jnp.float32(1))[0]

    made = loss_scales(2.0**15)
    return {
        name: (make, flax if name == "flax" else adjusted)
        for name, make in made.items()
    }


def finite_checks() -> dict[str, Callable[[Any], Any]]:
    """tree -> bool[]"""

    def jmp(tree):
        import jmp

        return jmp.all_finite(tree)

    def mpx(tree):
        import mpx

        return mpx.all_finite(tree)

    return {"jmp": jmp, "mpx": mpx, "jmp_scale": jmp_scale.all_finite}


def selects() -> dict[str, Callable[..., Any]]:
    """(bool[], new, old) -> the one or the other"""

    def jmp(*args):
        import jmp

        return jmp.select_tree(*args)

    def mpx(*args):
        import mpx

        return mpx.select_tree(*args)

    return {"jmp": jmp, "mpx": mpx, "jmp_scale": jmp_scale.select_tree}


def wrappers() -> dict[str, Callable[[Any], Any]]:
    """An Optax optimizer -> one that skips."""
    return {
        "optax": lambda tx: optax.apply_if_finite(tx, MAX_CONSECUTIVE_ERRORS),
        "jmp_scale": jmp_scale.with_loss_scale,
    }


def gradients() -> dict[str, Callable[..., Any]]:
    """(loss, w, S, axis name or None) -> unscaled gradient, averaged over the axis"""

    def mean(grad, axis_name):
        return grad if axis_name is None else jax.lax.pmean(grad, axis_name)

    def jmp(loss_fn, w, s, axis_name=None):
        loss_scale = loss_scales(s)["jmp"]()
        return mean(
            loss_scale.unscale(jax.grad(lambda w: loss_scale.scale(loss_fn(w)))(w)),
            axis_name,
        )

    def flax(loss_fn, w, s, axis_name=None):
        return loss_scales(s)["flax"]().value_and_grad(loss_fn, axis_name=axis_name)(w)[
            3
        ]

    def mpx(loss_fn, w, s, axis_name=None):
        import mpx

        scaling = loss_scales(s)["mpx"]()
        return mean(
            scaling.unscale(jax.grad(mpx.scaled(loss_fn, scaling))(w)), axis_name
        )

    def ours(loss_fn, w, s, axis_name=None):
        return mean(
            jmp_scale.grad(loss_fn, jmp_scale.DynamicLossScale(s))(w), axis_name
        )

    return {"jmp": jmp, "flax": flax, "mpx": mpx, "jmp_scale": ours}


def float16_losses() -> dict[str, Callable[[], Any]]:
    """() -> the unscaled loss of a step whose loss is 3 in float16, at S = 2^15"""

    def loss_fn(w):
        return (3 * w).astype(jnp.float16)

    def by_verbs(name):
        loss_scale = loss_scales(2.0**15)[name]()
        return loss_scale.unscale(loss_scale.scale(loss_fn(jnp.float32(1))))

    return {
        "jmp": lambda: by_verbs("jmp"),
        "flax": lambda: loss_scales(2.0**15)["flax"]().value_and_grad(loss_fn)(
            jnp.float32(1)
        )[2],
        "mpx": lambda: by_verbs("mpx"),
        "jmp_scale": lambda: by_verbs("jmp_scale"),
    }


def adjusted_over_examples() -> dict[str, Callable[[Any], Any]]:
    """x of each example -> S after one step with the gradients of w * x"""

    def by_verbs(library):
        def step(xs):
            loss_scale = loss_scales(8.0)[library]()
            grads = jax.vmap(
                lambda x: gradients()[library](lambda w: w * x, jnp.float32(1), 8.0)
            )(xs)
            return loss_scale.adjust(finite_checks()[library](grads))

        return step

    def flax(xs):
        scale = loss_scales(8.0)["flax"]()
        return jax.vmap(
            lambda x: scale.value_and_grad(lambda w: w * x)(jnp.float32(1))[0]
        )(xs).scale

    return {
        "jmp": lambda xs: by_verbs("jmp")(xs).loss_scale,
        "flax": flax,
        "mpx": lambda xs: by_verbs("mpx")(xs).loss_scaling,
        "jmp_scale": lambda xs: by_verbs("jmp_scale")(xs).loss_scale,
    }


def traces_of_four_steps() -> dict[str, Callable[[], int]]:
    """() -> how often a step is traced"""

    def counted(name):
        def count():
            make, adjust = steps()[name]
            traces = []

            def step(loss_scale):
                traces.append(loss_scale)
                return adjust(loss_scale)

            jitted = jit_of(name)(step)
            loss_scale = make()
            for _ in range(4):
                loss_scale = jitted(loss_scale)
            return len(traces)

        return count

    def jit_of(name):
        if name == "mpx":  # an Equinox module, jitted as its documentation does
            import equinox

            return equinox.filter_jit
        return jax.jit

    return {name: counted(name) for name in steps()}


def clipped_steps() -> dict[str, Callable[[], float]]:
    """() -> w = 1 after a step with gradient 5, clipped to norm 1, learning rate 1"""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))

    def torch():
        import torch

        w = torch.tensor(1.0, requires_grad=True)
        optimizer, scaler = (
            torch.optim.SGD([w], 1.0),
            torch.amp.GradScaler("cpu", init_scale=8.0),
        )
        scaler.scale(5 * w).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([w], 1.0)
        scaler.step(optimizer)
        scaler.update()
        return w.item()

    def keras():
        import keras

        return TRAIN["keras"](
            [5.0], tx=lambda: keras.optimizers.SGD(1.0, global_clipnorm=1.0)
        )[0].w

    by_optax = {
        name: lambda name=name: TRAIN[name]([5.0], tx=tx)[0].w
        for name in loss_scales(8.0)
    }
    return by_optax | {"torch": torch, "keras": keras}


def flags_of_replicas() -> dict[str, Callable[[Any], Any]]:
    """x of each device -> whether it applies the step with the gradient of w * x.

    No axis is named.
    """

    def flax(xs):
        from flax.training.dynamic_scale import DynamicScale

        return jax.pmap(
            lambda x: DynamicScale().value_and_grad(lambda w: w * x)(jnp.float32(1))[1]
        )(xs)

    def optax_(xs):
        def applied(x):
            tx = wrappers()["optax"](optax.sgd(1.0))
            return tx.update(x, tx.init(x), x)[1].last_finite

        return jax.pmap(applied)(xs)

    by_check = {name: jax.pmap(check) for name, check in finite_checks().items()}
    return by_check | {"flax": flax, "optax": optax_}


def saved_and_restored() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """() -> (S before, S restored into a fresh one), in the library's own way"""

    def jmp():
        used = loss_scales(2.0**15)["jmp"]().adjust(jnp.array(False))
        return used.loss_scale, pickle.loads(pickle.dumps(used)).loss_scale

    def mpx():
        import equinox

        fresh, file = loss_scales(2.0**15)["mpx"](), io.BytesIO()
        used = fresh.adjust(jnp.array(False))
        equinox.tree_serialise_leaves(file, used)
        file.seek(0)
        return used.loss_scaling, equinox.tree_deserialise_leaves(
            file, fresh
        ).loss_scaling

    def torch():
        import torch

        used, restored = (
            torch.amp.GradScaler("cpu", init_scale=4.0),
            torch.amp.GradScaler("cpu"),
        )
        for scaler in (used, restored):
            scaler.scale(torch.tensor(1.0))  # makes S, which is lazy
        restored.load_state_dict(used.state_dict())
        return used.get_scale(), restored.get_scale()

    def keras():
        import keras

        used, restored = (
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=s)
            for s in (4.0, 8.0)
        )
        store: dict[str, Any] = {}
        for optimizer in (used, restored):
            optimizer.build([keras.Variable(1.0)])
        used.save_own_variables(store)
        restored.load_own_variables(store)
        return float(used.dynamic_scale), float(restored.dynamic_scale)

    by_flax = {name: serialized_by_flax()[name] for name in ("flax", "jmp_scale")}
    return by_flax | {"jmp": jmp, "mpx": mpx, "torch": torch, "keras": keras}


def serialized_by_flax() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """() -> (S before, S after `flax.serialization`), where users train with Flax"""

    def through(fresh, used, name):
        from flax import serialization

        restored = serialization.from_bytes(fresh, serialization.to_bytes(used))
        return getattr(used, name), getattr(restored, name)

    def flax():
        from flax.training.dynamic_scale import DynamicScale

        return through(DynamicScale(), DynamicScale(scale=jnp.float32(4)), "scale")

    def adjusted(library, name):
        import jmp_scale.linen  # noqa: F401, registers the loss scales

        fresh = loss_scales(2.0**15)[library]()
        return through(fresh, fresh.adjust(jnp.array(False)), name)

    return {
        "jmp": lambda: adjusted("jmp", "loss_scale"),
        "flax": flax,
        "jmp_scale": lambda: adjusted("jmp_scale", "loss_scale"),
    }


def signs_of_a_stuck_run() -> dict[str, Callable[[], Any]]:
    """() -> what there is to see after a run that skips every step"""

    def state_after_60(tx):
        w = jnp.float32(1)
        state = tx.init(w)
        for _ in range(60):
            _, state = jax.jit(tx.update)(jnp.float32(math.nan), state, w)
        return state

    def ours():
        from jmp_scale import diagnostics

        tx = jmp_scale.with_loss_scale(optax.sgd(1.0), jmp_scale.DynamicLossScale())
        return diagnostics.health(state_after_60(tx))

    return {
        "optax": lambda: (
            state_after_60(optax.apply_if_finite(optax.sgd(1.0), 1000)).notfinite_count
            == 60
        ),
        "jmp_scale": ours,
    }
