"""A transformer in plain JAX, whose parameters are a dictionary.

Written for these benchmarks, with synthetic data; nothing is taken from a published
implementation. Parameters are float32, and cast to `dtype` inside the loss; statistics
and losses are float32.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jmp_scale


class Model(NamedTuple):
    params: Any
    loss: Callable[[Any, Any, Any], jax.Array]  # of (params, batch, dtype), f32[]
    batch: Any


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Sizes of a transformer with pre-normalization and tied embeddings.

    It predicts the next token.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    context: int = 1024


def transformer(sizes: Transformer, batch_size: int) -> Model:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, sizes.vocabulary, (batch_size, sizes.context), np.int32)

    def loss(params, batch, dtype):
        return _loss(sizes, params, batch, dtype)

    return Model(transformer_params(sizes), loss, {"tokens": tokens})


def transformer_params(sizes: Any, key: jax.Array | None = None) -> Any:
    """16 leaves a layer and 4 more."""
    d = sizes.width
    shapes = dict.fromkeys("qkvo", (d, d)) | {"up": (d, 4 * d), "down": (4 * d, d)}
    key = jax.random.key(0) if key is None else key
    keys = iter(jax.random.split(key, len(shapes) * sizes.layers + 2))

    def normal(*shape):
        return 0.02 * jax.random.normal(next(keys), shape)

    def norm():
        return {"gain": jnp.ones(d), "bias": jnp.zeros(d)}

    def layer():
        dense = {
            name: {"kernel": normal(*shape), "bias": jnp.zeros(shape[1])}
            for name, shape in shapes.items()
        }
        return dense | {"norm1": norm(), "norm2": norm()}

    return {
        "tokens": normal(sizes.vocabulary, d),
        "positions": normal(sizes.context, d),
        "layers": [layer() for _ in range(sizes.layers)],
        "norm": norm(),
    }


def _loss(sizes, params, batch, dtype):
    params = jmp_scale.Policy(jnp.float32, dtype, jnp.float32).cast_to_compute(params)
    tokens = batch["tokens"]
    x = params["tokens"][tokens] + params["positions"][None]
    for layer in params["layers"]:
        x = x + attention(sizes, layer, normalize(x, layer["norm1"]))
        hidden = jax.nn.gelu(dense(normalize(x, layer["norm2"]), layer["up"]))
        x = x + dense(hidden, layer["down"])
    logits = (normalize(x, params["norm"]) @ params["tokens"].T).astype(jnp.float32)
    targets = jnp.roll(tokens, -1, axis=1)
    logs = jax.nn.log_softmax(logits)
    losses = -jnp.take_along_axis(logs, targets[..., None], axis=-1)[..., 0]
    has_next = jnp.arange(sizes.context) < sizes.context - 1
    counted = jnp.broadcast_to(has_next, tokens.shape)
    return jnp.sum(losses * counted) / jnp.sum(counted)


def dense(x, layer):
    return x @ layer["kernel"] + jnp.expand_dims(layer["bias"], range(x.ndim - 1))


def normalize(x, norm):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
    wide = (wide - wide.mean(-1, keepdims=True)) * scale
    return wide.astype(x.dtype) * norm["gain"][None, None] + norm["bias"][None, None]


def attend(q, k, v):
    """Of queries, keys and values (batch, position, head, width), causal."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = scores.astype(jnp.promote_types(q.dtype, jnp.float32))
    seen = jnp.tri(q.shape[1], dtype=bool)[None, None]
    scores = jnp.where(seen, scores / math.sqrt(q.shape[-1]), -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(q.dtype), v)


def attention(sizes, layer, x, attend=attend):
    heads = (*x.shape[:2], sizes.heads, sizes.width // sizes.heads)
    q, k, v = (dense(x, layer[name]).reshape(heads) for name in "qkv")
    return dense(attend(q, k, v).reshape(x.shape), layer["o"])
