"""The smallest programs in which half precision decides what crosses the wire."""

import contextlib
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from _layouts import placed
from compilers import options
from compilers.targets import Target
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_scale
from models import cast, cross_entropy, mean_loss, wide

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
from _loss_without_logits import summed_loss

HALF = jnp.bfloat16
# How a loss of (parameters, batch, dtype), where None is float32, becomes one of two
# arguments. The last is given parameters that are stored in half precision.
HALF_PARAMETERS = "autocast, half parameters"
PROGRAMS: dict[str, Callable[..., Callable[[Any, Any], jax.Array]]] = {
    "by hand": lambda loss: lambda params, batch: loss(params, batch, HALF),
    "autocast": lambda loss: jmp_scale.autocast(
        lambda params, batch: loss(params, batch, None), HALF
    ),
}
PROGRAMS[HALF_PARAMETERS] = PROGRAMS["autocast"]


class Minimal(NamedTuple):
    """A loss of (parameters, batch, dtype), and the shapes and specs of its arguments.

    `batch` is also given its dtype. The mesh has the one axis `chips`, or those of the
    `model` that devices share and of the batch.
    """

    loss: Callable[..., jax.Array]
    params: dict[str, tuple[tuple[int, ...], P]]
    batch: tuple[tuple[int, ...], P, Any]
    shared: int = 0  # chips of the axis `model`; 0: there is the axis `chips` alone
    axes: AxisType = AxisType.Auto

    def mesh(self, target: Target) -> Mesh:
        names = {"chips": target.chips}
        if self.shared:
            names = {"data": target.chips // self.shared, "model": self.shared}
        return target.mesh_of(names, self.axes)


def _products_of_one_operand(params, x, dtype):
    params = cast(params, dtype)
    x = jnp.tanh(cast(x, dtype) @ params["in"])
    q, k, v = (x @ params[name] for name in "qkv")
    return jnp.mean(wide(q * k * v) ** 2)


def _products_of_rows(params, tokens, dtype):
    params = cast(params, dtype)
    x = cast(jnp.tanh(wide(params["table"][tokens])), dtype)
    q, k, v = (x @ params[name] for name in "qkv")
    return jnp.mean(wide(q * k * v) ** 2)


def _lookup(params, tokens, dtype):
    params = cast(params, dtype)
    return jnp.mean(wide(jax.nn.gelu(params["table"][tokens]) @ params["out"]) ** 2)


def _layers(params, x, dtype):
    x = cast(x, dtype)
    for weight in cast(params, dtype).values():
        x = jax.nn.gelu(x @ weight)
    return jnp.mean(wide(x) ** 2)


def _logits(params, dtype):
    """Of a head; under Explicit axes its weights are gathered before the product."""
    x, out = (cast(params[name], dtype) for name in ("x", "out"))
    sharding = jax.typeof(out).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        out = jax.sharding.reshard(out, NamedSharding(sharding.mesh, P()))
    return wide(x @ out)


def _logsumexp_head(params, labels, dtype):
    return cross_entropy(_logits(params, dtype), labels)


def _log_softmax_head(params, labels, dtype):
    return mean_loss(_logits(params, dtype), labels)


def _head_in_checkpoints(params, labels, dtype, chunks=4):
    def chunk(total, batch):
        x, labels = batch
        loss = _logsumexp_head({"x": x, "out": params["out"]}, labels, dtype)
        return total + loss / chunks, None

    batches = jax.tree.map(
        lambda array: array.reshape(chunks, -1, *array.shape[1:]),
        (params["x"], labels),
    )
    return jax.lax.scan(jax.checkpoint(chunk), 0.0, batches)[0]


def _head_in_chunks(params, labels, dtype, chunks=4):
    """As in the example: in half precision under `autocast`, whatever the dtype."""
    weights = jnp.full(len(labels), 1 / len(labels))
    return summed_loss(params["x"], params["out"], labels, weights, chunks=chunks)


ROWS, COLUMNS, WHOLE = P("chips"), P(None, "chips"), P()
SQUARE, TABLE = (1024, 1024), (32768, 1024)
MINIMAL = {
    "qkv, TP": Minimal(
        _products_of_one_operand,
        {"in": (SQUARE, WHOLE), **dict.fromkeys("qkv", (SQUARE, COLUMNS))},
        ((4096, 1024), WHOLE, jnp.float32),
    ),
    "embedding, TP": Minimal(
        _products_of_rows,
        {"table": (SQUARE, WHOLE), **dict.fromkeys("qkv", (SQUARE, COLUMNS))},
        ((8, 512), WHOLE, jnp.int32),
    ),
    "vocabulary, TP": Minimal(
        _lookup,
        {"table": (TABLE, ROWS), "out": (SQUARE, WHOLE)},
        ((8, 512), WHOLE, jnp.int32),
    ),
    "vocabulary, FSDP": Minimal(
        _lookup,
        {"table": (TABLE, ROWS), "out": (SQUARE, ROWS)},
        ((64, 512), ROWS, jnp.int32),
    ),
    "four layers, FSDP": Minimal(
        _layers,
        dict.fromkeys("1234", (SQUARE, ROWS)),
        ((32768, 1024), ROWS, jnp.float32),
    ),
}


def _heads() -> dict[str, Minimal]:
    """The head of a language model by form of the loss and layout."""
    tokens, out = (8192, 768), (768, 50304)
    layouts: dict[str, tuple[P, P, int, AxisType]] = {
        "DP": (ROWS, WHOLE, 0, AxisType.Auto),
        "FSDP": (ROWS, ROWS, 0, AxisType.Auto),
        "FSDP, Explicit": (ROWS, ROWS, 0, AxisType.Explicit),
        "TP": (WHOLE, P(None, "model"), 8, AxisType.Auto),
        "DPxTP": (P("data"), P(None, "model"), 4, AxisType.Auto),
    }
    heads = {}
    for form, loss in (
        ("logsumexp", _logsumexp_head),
        ("log_softmax", _log_softmax_head),
    ):
        for layout, (by_row, of_out, *how) in layouts.items():
            params = {"x": (tokens, by_row), "out": (out, of_out)}
            batch = tokens[:1], by_row, jnp.int32
            heads[f"head by {form}, {layout}"] = Minimal(loss, params, batch, *how)
    odd = heads["head by log_softmax, DP"].params | {"out": ((768, 50257), WHOLE)}
    of_one_chip = heads["head by log_softmax, DP"]._replace(params=odd)
    losses = {
        "": _logsumexp_head,
        " in 4 checkpoints": _head_in_checkpoints,
        " in 4 chunks": _head_in_chunks,
        " in 8 chunks": functools.partial(_head_in_chunks, chunks=8),
    }
    return heads | {
        f"head of 50,257{how}": of_one_chip._replace(loss=loss)
        for how, loss in losses.items()
    }


MINIMAL |= _heads()


def compile_minimal(name: str, target: Target, program: str) -> Any:
    """Value and gradient, each gradient placed like its parameter."""
    minimal = MINIMAL[name]
    mesh = minimal.mesh(target)

    def place(shape: Any, spec: P, dtype: Any) -> jax.ShapeDtypeStruct:
        return placed(jax.ShapeDtypeStruct(shape, dtype), mesh, *spec)

    stored = HALF if program == HALF_PARAMETERS else jnp.float32
    params = {name: place(*how, stored) for name, how in minimal.params.items()}
    out = {name: param.sharding for name, param in params.items()}
    loss = PROGRAMS[program](minimal.loss)
    jitted = jax.jit(jax.value_and_grad(loss), out_shardings=(None, out))
    is_explicit = minimal.axes == AxisType.Explicit
    with jax.set_mesh(mesh) if is_explicit else contextlib.nullcontext():
        lowered = jitted.lower(params, place(*minimal.batch))
    return lowered.compile(compiler_options=options(target))
