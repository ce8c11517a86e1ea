"""What `autocast` sends between many devices, beside casting by hand.

Layers of GPT-2 small, 8 rows for each device of the axis that the batch is split over,
as the compilers of GPUs and TPUs make them. No such machine is needed; nothing is
allocated or run. Ratios are to casting by hand. One row alone:

    python benchmarks/sharded.py --targets h100:8 --layouts FSDP --models u2 \
        --programs autocast --resume rows.json

A loop counts as often as it runs. `--minimal` compiles programs of one cause each, and
the head of a language model.
Programs with `sum_gradients` are a `shard_map` over the axis of the batch, under FSDP
with weights that are gathered once, in half precision: layouts DP and FSDP alone.

A program takes 5 to 30 s for GPUs, and minutes for TPUs. Rows in the file of `--resume`
are not measured again, so a long run may be stopped; remove those of code that has
changed.
"""

import argparse
import time
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import _harness
import jax
from _harness import MEMORY, Table
from _layouts import LAYOUTS, placed
from _tables import compared
from compilers import options, targets, traffic, wire
from compilers.targets import TARGETS, Target
from jax import lax
from jax.sharding import PartitionSpec as P
from models import Transformer, cast
from models.minimal import HALF, HALF_PARAMETERS, MINIMAL, PROGRAMS, compile_minimal
from tqdm import tqdm

import jmp_scale

ROWS = 8  # of the batch, for each device of its axis
SUMS = ", sum_gradients"  # ends the name of a program that adds up itself
SUMMED = {f"{name}{SUMS}": name for name in ("autocast", HALF_PARAMETERS)}
MODELS = {"u2": (2, False), "u4": (4, False), "s12": (12, True)}  # layers, as a scan
RATIOS = (MEMORY, "peak, MB", "bytes, GB", "M cycles", "wire, MB")
OTHERS = ("asynchronous", "collectives: number, MB")


class Case(NamedTuple):
    """One row. `layout` may name a minimal program instead, whose `model` is "-"."""

    target: Target
    kind: str
    layout: str
    model: str
    program: str

    def __str__(self) -> str:
        target = f"{self.target.name}:{self.target.chips}"
        return " | ".join([target, *self[1:]])


def main(argv: Sequence[str] | None = None) -> None:
    parser = _parser()
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    kind = "minimal programs" if args.minimal else "gradient"
    if args.minimal:
        args.models = ["-"]
        args.layouts = [name for name in args.layouts if name in MINIMAL] or MINIMAL
    tables = []
    for given in args.targets:
        name, _, chips = given.partition(":")
        if name not in TARGETS or not chips.isdigit():
            parser.error(f"--targets: expected NAME:CHIPS, got {given!r}")
        if reason := targets.missing(name):
            print(f"{given}: {reason}")
            continue
        rows = product(args.layouts, args.models, args.programs)
        cases = [Case(Target(name, int(chips)), kind, *row) for row in rows]
        cases = [case for case in cases if _exists(case)]
        tables.append(_table(_harness.Kept(args.resume), cases))
    _harness.report(tables, "compiled, not run")


def _exists(case: Case) -> bool:
    if case.program in SUMMED:
        return case.layout in ("DP", "FSDP")
    minimal = MINIMAL.get(case.layout)
    return minimal is None or minimal.shared <= case.target.chips


def _table(kept: _harness.Kept, cases: Sequence[Case]) -> Table:
    """Rows of one machine and kind of program."""
    target, kind, *_ = cases[0]
    title = f"{target.name} x {target.chips}, {kind}, bf16"
    for case in tqdm(cases, title):
        kept.measure(str(case), _measure, case)
    table = Table(title, ["layout", "model", "program", *RATIOS, *OTHERS])
    for case in cases:
        own, base = kept.rows[str(case)], {}
        if case.program != "by hand":
            base = kept.rows.get(str(case._replace(program="by hand")), {})
        ratios = [compared(own.get(name), base.get(name)) for name in RATIOS]
        table.rows.append([*case[-3:], *ratios, *(own.get(name) for name in OTHERS)])
    return table


def _measure(case: Case) -> dict[str, Any]:
    start = time.process_time()
    compiled = _compile(case)
    memory = compiled.memory_analysis()
    module = wire.parse(compiled.as_text())
    sent = wire.sent(module)
    asynchronous = sum(one.times for one in sent if one.asynchronous)
    kinds = [f"{k} {n}, {b / 1e6:.1f}" for k, (n, b) in wire.totals(module).items()]
    return {
        MEMORY: memory.temp_size_in_bytes / 1e6,
        "peak, MB": memory.peak_memory_in_bytes / 1e6,
        "bytes, GB": traffic.traffic(module) / 1e9,
        "M cycles": traffic.estimated_cycles(module) / 1e6 or None,
        "wire, MB": sum(one.bytes for one in sent) / 1e6,
        "asynchronous": f"{asynchronous}/{sum(one.times for one in sent)}",
        "collectives: number, MB": "; ".join(kinds),
        "seconds": time.process_time() - start,
    }


def _compile(case: Case) -> Any:
    layout = LAYOUTS.get(case.layout)
    if layout is None:
        return compile_minimal(case.layout, case.target, case.program)
    mesh = layout.mesh(case.target)
    layers, scanned = MODELS[case.model]
    sizes = Transformer(layers, vocabulary=8192, batch=ROWS * mesh.shape["data"])
    model = layout.model(sizes, mesh, scanned=scanned)
    params, batch = jax.eval_shape(model.init, jax.random.key(0))
    program = SUMMED.get(case.program, case.program)
    if program == HALF_PARAMETERS:
        params = jax.eval_shape(lambda tree: cast(tree, HALF), params)
    params = layout.place(params, mesh)
    out = jax.tree.map(lambda leaf: leaf.sharding, params)
    specs = jax.tree.map(lambda sharding: sharding.spec, out)
    step = jax.value_and_grad(PROGRAMS[program](model.loss))
    if case.program in SUMMED:
        step = _of_shares(step, specs)
    elif layout.shard_map:
        step = _averaged(step)
    if layout.shard_map or case.program in SUMMED:
        of = {"in_specs": (specs, P("data")), "out_specs": (P(), specs)}
        step = jax.shard_map(step, mesh=mesh, **of, check_vma=False)
    jitted = jax.jit(step, out_shardings=(None, out))
    lowered = jitted.lower(params, {"tokens": placed(batch["tokens"], mesh, "data")})
    return lowered.compile(compiler_options=options(case.target))


def _averaged(value_and_grad: Any) -> Any:
    return lambda *args: lax.pmean(value_and_grad(*args), "data")


def _of_shares(value_and_grad: Any, specs: Any) -> Any:
    """Value and gradient of parameters of which a device holds all or its shares."""

    def whole(path: Any, x: jax.Array, spec: Any) -> jax.Array:
        axes = [at for at, axis in enumerate(spec) if axis is not None]
        if not axes:
            return x
        is_weight = jax.tree_util.keystr(path[-1:], simple=True) == "kernel"
        x = x.astype(HALF) if is_weight else x
        return lax.all_gather(x, "data", axis=axes[0], tiled=True)

    def of_shares(params: Any, batch: Any) -> Any:
        wholes = jax.tree_util.tree_map_with_path(whole, params, specs)
        value, grads = value_and_grad(wholes, batch)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        grads = jmp_scale.sum_gradients(grads, "data", like=specs, mean=True)
        return lax.pmean(value, "data"), grads

    return of_shares


def _parser() -> argparse.ArgumentParser:
    parser = _harness.parser(__doc__)
    for flag, choices, default, text in (
        ("--layouts", [*LAYOUTS, *MINIMAL], LAYOUTS, "where arrays lie"),
        ("--models", MODELS, MODELS, "layers, unrolled or as a scan"),
        ("--programs", [*PROGRAMS, *SUMMED], [*PROGRAMS, *SUMMED], "of each"),
    ):
        _harness.add_several(parser, flag, choices, default, text)
    text = f"NAME:CHIPS, of {', '.join(TARGETS)}"
    default = ["h100:8", "tpu-v5e:8"]
    parser.add_argument("--targets", nargs="+", default=default, help=text)
    text = "gradients of minimal programs, not of models"
    parser.add_argument("--minimal", action="store_true", help=text)
    _harness.add_resume(parser)
    return parser


if __name__ == "__main__":
    main()
