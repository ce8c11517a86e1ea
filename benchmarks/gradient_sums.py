"""In which dtype gradients are summed over devices, and what float32 costs there.

Two layers of 1024 -> 4096 -> 1024 with a bias, float16 compute and float32 parameters,
64 x 128 rows a device, as the compilers of TPUs and of NVIDIA's GPUs make their step:
with `lax.dot_general`, and as a float32 program in `jmp_scale.autocast`. Nothing is run
on these machines; the error of a sum in float16 is computed here.
"""

import functools
from typing import Any

import _hlo
import _targets
import _traffic
import jax
import jax.numpy as jnp
import numpy as np
from _compiled import AS_WRITTEN
from _harness import Table, parser, relative_error, report
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import jmp_scale

SHAPES = {"in": (1024, 4096), "bias": (4096,), "out": (4096, 1024)}
LAYERS, ROWS, TOKENS = 2, 64, 128  # rows of each device
LOSS_SCALE = 1024.0

# Of the parameters, by name, and of the batch.
SHARDINGS = {
    "data-parallel": ({"in": P(), "bias": P(), "out": P()}, P("chips")),
    "FSDP": ({name: P("chips") for name in SHAPES}, P("chips")),
    "tensor-parallel": (
        {"in": P(None, "chips"), "bias": P("chips"), "out": P("chips", None)},
        P(),
    ),
}
PRODUCTS = ("lax.dot_general", "autocast")
SUMS = ("all-reduce", "reduce-scatter", "collective-permute")
GATHERS = ("all-gather",)


def main(argv=None):
    arguments = parser(__doc__)
    text = f"NAME:CHIPS, of {', '.join(_targets.TARGETS)}"
    default = ["h100:8", "tpu-v5e:4"]
    arguments.add_argument("--targets", nargs="+", default=default, help=text)
    devices = {"type": int, "default": [1, 8, 64], "help": "of the error table"}
    arguments.add_argument("--devices", nargs="+", **devices)
    args = arguments.parse_args(argv)
    tables = [error_table(args.devices)]
    for given in args.targets:
        name, _, chips = given.partition(":")
        if name not in _targets.TARGETS or not chips.isdigit():
            arguments.error(f"--targets: expected NAME:CHIPS, got {given!r}")
        if reason := _targets.missing(name):
            print(f"{given}: {reason}")
            continue
        tables.append(table_of(_targets.Target(name, int(chips))))
    report(tables, args.json)


def table_of(target):
    """What is summed over the chips, and what it costs."""
    columns = ["parameters", "product", "16-bit sums, MB", "float32 sums, MB"]
    columns += ["16-bit gathers, MB", "float32 gathers, MB"]
    columns += ["device memory", "estimated cycles", "half operands"]
    table = Table(f"{target.name}, {target.chips} chips", columns)
    cases = [(s, p) for s in SHARDINGS for p in PRODUCTS]
    base: Any = None
    for sharding, product in tqdm(cases, f"{target.name}, {target.chips} chips"):
        compiled = compile_step(target, sharding, product)
        module = _hlo.parse(compiled.as_text())
        figures = _traffic.traffic(module), _traffic.estimated_cycles(module)
        base = figures if product == PRODUCTS[0] else base
        sizes = moved_bytes(module, SUMS) + moved_bytes(module, GATHERS)
        megabytes = [size / 1e6 for size in sizes]
        costs = [figures[0] / base[0], figures[1] / base[1] if base[1] else "-"]
        row = [sharding, product, *megabytes, *costs, half_operands(module)]
        table.rows.append(row)
    table.notes.append(
        "sums: operands of all-reduces and reduce-scatters. gathers: results of "
        "all-gathers. A TPU packs two 16-bit "
        "numbers in a u32, and turns a float32 reduce-scatter into a loop of "
        "collective-permutes, of which one turn is counted. Under tensor parallelism "
        "activations are summed as well. device memory, estimated cycles: beside "
        "lax.dot_general. half operands: products of two 16-bit operands, among all."
    )
    return table


def loss(params, batch, product):
    def dense(x, w):
        return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))

    dtype = jnp.float32 if product == "autocast" else jnp.float16
    x = batch.astype(dtype)
    for layer in params:
        layer = {name: leaf.astype(dtype) for name, leaf in layer.items()}
        hidden = dense(x, layer["in"])
        bias = jnp.broadcast_to(layer["bias"], hidden.shape)
        hidden = jax.nn.relu(hidden + bias)
        x = x + dense(hidden, layer["out"])
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def compile_step(target, sharding, product):
    of_params, of_batch = SHARDINGS[sharding]

    def placed(shape, spec):
        where = NamedSharding(target.mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)

    params = [{n: placed(SHAPES[n], of_params[n]) for n in SHAPES}] * LAYERS
    rows = ROWS * (1 if of_batch == P() else target.chips)
    batch = placed((rows, TOKENS, SHAPES["in"][0]), of_batch)

    program = functools.partial(loss, product=product)
    if product == "autocast":
        program = jmp_scale.autocast(program, "float16")

    def step(params, batch):
        def scaled(params):
            return LOSS_SCALE * program(params, batch)

        grads = jax.grad(scaled)(params)
        return jax.tree.map(lambda p, g: p - 1e-3 / LOSS_SCALE * g, params, grads)

    out = jax.tree.map(lambda x: x.sharding, params)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
    return jitted.lower(params, batch).compile(compiler_options=AS_WRITTEN)


def moved_bytes(module, kinds):
    """Bytes of 16-bit and of float32 arrays in collectives of some kinds.

    Of sums the operands count, of gathers the results.
    """
    half, full = 0, 0
    for ran in _traffic.executed(module):
        if _traffic.collective(ran.instruction) not in kinds:
            continue
        gathered = ran.instruction.results[-len(ran.operands) :]
        for array in gathered if kinds == GATHERS else ran.operands:
            if array.dtype in ("f16", "u32"):
                half += array.bytes
            elif array.dtype == "f32":
                full += array.bytes
    return half, full


def half_operands(module):
    """Products of two float16 operands, among all."""
    half, total = 0, 0
    for computation in module.computations.values():
        for instruction in computation.values():
            if instruction.opcode not in ("dot", "convolution"):
                continue
            operands = [computation[name] for name in instruction.operands]
            types = {array.dtype for found in operands for array in found.results}
            total += 1
            half += types == {"f16"}
    return f"{half} of {total}"


def error_table(devices):
    """The error of one weight's gradient, of 64 x 128 rows dealt out to devices."""
    columns = ["devices", "summed in float16", "summed in float32, rounded once"]
    table = Table("Relative error of a gradient after the sum over devices", columns)
    rng = np.random.RandomState(0)
    x = rng.normal(size=(8192, 64)).astype(np.float16)
    g = rng.normal(size=(8192, 64)).astype(np.float16)
    exact = x.astype(np.float64).T @ g.astype(np.float64)
    for count in devices:
        shards = zip(np.split(x, count), np.split(g, count), strict=True)
        parts = [a.astype(np.float32).T @ b.astype(np.float32) for a, b in shards]
        in_half = parts[0].astype(np.float16)
        for part in parts[1:]:
            in_half = in_half + part.astype(np.float16)
        in_full = np.sum(parts, 0, dtype=np.float32).astype(np.float16)
        errors = [relative_error(y, exact) for y in (in_half, in_full)]
        table.rows.append([count, *(f"{error:.1e}" for error in errors)])
    table.notes.append(
        "Norm of the difference from float64, over the norm. One rounding for each "
        "addition, as in a ring."
    )
    return table


if __name__ == "__main__":
    main()
