"""Compares usual models in float32, cast by hand and with `autocast`."""

import time
from collections.abc import Callable, Iterator
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
from .facts import HALVES
from .timing import Comparison, Program, compare, memory_of

Loss = Callable[[PyTree, jax.Array], jax.Array]
Compile = Callable[[], Program]


class Sizes(NamedTuple):
    """Sizes of the three models."""

    mlp: tuple[int, int, int]  # layers, width, batch
    blocks: tuple[int, int, int, int, int]  # layers, width, heads, context, batch
    stage: tuple[int, int, int, int]  # blocks, channels, side, batch


USUAL = Sizes((4, 4096, 4096), (4, 768, 12, 1024, 4), (4, 256, 28, 64))
FOR_CPU = Sizes((4, 256, 128), (2, 128, 4, 128, 2), (2, 32, 14, 8))


class Model(NamedTuple):
    """A loss and its arguments, in float32."""

    title: str
    loss: Loss
    params: PyTree
    batch: jax.Array


def gains(
    sizes: Sizes, seconds: float, tick: Callable[[], object] = lambda: None
) -> Iterator[Comparison]:
    """Compares the gradients of each model, and whole steps of AdamW, in `seconds`."""
    end = time.perf_counter() + seconds
    makers = [_mlp, _stage, _blocks]
    for i, make in enumerate(makers):
        model = make(sizes)
        left = (end - time.perf_counter()) / (len(makers) + 1 - i)
        title = f"gradient of {model.title}"
        yield compare(title, _gradients(model), seconds=left, tick=tick)
    model, left = _blocks(sizes), end - time.perf_counter()
    title = f"step of AdamW for {model.title}"
    yield compare(title, _steps(model), seconds=left, tick=tick)


def _gradients(model: Model) -> dict[str, Compile]:
    """Returns programs that compute the loss and its gradient, by name."""

    def program(loss: Loss, loss_scale: LossScale) -> Compile:
        def compile_() -> Program:
            fun = jax.jit(value_and_grad(loss, loss_scale))
            compiled = fun.lower(model.params, model.batch).compile()
            memory = memory_of(compiled)
            return Program(lambda: compiled(model.params, model.batch), memory)

        return compile_

    def by_hand(dtype: str) -> Loss:
        return lambda *args: model.loss(*cast_floating(args, dtype))

    found = {"float32": program(model.loss, NoOpLossScale())}
    scales = dict(zip(HALVES, (NoOpLossScale(), StaticLossScale(2.0**10)), strict=True))
    for dtype, loss_scale in scales.items():
        found[f"autocast, {dtype}"] = program(autocast(model.loss, dtype), loss_scale)
    for dtype, loss_scale in scales.items():
        found[f"cast by hand, {dtype}"] = program(by_hand(dtype), loss_scale)
    return found


def _steps(model: Model) -> dict[str, Compile]:
    """Returns programs that take one step of AdamW, by name."""
    plain = optax.with_extra_args_support(optax.adamw(1e-4))

    def program(loss: Loss, tx: optax.GradientTransformationExtraArgs) -> Compile:
        @jax.jit
        def init(params: PyTree) -> tuple[PyTree, PyTree]:
            return jax.tree.map(jnp.copy, params), tx.init(params)

        def step(
            state: tuple[PyTree, PyTree], batch: jax.Array
        ) -> tuple[PyTree, jax.Array]:
            params, opt_state = state
            loss_scale = NoOpLossScale() if tx is plain else opt_state.loss_scale
            value, grads = value_and_grad(loss, loss_scale)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params, value=value)
            return (optax.apply_updates(params, updates), opt_state), value

        def compile_() -> Program:
            state = init(model.params)
            donating = jax.jit(step, donate_argnums=0)
            compiled = donating.lower(state, model.batch).compile()

            def run() -> jax.Array:
                nonlocal state
                state, value = compiled(state, model.batch)
                return value

            return Program(run, memory_of(compiled))

        return compile_

    half = {dtype: autocast(model.loss, dtype) for dtype in HALVES}
    dynamic = with_loss_scale(plain, DynamicLossScale(2.0**10))
    return {
        "float32": program(model.loss, plain),
        "autocast, bfloat16": program(half["bfloat16"], plain),
        "autocast, bfloat16, skip": program(half["bfloat16"], with_loss_scale(plain)),
        "autocast, float16, loss scale, skip": program(half["float16"], dynamic),
    }


def _mlp(sizes: Sizes) -> Model:
    layers, width, batch = sizes.mlp

    def network(weights: PyTree, x: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.nn.gelu(x @ w)
        return x

    weights = _weights(layers, (width, width), width)
    title = f"an MLP ({layers} layers of {width}, batch {batch})"
    return Model(title, _loss_of(network), weights, _normal(batch, width))


def _stage(sizes: Sizes) -> Model:
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
    return Model(
        title, _loss_of(network), kernels, _normal(batch, side, side, channels)
    )


def _blocks(sizes: Sizes) -> Model:
    """Builds the blocks of GPT-2."""
    layers, width, heads, context, batch = sizes.blocks

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
        mask = jnp.tril(jnp.ones((context, context), bool))
        scores = jnp.where(mask, scores.astype(jnp.float32), -1e30)
        shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", shares, v)

    def network(params: PyTree, x: jax.Array) -> jax.Array:
        for layer in params:
            y = _normalized(x, -1) @ layer["qkv"]
            y = y.reshape(*x.shape[:2], 3, heads, width // heads)
            y = attend(*(y[:, :, i] for i in range(3))).reshape(x.shape)
            x = x + y @ layer["out"]
            y = jax.nn.gelu(_normalized(x, -1) @ layer["up"])
            x = x + y @ layer["down"]
        return x

    shapes = {"qkv": 3 * width, "out": width, "up": 4 * width}
    params = []
    for _ in range(layers):
        layer = {name: _weights(1, (width, n), width)[0] for name, n in shapes.items()}
        layer["down"] = _weights(1, (4 * width, width), 4 * width)[0]
        params.append(layer)
    title = f"GPT-2's blocks ({layers} of width {width}, batch {batch} x {context})"
    return Model(title, _loss_of(network), params, _normal(batch, context, width))


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
