"""One block of each usual kind, three times in a row, in plain JAX.

A block adds what it computes of the normalized stream to the stream. Its loss takes one
argument more than that of other models: the dtype to which each block casts the stream
that it returns.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from models import Model, attend, cast, wide

BLOCKS_IN_A_ROW = 3
WIDTH, HEADS = 768, 12
TOKENS = (8, 1024, WIDTH)
IMAGES = (32, 32, 32, WIDTH)
UP = {"up": (WIDTH, 4 * WIDTH)}
MLP = UP | {"down": (4 * WIDTH, WIDTH)}
GATED = MLP | {"gate": (WIDTH, 4 * WIDTH)}

Layer = dict[str, jax.Array]
Inner = Callable[[jax.Array, Layer], jax.Array]  # of (y, layer)


def _dense(x: jax.Array, layer: Layer, name: str) -> jax.Array:
    return x @ layer[name] + layer[f"{name} bias"]


def _mlp(activation: Callable[[jax.Array], jax.Array]) -> Inner:
    return lambda y, layer: _dense(activation(_dense(y, layer, "up")), layer, "down")


def _gated(activation: Callable[[jax.Array], jax.Array]) -> Inner:
    def inner(y: jax.Array, layer: Layer) -> jax.Array:
        gate = activation(_dense(y, layer, "gate"))
        return _dense(gate * _dense(y, layer, "up"), layer, "down")

    return inner


def _convnext(y: jax.Array, layer: Layer) -> jax.Array:
    y = jax.lax.conv_general_dilated(
        y,
        layer["depthwise"],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=WIDTH,
    )
    return GELU(_normalize(y, layer["gain"]), layer)


def _attention(y: jax.Array, layer: Layer) -> jax.Array:
    heads = *y.shape[:2], HEADS, WIDTH // HEADS
    y = attend(*(_dense(y, layer, name).reshape(heads) for name in "qkv"))
    return _dense(y.reshape(TOKENS), layer, "o")


def _normalize(x: jax.Array, gain: jax.Array) -> jax.Array:
    return jax.nn.standardize(wide(x), -1).astype(x.dtype) * gain


def _blocks(
    inner: Inner,
    weights: dict[str, tuple[int, ...]] = MLP,
    shape: tuple[int, ...] = TOKENS,
) -> Model:
    def init(key: jax.Array) -> Any:
        def layer(key: jax.Array) -> Layer:
            made = {"gain": jnp.ones(WIDTH)}
            for name, size in weights.items():
                own = jax.random.normal(jax.random.fold_in(key, len(made)), size)
                made |= {name: own * size[-2] ** -0.5, f"{name} bias": own[0] * 0}
            return made

        keys = jax.random.split(key, BLOCKS_IN_A_ROW)
        stacked = jax.vmap(layer)(keys)
        return stacked, jax.random.normal(key, shape)

    def loss(
        params: Any, batch: Any, dtype: Any, checkpointed: bool, result: Any = None
    ) -> jax.Array:
        def block(x: jax.Array, layer: Layer) -> jax.Array:
            layer = cast(layer, dtype)
            x = x + inner(_normalize(x, layer["gain"]), layer)
            return cast(x, result)

        wrapped = jax.checkpoint(block) if checkpointed else block
        x = cast(cast(batch, dtype), result)
        for i in range(BLOCKS_IN_A_ROW):
            x = wrapped(x, jax.tree.map(operator.itemgetter(i), params))
        return jnp.mean(wide(x) ** 2)

    return Model(init, loss)


GELU = _mlp(jax.nn.gelu)
BLOCKS = {
    "gelu": _blocks(GELU),
    "relu": _blocks(_mlp(jax.nn.relu)),
    "SwiGLU": _blocks(_gated(jax.nn.silu), GATED),
    "ConvNeXt": _blocks(_convnext, MLP | {"depthwise": (7, 7, 1, WIDTH)}, IMAGES),
    "attention": _blocks(_attention, dict.fromkeys("qkvo", (WIDTH, WIDTH))),
}
