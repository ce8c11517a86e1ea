"""A text and a model: a small transformer of characters, or of several at a time."""

import functools
import pathlib
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 2


def load_text():
    """Python's standard library as ASCII codes, i32[n]."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(path.read_text(errors="ignore") for path in files)
    return np.frombuffer(text.encode("ascii", "ignore"), np.uint8).astype(np.int32)


def batches(count, size=16, letters=1):
    """Random pieces of the text, i32[count, size, CONTEXT + 1]: `letters` a token."""
    text = load_text()
    text = text[: len(text) // letters * letters].reshape(-1, letters)
    text = text @ 128 ** np.arange(letters, dtype=np.int32)[::-1]
    shape = (count, size, 1)
    starts = np.random.RandomState(0).randint(0, len(text) - CONTEXT - 1, shape)
    return text[starts + np.arange(CONTEXT + 1)]


class Layer(nnx.Module):
    def __init__(self, rngs):
        linear = functools.partial(nnx.Linear, rngs=rngs)
        norm = functools.partial(nnx.LayerNorm, WIDTH, rngs=rngs)
        self.norms = nnx.List([norm(), norm()])
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def __call__(self, x):
        heads = self.qkv(self.norms[0](x)).reshape(*x.shape[:2], 3 * HEADS, -1)
        x = x + self.out(attend(*jnp.split(heads, 3, axis=2)).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


def attend(q, k, v):
    """Causal attention of [batch, CONTEXT, heads, n]."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(jnp.tri(CONTEXT, dtype=bool), scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


class Transformer(nnx.Module):
    """Logits of the next token."""

    def __init__(self, rngs, vocabulary=128, use_bias=True):
        embed = functools.partial(
            nnx.Embed, features=WIDTH, dtype=jnp.float32, rngs=rngs
        )
        self.characters, self.positions = embed(vocabulary), embed(CONTEXT)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, vocabulary, use_bias=use_bias, rngs=rngs)

    def __call__(self, text):
        return self.out(self.hidden(text))

    def hidden(self, text):
        """What the last product reads, f32[batch, CONTEXT, WIDTH]."""
        x = self.characters(text) + self.positions(jnp.arange(CONTEXT))[None]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)
