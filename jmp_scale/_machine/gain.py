"""GPT-2 in float32, cast by hand and with `autocast`, to be compared."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._autocast.autocast import autocast
from .._scaling.gradients import value_and_grad
from .._scaling.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
)
from .._scaling.transform import with_loss_scale
from .._tree import cast_floating
from .._types import PyTree
from ..diagnostics._timing import Compile, Program, compiling

Loss = Callable[[PyTree, jax.Array], jax.Array]
Programs = dict[str, Compile]  # by name


class Sizes(NamedTuple):
    """Sizes of the model and its batch."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocabulary: int


USUAL = Sizes(4, 768, 12, 1024, 4, 50_257)
FOR_CPU = Sizes(2, 128, 4, 128, 2, 1024)


class Model(NamedTuple):
    """A loss and its arguments, in float32."""

    title: str
    loss: Loss
    params: PyTree
    tokens: jax.Array


def gradients(model: Model) -> tuple[str, Programs]:
    """Returns programs that compute the loss and its gradient."""
    losses: dict[str, tuple[Loss, LossScale]]
    losses = {"float32": (model.loss, NoOpLossScale())}
    for cast, name in ((autocast, "autocast"), (_by_hand, "cast by hand")):
        losses[f"{name}, bfloat16"] = cast(model.loss, "bfloat16"), NoOpLossScale()
        losses[f"{name}, float16"] = cast(model.loss, "float16"), StaticLossScale(2**10)
    programs = {}
    for name, (loss, loss_scale) in losses.items():
        gradient = value_and_grad(loss, loss_scale)
        programs[name] = compiling(gradient, model.params, model.tokens)
    return f"gradient of {model.title}", programs


def steps(model: Model) -> tuple[str, Programs]:
    """Returns programs that take one step of AdamW."""
    plain = optax.with_extra_args_support(optax.adamw(1e-4))

    def program(loss: Loss, tx: optax.GradientTransformationExtraArgs) -> Compile:
        def step(params: PyTree, opt_state: PyTree, tokens: jax.Array) -> PyTree:
            loss_scale = NoOpLossScale() if tx is plain else opt_state.loss_scale
            value, grads = value_and_grad(loss, loss_scale)(params, tokens)
            updates, opt_state = tx.update(grads, opt_state, params, value=value)
            return optax.apply_updates(params, updates), opt_state, value

        def compile_() -> Program:
            # Each program has its own state, because it donates it.
            params = jax.tree.map(jnp.copy, model.params)
            return compiling(step, params, tx.init(params), model.tokens, carried=2)()

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


def gpt(sizes: Sizes) -> Model:
    """Builds GPT-2 with tied embeddings, and fewer blocks."""
    layers, width, heads, context, batch, vocabulary = sizes

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
            y = _normalized(x) @ qkv
            q, k, v = jnp.moveaxis(y.reshape(batch, context, 3, heads, -1), 2, 0)
            x = x + attend(q, k, v).reshape(x.shape) @ out
            x = x + jax.nn.gelu(_normalized(x) @ up) @ down
        logits = (_normalized(x) @ table.T).astype(jnp.float32)
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        return jnp.mean(cross_entropy(logits, tokens[:, 1:]))

    keys = iter(jax.random.split(jax.random.key(0), 4 * layers + 2))

    def weights(fan_in: int, *shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * fan_in**-0.5

    blocks = []
    for _ in range(layers):
        wide = [weights(width, width, n * width) for n in (3, 1, 4)]
        blocks.append([*wide, weights(4 * width, 4 * width, width)])
    params = weights(width, vocabulary, width), blocks
    tokens = jax.random.randint(next(keys), (batch, context + 1), 0, vocabulary)
    title = f"GPT-2 ({layers} blocks of width {width}, vocabulary {vocabulary}, "
    title += f"batch {batch} x {context})"
    return Model(title, loss, params, tokens)


def _by_hand(loss: Loss, dtype: str) -> Loss:
    return lambda *args: loss(*cast_floating(args, dtype))


def _normalized(x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x.astype(jnp.float32), -1).astype(x.dtype)
