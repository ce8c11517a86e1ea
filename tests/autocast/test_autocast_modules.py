"""Modules of Linen and NNX, whose layers have a state."""

import functools

import jax
import jax.numpy as jnp
import pytest
from autocast_checks import F16, F32, assert_close
from autocast_programs import N, X, mean_square, products
from flax import linen, nnx

import jmp_scale.nnx
from jmp_scale import autocast, keep_float32


def bare_nnx_loss(model, x):
    return mean_square(model(x))


def test_nnx_modules_are_refused_and_the_right_function_is_named():
    model = nnx.Linear(N, 4, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"got a Linear.*jmp_scale\.nnx\.autocast"):
        autocast(lambda d: 0.0, "float16")({"models": [model]})


def test_a_class_of_nnx_names_its_products():
    model = nnx.Linear(N, N, rngs=nnx.Rngs(0))
    loss = lambda model, x: model(x) @ model.kernel[...]  # noqa: E731
    half = jmp_scale.nnx.autocast(loss, "float16", keep_float32="Linear")
    assert products(functools.partial(half, model), X) == [F32, F16]


def test_layers_of_linen_with_state_work_in_keep_float32():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            norm = linen.BatchNorm(use_running_average=False)
            x = keep_float32(norm)(linen.Dense(N)(x))
            x = linen.Dropout(0.5, deterministic=False)(linen.relu(x))
            return keep_float32(linen.Dense(3))(x)

    net, rngs = Net(), {"dropout": jax.random.key(1)}
    variables = jax.jit(net.init)({"params": jax.random.key(0), **rngs}, X)

    def loss(variables, x):
        y, new = net.apply(variables, x, mutable=["batch_stats"], rngs=rngs)
        return mean_square(y), new

    half = autocast(loss, "float16")
    assert products(half, variables, X) == [F16, F32]
    got, wanted = (
        jax.jit(jax.value_and_grad(f, has_aux=True))(variables, X) for f in (half, loss)
    )
    assert_close(got, wanted, 0.01)


def test_what_a_forward_pass_writes_to_nnx_modules_is_written():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(N, 32, rngs=rngs)
            self.norm = nnx.BatchNorm(32, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return keep_float32(self.dropout)(keep_float32(self.norm)(self.dense(x)))

    def step(loss):
        model = Net(nnx.Rngs(0))
        result = nnx.jit(nnx.value_and_grad(loss))(model, X)
        written = nnx.state(model, (nnx.BatchStat, nnx.RngCount))
        return jax.tree.leaves((result, written))

    wanted = step(bare_nnx_loss)
    half = functools.partial(jmp_scale.nnx.autocast, bare_nnx_loss, "float16")
    assert_close(step(half()), wanted, 0.02)
    # The counter of the random stream is among them.
    assert any(x.dtype == jnp.uint32 and x == 1 for x in wanted)


@pytest.mark.parametrize("transform", [lambda f: f, nnx.jit])
def test_attributes_that_nnx_modules_write_arrive(transform):
    class Net(nnx.Module):
        def __init__(self):
            self.dense, self.calls = nnx.Linear(N, N, rngs=nnx.Rngs(0)), 0

        def __call__(self, x):
            self.calls += 1
            self.label, self.lazy = "called", nnx.Linear(N, 3, rngs=nnx.Rngs(1))
            return self.lazy(self.dense(x))

    model = Net()
    half = jmp_scale.nnx.autocast(lambda model, x: model(x), "bfloat16")
    transform(half)(model, X)
    assert (model.calls, model.label, model.lazy.out_features) == (1, "called", 3)
