"""Three small tasks that are trained, with losses near zero and of two nats."""

import functools
import pathlib
import sysconfig
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

CONTEXT, WIDTH = 16, 32
LAYERS = ("attention", "layers")
WIDTHS = (64, 128, 64, 32, 16, 32, 64, 128, 64)  # of the autoencoder


class Task(NamedTuple):
    """One thing to train."""

    init: Callable[[jax.Array], Any]  # parameters of a key
    examples: Callable[[jax.Array, int], Any]  # (inputs, targets) of a key and a number
    losses: Callable[[Any, jax.Array, jax.Array], jax.Array]  # of each example, f32[n]
    learning_rate: float  # peak of Adam's cosine schedule
    batch: int = 64  # examples of a step


@functools.cache
def tasks() -> dict[str, Task]:
    from sklearn.datasets import load_digits  # it takes seconds to import

    digits = load_digits()
    images = jnp.float32(digits.data / 16)
    labels = jnp.int32(digits.target)
    text = _text()

    def pictures(key, n):
        x = images[jax.random.randint(key, [n], 0, len(images))]
        return x, x

    def labeled(key, n):
        picks = jax.random.randint(key, [n], 0, len(images))
        return images[picks], labels[picks]

    def snippets(key, n):
        starts = jax.random.randint(key, [n], 0, len(text) - CONTEXT - 1)
        pieces = text[starts[:, None] + jnp.arange(CONTEXT + 1)]
        return pieces[:, :-1], pieces[:, 1:]

    return {
        "autoencoder": Task(dense(WIDTHS), pictures, _squared_errors, 5e-3),
        "classifier": Task(dense((64, 64, 10)), labeled, _cross_entropies, 3e-3),
        "char-LM": Task(_init_language_model, snippets, _character_losses, 3e-3, 8),
    }


def _text():
    """The first modules of Python's standard library as ASCII codes, i32[n]."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    text = "".join(path.read_text(errors="ignore") for path in files)
    codes = np.frombuffer(text.encode("ascii", "ignore"), np.uint8)
    return jnp.asarray(codes.astype(np.int32))


def dense(widths):
    def init(key):
        keys = jax.random.split(key, len(widths) - 1)
        glorot = jax.nn.initializers.glorot_normal()
        shapes = zip(keys, widths[:-1], widths[1:], strict=True)
        return [(glorot(k, shape), jnp.zeros(shape[1])) for k, *shape in shapes]

    return init


def spread_beside(losses, reference):
    """Cells of a row: median, least and largest loss of all seeds, and the verdict."""
    is_as = losses.min() <= reference.max() and losses.max() >= reference.min()
    cells = [f"{of(losses):.3g}" for of in (np.median, np.min, np.max)]
    return [*cells, "as float32" if is_as else "not as float32"]


def _network(params, x, activation):
    *hidden, (w, b) = params
    x = x.astype(w.dtype)
    for weights, bias in hidden:
        x = activation(x @ weights + bias[None])
    return (x @ w + b[None]).astype(jnp.float32)


def _squared_errors(params, x, y):
    outputs = jax.nn.sigmoid(_network(params, x, jax.nn.sigmoid))
    return jnp.mean((outputs - y) ** 2, axis=1)


def _cross_entropies(params, x, y):
    logits = _network(params, x, jax.nn.relu)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def _init_language_model(key):
    keys = iter(jax.random.split(key, 6))

    def normal(*shape):
        return jax.random.normal(next(keys), shape) / np.sqrt(shape[0])

    return {
        "characters": normal(128, WIDTH) * np.sqrt(128),
        "positions": normal(CONTEXT, WIDTH),
        "attention": (normal(WIDTH, 3 * WIDTH), normal(WIDTH, WIDTH)),
        "layers": (normal(WIDTH, 64), normal(64, WIDTH)),
    }


def _character_losses(params, x, y):
    """One block: causal attention of one head, and two layers; tied embeddings."""
    table, (qkv, out), (up, down) = map(params.get, ("characters", *LAYERS))
    h = table[x] + params["positions"][None]
    q, k, v = jnp.split(_normalized(h) @ qkv, 3, axis=-1)
    scores = (q @ k.mT).astype(jnp.float32) / np.sqrt(WIDTH)
    mask = jnp.tri(CONTEXT, dtype=bool)[None]
    attention = jax.nn.softmax(jnp.where(mask, scores, -1e9)).astype(h.dtype)
    h = h + attention @ v @ out
    h = h + jax.nn.relu(_normalized(h) @ up) @ down
    logits = (_normalized(h) @ table.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(axis=1)


def _normalized(x):
    squares = jnp.mean(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(squares + 1e-6).astype(x.dtype)
