"""Usual models in float32, cast by hand and with `autocast`, to be compared."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._autocast.autocast import autocast
from .._scaling.gradients import value_and_grad
from .._scaling.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from .._scaling.transform import with_loss_scale
from .._tree import cast_floating
from .._types import PyTree
from ..diagnostics._timing import Compile, Program, compiling

Loss = Callable[[PyTree, jax.Array], jax.Array]
Programs = dict[str, Compile]  # by name


class Sizes(NamedTuple):
    """Sizes of the three models."""

    mlp: tuple[int, int, int]  # layers, width, batch
    # Layers, width, heads, context, batch, vocabulary.
    blocks: tuple[int, int, int, int, int, int]
    stage: tuple[int, int, int, int]  # blocks, channels, side, batch


USUAL = Sizes((4, 4096, 4096), (4, 768, 12, 1024, 4, 50_257), (4, 256, 28, 64))
FOR_CPU = Sizes((4, 256, 128), (2, 128, 4, 128, 2, 1024), (2, 32, 14, 8))


class Model(NamedTuple):
    """A loss and its arguments, in float32."""

    title: str
    loss: Loss
    params: PyTree
    batch: jax.Array


def gradients(model: Model) -> tuple[str, Programs]:
    """Returns programs that compute the loss and its gradient."""
    args = model.params, model.batch
    bfloat16, float16 = NoOpLossScale(), StaticLossScale(2.0**10)
    losses = {
        "float32": (model.loss, NoOpLossScale()),
        "autocast, bfloat16": (autocast(model.loss, "bfloat16"), bfloat16),
        "autocast, float16": (autocast(model.loss, "float16"), float16),
        "cast by hand, bfloat16": (_by_hand(model.loss, "bfloat16"), bfloat16),
        "cast by hand, float16": (_by_hand(model.loss, "float16"), float16),
    }
    programs = {}
    for name, (loss, loss_scale) in losses.items():
        programs[name] = compiling(value_and_grad(loss, loss_scale), *args)
    return f"gradient of {model.title}", programs


def steps(model: Model) -> tuple[str, Programs]:
    """Returns programs that take one step of AdamW."""
    plain = optax.with_extra_args_support(optax.adamw(1e-4))

    def program(loss: Loss, tx: optax.GradientTransformationExtraArgs) -> Compile:
        def step(params: PyTree, opt_state: PyTree, batch: jax.Array) -> PyTree:
            loss_scale = NoOpLossScale() if tx is plain else opt_state.loss_scale
            value, grads = value_and_grad(loss, loss_scale)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params, value=value)
            return optax.apply_updates(params, updates), opt_state, value

        def compile_() -> Program:
            # Each program has its own state, because it donates it.
            params = jax.tree.map(jnp.copy, model.params)
            return compiling(step, params, tx.init(params), model.batch, carried=2)()

        return compile_

    bfloat16, float16 = (autocast(model.loss, x) for x in ("bfloat16", "float16"))
    dynamic = with_loss_scale(plain, DynamicLossScale(2.0**10))
    return f"step of AdamW for {model.title}", {
        "float32": program(model.loss, plain),
        "cast by hand, bfloat16": program(_by_hand(model.loss, "bfloat16"), plain),
        "autocast, bfloat16": program(bfloat16, plain),
        "autocast, bfloat16, skip": program(bfloat16, with_loss_scale(plain)),
        "autocast, float16, loss scale, skip": program(float16, dynamic),
    }


def mlp(sizes: Sizes) -> Model:
    """Builds a multilayer perceptron."""
    layers, width, batch = sizes.mlp

    def network(weights: PyTree, x: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.nn.gelu(x @ w)
        return x

    weights = _weights(layers, (width, width), width)
    title = f"an MLP ({layers} layers of {width}, batch {batch})"
    return Model(title, _loss_of(network), weights, _normal(batch, width))


def stage(sizes: Sizes) -> Model:
    """Builds residual blocks."""
    blocks, channels, side, batch = sizes.stage

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=numbers
        )
        return _normalized(y, (0, 1, 2))

    def network(kernels: PyTree, x: jax.Array) -> jax.Array:
        for first, second in zip(kernels[::2], kernels[1::2], strict=True):
            x = jax.nn.relu(x + convolve(jax.nn.relu(convolve(x, first)), second))
        return x

    kernels = _weights(2 * blocks, (3, 3, channels, channels), 9 * channels)
    title = f"{blocks} residual blocks ({channels} channels, {batch} x {side} x {side})"
    x = _normal(batch, side, side, channels)
    return Model(title, _loss_of(network), kernels, x)


def blocks(sizes: Sizes) -> Model:
    """Builds GPT-2 with tied embeddings, and fewer blocks."""
    layers, width, heads, context, batch, vocabulary = sizes.blocks

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
        mask = jnp.tril(jnp.ones((context, context), bool))
        scores = jnp.where(mask, scores.astype(jnp.float32), -1e30)
        shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", shares, v)

    def loss(params: PyTree, tokens: jax.Array) -> jax.Array:
        table, blocks = params
        x = table[tokens[:, :-1]]
        for qkv, out, up, down in blocks:
            y = _normalized(x, -1) @ qkv
            q, k, v = jnp.moveaxis(y.reshape(batch, context, 3, heads, -1), 2, 0)
            x = x + attend(q, k, v).reshape(x.shape) @ out
            x = x + jax.nn.gelu(_normalized(x, -1) @ up) @ down
        logits = (_normalized(x, -1) @ table.T).astype(jnp.float32)
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        return jnp.mean(cross_entropy(logits, tokens[:, 1:]))

    wide = 3 * width, width, 4 * width
    params = []
    for _ in range(layers):
        layer = [_weights(1, (width, n), width)[0] for n in wide]
        params.append([*layer, *_weights(1, (4 * width, width), 4 * width)])
    (table,) = _weights(1, (vocabulary, width), width)
    tokens = jax.random.randint(jax.random.key(1), (batch, context + 1), 0, vocabulary)
    title = f"GPT-2 ({layers} blocks of width {width}, vocabulary {vocabulary}, "
    title += f"batch {batch} x {context})"
    return Model(title, loss, (table, params), tokens)


MODELS = mlp, stage, blocks


def _by_hand(loss: Loss, dtype: str) -> Loss:
    return lambda *args: loss(*cast_floating(args, dtype))


def _loss_of(network: Loss) -> Loss:
    def loss(params: PyTree, x: jax.Array) -> jax.Array:
        return jnp.mean(network(params, x).astype(jnp.float32) ** 2)

    return loss


def _normalized(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    wide = x.astype(jnp.float32)
    return jax.nn.standardize(wide, axis).astype(x.dtype)


def _weights(count: int, shape: tuple[int, ...], fan_in: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), count)
    return [jax.random.normal(key, shape) * fan_in**-0.5 for key in keys]


def _normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape)
