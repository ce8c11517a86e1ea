"""The smallest programs in which half precision decides what crosses the wire."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from _compiled import AS_WRITTEN
from _layouts import pin, placed
from _models import cast, wide
from _targets import Target
from jax.sharding import Mesh

import jmp_scale

WIDTH = 1024

Loss = Callable[[Any, Any, Any], jax.Array]  # of parameters, batch and dtype

# What makes a loss of two arguments from one whose dtype None stands for float32. Those
# of `HALF_PARAMETERS` are given parameters in half precision.
PROGRAMS: dict[str, Callable[[Loss, Any], Callable[[Any, Any], jax.Array]]] = {
    "by hand": lambda loss, half: lambda params, batch: loss(params, batch, half),
    "autocast": lambda loss, half: jmp_scale.autocast(
        lambda params, batch: loss(params, batch, None), half
    ),
}
HALF_PARAMETERS = "autocast, half parameters"
PROGRAMS[HALF_PARAMETERS] = PROGRAMS["autocast"]


class Minimal(NamedTuple):
    """A program, and how its arguments are split over the one axis of a mesh.

    Attributes:
      loss: made of the mesh.
      params: shape and the dimension that is split, if one is, of each parameter.
      batch: the same of the rows, or of the token numbers.
    """

    loss: Callable[[Mesh], Loss]
    params: dict[str, tuple[tuple[int, ...], int | None]]
    batch: tuple[tuple[int, ...], int | None]


def _products_of_one_operand(_: Mesh) -> Loss:
    """Queries, keys and values, whose gradients of `x` are added over the devices."""

    def loss(params, x, dtype):
        params = cast(params, dtype)
        x = jnp.tanh(cast(x, dtype) @ params["in"])
        q, k, v = (x @ params[name] for name in "qkv")
        return jnp.mean(wide(q * k * v) ** 2)

    return loss


def _lookup(_: Mesh) -> Loss:
    def loss(params, tokens, dtype):
        params = cast(params, dtype)
        return jnp.mean(wide(jax.nn.gelu(params["table"][tokens]) @ params["out"]) ** 2)

    return loss


def _layers(_: Mesh) -> Loss:
    def loss(params, x, dtype):
        x = cast(x, dtype)
        for weight in cast(params, dtype).values():
            x = jax.nn.gelu(x @ weight)
        return jnp.mean(wide(x) ** 2)

    return loss


def _sequence_parallel(mesh: Mesh) -> Loss:
    """Rows are split, and gathered for each layer (Megatron's)."""
    split, whole = pin(mesh, mesh.axis_names[0], None), pin(mesh, None, None)

    def loss(params, x, dtype):
        x, params = cast(x, dtype), cast(params, dtype)
        for up, down in (("up0", "down0"), ("up1", "down1")):
            y = jax.nn.gelu(whole(_normalize(x)) @ params[up])
            x = x + split(y @ params[down])
        return jnp.mean(wide(_normalize(x)) * jnp.arange(WIDTH)[None])

    return loss


def _normalize(x: jax.Array) -> jax.Array:
    y = wide(x)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
    return y.astype(x.dtype)


_SQUARE = (WIDTH, WIDTH)
_TABLE = (32 * WIDTH, WIDTH)
_MLP = {f"up{at}": ((WIDTH, 4 * WIDTH), 1) for at in (0, 1)}
_MLP |= {f"down{at}": ((4 * WIDTH, WIDTH), 0) for at in (0, 1)}
MINIMAL = {
    "qkv, TP": Minimal(
        _products_of_one_operand,
        {"in": (_SQUARE, None)} | dict.fromkeys("qkv", (_SQUARE, 1)),
        ((4 * WIDTH, WIDTH), None),
    ),
    "vocabulary, TP": Minimal(
        _lookup, {"table": (_TABLE, 0), "out": (_SQUARE, None)}, ((8, 512), None)
    ),
    "vocabulary, FSDP": Minimal(
        _lookup, {"table": (_TABLE, 0), "out": (_SQUARE, 0)}, ((64, 512), 0)
    ),
    "four layers, FSDP": Minimal(
        _layers, {str(at): (_SQUARE, 0) for at in range(4)}, ((32 * WIDTH, WIDTH), 0)
    ),
    "MLP, sequence": Minimal(_sequence_parallel, _MLP, ((4 * WIDTH, WIDTH), 0)),
}


def compile_minimal(
    name: str, target: Target, program: str = "autocast", half: Any = jnp.bfloat16
) -> Any:
    """Value and gradient, each gradient placed as its parameter."""
    minimal, mesh = MINIMAL[name], target.mesh

    def place(shape: Any, split: int | None, dtype: Any) -> jax.ShapeDtypeStruct:
        axes = [None if at != split else mesh.axis_names[0] for at in range(len(shape))]
        return placed(jax.ShapeDtypeStruct(shape, dtype), mesh, *axes)

    stored = half if program == HALF_PARAMETERS else jnp.float32
    params = {name: place(*how, stored) for name, how in minimal.params.items()}
    is_tokens = "table" in params
    batch = place(*minimal.batch, jnp.int32 if is_tokens else jnp.float32)
    loss = PROGRAMS[program](minimal.loss(mesh), half)
    return compile_gradient(loss, params, batch, target)


def compile_gradient(loss: Any, params: Any, batch: Any, target: Target) -> Any:
    out = jax.tree.map(lambda x: x.sharding, params)
    jitted = jax.jit(jax.value_and_grad(loss), out_shardings=(None, out))
    return jitted.lower(params, batch).compile(compiler_options=options(target))


def options(target: Target) -> Any:
    return AS_WRITTEN if target.name == "h100" else {}
