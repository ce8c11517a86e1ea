"""What `autocast` sends between many devices, beside casting by hand.

As the compilers of GPUs and TPUs make it: GPT-2 small's layers (width 768, 12 heads,
1,024 tokens, vocabulary 8,192), 8 rows for each device of the axis that the batch is
split over; uN is N layers unrolled, sN a `lax.scan`. No such machine is needed; nothing
is allocated or run. Ratios are to casting by hand. One row alone:

    python benchmarks/sharded.py --targets h100:8 --layouts FSDP --models u2 \
        --steps gradient --programs autocast --resume rows.json

A program takes 5 to 30 s for GPUs, and minutes for TPUs. Rows in the file of `--resume`
are not measured again, so a long run may be stopped; remove those of code that has
changed.
"""

import argparse
import contextlib
import json
import pathlib
import re
import time
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import _harness
import _traffic
import _wire
import jax
import jax.numpy as jnp
import optax
from _harness import Table
from _layouts import LAYOUTS, place_state, placed
from _minimal import HALF_PARAMETERS, MINIMAL, PROGRAMS, compile_minimal, options
from _models import Transformer, cast
from _tables import compared
from _targets import TARGETS, Target, missing
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import jmp_scale

ROWS = 8  # of the batch, for each device of its axis
HALF = {"bf16": jnp.bfloat16, "f16": jnp.float16}
AXES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
STEPS = ("gradient", "AdamW")
RATIOS = ("temporaries, MB", "peak, MB", "bytes, GB", "M cycles", "wire, MB")
SHOWN = 1024  # bytes of the smallest array that is shown


class Case(NamedTuple):
    """One row: a model's layout, or the name of a minimal program."""

    target: Target
    step: str
    dtype: str
    axes: str
    layout: str
    model: str
    program: str

    def __str__(self) -> str:
        target = f"{self.target.name}:{self.target.chips}"
        return " | ".join([target, *self[1:]])


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    if args.minimal:
        args.steps, args.models = ["gradient"], ["minimal"]
    jax.config.update("jax_platforms", "cpu")
    kept = args.resume is not None and args.resume.exists()
    found = json.loads(args.resume.read_text()) if kept else {}
    tables = []
    for target in args.targets:
        if reason := missing(target.name):
            print(f"{target.name}: {reason}")
            continue
        for step, dtype, axes in product(args.steps, args.dtypes, args.axes):
            names = product(MINIMAL if args.minimal else args.layouts, args.models)
            rows = [Case(target, step, dtype, axes, *name, "") for name in names]
            tables.append(_table(args, found, rows))
    _harness.report(tables, args.json, "compiled, not run")


def _table(args: Any, found: Any, rows: Sequence[Case]) -> Table:
    """Rows of one machine and step; measures those that are not in `found`."""
    cases = [row._replace(program=program) for row in rows for program in args.programs]
    first = rows[0]
    title = f"{first.target.name} x {first.target.chips}, {first.step}, {first.dtype}"
    title += ", Explicit axes" if first.axes == "explicit" else ""
    for case in tqdm(cases, title):
        if str(case) not in found:
            found[str(case)] = _measure(case)
            if args.resume is not None:
                args.resume.write_text(json.dumps(found, indent=1) + "\n")
    others = ["asynchronous", "collectives: number, MB"]
    table = Table(title, ["layout", "model", "program", *RATIOS, *others])
    for case in cases:
        row = found[str(case)]
        base = found.get(str(case._replace(program="by hand")), {})
        base = {} if case.program == "by hand" else base
        figures = [compared(row.get(name), base.get(name)) for name in RATIOS]
        sizes = [f"{k} {n}, {mb:.1f}" for k, (n, mb) in row["collectives"].items()]
        named = [case.layout, case.model, case.program]
        table.rows.append([*named, *figures, row["asynchronous"], "; ".join(sizes)])
    return table


def _measure(case: Case) -> dict[str, Any]:
    start = time.process_time()
    try:
        compiled = _compile(case)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        more = float("inf")  # than the machine has
        return {"temporaries, MB": more, "asynchronous": "-", "collectives": {}}
    module, memory = _wire.module_of(compiled), compiled.memory_analysis()
    sent = _wire.sent(module)
    runs = [one.times * one.asynchronous for one in sent if one.first]
    cycles = _traffic.estimated_cycles(module) / 1e6
    return {
        "temporaries, MB": memory.temp_size_in_bytes / 1e6,
        "peak, MB": memory.peak_memory_in_bytes / 1e6,
        "bytes, GB": _traffic.traffic(module) / 1e9,
        "M cycles": cycles or None,
        "wire, MB": sum(one.bytes for one in sent) / 1e6,
        "asynchronous": f"{sum(runs)}/{sum(one.times for one in sent if one.first)}",
        "collectives": {
            name: (total.number, total.bytes / 1e6)
            for name, total in _wire.totals(sent, SHOWN).items()
        },
        "compile time, s": time.process_time() - start,
    }


def _compile(case: Case) -> Any:
    half, target = HALF[case.dtype], case.target
    if case.layout in MINIMAL:
        return compile_minimal(case.layout, target, case.program, half)
    layout = LAYOUTS[case.layout]
    mesh = layout.mesh(target, AXES[case.axes])
    sizes = Transformer(
        int(case.model[1:]), vocabulary=8192, batch=ROWS * mesh.shape["data"]
    )
    model = layout.model(sizes, mesh, scanned=case.model[0] == "s")
    params, batch = jax.eval_shape(model.init, jax.random.key(0))
    if case.program == HALF_PARAMETERS:
        params = jax.eval_shape(lambda tree: cast(tree, half), params)
    args = [layout.place(params, mesh)]
    loss = PROGRAMS[case.program](model.loss, half)
    tx = None
    if case.step == "AdamW":
        tx = _optimizer(case.program)
        args.append(place_state(jax.eval_shape(tx.init, params), args[0], mesh))
    step = _step(loss, tx, layout.shard_map)
    if layout.shard_map:
        specs = (*[P()] * len(args), P("data"))
        step = jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False
        )
    out = jax.tree.map(lambda leaf: leaf.sharding, args)
    donated = tuple(range(len(args))) if case.step == "AdamW" else ()
    jitted = jax.jit(step, donate_argnums=donated, out_shardings=(None, *out))
    explicit = case.axes == "explicit"
    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        lowered = jitted.lower(*args, {"tokens": placed(batch["tokens"], mesh, "data")})
    return lowered.compile(compiler_options=options(target))


def _optimizer(program: str) -> Any:
    inner = optax.adamw(1e-3)
    if program == HALF_PARAMETERS:
        inner = jmp_scale.with_half_parameters(inner)
    return jmp_scale.with_loss_scale(inner, jmp_scale.DynamicLossScale())


def _step(loss: Any, tx: Any, averaged: bool) -> Any:
    """Value and gradient; with a state of the optimizer a whole step."""

    def step(params, *rest):
        *state, batch = rest
        value_and_grad = jax.value_and_grad(loss)
        if state:
            value_and_grad = jmp_scale.value_and_grad(loss, state[0].loss_scale)
        value, grads = value_and_grad(params, batch)
        if averaged:
            value, grads = lax.pmean((value, grads), "data")
        if not state:
            return value, grads
        updates, state = tx.update(grads, *state, params, value=value)
        return value, optax.apply_updates(params, updates), state

    return step


def _target(text: str) -> Target:
    name, _, chips = text.partition(":")
    if name not in TARGETS or not chips.isdigit():
        raise argparse.ArgumentTypeError(
            f"expected NAME:CHIPS with a name of {', '.join(TARGETS)}, got {text!r}"
        )
    return Target(name, int(chips))


def _model(text: str) -> str:
    if not re.fullmatch(r"[us][1-9]\d*", text):
        raise argparse.ArgumentTypeError(
            f"expected uN for N unrolled layers or sN for a scan, got {text!r}"
        )
    return text


def _parser() -> argparse.ArgumentParser:
    parser = _harness.parser(__doc__)
    targets = [Target("h100", 8), Target("tpu-v5e", 8)]
    text = f"NAME:CHIPS of {', '.join(TARGETS)}"
    parser.add_argument(
        "--targets", nargs="+", type=_target, default=targets, help=text
    )
    text = "layers, such as u2 or s12"
    models = ["u2", "u4", "s12"]
    parser.add_argument("--models", nargs="+", type=_model, default=models, help=text)
    for flag, choices, default, text in (
        ("--layouts", LAYOUTS, LAYOUTS, "of the models"),
        ("--steps", STEPS, STEPS, "value and gradient, or a whole step"),
        ("--programs", PROGRAMS, PROGRAMS, "of each"),
        ("--dtypes", HALF, ["bf16"], "half-precision dtypes"),
        ("--axes", AXES, ["auto"], "types of the mesh's axes"),
    ):
        _harness.add_several(parser, flag, choices, default, text)
    text = "the minimal programs in place of models; their gradient alone"
    parser.add_argument("--minimal", action="store_true", help=text)
    parser.add_argument("--resume", type=pathlib.Path, help="file of measured rows")
    return parser


if __name__ == "__main__":
    main()
