"""What the clock measures: each part is a question, and a process of its own."""

import dataclasses
import functools
import importlib.util
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import _steps
import jax
import jax.numpy as jnp
import models
import optax
from _clock import Clock, Programs, gradient, step
from _clock_models import lstm, nnx_transformer, torch_step
from autocast import HALF, SAVED, by_autocast, by_hand
from autocast import PROGRAMS as LOSSES
from models import Model, Transformer, catalog, transformer
from models.llama import Llama, llama
from models.minimal import MINIMAL, PROGRAMS

import jmp_scale

BF16, F16 = HALF.values()


class Sizes(NamedTuple):
    """The sizes of what is timed on one kind of machine."""

    gpt: Transformer  # with a small vocabulary
    narrow: Transformer
    llama: Llama
    mlp: tuple[int, int, int]  # width, layers, rows
    images: tuple[int, int, int, int]
    lstm: tuple[int, int, int]  # width, steps, batch
    float8: tuple[int, ...] = ()  # widths
    large_vocabulary: int = 50257
    layers: int = 12  # of the deepest one


SIZES = {
    "gpu": Sizes(
        Transformer(4, vocabulary=8192),
        Transformer(4, 512, 8, 8192, 1024, 8),
        catalog.LLAMA,
        mlp=(4096, 8, 8192),
        images=(32, 28, 28, 512),
        lstm=(1024, 128, 64),
        float8=(4096, 1024, 2048),
    ),
    "cpu": Sizes(
        Transformer(4, 768, 12, 8192, 256, 4),
        Transformer(4, 512, 8, 4096, 128, 4),
        Llama(4, 512, 8, 4096, 128, 4, hidden=1408, groups=2),
        mlp=(1024, 4, 1024),
        images=(4, 28, 28, 512),
        lstm=(512, 32, 32),
    ),
    "tiny": Sizes(
        Transformer(2, 64, 4, 256, 32, 2),
        Transformer(2, 32, 4, 256, 32, 2),
        Llama(2, 64, 4, 256, 32, 2, hidden=96, groups=2),
        mlp=(64, 2, 32),
        images=(2, 4, 4, 16),
        lstm=(32, 4, 2),
        float8=(64,),
        large_vocabulary=384,
        layers=3,
    ),
}


def _usual(model: Model, *more: str) -> dict[str, Any]:
    """Losses in bfloat16 by the names that `autocast.py` gives them, and in float32."""
    names = "float32", "by hand", "autocast", *more
    return {name: LOSSES[name](model, BF16) for name in names}


def _gradients(clock: Clock, title: str, model: Model, losses: dict[str, Any]) -> None:
    """Times value and gradient by each of these losses."""
    args = jax.jit(model.init)(jax.random.key(0))
    clock.take_turns(title, {name: gradient(f, *args) for name, f in losses.items()})


def _gpt4(clock: Clock, sizes: Sizes) -> None:
    model = transformer(sizes.gpt)
    more = "autocast, recompute=False", "autocast, float32_results=head"
    losses = _usual(model, *more) | {
        "autocast f16": by_autocast(model, F16),
        "by hand f16": by_hand(model, F16),
        "by hand, dots_saveable": jax.checkpoint(by_hand(model, BF16), policy=SAVED),
    }
    _gradients(clock, "gpt4", model, losses)


def _attention(clock: Clock, sizes: Sizes) -> None:
    make = functools.partial(transformer, _large(sizes))
    title = f"gpt4, V = {sizes.large_vocabulary:,}"
    _gradients(clock, title, make(), _with_cudnn(make))


def _llama(clock: Clock, sizes: Sizes) -> None:
    for how, scanned in ("", False), (" in a scan", True):
        make = functools.partial(llama, sizes.llama, scanned=scanned)
        _gradients(clock, f"llama4{how}", make(), _with_cudnn(make))


def _with_cudnn(make: Callable[..., Model]) -> dict[str, Any]:
    """The usual losses, and on a GPU those with cuDNN's attention, which is marked."""
    losses, marked = _usual(make()), make(attention=models.cudnn_attention)
    if jax.default_backend() == "gpu":
        losses["by hand, cudnn"] = by_hand(marked, BF16)
        losses["autocast, in_half(cudnn)"] = by_autocast(marked, BF16)
        losses["autocast f16, in_half(cudnn)"] = by_autocast(marked, F16)
    return losses


def _large(sizes: Sizes, **more: Any) -> Transformer:
    vocabulary = sizes.large_vocabulary
    return dataclasses.replace(sizes.gpt, vocabulary=vocabulary, **more)


def _sizes_of_steps(sizes: Sizes) -> dict[str, Transformer]:
    """Sizes by what is said of them, that of the first screen first."""
    large = f"gpt4, V = {sizes.large_vocabulary:,}"
    return {large: _large(sizes), "gpt4": sizes.gpt, "gpt4, width 512": sizes.narrow}


def _frameworks(clock: Clock, sizes: Sizes) -> None:
    for name, make in (
        ("linen", catalog.linen),
        ("nnx", nnx_transformer),
        ("equinox", catalog.equinox),
    ):
        model = make(sizes.gpt)
        _gradients(clock, f"gpt4 in {name}", model, _usual(model))
    scanned = transformer(sizes.gpt, scanned=True)
    _gradients(clock, "gpt4 in a scan", scanned, _usual(scanned))


def _others(clock: Clock, sizes: Sizes) -> None:
    width, layers, rows = sizes.mlp
    channels = sizes.images[-1] // 2
    stage = [
        ((channels, 1, 1), (channels, 3, 1 if at else 2), (4 * channels, 1, 1))
        for at in range(6)
    ]
    resnet = catalog.resnet(sizes.images, None, stage, 100)
    for name, model in {
        "mlp-gelu": catalog.mlp([width] * (layers + 1), rows, jax.nn.gelu),
        "mlp-relu": catalog.mlp([width] * (layers + 1), rows, jax.nn.relu),
        "resnet50-stage3": resnet,
        "lstm": lstm(*sizes.lstm),
    }.items():
        _gradients(clock, name, model, _usual(model))


def _steps_of(model: Model) -> dict[str, Callable[[Any], Any]]:
    """Steps of AdamW by name, each of the parameters."""
    tx = optax.adamw(1e-4)

    def by(make: Any, loss: Any) -> Callable[[Any], Any]:
        return lambda params: make(loss, tx, params)

    wide, hand, auto = _usual(model).values()
    auto_f16, hand_f16 = by_autocast(model, F16), by_hand(model, F16)
    peers = "with_loss_scale", "flax DynamicScale", "jmp", "with_loss_scale, guard"
    return {
        "float32": by(_steps.unscaled, wide),
        "by hand": by(_steps.unscaled, hand),
        "autocast": by(_steps.unscaled, auto),
        "autocast, skip": by(_steps.with_loss_scale, auto),
        "autocast, half storage": lambda params: _half_stored(auto, tx, params),
        "by hand f16": by(_steps.unscaled, hand_f16),
        **{f"by hand f16, {peer}": by(_steps.PEERS[peer], hand_f16) for peer in peers},
        "autocast f16": by(_steps.unscaled, auto_f16),
        "autocast f16, with_loss_scale": by(_steps.with_loss_scale, auto_f16),
    }


def _half_stored(loss: Any, tx: Any, params: Any) -> Any:
    params = models.cast(params, jnp.bfloat16)
    return _steps.unscaled(loss, jmp_scale.with_half_storage(tx), params)


def _time_steps(clock: Clock, title: str, model: Model, *wanted: str) -> None:
    params, batch = jax.jit(model.init)(jax.random.key(0))
    steps = _steps_of(model)
    _, missing = _steps.installed(["jmp", "flax DynamicScale"])
    programs: Programs = {}
    for name in wanted:
        if any(name.endswith(peer) for peer in missing):
            clock.say(title=title, name=name, skipped="not installed")
        else:
            programs[name] = step(functools.partial(steps[name], params), batch)
    clock.take_turns(title, programs, rounds=7)


_PLAIN = "float32", "by hand", "autocast", "autocast, skip", "autocast, half storage"


def _adamw(clock: Clock, sizes: Sizes) -> None:
    for name, own in _sizes_of_steps(sizes).items():
        _time_steps(clock, f"step of {name}", transformer(own), *_PLAIN)


def _scaling(clock: Clock, sizes: Sizes) -> None:
    """What S, the skip and the guard cost, all on one loss."""
    model = transformer(sizes.gpt)
    names = [name for name in _steps_of(model) if name.startswith("by hand f16")]
    _time_steps(clock, "scaling, step of gpt4", model, *names)


def _step12(clock: Clock, sizes: Sizes) -> None:
    names = ["by hand", "autocast", "autocast f16, with_loss_scale"]
    names += ["by hand f16, flax DynamicScale", "float32"]
    model = transformer(_large(sizes, layers=sizes.layers))
    _time_steps(clock, f"step of gpt{sizes.layers}", model, *names)


def _torch(clock: Clock, sizes: Sizes) -> None:
    if importlib.util.find_spec("torch") is None:
        clock.say(title="torch", skipped="torch is not installed")
        return
    programs = (
        ("bfloat16", True, True),
        ("bfloat16", False, True),
        (None, False, True),
        ("bfloat16", True, False),
        ("float16", True, True),
    )
    for program, own in itertools.product(programs, _sizes_of_steps(sizes).items()):
        _time_torch(clock, *own, *program)


def _time_torch(
    clock: Clock, of: str, sizes: Transformer, dtype: str | None, *how: bool
) -> None:
    fused, compiled = how
    name = f"{'fused' if fused else 'plain'} attention, {dtype or 'float32'}"
    row = {"title": f"torch, step of {of}", "name": name + ", compiled" * compiled}
    if clock.left() < 20:
        clock.say(**row, skipped="no time")
        return
    try:
        run = torch_step(sizes, dtype, fused=fused, compiled=compiled)
        run()
        clock.time_in_turn(row["title"], {row["name"]: run}, rounds=7)
    except Exception as error:  # no compiler, or no memory
        clock.say(**row, error=str(error)[:300])


def _float8(clock: Clock, sizes: Sizes) -> None:
    """Blocks of dense layers whose products are float8, written by hand."""
    if not sizes.float8:
        clock.say(title="float8", skipped="a CPU has no float8 units")
    for width in sizes.float8:
        rows = sizes.gpt.batch * sizes.gpt.context
        model = catalog.mlp([width, 4 * width] * 2, rows, jax.nn.gelu)

        def in_float8(params: Any, x: Any) -> Any:
            x = x.astype(jnp.bfloat16)
            for layer in params:
                y = _float8_product(x, layer["w"]) + layer["b"]
                x = jax.nn.gelu(y).astype(jnp.bfloat16)
            return jnp.mean(x.astype(jnp.float32) ** 2) * 2.0**13

        losses = _usual(model) | {"float8": in_float8}
        _gradients(clock, f"float8, width {width}", model, losses)


@jax.custom_vjp
def _float8_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w` of e4m3 numbers with static powers of two, and e5m2 cotangents."""
    return _float8_forward(x, w)[0]


def _float8_forward(x: jax.Array, w: jax.Array) -> Any:
    power = 2.0 ** round(math.log2(w.shape[0]) / 2)
    x8, w8 = _in_float8(x, 1.0, "e4m3fn"), _in_float8(w, power, "e4m3fn")
    y = jnp.matmul(x8, w8, preferred_element_type=jnp.bfloat16) / power
    return y.astype(jnp.bfloat16), (x8, w8, power)


def _float8_backward(saved: Any, g: jax.Array) -> Any:
    x8, w8, power = saved
    g8 = _in_float8(g, 1.0, "e5m2")
    # The units multiply rows by rows: `precision` keeps their sums in float32.
    product = functools.partial(jnp.matmul, precision="highest")
    of_x = product(g8, w8.T, preferred_element_type=jnp.bfloat16) / power
    of_w = product(x8.T, g8, preferred_element_type=jnp.float32)
    return of_x.astype(jnp.bfloat16), of_w


_float8_product.defvjp(_float8_forward, _float8_backward)


def _in_float8(x: jax.Array, factor: float, kind: str) -> jax.Array:
    return (x.astype(jnp.float32) * factor).astype(f"float8_{kind}")


def _head(clock: Clock, sizes: Sizes) -> None:
    """A head of an odd vocabulary beside a padded one, with and without logits."""
    rows = sizes.gpt.batch * sizes.gpt.context
    vocabulary = sizes.large_vocabulary
    padded = vocabulary + -vocabulary % 128
    labels = jax.random.randint(jax.random.key(2), (rows,), 0, vocabulary)
    programs: Programs = {}
    for size in dict.fromkeys((vocabulary, padded)):
        h, out = jax.jit(
            lambda key, size=size: (
                jax.random.normal(key, (rows, sizes.gpt.width)),
                0.02 * jax.random.normal(key, (sizes.gpt.width, size)),
            )
        )(jax.random.key(0))
        for name, loss in _head_losses().items():
            params = {"x": h, "out": out}
            programs[f"{name}, V = {size:,}"] = gradient(loss, params, labels)
    clock.take_turns("head", programs, rounds=7)


def _head_losses() -> dict[str, Any]:
    plain = MINIMAL["head of 50,257"].loss
    losses = {"by hand": PROGRAMS["by hand"](plain)}
    for how in ("", " in 4 checkpoints", " in 4 chunks", " in 8 chunks"):
        loss = MINIMAL[f"head of 50,257{how}"].loss
        losses[f"autocast{how}"] = PROGRAMS["autocast"](loss)
    return losses


class Part(NamedTuple):
    """A question, and the seconds that its answer may take."""

    run: Callable[[Clock, Sizes], None]
    seconds: int
    question: str


# The most telling first.
PARTS = {
    "gpt4": Part(_gpt4, 60, "the gradient of GPT-2 with four layers"),
    "others": Part(_others, 50, "gradients of an MLP, a ResNet's stage and an LSTM"),
    "llama": Part(
        _llama, 90, "gradients of LLaMA's layers, with cuDNN's attention too"
    ),
    "attention": Part(_attention, 70, "the gradient with 50,257 tokens, likewise"),
    "scaling": Part(_scaling, 75, "what S, the skip and the guard cost on one loss"),
    "torch": Part(_torch, 150, "the steps of the part `steps` in PyTorch"),
    "steps": Part(_adamw, 180, "steps of AdamW, with the skip, in half storage"),
    "float8": Part(_float8, 60, "float8 by hand beside bfloat16"),
    "head": Part(_head, 45, "a head with and without logits, odd and padded"),
    "step12": Part(_step12, 85, "the step of GPT-2 with twelve layers"),
    "frameworks": Part(_frameworks, 120, "gradients in Linen, NNX, Equinox, a scan"),
}
