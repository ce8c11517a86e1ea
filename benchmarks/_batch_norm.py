"""What is left in a BatchNorm after an overflow in float16, for `correctness.py`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_scale


def after_an_overflow():
    """() -> the running mean of a BatchNorm after the layer before it overflowed"""
    others = {"flax": _of_flax, "torch": _of_torch, "keras": _of_keras}
    return others | {"jmp_scale": _of_linen_train_state}


def _linen_state(train_state, **kwargs):
    """A state of a Linen model with 300 x 300 = inf in float16, and its loss."""
    from flax import linen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            kernel = linen.initializers.constant(300.0)
            x = linen.Dense(1, dtype=jnp.float16, kernel_init=kernel)(x)
            return linen.BatchNorm(use_running_average=False)(x).mean()

    net, x = Net(), jnp.full((4, 1), 300.0)
    variables = net.init(jax.random.key(0), 0 * x)
    fields = {"__annotations__": {"batch_stats": Any, "dynamic_scale": Any}}
    state_type = type("State", (train_state,), fields)
    kwargs = {"dynamic_scale": None, "batch_stats": variables["batch_stats"]} | kwargs
    state = state_type.create(
        apply_fn=net.apply, params=variables["params"], tx=optax.sgd(0.1), **kwargs
    )

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        return net.apply(variables, x, mutable=["batch_stats"])

    return state, loss_fn


def _of_flax():
    """The step of Flax's ImageNet example, which selects parameters and state."""
    from flax.training.dynamic_scale import DynamicScale
    from flax.training.train_state import TrainState

    state, loss_fn = _linen_state(TrainState, dynamic_scale=DynamicScale())
    gradients_of = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True)
    dynamic_scale, finite, (_, updates), grads = gradients_of(state.params)
    new = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])

    def keep(new, old):
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    new = new.replace(
        opt_state=keep(new.opt_state, state.opt_state),
        params=keep(new.params, state.params),
        dynamic_scale=dynamic_scale,
    )
    return new.batch_stats["BatchNorm_0"]["mean"]


def _of_linen_train_state():
    from jmp_scale.linen import TrainState

    state, loss_fn = _linen_state(TrainState, loss_scale=jmp_scale.DynamicLossScale())
    (loss, updates), grads = state.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(
        grads=grads, value=loss, batch_stats=updates["batch_stats"]
    )
    return state.batch_stats["BatchNorm_0"]["mean"]


def _of_torch():
    import torch

    dense, norm = torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)
    scaler = torch.amp.GradScaler("cpu")
    torch.nn.init.constant_(dense.weight, 300.0)
    optimizer = torch.optim.SGD([*dense.parameters(), *norm.parameters()], 0.1)
    with torch.autocast("cpu", torch.float16):
        loss = norm(dense(torch.full((4, 1), 300.0)).float()).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return norm.running_mean.numpy()


def _of_keras():
    import keras

    norm = keras.layers.BatchNormalization(dtype="float32")
    kernel = keras.initializers.Constant(300.0)
    half = {"kernel_initializer": kernel, "dtype": "mixed_float16"}
    dense = keras.layers.Dense(1, **half)
    model = keras.Sequential([keras.layers.Input((1,)), dense, norm])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = np.full((4, 1), 300.0, np.float32)
    model.train_on_batch(x, 0 * x)
    return norm.moving_mean.numpy()
