"""One block of each usual kind, three times in a row, in plain JAX.

A block adds what it computes of the normalized stream to the stream. Its loss takes one
argument more than that of other models: the dtype to which each block casts the stream
that it returns.
"""

import functools
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
Inner = Callable[[jax.Array, Layer, jax.Array], jax.Array]  # of (y, layer, key)


def _dense(x: jax.Array, layer: Layer, name: str) -> jax.Array:
    return x @ layer[name] + layer[f"{name} bias"]


def _mlp(activation: Callable[[jax.Array], jax.Array]) -> Inner:
    return lambda y, layer, key: _dense(
        activation(_dense(y, layer, "up")), layer, "down"
    )


def _gated(activation: Callable[[jax.Array], jax.Array]) -> Inner:
    def inner(y: jax.Array, layer: Layer, key: jax.Array) -> jax.Array:
        gate = activation(_dense(y, layer, "gate"))
        return _dense(gate * _dense(y, layer, "up"), layer, "down")

    return inner


def _dropout(y: jax.Array, layer: Layer, key: jax.Array) -> jax.Array:
    z = jax.nn.gelu(_dense(y, layer, "up"))
    kept = jax.random.bernoulli(key, 0.9, z.shape)
    return _dense(jnp.where(kept, z / 0.9, 0), layer, "down")


def _mapped(y: jax.Array, layer: Layer, key: jax.Array) -> jax.Array:
    """As Equinox does it: a function of one token."""
    of_token = functools.partial(GELU, layer=layer, key=key)
    return jax.vmap(jax.vmap(of_token))(y)


def _convnext(y: jax.Array, layer: Layer, key: jax.Array) -> jax.Array:
    y = jax.lax.conv_general_dilated(
        y,
        layer["depthwise"],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=WIDTH,
    )
    return GELU(_normalize(y, layer["gain"]), layer, key)


def _attention(y: jax.Array, layer: Layer, key: jax.Array) -> jax.Array:
    heads = *y.shape[:2], HEADS, WIDTH // HEADS
    y = attend(*(_dense(y, layer, name).reshape(heads) for name in "qkv"))
    return _dense(y.reshape(TOKENS), layer, "o")


def _normalize(x: jax.Array, gain: jax.Array) -> jax.Array:
    return jax.nn.standardize(wide(x), -1).astype(x.dtype) * gain


def _blocks(
    inner: Inner,
    weights: dict[str, tuple[int, ...]] = MLP,
    shape: tuple[int, ...] = TOKENS,
    *,
    scanned: bool = False,
    always_checkpointed: bool = False,
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
        return stacked, (jax.random.normal(key, shape), jax.random.key_data(keys))

    def loss(
        params: Any, batch: Any, dtype: Any, checkpointed: bool, result: Any = None
    ) -> jax.Array:
        def block(x: jax.Array, given: Any) -> jax.Array:
            layer, key = cast(given[0], dtype), jax.random.wrap_key_data(given[1])
            x = x + inner(_normalize(x, layer["gain"]), layer, key)
            return cast(x, result)

        is_checkpointed = checkpointed or always_checkpointed
        wrapped = jax.checkpoint(block) if is_checkpointed else block
        x, given = cast(cast(batch[0], dtype), result), (params, batch[1])
        if scanned:
            x, _ = jax.lax.scan(lambda x, own: (wrapped(x, own), None), x, given)
        else:
            for i in range(BLOCKS_IN_A_ROW):
                x = wrapped(x, jax.tree.map(operator.itemgetter(i), given))
        return jnp.mean(wide(x) ** 2)

    return Model(init, loss)


GELU = _mlp(jax.nn.gelu)
BLOCKS = {
    "gelu": _blocks(GELU),
    "exact gelu": _blocks(_mlp(functools.partial(jax.nn.gelu, approximate=False))),
    "silu": _blocks(_mlp(jax.nn.silu)),
    "relu": _blocks(_mlp(jax.nn.relu)),
    "tanh": _blocks(_mlp(jnp.tanh)),
    "GEGLU": _blocks(_gated(jax.nn.gelu), GATED),
    "SwiGLU": _blocks(_gated(jax.nn.silu), GATED),
    "ConvNeXt": _blocks(_convnext, MLP | {"depthwise": (7, 7, 1, WIDTH)}, IMAGES),
    "dropout": _blocks(_dropout),
    "mapped": _blocks(_mapped),
    "checkpointed": _blocks(GELU, always_checkpointed=True),
    "scanned": _blocks(GELU, scanned=True),
    "attention": _blocks(_attention, dict.fromkeys("qkvo", (WIDTH, WIDTH))),
}
