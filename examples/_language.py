"""The text and the model of `nnx_transformer.py`: a small character transformer."""

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


def batches(count, size=16):
    """Random pieces of the text, i32[count, size, CONTEXT + 1]."""
    text = load_text()
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
    """Logits of the next character."""

    def __init__(self, rngs):
        embed = functools.partial(
            nnx.Embed, features=WIDTH, dtype=jnp.float32, rngs=rngs
        )
        self.characters, self.positions = embed(128), embed(CONTEXT)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 128, rngs=rngs)

    def __call__(self, text):
        x = self.characters(text) + self.positions(jnp.arange(CONTEXT))[None]
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))
