"""Steps of the examples are right: `check_step` says nothing of them but notes."""

import functools
import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import one_of

import jmp_scale
from jmp_scale import diagnostics

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"
DYNAMIC = jmp_scale.DynamicLossScale()
KEY = jax.random.key(0)
pytestmark = pytest.mark.usefixtures("ranks_promote")


def digits(name, *args):
    return getattr(importlib.import_module("_digits"), name)(*args)


def images():
    return digits("image_batches", 1, 8)[0]


def labelled():
    return tuple(x[0] for x in digits("labelled_batches", 1, 8))


def carried(tx, params, *more):
    return params, tx.init(params), *more


def autoencoder(step, tx):
    return step, carried(tx, digits("init_autoencoder")), images()


def quickstart(m):
    params = [jax.random.normal(key, (32, 32)) / 6 for key in jax.random.split(KEY, 3)]
    return m.train_step, *carried(m.tx, params), jax.random.uniform(KEY, (8, 32))


def gan(m):
    widths = (16, 128, 64), (64, 64, 1)
    players = [digits("init_layers", w, KEY, "he_normal") for w in widths]
    players = tuple(carried(m.TX, params) for params in players)
    return m.train_step, players, (images(), KEY, np.float32(1))


def gaussian_process(m):
    params = digits("init_layers", [4, 8, 8], KEY)
    tx = jmp_scale.with_loss_scale(optax.adam(3e-3), DYNAMIC)
    half = jmp_scale.autocast(m.loss_fn, "float16", keep_float32="distances")
    batch = [x[0] for x in m.data(KEY, 1)]
    return functools.partial(m.train_step, half, tx), carried(tx, params), batch


def linen_resnet(m):
    model, batch = m.ResNet(channels=4, blocks=1), labelled()
    variables = model.init(KEY, batch[0], True)
    tx = {"tx": optax.adam(3e-3), "loss_scale": DYNAMIC}
    state = m.State.create(apply_fn=model.apply, **variables, **tx)
    return m.train_step, state, batch


def multihost(m):
    tx = jmp_scale.with_loss_scale(optax.adam(5e-3), DYNAMIC)
    params, weights = digits("init_autoencoder"), digits("weights", 8, False)
    step = functools.partial(m.train_step, tx)
    return step, carried(tx, params), images(), weights


def nan_image(m):
    tx, step = m.trainer(DYNAMIC, True)
    return autoencoder(step, tx)


def nnx_transformer(m):
    language = importlib.import_module("_language")
    model = language.Transformer(m.nnx.Rngs(0))
    tx = optax.MultiSteps(optax.adam(3e-3), 2).gradient_transformation()
    optimizer = jmp_scale.nnx.Optimizer(model, tx, loss_scale=DYNAMIC)
    text = jnp.arange(2 * (language.CONTEXT + 1)).reshape(2, -1) % 128
    return m.train_step, model, optimizer, text


def pinn(m):
    tx = jmp_scale.with_loss_scale(optax.adam(1e-2), DYNAMIC)
    init = functools.partial(digits, "init_layers", [1, 8, 8, 1])
    params = jax.vmap(init)(jax.random.split(KEY, 2))
    step = jax.vmap(functools.partial(m.train_step, tx, "float16"))
    return step, (params, jax.vmap(tx.init)(params)), jax.random.split(KEY, 2)


def policy_gradient(m):
    tx = jmp_scale.with_loss_scale(optax.adam(3e-3), DYNAMIC)
    params = importlib.import_module("_transformer").init_params(0)
    return functools.partial(m.train_step, tx, "float16"), carried(tx, params), KEY


def precision_fallback(m):
    params = {"layers": digits("init_classifier"), "t": jnp.float32(0.1)}
    return m.train_step, carried(m.TX, params), labelled()


def rewind(m):
    params = digits("init_autoencoder")
    state = {"params": params, "opt_state": m.TX.init(params)}
    state["history"] = diagnostics.LossScaleHistory.create(50)
    return m.train_step, state, images()


def several_losses(m):
    scales = dict.fromkeys(m.WEIGHTS, m.DYNAMIC)
    state = carried(m.TX, digits("init_two_heads"), scales)
    return m.train_step, state, labelled()


def shared_scale(m):
    params = digits("init_two_heads")
    states = {name: tx.init(params[name]) for name, tx in m.OPTIMIZERS.items()}
    return m.train_step, (params, states, DYNAMIC), labelled()


STEPS = {
    "quickstart": quickstart,
    "gan": gan,
    "gaussian_process": gaussian_process,
    "linen_resnet": linen_resnet,
    "log_metrics": lambda m: autoencoder(m.train_step, m.TX),
    "multihost": multihost,
    "nan_image": nan_image,
    "nnx_transformer": nnx_transformer,
    "pinn": pinn,
    "policy_gradient": policy_gradient,
    "precision_fallback": precision_fallback,
    "resume": lambda m: (m.train_step, m.init(), labelled()),
    "rewind": rewind,
    "shared_scale": shared_scale,
    "several_losses": several_losses,
}
# Without a step of float32 parameters, of one device, or of their own: a gradient
# descent by hand, steps of other examples, data_parallel.py is that of multihost.py.
OTHERS = {"linear_regression", "diagnose", "train_digits", "data_parallel"}
# These skip no step, and this one checks its step itself.
OTHERS |= {"bfloat16_equinox", "bfloat16_storage", "from_pytorch"}


def test_each_example_is_here():
    names = {path.stem for path in EXAMPLES.glob("[!_]*.py")}
    assert names == STEPS.keys() | OTHERS


@pytest.mark.parametrize("name", one_of(len(STEPS), STEPS))
def test_the_step_of_an_example_is_right(name, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("XLA_FLAGS", "")
    step, *args = STEPS[name](importlib.import_module(name))
    if not (hasattr(step, "_cache_size") or name == "nnx_transformer"):
        step = jax.jit(step)
    found = diagnostics.check_step(step, *args)
    assert found.ok, str(found)
