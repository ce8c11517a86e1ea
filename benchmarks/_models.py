"""Models of the sizes that people train, in plain JAX.

Parameters are dictionaries, and a loss is that of one batch. Written for these
benchmarks, with synthetic data; nothing is taken from a published implementation.
Parameters are float32, and cast to `dtype` inside the loss; statistics and losses are
float32.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmp_scale


@dataclasses.dataclass(frozen=True)
class Model:
    """Parameters, the loss `loss(params, batch, dtype) -> f32[]`, and a batch."""

    params: Any
    loss: Callable[[Any, Any, Any], jax.Array]
    batch: Any


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Sizes of a transformer with pre-normalization and tied embeddings.

    Attributes:
      causal: predicts the next token (as GPT-2), or else 15 % of the tokens, masked
        (as BERT).
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    context: int = 1024
    causal: bool = True


GPT2_SMALL = Transformer()
BERT_BASE = Transformer(vocabulary=30522, context=512, causal=False)


def transformer(sizes: Transformer, batch_size: int) -> Model:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, sizes.vocabulary, (batch_size, sizes.context), np.int32)
    batch = {"tokens": tokens, "masked": rng.random(tokens.shape) < 0.15}
    return Model(
        transformer_params(sizes),
        lambda p, b, d: _transformer_loss(sizes, p, b, d),
        batch,
    )


def transformer_params(sizes: Transformer) -> Any:
    """16 leaves a layer and 4 more."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(0.02 * rng.standard_normal(shape, np.float32))

    def layer():
        d = sizes.width
        kernels = {
            "q": (d, d),
            "k": (d, d),
            "v": (d, d),
            "o": (d, d),
            "up": (d, 4 * d),
            "down": (4 * d, d),
        }
        dense = {
            name: {"kernel": normal(*s), "bias": jnp.zeros(s[1])}
            for name, s in kernels.items()
        }
        return dense | {
            name: {"gain": jnp.ones(d), "bias": jnp.zeros(d)}
            for name in ("norm1", "norm2")
        }

    return {
        "tokens": normal(sizes.vocabulary, sizes.width),
        "positions": normal(sizes.context, sizes.width),
        "layers": [layer() for _ in range(sizes.layers)],
        "norm": {"gain": jnp.ones(sizes.width), "bias": jnp.zeros(sizes.width)},
    }


def _transformer_loss(
    sizes: Transformer, params: Any, batch: Any, dtype: Any
) -> jax.Array:
    params = jmp_scale.Policy(jnp.float32, dtype, jnp.float32).cast_to_compute(params)
    tokens, counted = batch["tokens"], batch["masked"]
    targets = tokens
    if sizes.causal:
        targets = jnp.roll(tokens, -1, axis=1)
        counted = jnp.broadcast_to(
            jnp.arange(sizes.context) < sizes.context - 1, tokens.shape
        )
    else:
        tokens = jnp.where(counted, 0, tokens)
    x = params["tokens"][tokens] + params["positions"][None]
    for layer in params["layers"]:
        x = x + _attention(sizes, layer, _normalize(x, layer["norm1"]))
        x = x + _dense(
            jax.nn.gelu(_dense(_normalize(x, layer["norm2"]), layer["up"])),
            layer["down"],
        )
    logits = (_normalize(x, params["norm"]) @ params["tokens"].T).astype(jnp.float32)
    losses = -jnp.take_along_axis(
        jax.nn.log_softmax(logits), targets[..., None], axis=-1
    )[..., 0]
    return jnp.sum(losses * counted) / jnp.sum(counted)


def _dense(x: jax.Array, layer: Any) -> jax.Array:
    return x @ layer["kernel"] + jnp.expand_dims(layer["bias"], range(x.ndim - 1))


def _normalize(x: jax.Array, norm: Any) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(
        wide.var(-1, keepdims=True) + 1e-5
    )
    gain, bias = (
        jnp.expand_dims(norm[name], range(x.ndim - 1)) for name in ("gain", "bias")
    )
    return wide.astype(x.dtype) * gain + bias


def _attention(sizes: Transformer, layer: Any, x: jax.Array) -> jax.Array:
    heads = (*x.shape[:2], sizes.heads, sizes.width // sizes.heads)
    q, k, v = (_dense(x, layer[name]).reshape(heads) for name in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / math.sqrt(
        heads[-1]
    )
    if sizes.causal:
        seen = jnp.tri(sizes.context, dtype=bool)[None, None]
        scores = jnp.where(seen, scores, -jnp.inf)
    attended = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), v)
    return _dense(attended.reshape(x.shape), layer["o"])


def resnet50(
    image_size: int,
    batch_size: int,
    width: int = 64,
    blocks: tuple[int, ...] = (3, 4, 6, 3),
) -> Model:
    """Bottleneck blocks, batch normalization with batch statistics, 1000 classes."""
    rng = np.random.default_rng(0)

    def conv(size, inputs, outputs):
        scale = math.sqrt(2 / (size * size * inputs))
        kernel = scale * rng.standard_normal((size, size, inputs, outputs), np.float32)
        return {
            "kernel": jnp.asarray(kernel),
            "gain": jnp.ones(outputs),
            "bias": jnp.zeros(outputs),
        }

    channels, stages = width, []
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        for block in range(count):
            layers = {
                "1": conv(1, channels, inner),
                "2": conv(3, inner, inner),
                "3": conv(1, inner, 4 * inner),
            }
            if block == 0:
                layers["shortcut"] = conv(1, channels, 4 * inner)
            stages.append(layers)
            channels = 4 * inner
    head = {
        "kernel": jnp.asarray(0.01 * rng.standard_normal((channels, 1000), np.float32)),
        "bias": jnp.zeros(1000),
    }
    params = {"stem": conv(7, 3, width), "blocks": stages, "head": head}
    images = rng.standard_normal((batch_size, image_size, image_size, 3), np.float32)
    batch = {"images": images, "labels": rng.integers(0, 1000, batch_size, np.int32)}
    first_of_stage = {sum(blocks[:stage]) for stage in range(1, len(blocks))}
    return Model(params, lambda p, b, d: _resnet_loss(first_of_stage, p, b, d), batch)


def _resnet_loss(
    first_of_stage: set[int], params: Any, batch: Any, dtype: Any
) -> jax.Array:
    params = jmp_scale.Policy(jnp.float32, dtype, jnp.float32).cast_to_compute(params)
    x = jax.nn.relu(_conv(batch["images"].astype(dtype), params["stem"], 2))
    x = jax.lax.reduce_window(
        x, np.array(-np.inf, x.dtype), jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"
    )
    for i, layers in enumerate(params["blocks"]):
        stride = 2 if i in first_of_stage else 1
        y = jax.nn.relu(_conv(x, layers["1"], 1))
        y = _conv(jax.nn.relu(_conv(y, layers["2"], stride)), layers["3"], 1)
        x = jax.nn.relu(
            y + (_conv(x, layers["shortcut"], stride) if "shortcut" in layers else x)
        )
    logits = _dense(x.mean((1, 2)), params["head"]).astype(jnp.float32)
    return -jnp.take_along_axis(
        jax.nn.log_softmax(logits), batch["labels"][:, None], axis=1
    ).mean()


def _conv(x: jax.Array, layer: Any, stride: int) -> jax.Array:
    """Convolution and batch normalization."""
    dims = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(
        x, layer["kernel"], (stride, stride), "SAME", dimension_numbers=dims
    )
    wide = x.astype(jnp.float32)
    axes = (0, 1, 2)
    wide = (wide - wide.mean(axes, keepdims=True)) * jax.lax.rsqrt(
        wide.var(axes, keepdims=True) + 1e-5
    )
    return (
        wide.astype(x.dtype) * layer["gain"][None, None, None]
        + layer["bias"][None, None, None]
    )
