"""Losses that several tests differentiate."""

import importlib
import pathlib

import jax
import jax.numpy as jnp
import optax
from flax import nnx


def forgetful(w, x):
    """Its gradient, 2^-30 for x = 1, is zero in float16 below S = 2^6."""
    half = w.astype(jnp.float16) * x.astype(jnp.float16)
    return (half * jnp.float16(2.0**-10)).astype(jnp.float32).sum() * 2.0**-20


def squared_distances(x, y):
    return (x**2).sum(1)[:, None] + (y**2).sum(1)[None] - 2 * x @ y.T


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def examples(monkeypatch, *names):
    """These modules of the examples."""
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[2] / "examples")
    return [importlib.import_module(name) for name in names]


def of_examples(monkeypatch):
    """Float32 loss, arguments and transform of a policy, a ResNet and an NNX model."""
    names = "_transformer", "policy_gradient", "linen_resnet", "_language"
    transformer, policy, linen, language = examples(monkeypatch, *names)
    keys = jax.random.split(jax.random.key(0), 4)
    tokens = jax.random.randint(keys[0], (16, transformer.LENGTH + 1), 0, 10)
    advantage, sampled = jax.random.normal(keys[1], (2, 16, transformer.LENGTH))
    args = transformer.init_params(0), tokens, -jnp.abs(sampled), advantage
    yield lambda *args: policy.loss_fn(*args, "float32")[0], args, jax.value_and_grad
    images, labels = jax.random.uniform(keys[2], (256, 64)), jnp.arange(256) % 10
    resnet = linen.ResNet()
    variables = resnet.init(keys[0], images, True)

    def of_images(params, images, labels):
        given = {**variables, "params": params}
        logits, _ = resnet.apply(given, images, True, mutable="batch_stats")
        return cross_entropy(logits, labels)

    yield of_images, (variables["params"], images, labels), jax.value_and_grad
    text = jax.random.randint(keys[3], (16, language.CONTEXT + 1), 0, 10)
    network = language.Transformer(nnx.Rngs(0))
    (of_text,) = examples(monkeypatch, "nnx_transformer")
    yield of_text.loss_fn, (network, text), nnx.value_and_grad
