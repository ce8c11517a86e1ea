"""Models at the size that people train, and small ones whose gradients are computed.

Each is a float32 program, or cast to half precision by hand as its framework's users do
it: a module's `dtype`, or one cast of all parameters. Normalization, softmax and losses
are float32 either way. Parameters and batches are made of a key, so that
`jax.eval_shape` gives their types and nothing is allocated.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import _models
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax


class Model(NamedTuple):
    """What is differentiated.

    Attributes:
      init: parameters and batch of a key.
      loss: of (parameters, batch, dtype, checkpointed), where the dtype None leaves
        them as they are, and each block is in a `jax.checkpoint` if checkpointed.
      options: of `autocast`.
    """

    init: Callable[[jax.Array], tuple[Any, Any]]
    loss: Callable[[Any, Any, Any, bool], jax.Array]
    options: Any = {}  # noqa: RUF012


class Sizes(NamedTuple):
    """Of a transformer that names the next of a row of tokens."""

    layers: int
    vocabulary: int = 8192
    width: int = 768
    heads: int = 12
    context: int = 1024
    batch: int = 8


TINY = Sizes(6, 50, 32, 4, 16, 2)


def gpt(sizes: Sizes, *, scanned: bool = False, keep_scores: bool = True) -> Model:
    """GPT-2 in plain JAX, unrolled or one `lax.scan`, with tied embeddings."""
    attend = _models.attend if keep_scores else jax.checkpoint(_models.attend)

    def init(key: jax.Array) -> Any:
        params = _models.transformer_params(sizes, key)
        if scanned:
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *params["layers"])
            params["layers"] = stacked
        return params, _tokens(sizes, key)

    def loss(params: Any, batch: Any, dtype: Any, checkpointed: bool) -> jax.Array:
        @_checkpoint(checkpointed)
        def block(x: jax.Array, layer: Any) -> jax.Array:
            layer = cast(layer, dtype)
            y = _models.normalize(x, layer["norm1"])
            x = x + _models.attention(sizes, layer, y, attend)
            y = _models.dense(_models.normalize(x, layer["norm2"]), layer["up"])
            return x + _models.dense(jax.nn.gelu(y), layer["down"])

        layers = params["layers"]
        rest = cast({k: v for k, v in params.items() if k != "layers"}, dtype)
        x = rest["tokens"][batch["x"]] + rest["positions"][None]
        if scanned:
            x, _ = lax.scan(lambda x, layer: (block(x, layer), None), x, layers)
        else:
            for layer in layers:
                x = block(x, layer)
        logits = _models.normalize(x, rest["norm"]) @ rest["tokens"].T
        logs = jax.nn.log_softmax(wide(logits))
        return -jnp.mean(jnp.take_along_axis(logs, batch["y"][..., None], -1))

    return Model(init, loss)


def linen(sizes: Sizes) -> Model:
    """A transformer in Flax Linen, unrolled."""
    width = sizes.width

    class Block(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
            dense = functools.partial(nn.Dense, dtype=self.dtype)
            attention = nn.MultiHeadDotProductAttention(
                sizes.heads, dtype=self.dtype, force_fp32_for_softmax=True
            )
            x = x + attention(nn.LayerNorm(dtype=self.dtype)(x), mask=mask)
            y = dense(4 * width)(nn.LayerNorm(dtype=self.dtype)(x))
            return x + dense(width)(nn.gelu(y))

    class Net(nn.Module):
        dtype: Any = None
        checkpointed: bool = False

        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            x = nn.Embed(sizes.vocabulary, width, dtype=self.dtype)(ids)
            positions = nn.initializers.normal(0.02)
            x = x + self.param("positions", positions, x.shape[1:]).astype(x.dtype)
            block = nn.remat(Block) if self.checkpointed else Block
            for at in range(sizes.layers):
                x = block(self.dtype, name=f"block{at}")(x, nn.make_causal_mask(ids))
            x = nn.LayerNorm(dtype=self.dtype)(x)
            return nn.Dense(sizes.vocabulary, dtype=self.dtype)(x)

    return _linen_model(Net, lambda key: _tokens(sizes, key))


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
                x = block(convolutions, self.dtype, name=f"block{at}")(x)
            return nn.Dense(classes, dtype=self.dtype)(jnp.mean(x, (1, 2)))

    def batch(key: jax.Array) -> Any:
        y = jnp.arange(shape[0]) % classes
        return {"x": jax.random.normal(key, shape), "y": y}

    return _linen_model(Net, batch)


def _conv_norm(width: int, size: int, stride: int, dtype: Any) -> Callable[..., Any]:
    conv = nn.Conv(width, (size,) * 2, (stride,) * 2, use_bias=False, dtype=dtype)
    norm = nn.BatchNorm(use_running_average=False, dtype=dtype)
    return lambda x: norm(conv(x))


def _linen_model(net: Any, make_batch: Any) -> Model:
    """A classifier, `net` of (dtype, checkpointed)."""

    def init(key: jax.Array) -> Any:
        batch = make_batch(key)
        return net().init(key, batch["x"][:1]), batch

    def loss(params: Any, batch: Any, dtype: Any, checkpointed: bool) -> jax.Array:
        made = net(dtype, checkpointed)
        logits, _ = made.apply(params, batch["x"], mutable=["batch_stats"])
        return cross_entropy(logits, batch["y"])

    return Model(init, loss)


def equinox(sizes: Sizes) -> Model:
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

    def loss(params: Any, batch: Any, dtype: Any, checkpointed: bool) -> jax.Array:
        shapes = eqx.filter_eval_shape(make, jax.random.key(0))
        is_array = lambda x: isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
        static = eqx.filter(shapes, is_array, inverse=True)
        params = cast(params, dtype)

        @_checkpoint(checkpointed)
        def block(x: jax.Array, arrays: Any) -> jax.Array:
            norm1, attention, norm2, mlp = eqx.combine(arrays, static["blocks"][0])
            mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
            y = jax.vmap(norm1)(x)
            x = x + attention(y, y, y, mask=mask)
            return x + jax.vmap(mlp)(jax.vmap(norm2)(x))

        def net(ids: jax.Array) -> jax.Array:
            x = jax.vmap(eqx.combine(params["embed"], static["embed"]))(ids)
            for arrays in params["blocks"]:
                x = block(x, arrays)
            x = jax.vmap(eqx.combine(params["norm"], static["norm"]))(x)
            return jax.vmap(eqx.combine(params["out"], static["out"]))(x)

        return cross_entropy(jax.vmap(net)(batch["x"]), batch["y"])

    return Model(init, loss)


def mlp(widths: Any, rows: int, activation: Any) -> Model:
    """Dense layers in plain JAX, whose results should be zero."""

    def init(key: jax.Array) -> Any:
        shapes = itertools.pairwise(widths)
        layers = [{"w": _weight(key, *s), "b": jnp.zeros(s[1])} for s in shapes]
        return layers, jax.random.normal(key, (rows, widths[0]))

    def loss(params: Any, batch: Any, dtype: Any, checkpointed: bool) -> jax.Array:
        @_checkpoint(checkpointed)
        def block(x: jax.Array, layer: Any) -> jax.Array:
            layer = cast(layer, dtype)
            return activation(x @ layer["w"] + layer["b"][None])

        x = functools.reduce(block, params, cast(batch, dtype))
        return jnp.mean(wide(x) ** 2)

    return Model(init, loss)


def mixer(layers: int, images: int, patches: int, width: int) -> Model:
    """An MLP-Mixer in plain JAX, without its first and last layer."""

    def init(key: jax.Array) -> Any:
        norm = {"gain": jnp.ones(width), "bias": jnp.zeros(width)}
        shapes = {"a": (patches, 4 * patches), "b": (4 * patches, patches)}
        shapes |= {"c": (width, 4 * width), "d": (4 * width, width)}
        layer = {name: _weight(key, *shape) for name, shape in shapes.items()}
        params = [layer | {"norm1": norm, "norm2": norm}] * layers
        return params, jax.random.normal(key, (images, patches, width))

    def loss(params: Any, batch: Any, dtype: Any, checkpointed: bool) -> jax.Array:
        @_checkpoint(checkpointed)
        def block(x: jax.Array, layer: Any) -> jax.Array:
            layer = cast(layer, dtype)
            y = _models.normalize(x, layer["norm1"]).mT
            x = x + (jax.nn.gelu(y @ layer["a"]) @ layer["b"]).mT
            y = _models.normalize(x, layer["norm2"])
            return x + jax.nn.gelu(y @ layer["c"]) @ layer["d"]

        x = functools.reduce(block, params, cast(batch, dtype))
        return jnp.mean(wide(x) ** 2)

    return Model(init, loss)


MLP = [4096] * 9
# Of a ResNet-50: width, size and stride of each convolution of a block.
STAGE_3 = [((256, 1, 1), (256, 3, 1 if at else 2), (1024, 1, 1)) for at in range(6)]
BASIC = [((8 * n, 3, 1 if n == 1 else 2), (8 * n, 3, 1)) for n in (1, 2, 4)]
# In the order of their compile times.
LARGE = {
    "mlp-gelu": mlp(MLP, 8192, jax.nn.gelu),
    "mlp-relu": mlp(MLP, 8192, jax.nn.relu),
    "resnet50-stage3": resnet((32, 28, 28, 512), None, STAGE_3, 1000)._replace(
        options={"share_casts": True}
    ),
    "mixer8": mixer(8, 64, 256, 768),
    "gpt12-scan": gpt(Sizes(12), scanned=True),
    "gpt4": gpt(Sizes(4)),
    "gpt8": gpt(Sizes(8)),
    "gpt4-V50257": gpt(Sizes(4, 50257)),
    "gpt4-no-scores": gpt(Sizes(4), keep_scores=False),
    "equinox4": equinox(Sizes(4)),
}
DEEP = {
    "gpt12": gpt(Sizes(12)),
    "linen12": linen(Sizes(12)),
    "equinox12": equinox(Sizes(12)),
}
SMALL = {
    "resnet": resnet((16, 8, 8, 3), 8, BASIC, 10),
    "linen": linen(TINY),
    "equinox": equinox(TINY),
    "mlp": mlp((64, 32, 16, 32, 64), 32, jax.nn.gelu),
    "scanned": gpt(TINY, scanned=True),
}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(wide(logits), labels)
    return losses.mean()


def wide(x: jax.Array) -> jax.Array:
    """`x` in float32 or wider: the reference of gradients runs in float64."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def cast(tree: Any, dtype: Any) -> Any:
    """All arrays in `dtype`, as they are if it is None."""
    return tree if dtype is None else jax.tree.map(lambda x: x.astype(dtype), tree)


def _checkpoint(checkpointed: bool) -> Callable[[Any], Any]:
    return jax.checkpoint if checkpointed else lambda fun: fun


def _tokens(sizes: Sizes, key: jax.Array) -> Any:
    ids = jax.random.randint(key, (sizes.batch, sizes.context), 0, sizes.vocabulary)
    return {"x": ids, "y": jnp.roll(ids, -1, 1)}


def _weight(key: jax.Array, rows: int, columns: int) -> jax.Array:
    return jax.random.normal(key, (rows, columns)) * rows**-0.5
