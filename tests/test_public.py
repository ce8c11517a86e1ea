"""Public names are those of jmp_scale, wherever they are defined."""

import inspect
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import assert_bitwise_equal

import jmp_scale
import jmp_scale.nnx
from jmp_scale import DynamicLossScale, SpikeGuard, checkpoints, diagnostics, presets
from jmp_scale.linen import TrainState


def definitions(module):
    """Public classes and functions of a module, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and (inspect.isclass(value) or callable(value))
    }


PUBLIC = {
    f"{module.__name__}.{name}": value
    for module in (jmp_scale, diagnostics)
    for name, value in definitions(module).items()
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_pickled_by_where_users_import_it(name):
    value = PUBLIC[name]
    assert f"{value.__module__}.{value.__qualname__}" == name
    assert pickle.loads(pickle.dumps(value)) is value


def test_a_pickled_state_names_no_private_module():
    tx = jmp_scale.with_loss_scale(
        optax.adam(0.1), DynamicLossScale(), guard=SpikeGuard()
    )
    state = tx.init(jnp.ones(2))
    data = pickle.dumps(state._replace(inner_state=()))
    assert b"jmp_scale" in data
    assert b"jmp_scale._" not in data
    restored, leaves = pickle.loads(data), jax.tree.leaves(state.guard)
    assert restored.loss_scale.period == DynamicLossScale().period
    assert [*map(float, jax.tree.leaves(restored.guard))] == [*map(float, leaves)]


PARAMS, ADAM = {"w": jnp.full((4, 4), 0.5)}, optax.adam(0.1)


def square(w):
    return w @ w


def loss(params):
    return jnp.sum(jnp.tanh(square(params["w"])) @ params["w"])


def nnx_loss(model):
    return jnp.sum(model(jnp.ones((4, 4))))


def linear():
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def state():
    return jmp_scale.with_loss_scale(ADAM, DynamicLossScale()).init(PARAMS)


def linen_state():
    kwargs = {"apply_fn": loss, "params": PARAMS, "tx": ADAM}
    return TrainState.create(**kwargs, loss_scale=DynamicLossScale())


def nnx_optimizer():
    return jmp_scale.nnx.Optimizer(linear(), ADAM, loss_scale=DynamicLossScale())


def in_half(options=None, wrapper=jmp_scale.autocast, fun=loss):
    return wrapper(fun, "float16", **(options or {}))


# What functions return that is called later, by a worker that it was sent to, and what
# it is called with.
CALLED = {
    "autocast": (in_half, PARAMS),
    "autocast, with names": (lambda: in_half({"keep_float32": ("square",)}), PARAMS),
    "nnx.autocast": (lambda: in_half(None, jmp_scale.nnx.autocast, nnx_loss), linear),
    "keep_float32": (lambda: jmp_scale.keep_float32(loss), PARAMS),
    "in_half": (lambda: jmp_scale.in_half(loss), PARAMS),
    "value_and_grad": (
        lambda: jmp_scale.value_and_grad(in_half(), DynamicLossScale()),
        PARAMS,
    ),
    "value_and_grad, compiled": (
        lambda: jax.jit(jmp_scale.value_and_grad(loss, jmp_scale.NoOpLossScale())),
        PARAMS,
    ),
    "grad": (lambda: jmp_scale.grad(loss, jmp_scale.StaticLossScale(8.0)), PARAMS),
    "TrainState.value_and_grad": (
        lambda: linen_state().value_and_grad(in_half()),
        PARAMS,
    ),
    "Optimizer.value_and_grad": (
        lambda: nnx_optimizer().value_and_grad(nnx_loss),
        linear,
    ),
}


@pytest.mark.parametrize("name", CALLED)
def test_a_function_that_comes_back_from_cloudpickle_returns_the_same(name):
    make, argument = CALLED[name]
    fun, args = make(), [argument() if callable(argument) else argument]
    assert_bitwise_equal(pickle.loads(cloudpickle.dumps(fun))(*args), fun(*args))


# Other results, most of them without arguments.
RESULTS = {
    "with_loss_scale": lambda: jmp_scale.with_loss_scale(ADAM, guard=SpikeGuard()),
    "with_half_storage": lambda: jmp_scale.with_half_storage(ADAM),
    "state": state,
    "linen state": linen_state,
    "nnx optimizer": nnx_optimizer,
    "get_policy": lambda: jmp_scale.get_policy("p=f32,c=f16"),
    "get_loss_scale": lambda: jmp_scale.get_loss_scale("dynamic"),
    "presets": lambda: [
        presets.jmp(8.0),
        presets.mpx(8.0, 1.0),
        presets.mindspore(8.0, 2, 3),
        *(getattr(presets, name)() for name in {*presets.__all__} - NEED_ARGUMENTS),
    ],
    "restore": lambda: checkpoints.restore(lambda template: template, state()),
    "history": lambda: diagnostics.LossScaleHistory.create(3).push(state(), state()),
    "HealthLog": diagnostics.HealthLog,
    "metrics": lambda: diagnostics.metrics(state(), PARAMS),
    "precision_report": lambda: diagnostics.precision_report(in_half(), PARAMS),
    "compare_gradients": lambda: diagnostics.compare_gradients(in_half(), loss, PARAMS),
    "diagnose_nonfinite": lambda: diagnostics.diagnose_nonfinite(
        lambda params: jnp.log(-loss(params)), DynamicLossScale(), PARAMS
    ),
}
NEED_ARGUMENTS = {"jmp", "mpx", "mindspore"}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_comes_back_from_cloudpickle(name):
    result = RESULTS[name]()
    restored = pickle.loads(cloudpickle.dumps(result))
    assert type(restored) is type(result)
    assert len(jax.tree.leaves(restored)) == len(jax.tree.leaves(result))
