"""Single functions of each library, under one signature a kind, for the rows of `correctness.py`.

Every function here returns a dictionary from the libraries that have such a thing to how it is called.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_scale


def loss_scales(s: Any) -> dict[str, Callable[[], Any]]:
    """() -> a loss scale that starts at `s`."""

    def jmp():
        import jmp

        return jmp.DynamicLossScale(s)

    def mpx():
        import mpx

        return mpx.DynamicLossScaling(s, jnp.float32(1))

    return {"jmp": jmp, "mpx": mpx, "jmp_scale": lambda: jmp_scale.DynamicLossScale(s)}


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
    return {"optax": lambda tx: optax.apply_if_finite(tx, 5), "jmp_scale": jmp_scale.with_loss_scale}


def gradients() -> dict[str, Callable[..., Any]]:
    """(loss, w, S, axis name or None) -> unscaled gradient, averaged over the axis"""

    def mean(grad, axis_name):
        return grad if axis_name is None else jax.lax.pmean(grad, axis_name)

    def jmp(loss_fn, w, s, axis_name=None):
        loss_scale = loss_scales(jnp.float32(s))["jmp"]()
        return mean(loss_scale.unscale(jax.grad(lambda w: loss_scale.scale(loss_fn(w)))(w)), axis_name)

    def flax(loss_fn, w, s, axis_name=None):
        from flax.training.dynamic_scale import DynamicScale

        return DynamicScale(scale=jnp.float32(s)).value_and_grad(loss_fn, axis_name=axis_name)(w)[3]

    def mpx(loss_fn, w, s, axis_name=None):
        import mpx

        scaling = loss_scales(jnp.float32(s))["mpx"]()
        return mean(scaling.unscale(jax.grad(mpx.scaled(loss_fn, scaling))(w)), axis_name)

    def ours(loss_fn, w, s, axis_name=None):
        return mean(jmp_scale.grad(loss_fn, jmp_scale.DynamicLossScale(s))(w), axis_name)

    return {"jmp": jmp, "flax": flax, "mpx": mpx, "jmp_scale": ours}


def adjusted_over_examples() -> dict[str, Callable[[Any], Any]]:
    """x of each example -> S after one step with the gradients of w * x"""

    def by_verbs(library):
        def step(xs):
            loss_scale = loss_scales(jnp.float32(8))[library]()
            grads = jax.vmap(lambda x: gradients()[library](lambda w: w * x, jnp.float32(1), 8.0))(xs)
            return loss_scale.adjust(finite_checks()[library](grads))

        return step

    def flax(xs):
        from flax.training.dynamic_scale import DynamicScale

        scale = DynamicScale(scale=jnp.float32(8))
        return jax.vmap(lambda x: scale.value_and_grad(lambda w: w * x)(jnp.float32(1))[0])(xs).scale

    return {
        "jmp": lambda xs: by_verbs("jmp")(xs).loss_scale,
        "flax": flax,
        "mpx": lambda xs: by_verbs("mpx")(xs).loss_scaling,
        "jmp_scale": lambda xs: by_verbs("jmp_scale")(xs).loss_scale,
    }


def saved_and_restored() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """() -> (S before, S after saving it and restoring it into a fresh one), in the library's own way"""

    def serialized(name, library):
        def run():
            from flax import serialization

            if name == "jmp_scale":
                import jmp_scale.linen  # noqa: F401, registers the loss scales

            fresh = loss_scales(jnp.float32(2.0**15))[name]()
            used = fresh.adjust(jnp.array(False))
            restored = serialization.from_bytes(fresh, serialization.to_bytes(used))
            return getattr(used, library), getattr(restored, library)

        return run

    def flax():
        from flax import serialization
        from flax.training.dynamic_scale import DynamicScale

        used = DynamicScale(scale=jnp.float32(4))
        restored = serialization.from_bytes(DynamicScale(), serialization.to_bytes(used))
        return used.scale, restored.scale

    def torch():
        import torch

        used, restored = torch.amp.GradScaler("cpu", init_scale=4.0), torch.amp.GradScaler("cpu")
        for scaler in (used, restored):
            scaler.scale(torch.tensor(1.0))  # makes S, which is lazy
        restored.load_state_dict(used.state_dict())
        return used.get_scale(), restored.get_scale()

    def keras():
        import keras

        used, restored = (
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=s) for s in (4.0, 8.0)
        )
        store: dict[str, Any] = {}
        for optimizer in (used, restored):
            optimizer.build([keras.Variable(1.0)])
        used.save_own_variables(store)
        restored.load_own_variables(store)
        return float(used.dynamic_scale), float(restored.dynamic_scale)

    return {
        "jmp": serialized("jmp", "loss_scale"),
        "flax": flax,
        "mpx": serialized("mpx", "loss_scaling"),
        "torch": torch,
        "keras": keras,
        "jmp_scale": serialized("jmp_scale", "loss_scale"),
    }


def statistics_after_an_overflow() -> dict[str, Callable[[], Any]]:
    """() -> the running mean of a BatchNorm after a step whose forward pass gave infinities"""

    def linen_model():
        from flax import linen

        class Net(linen.Module):
            @linen.compact
            def __call__(self, x):
                x = linen.Dense(1, dtype=jnp.float16, kernel_init=linen.initializers.constant(300.0))(x)
                return linen.BatchNorm(use_running_average=False)(x).mean()

        net, x = Net(), jnp.full((4, 1), 300.0)
        variables = net.init(jax.random.key(0), 0 * x)

        def loss_fn(params):
            state = {"params": params, "batch_stats": variables["batch_stats"]}
            return net.apply(state, x, mutable=["batch_stats"])

        return net, variables, loss_fn

    def flax():
        """The step of Flax's ImageNet example, which selects parameters and optimizer state."""
        from flax.training.dynamic_scale import DynamicScale

        _, variables, loss_fn = linen_model()
        gradients_of = DynamicScale().value_and_grad(loss_fn, has_aux=True)
        _, finite, (_, updates), _ = gradients_of(variables["params"])
        assert not finite
        return updates["batch_stats"]["BatchNorm_0"]["mean"]

    def ours():
        from jmp_scale.linen import TrainState

        net, variables, loss_fn = linen_model()
        state_type = type("State", (TrainState,), {"__annotations__": {"batch_stats": Any}})
        state = state_type.create(
            apply_fn=net.apply,
            params=variables["params"],
            tx=optax.sgd(0.1),
            loss_scale=jmp_scale.DynamicLossScale(),
            batch_stats=variables["batch_stats"],
        )
        (loss, updates), grads = state.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, value=loss, batch_stats=updates["batch_stats"])
        return state.batch_stats["BatchNorm_0"]["mean"]

    def torch():
        import torch

        norm, scaler = torch.nn.BatchNorm1d(1), torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(norm.parameters(), 0.1)
        overflowed = (torch.full((4, 1), 300.0).half() * 300).float()
        scaler.scale(norm(overflowed).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        return norm.running_mean.numpy()

    def keras():
        import keras

        norm = keras.layers.BatchNormalization()
        model = keras.Sequential([keras.layers.Input((1,)), norm])
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse")
        model.train_on_batch(np.full((4, 1), math.inf, np.float32), np.zeros((4, 1), np.float32))
        return norm.moving_mean.numpy()

    return {"flax": flax, "torch": torch, "keras": keras, "jmp_scale": ours}


def warnings_of_a_stuck_run() -> dict[str, Callable[[], Any]]:
    """() -> what the library says of a run that skips every step"""

    def ours():
        tx, w = jmp_scale.with_loss_scale(optax.sgd(1.0), jmp_scale.DynamicLossScale()), jnp.float32(1)
        state = tx.init(w)
        for _ in range(60):
            _, state = jax.jit(tx.update)(jnp.float32(math.nan), state, w)
        from jmp_scale import diagnostics

        return diagnostics.health(state)

    return {"jmp_scale": ours}
