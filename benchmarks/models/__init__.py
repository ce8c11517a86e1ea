"""A transformer in plain JAX, whose parameters are a dictionary.

Written for these benchmarks, with synthetic data; nothing is taken from a published
implementation. Parameters are float32, and cast to `dtype` inside the loss; statistics
and losses are float32, or wider where the parameters are.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jmp_scale


class Model(NamedTuple):
    """What is differentiated.

    Attributes:
      init: parameters and batch of a key; `jax.eval_shape` gives their types.
      loss: f32[] of (parameters, batch, dtype, checkpointed). The dtype None leaves the
        parameters as they are; each block is in a `jax.checkpoint` if checkpointed.
    """

    init: Callable[[jax.Array], tuple[Any, Any]]
    loss: Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Sizes of a transformer with pre-normalization that predicts the next token."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    context: int = 1024
    batch: int = 8


def transformer(
    sizes: Transformer,
    *,
    scanned: bool = False,
    stream: Callable[[jax.Array], jax.Array] = lambda x: x,
    attention: Callable[..., jax.Array] | None = None,
) -> Model:
    """With tied embeddings, unrolled or a `lax.scan`; 16 leaves a layer and 4 more.

    `stream` says where the arrays (batch, position, width) lie that are added up from
    block to block.
    """

    def loss(params, batch, dtype, checkpointed=False):
        def block(x, layer):
            layer = cast(layer, dtype)
            heads = (*x.shape[:2], sizes.heads, sizes.width // sizes.heads)
            y = normalize(x, layer["norm1"])
            q, k, v = (_dense(y, layer[name]).reshape(heads) for name in "qkv")
            y = (attention or attend)(q, k, v)
            x = x + stream(_dense(y.reshape(x.shape), layer["o"]))
            y = _dense(normalize(x, layer["norm2"]), layer["up"])
            return x + stream(_dense(jax.nn.gelu(y), layer["down"]))

        tokens, layers = batch["tokens"], params["layers"]
        rest = cast(params | {"layers": None}, dtype)
        x = rest["tokens"][tokens] + rest["positions"][None]
        # Parameters may be stored in half precision, and the program be float32.
        x = stream(wide(x) if dtype is None else x)
        x = through(jax.checkpoint(block) if checkpointed else block, x, layers)
        with jax.named_scope("head"):
            logits = normalize(x, rest["norm"]) @ rest["tokens"].T
        return mean_loss(logits, jnp.roll(tokens, -1, axis=1))

    def shapes():
        d = sizes.width
        of = dict.fromkeys("qkvo", (d, d)) | {"up": (d, 4 * d), "down": (4 * d, d)}
        norm = {"gain": jnp.ones(d), "bias": jnp.zeros(d)}
        layer = {
            name: {"kernel": shape, "bias": jnp.zeros(shape[1])}
            for name, shape in of.items()
        }
        layers = [layer | {"norm1": norm, "norm2": norm}] * sizes.layers
        tables = {"tokens": (sizes.vocabulary, d), "positions": (sizes.context, d)}
        return tables | {"layers": layers, "norm": norm}

    return Model(functools.partial(drawn, shapes, sizes, scanned), loss)


def through(block: Callable[..., jax.Array], x: jax.Array, layers: Any) -> jax.Array:
    """`x` behind all layers, a list of them or stacked ones, which are scanned."""
    if isinstance(layers, list):
        return functools.reduce(block, layers, x)
    return jax.lax.scan(lambda x, layer: (block(x, layer), None), x, layers)[0]


def drawn(
    shapes: Callable[[], Any], sizes: Transformer, scanned: bool, key: jax.Array
) -> Any:
    """Parameters, small random numbers where a shape stands, and a batch of tokens."""
    is_shape = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
    leaves, structure = jax.tree.flatten(shapes(), is_shape)
    for at, leaf in enumerate(leaves):
        if is_shape(leaf):
            own = jax.random.fold_in(key, at)
            leaves[at] = 0.02 * jax.random.normal(own, leaf)
        else:  # one array may stand in several places, and be donated
            leaves[at] = jnp.copy(leaf)
    params = structure.unflatten(leaves)
    if scanned:
        params["layers"] = jax.tree.map(lambda *x: jnp.stack(x), *params["layers"])
    batch = sizes.batch, sizes.context
    return params, {"tokens": jax.random.randint(key, batch, 0, sizes.vocabulary)}


def _dense(x, layer):
    return x @ layer["kernel"] + jnp.expand_dims(layer["bias"], range(x.ndim - 1))


def attend(q, k, v):
    """Causal, of queries, keys and values (batch, position, head, width)."""
    share = jax.nn.softmax(_scores(q, k)).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", share, v)


@jmp_scale.in_half
def cudnn_attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def attend_divided_last(q, k, v):
    """As `attend`, but exponentials are divided by their sum after the product."""
    scores = _scores(q, k)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    shares = jnp.exp(scores - top)
    sums = jnp.moveaxis(shares.sum(-1), 1, 2)[..., None]
    y = jnp.einsum("bhqk,bkhd->bqhd", shares.astype(q.dtype), v)
    return (wide(y) / sums).astype(q.dtype)


def _scores(q, k):
    scores = wide(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    seen = jnp.tri(q.shape[1], dtype=bool)[None, None]
    return jnp.where(seen, scores / math.sqrt(q.shape[-1]), -jnp.inf)


def normalize(x, norm):
    y = wide(x)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * norm["gain"][None, None] + norm["bias"][None, None]


def mean_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logs = jax.nn.log_softmax(wide(logits))
    return -jnp.mean(jnp.take_along_axis(logs, labels[..., None], axis=-1))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(wide(logits), labels)
    return losses.mean()


def wide(x: jax.Array) -> jax.Array:
    """`x` in float32 or wider: the reference of gradients runs in float64."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def cast(tree: Any, dtype: Any) -> Any:
    """All arrays in `dtype`, as they are if it is None."""
    return tree if dtype is None else jax.tree.map(lambda x: x.astype(dtype), tree)
