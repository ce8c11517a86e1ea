"""A transformer as LLaMA is one: RMSNorm, RoPE, SwiGLU and grouped queries."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models import Model, Transformer, attend, cast, drawn, mean_loss, through, wide


@dataclasses.dataclass(frozen=True)
class Llama(Transformer):
    """Sizes of the model and its batch."""

    hidden: int = 5632
    groups: int = 4  # heads of keys and values


def llama(
    sizes: Llama,
    *,
    scanned: bool = False,
    attention: Callable[..., jax.Array] = attend,
) -> Model:
    """Written out, or a `lax.scan` over the layers; by hand, all weights are cast."""
    heads = {"q": sizes.heads, "k": sizes.groups, "v": sizes.groups}.items()

    def block(x: jax.Array, layer: Any) -> jax.Array:
        y = _normalize(x, layer["norm1"])
        q, k, v = ((y @ layer[name]).reshape(*x.shape[:2], h, -1) for name, h in heads)
        k, v = (jnp.repeat(each, sizes.heads // sizes.groups, 2) for each in (k, v))
        y = attention(_rotated(q), _rotated(k), v)
        x = x + y.reshape(x.shape) @ layer["o"]
        y = _normalize(x, layer["norm2"])
        return x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]

    def loss(
        params: Any, batch: Any, dtype: Any, checkpointed: bool = False
    ) -> jax.Array:
        params, tokens = cast(params, dtype), batch["tokens"]
        x = params["tokens"][tokens]
        x = wide(x) if dtype is None else x
        step = jax.checkpoint(block) if checkpointed else block
        x = through(step, x, params["layers"])
        logits = _normalize(x, params["norm"]) @ params["out"]
        return mean_loss(logits, jnp.roll(tokens, -1, axis=1))

    def shapes() -> Any:
        d, hidden, words = sizes.width, sizes.hidden, sizes.vocabulary
        of_groups = d, sizes.groups * d // sizes.heads
        layer = {"q": (d, d), "k": of_groups, "v": of_groups, "o": (d, d)}
        layer |= {"gate": (d, hidden), "up": (d, hidden), "down": (hidden, d)}
        layer |= {"norm1": jnp.ones(d), "norm2": jnp.ones(d)}
        rest = {"tokens": (words, d), "norm": jnp.ones(d), "out": (d, words)}
        return rest | {"layers": [layer] * sizes.layers}

    return Model(functools.partial(drawn, shapes, sizes, scanned), loss)


def _normalize(x: jax.Array, gain: jax.Array) -> jax.Array:
    y = wide(x)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
    return (y * wide(gain)[None, None]).astype(x.dtype)


def _rotated(x: jax.Array) -> jax.Array:
    """Each pair of numbers turned by an angle that grows with the position (RoPE)."""
    steps, width = x.shape[1], x.shape[-1]
    frequencies = 10_000.0 ** (-jnp.arange(0, width, 2) / width)
    angles = jnp.arange(steps)[None, :, None, None] * frequencies[None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = wide(x[..., ::2]), wide(x[..., 1::2])
    turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], -1)
    return turned.reshape(x.shape).astype(x.dtype)
