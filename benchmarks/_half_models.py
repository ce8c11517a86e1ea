"""Five models, as a float32 program or cast to half precision by hand.

What casts by hand is what each framework's users write: a module's `dtype`, or one cast
of all parameters. Normalization, softmax and losses are float32 either way.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax


class Problem(NamedTuple):
    """A loss of (parameters, batch), and these two; their types where it is large."""

    loss: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any


class Sizes(NamedTuple):
    """Of a transformer that names the next of a row of tokens."""

    layers: int = 6
    width: int = 512
    heads: int = 8
    context: int = 512
    vocabulary: int = 8192
    batch: int = 8


SMALL, LARGE = Sizes(6, 32, 4, 16, 50, 2), Sizes()


def resnet(large: bool, dtype: Any, seed: int = 0) -> Problem:
    """A ResNet with BatchNorm, in Flax Linen: 64 channels, 3 x 3 blocks of 2 layers."""
    channels, blocks, side, size = (64, 3, 32, 256) if large else (8, 1, 16, 8)

    class Block(nn.Module):
        width: int
        stride: int

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y = _conv_norm(self.width, 3, self.stride, dtype)(x)
            y = _conv_norm(self.width, 3, 1, dtype)(nn.relu(y))
            if x.shape != y.shape:
                x = _conv_norm(self.width, 1, self.stride, dtype)(x)
            return nn.relu(x + y)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.relu(_conv_norm(channels, 3, 1, dtype)(x))
            for stage in range(3):
                for block in range(blocks):
                    stride = 2 if stage and not block else 1
                    x = Block(channels * 2**stage, stride)(x)
            return nn.Dense(10, dtype=dtype)(jnp.mean(x, (1, 2)))

    net = Net()
    images = _normal(seed, size, side, side, 3)

    def loss(params: Any, batch: Any) -> jax.Array:
        logits, _ = net.apply(params, batch["x"], mutable=["batch_stats"])
        return cross_entropy(logits, batch["y"])

    params = _made(large, lambda: net.init(jax.random.key(seed), images[:1]))
    return Problem(loss, params, {"x": images, "y": jnp.arange(size) % 10})


def _conv_norm(width: int, size: int, stride: int, dtype: Any) -> Callable[..., Any]:
    conv = nn.Conv(width, (size,) * 2, (stride,) * 2, use_bias=False, dtype=dtype)
    norm = nn.BatchNorm(use_running_average=False, dtype=dtype)
    return lambda x: norm(conv(x))


def linen(large: bool, dtype: Any, seed: int = 0) -> Problem:
    """A transformer in Flax Linen, unrolled, with dropout where it is large."""
    sizes = LARGE if large else SMALL
    width, kept = sizes.width, not large

    class Net(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            x = nn.Embed(sizes.vocabulary, width, dtype=dtype)(ids)
            positions = nn.initializers.normal(0.02)
            x = x + self.param("positions", positions, x.shape[1:]).astype(x.dtype)
            mask = nn.make_causal_mask(ids)
            for _ in range(sizes.layers):
                y = nn.LayerNorm(dtype=dtype)(x)
                y = nn.MultiHeadDotProductAttention(
                    sizes.heads, dtype=dtype, force_fp32_for_softmax=True
                )(y, mask=mask)
                x = x + nn.Dropout(0.1, deterministic=kept)(y)
                y = nn.Dense(4 * width, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
                y = nn.Dense(width, dtype=dtype)(nn.gelu(y))
                x = x + nn.Dropout(0.1, deterministic=kept)(y)
            x = nn.LayerNorm(dtype=dtype)(x)
            return nn.Dense(sizes.vocabulary, dtype=dtype)(x)

    net, batch = Net(), _tokens(sizes)
    keys = {"params": jax.random.key(seed), "dropout": jax.random.key(1)}

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = net.apply(params, batch["x"], rngs={"dropout": jax.random.key(1)})
        return cross_entropy(logits, batch["y"])

    params = _made(large, lambda: net.init(keys, batch["x"]))
    return Problem(loss, params, batch)


def equinox(large: bool, dtype: Any, seed: int = 0) -> Problem:
    """A transformer in Equinox, unrolled, each layer mapped over tokens and batch."""
    sizes = LARGE if large else SMALL
    width, layers = sizes.width, sizes.layers

    def init() -> Any:
        keys = jax.random.split(jax.random.key(seed), (layers + 1, 2))
        attention = lambda key: eqx.nn.MultiheadAttention(sizes.heads, width, key=key)  # noqa: E731
        mlp = lambda key: eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=key)  # noqa: E731
        norm = lambda: eqx.nn.LayerNorm(width)  # noqa: E731
        return {
            "embed": eqx.nn.Embedding(sizes.vocabulary, width, key=keys[-1, 0]),
            "blocks": [(norm(), attention(a), norm(), mlp(b)) for a, b in keys[:-1]],
            "norm": norm(),
            "out": eqx.nn.Linear(width, sizes.vocabulary, key=keys[-1, 1]),
        }

    def net(model: Any, ids: jax.Array) -> jax.Array:
        x = jax.vmap(model["embed"])(ids)
        mask = jnp.tril(jnp.ones((len(ids), len(ids)), bool))
        for norm1, attention, norm2, mlp in model["blocks"]:
            y = jax.vmap(norm1)(x)
            x = x + attention(y, y, y, mask=mask)
            x = x + jax.vmap(mlp)(jax.vmap(norm2)(x))
        return jax.vmap(model["out"])(jax.vmap(model["norm"])(x))

    model = eqx.filter_eval_shape(init) if large else init()
    is_array = lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
    params, static = eqx.partition(model, is_array)

    def loss(params: Any, batch: Any) -> jax.Array:
        model = eqx.combine(cast(params, dtype), static)
        logits = jax.vmap(lambda ids: net(model, ids))(batch["x"])
        return cross_entropy(logits, batch["y"])

    return Problem(loss, params, _tokens(sizes))


def mlp(large: bool, dtype: Any, seed: int = 0) -> Problem:
    """An autoencoder of dense layers."""
    widths = (784, 2048, 1024, 256, 1024, 2048, 784) if large else (64, 32, 16, 32, 64)
    layers = [
        {"w": _normal(seed, i, o) * i**-0.5, "b": jnp.zeros(o, jnp.float32)}
        for i, o in itertools.pairwise(widths)
    ]

    def loss(params: Any, batch: Any) -> jax.Array:
        params, x = cast((params, batch["x"]), dtype)
        for layer in params[:-1]:
            x = jax.nn.gelu(x @ layer["w"] + layer["b"])
        x = wide(x @ params[-1]["w"] + params[-1]["b"])
        return jnp.mean((jax.nn.sigmoid(x) - batch["x"]) ** 2)

    images = jax.nn.sigmoid(_normal(seed, 4096 if large else 32, widths[0]))
    return Problem(loss, layers, {"x": images})


def scanned(large: bool, dtype: Any, seed: int = 0) -> Problem:
    """A transformer in plain JAX, whose layers are one `lax.scan`."""
    sizes = LARGE if large else SMALL
    n, d, h = sizes.layers, sizes.width, sizes.heads
    stacked = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    layers = {k: _normal(seed, n, *s) * s[0] ** -0.5 for k, s in stacked.items()}
    layers |= {f"{k}_b": jnp.zeros((n, s[1]), jnp.float32) for k, s in stacked.items()}
    layers |= {k: jnp.ones((n, d), jnp.float32) for k in ("norm1", "norm2")}
    params = {
        "embed": _normal(seed, sizes.vocabulary, d),
        "layers": layers,
        "norm": jnp.ones(d, jnp.float32),
        "head": _normal(seed, d, sizes.vocabulary) * d**-0.5,
    }

    mask = jnp.tril(jnp.ones((sizes.context, sizes.context), bool))

    def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
        y = wide(x)
        scale = lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
        return ((y - y.mean(-1, keepdims=True)) * scale * gain).astype(x.dtype)

    def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
        w = cast(params, dtype)
        y = norm(x, params["norm1"]) @ w["qkv"] + w["qkv_b"]
        y = y.reshape(*x.shape[:2], 3, h, d // h)
        q, k, v = (y[:, :, i].swapaxes(1, 2) for i in range(3))
        scores = wide(q @ k.mT) * (d // h) ** -0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9)).astype(x.dtype)
        y = (weights @ v).swapaxes(1, 2).reshape(x.shape)
        x = x + y @ w["out"] + w["out_b"]
        y = jax.nn.gelu(norm(x, params["norm2"]) @ w["up"] + w["up_b"])
        return x + y @ w["down"] + w["down_b"], None

    def loss(params: Any, batch: Any) -> jax.Array:
        x, _ = lax.scan(
            layer, cast(params["embed"], dtype)[batch["x"]], params["layers"]
        )
        logits = norm(x, params["norm"]) @ cast(params["head"], dtype)
        logs = jax.nn.log_softmax(wide(logits))
        return -jnp.mean(jnp.take_along_axis(logs, batch["y"][..., None], -1))

    return Problem(loss, params, _tokens(sizes))


MODELS = {f.__name__: f for f in (resnet, linen, equinox, mlp, scanned)}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(wide(logits), labels)
    return losses.mean()


def wide(x: jax.Array) -> jax.Array:
    """`x` in float32 or wider: the reference of gradients runs in float64."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def cast(tree: Any, dtype: Any) -> Any:
    """All arrays in `dtype`, as they are if it is None."""
    return tree if dtype is None else jax.tree.map(lambda x: x.astype(dtype), tree)


def _made(large: bool, init: Callable[[], Any]) -> Any:
    return jax.eval_shape(init) if large else init()


def _tokens(sizes: Sizes) -> Any:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, sizes.vocabulary, (sizes.batch, sizes.context), np.int32)
    return {"x": jnp.asarray(ids), "y": jnp.asarray(np.roll(ids, -1, 1))}


def _normal(seed: int, *shape: int) -> jax.Array:
    rng = np.random.default_rng(1000 * seed + sum(shape))
    return jnp.asarray(rng.standard_normal(shape, np.float32))
