"""Models at the size that people train, and small ones whose gradients are computed.

Each is a float32 program, or cast to half precision by hand as its framework's users do
it: a module's `dtype`, or one cast of all parameters. Normalization, softmax and losses
are float32 either way.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp

import models
from models import Model, Transformer, cast, cross_entropy, transformer, wide
from models.llama import Llama, llama


def linen(sizes: Transformer) -> Model:
    """A transformer in Flax Linen, unrolled."""

    class Block(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
            width, dense = x.shape[-1], functools.partial(nn.Dense, dtype=self.dtype)
            y = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(
                sizes.heads, dtype=self.dtype, force_fp32_for_softmax=True
            )(y, mask=mask)
            y = dense(4 * width)(nn.LayerNorm(dtype=self.dtype)(x))
            return x + dense(width)(nn.gelu(y))

    class Net(nn.Module):
        dtype: Any = None
        checkpointed: bool = False

        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            x = nn.Embed(sizes.vocabulary, sizes.width, dtype=self.dtype)(ids)
            normal, shape = nn.initializers.normal(0.02), (1, *x.shape[1:])
            x = x + self.param("positions", normal, shape).astype(x.dtype)
            block = nn.remat(Block) if self.checkpointed else Block
            for at in range(sizes.layers):
                x = block(self.dtype, name=f"block{at}")(x, nn.make_causal_mask(ids))
            x = nn.LayerNorm(dtype=self.dtype)(x)
            return nn.Dense(sizes.vocabulary, dtype=self.dtype)(x)

    return _linen_model(Net, functools.partial(_tokens, sizes))


def resnet(shape: Any, stem: int | None, blocks: Any, classes: int) -> Model:
    """A ResNet with BatchNorm, in Flax Linen, on a batch of this shape.

    A block is (width, size, stride) of each of its convolutions.
    """

    class Block(nn.Module):
        convolutions: Any
        dtype: Any

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y = x
            for at, convolution in enumerate(self.convolutions):
                y = _conv_norm(*convolution, self.dtype)(nn.relu(y) if at else y)
            if x.shape != y.shape:
                stride = max(stride for _, _, stride in self.convolutions)
                x = _conv_norm(y.shape[-1], 1, stride, self.dtype)(x)
            return nn.relu(x + y)

    class Net(nn.Module):
        dtype: Any = None
        checkpointed: bool = False

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            if stem is not None:
                x = nn.relu(_conv_norm(stem, 3, 1, self.dtype)(x))
            block = nn.remat(Block) if self.checkpointed else Block
            for at, convolutions in enumerate(blocks):
                x = block(convolutions, self.dtype, name=f"Block_{at}")(x)
            return nn.Dense(classes, dtype=self.dtype)(jnp.mean(x, (1, 2)))

    def batch(key: jax.Array) -> Any:
        labels = jnp.arange(shape[0]) % classes
        return {"x": jax.random.normal(key, shape), "y": labels}

    return _linen_model(Net, batch)


def _conv_norm(width: int, size: int, stride: int, dtype: Any) -> Callable[..., Any]:
    conv = nn.Conv(width, (size,) * 2, (stride,) * 2, use_bias=False, dtype=dtype)
    norm = nn.BatchNorm(use_running_average=False, dtype=dtype)
    return lambda x: norm(conv(x))


def _linen_model(net: Any, batch: Any) -> Model:
    """A classifier: `net` of (dtype, checkpointed), `batch` of a key."""

    def init(key: jax.Array) -> Any:
        made = batch(key)
        return net().init(key, made["x"][:1]), made

    def loss(params: Any, batch: Any, *how: Any) -> jax.Array:
        logits, _ = net(*how).apply(params, batch["x"], mutable=["batch_stats"])
        return models.mean_loss(logits, batch["y"])

    return Model(init, loss)


def equinox(sizes: Transformer) -> Model:
    """A transformer in Equinox, unrolled, each layer mapped over tokens and batch."""
    width = sizes.width

    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key, (sizes.layers + 1, 2))
        attention = lambda key: eqx.nn.MultiheadAttention(sizes.heads, width, key=key)  # noqa: E731
        mlp = lambda key: eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=key)  # noqa: E731
        norm = lambda: eqx.nn.LayerNorm(width)  # noqa: E731
        return {
            "embed": eqx.nn.Embedding(sizes.vocabulary, width, key=keys[-1, 0]),
            "blocks": [(norm(), attention(a), norm(), mlp(b)) for a, b in keys[:-1]],
            "norm": norm(),
            "out": eqx.nn.Linear(width, sizes.vocabulary, key=keys[-1, 1]),
        }

    def init(key: jax.Array) -> Any:
        return eqx.filter(make(key), eqx.is_array), _tokens(sizes, key)

    def block(layers: Any, x: jax.Array) -> jax.Array:
        norm1, attention, norm2, mlp = layers
        y = jax.vmap(norm1)(x)
        x = x + attention(y, y, y, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(mlp)(jax.vmap(norm2)(x))

    def loss(params: Any, batch: Any, dtype: Any, checkpointed: bool) -> jax.Array:
        shapes = eqx.filter_eval_shape(make, jax.random.key(0))
        static = eqx.filter(shapes, lambda x: not hasattr(x, "shape"))
        model = eqx.combine(cast(params, dtype), static)
        wrapped = eqx.filter_checkpoint(block) if checkpointed else block

        def net(ids: jax.Array) -> jax.Array:
            x = jax.vmap(model["embed"])(ids)
            for layers in model["blocks"]:
                x = wrapped(layers, x)
            return jax.vmap(model["out"])(jax.vmap(model["norm"])(x))

        return cross_entropy(jax.vmap(net)(batch["x"]), batch["y"])

    return Model(init, loss)


def mlp(widths: Any, rows: int, activation: Any) -> Model:
    """Dense layers in plain JAX."""

    def layers(key: jax.Array) -> Any:
        shapes = itertools.pairwise(widths)
        return [{"w": _weight(key, *s), "b": jnp.zeros(s[1])} for s in shapes]

    def layer(x: jax.Array, params: Any) -> jax.Array:
        return activation(x @ params["w"] + params["b"][None])

    return _chain(layers, layer, (rows, widths[0]))


def mixer(blocks: int, images: int, patches: int, width: int) -> Model:
    """An MLP-Mixer in plain JAX, without its first and last layer."""

    def layers(key: jax.Array) -> Any:
        norm = {"gain": jnp.ones(width), "bias": jnp.zeros(width)}
        shapes = {"a": (patches, 4 * patches), "b": (4 * patches, patches)}
        shapes |= {"c": (width, 4 * width), "d": (4 * width, width)}
        layer = {name: _weight(key, *shape) for name, shape in shapes.items()}
        return [layer | {"norm1": norm, "norm2": norm}] * blocks

    def block(x: jax.Array, layer: Any) -> jax.Array:
        y = models.normalize(x, layer["norm1"]).mT
        x = x + (jax.nn.gelu(y @ layer["a"]) @ layer["b"]).mT
        y = models.normalize(x, layer["norm2"])
        return x + jax.nn.gelu(y @ layer["c"]) @ layer["d"]

    return _chain(layers, block, (images, patches, width))


def _chain(layers: Any, block: Any, shape: Any) -> Model:
    """Blocks one after another, whose last result should be zero."""

    def init(key: jax.Array) -> Any:
        return layers(key), jax.random.normal(key, shape)

    def loss(params: Any, batch: Any, dtype: Any, checkpointed: bool) -> jax.Array:
        cast_block = lambda x, layer: block(x, cast(layer, dtype))  # noqa: E731
        wrapped = jax.checkpoint(cast_block) if checkpointed else cast_block
        return jnp.mean(
            wide(functools.reduce(wrapped, params, cast(batch, dtype))) ** 2
        )

    return Model(init, loss)


def _weight(key: jax.Array, rows: int, columns: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.fold_in(key, rows), columns)
    return jax.random.normal(key, (rows, columns)) * rows**-0.5


def _tokens(sizes: Transformer, key: jax.Array) -> Any:
    ids = jax.random.randint(key, (sizes.batch, sizes.context), 0, sizes.vocabulary)
    return {"x": ids, "y": jnp.roll(ids, -1, 1)}


STAGE_3 = [((256, 1, 1), (256, 3, 1 if at else 2), (1024, 1, 1)) for at in range(6)]
BASIC = [((8 * n, 3, 1 if n == 1 else 2), (8 * n, 3, 1)) for n in (1, 2, 4)]
TINY = Transformer(6, 32, 4, 50, 16, 2)
GPT = functools.partial(Transformer, vocabulary=8192)
CUDNN = models.cudnn_attention  # on an H100 alone; there is no float32 program of it
LLAMA = Llama(4, 2048, 16, 32_000, 2048, 4)
# The TPU's compiler takes minutes for a width of 2,048.
NARROW = Llama(4, 1024, 8, 32_000, 2048, 4, hidden=2816, groups=2)

# In the order of their compile times.
LARGE = {
    "mlp-gelu": mlp([4096] * 9, 8192, jax.nn.gelu),
    "mlp-relu": mlp([4096] * 9, 8192, jax.nn.relu),
    "resnet50-stage3": resnet((32, 28, 28, 512), None, STAGE_3, 1000),
    "mixer8": mixer(8, 64, 256, 768),
    "gpt12-scan": transformer(GPT(12), scanned=True),
    "gpt4": transformer(GPT(4)),
    "gpt4-V50257": transformer(Transformer(4)),
    "gpt4-V50257-cudnn": transformer(Transformer(4), attention=CUDNN),
    "gpt4-divided-last": transformer(GPT(4), attention=models.attend_divided_last),
    "equinox4": equinox(GPT(4)),
    "llama4": llama(LLAMA),
    "llama4-scan": llama(LLAMA, scanned=True),
    "llama4-cudnn": llama(LLAMA, attention=CUDNN),
    "llama4-scan-cudnn": llama(LLAMA, scanned=True, attention=CUDNN),
    "llama4-1024": llama(NARROW),
    "llama4-1024-scan": llama(NARROW, scanned=True),
}
DEEP = {
    "gpt12": transformer(GPT(12)),
    "linen12": linen(GPT(12)),
    "equinox12": equinox(GPT(12)),
}
SMALL = {
    "resnet": resnet((16, 8, 8, 3), 8, BASIC, 10),
    "linen": linen(TINY),
    "equinox": equinox(TINY),
    "mlp": mlp((64, 32, 16, 32, 64), 32, jax.nn.gelu),
    "scanned": transformer(TINY, scanned=True),
}
