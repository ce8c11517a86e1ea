"""What this machine is, and what half precision gains on it in GPT-2."""

import functools
import importlib.metadata
import os
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._autocast.autocast import autocast
from ._scaling.gradients import value_and_grad
from ._scaling.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
)
from ._scaling.transform import with_loss_scale
from ._tree import cast_floating
from ._types import PyTree
from .diagnostics._timing import Comparison, Compile, Program, compare, compiling

LossFunction = Callable[[PyTree, jax.Array], jax.Array]
Programs = dict[str, Compile]  # by name
HALVES = ("bfloat16", "float16")

_PACKAGES = "jax jaxlib libtpu jax-cuda12-plugin jax-cuda13-plugin"
_PACKAGES += " jax-rocm7-plugin optax flax equinox"
_VARIABLES = ("JAX_", "XLA_", "LIBTPU_", "NVIDIA_TF32_")  # how their names begin
_FAST = 1.3  # a smaller gain is not worth a change of dtype

_TAKE = {
    "bfloat16": 'Take "bfloat16", which needs no loss scale.',
    "float16": 'Take "float16" with DynamicLossScale().',
}
ACCELERATOR, CPU, CPU_WITH_UNITS = "accelerator", "CPU", "CPU with matrix units"
_NO_GAIN = {
    ACCELERATOR: "half precision saves memory only. If float32 at precision "
    '"highest" is slower than float32, the device already uses fewer digits (TF32).',
    CPU: "use half precision for tests here, not for speed: no matrix units for "
    "bfloat16 (AMX) were found.",
    CPU_WITH_UNITS: "its matrix units for bfloat16 (AMX) do not show with jax "
    f"{jax.__version__}. jax 0.12 uses them; 0.10.2 and 0.11 only for products with a "
    "float32 result, which autocast makes too: see what --measure says of it; older "
    "versions never.",
}
_UNITS_GAIN = (
    "The matrix units of this CPU (AMX) compute its products. Use autocast: it leaves "
    "the rest in float32, which casts by hand make slower."
)
_ON_CPU = "This is a CPU, whose times say nothing about an accelerator: run this there."


def versions(packages: str = _PACKAGES) -> dict[str, str]:
    """Returns the versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages.split():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device() -> dict[str, Any]:
    """Describes the devices of all processes, which are assumed to be equal."""
    first = jax.local_devices()[0]
    return {
        "count": jax.device_count(),
        "kind": first.device_kind,
        "platform": first.platform,
        "memory_bytes_each": (first.memory_stats() or {}).get("bytes_limit"),
    }


def environment() -> dict[str, str]:
    """Returns the environment variables that change how programs are compiled."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)}


def kind(platform: str, *, has_units: bool) -> str:
    """Returns what is measured here; the units of a CPU are those for bfloat16."""
    if platform != "cpu":
        return ACCELERATOR
    return CPU_WITH_UNITS if has_units else CPU


class Sizes(NamedTuple):
    """Sizes of what is measured."""

    side: int  # of the matrices of the product
    # Of the model and its batch.
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocabulary: int


SIZES = {
    ACCELERATOR: Sizes(8192, 4, 768, 12, 1024, 4, 50_257),
    CPU: Sizes(512, 2, 128, 4, 128, 2, 1024),
    CPU_WITH_UNITS: Sizes(2048, 2, 512, 8, 128, 4, 4096),  # smaller ones show no gain
}


def products(sizes: Sizes) -> Comparison:
    """Measures a matrix product in float32 and in half precision."""
    side = sizes.side

    def program(dtype: str, precision: str | None = None) -> Compile:
        keys = jax.random.split(jax.random.key(0))
        a, b = (jax.random.normal(key, (side, side)).astype(dtype) for key in keys)
        return compiling(functools.partial(jnp.matmul, precision=precision), a, b)

    programs = {dtype: program(dtype) for dtype in ("float32", *HALVES)}
    programs['float32, precision "highest"'] = program("float32", "highest")
    title = f"product of two {side} x {side} matrices"
    return compare(title, programs, seconds=10, flops=2.0 * side**3)


def advice(measured: Comparison, kind: str) -> str:
    """Recommends a dtype for this kind of machine from what ran, with `autocast`."""
    found = {row.program.removeprefix("autocast, "): row.gain for row in measured.rows}
    gains = {name: gain.median for name in HALVES if (gain := found.get(name))}
    least = max(_FAST, measured.believable or 1)
    fast = next((dtype for dtype, gain in gains.items() if gain > least), None)
    if not gains:
        text = "No advice: no product in half precision could be compared with float32."
    elif fast is None:
        text = f"{' and '.join(gains)}: no gain above {least:.1f} times in the "
        text += f"{measured.title}, so {_NO_GAIN[kind]}"
    elif (kind, fast) == (CPU_WITH_UNITS, "bfloat16"):
        text = f"{_TAKE[fast]} {_UNITS_GAIN}"
    else:
        text = _TAKE[fast]
    return text if kind == ACCELERATOR else f"{text} {_ON_CPU}"


class Model(NamedTuple):
    """A loss and its arguments, in float32."""

    title: str
    loss: LossFunction
    params: PyTree
    tokens: jax.Array


def gradients(model: Model) -> tuple[str, Programs]:
    """Returns programs that compute the loss and its gradient."""

    def program(loss: LossFunction, loss_scale: LossScale) -> Compile:
        gradient = value_and_grad(loss, loss_scale)
        return compiling(gradient, model.params, model.tokens)

    none, scaled = NoOpLossScale(), StaticLossScale(2**10)
    programs = {"float32": program(model.loss, none)}
    for cast, name in ((autocast, "autocast"), (_by_hand, "cast by hand")):
        programs[f"{name}, bfloat16"] = program(cast(model.loss, "bfloat16"), none)
        programs[f"{name}, float16"] = program(cast(model.loss, "float16"), scaled)
    return f"gradient of {model.title}", programs


def steps(model: Model) -> tuple[str, Programs]:
    """Returns programs that take one step of AdamW."""
    plain = optax.with_extra_args_support(optax.adamw(1e-4))

    def program(
        loss: LossFunction, tx: optax.GradientTransformationExtraArgs
    ) -> Compile:
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
    _, layers, width, heads, context, batch, vocabulary = sizes

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


def _by_hand(loss: LossFunction, dtype: str) -> LossFunction:
    return lambda *args: loss(*cast_floating(args, dtype))


def _normalized(x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x.astype(jnp.float32), -1).astype(x.dtype)
