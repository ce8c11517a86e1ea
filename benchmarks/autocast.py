"""What `autocast` makes of a float32 program, beside casting it by hand.

- compiled: memory, traffic and kernels or cycles of value and gradient, of models at
  the size that people train, as the compilers of GPUs and TPUs make them. No such
  machine is needed, nothing is allocated and nothing is run.
- traced: trace times of twelve unrolled layers, over the float32 program's.
- error: of the gradients of small models, which are computed here.

By hand is told as it is, everything else as a ratio to it, where it is known. One row:

    python benchmarks/autocast.py --parts compiled --targets h100 --models gpt4 \
        --programs autocast --resume rows.json

A compiler for TPUs takes minutes for each row of a transformer. `--resume` keeps every
row in a file, and takes from it what is there: after a stop the same command goes on,
and other models and programs of the same file are what they are compared with. Rows of
code that has changed since must be taken out of it.
"""

import functools
import gc
import itertools
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import _harness
import _targets
import jax
import jax.numpy as jnp
import numpy as np
from _compiled import figures
from _half_models import DEEP, LARGE, SMALL, Model
from _harness import Table
from tqdm import tqdm

import jmp_scale

LOSS_SCALE = 2.0**15  # of gradients that are computed
SEEDS = 20  # of the models whose errors are compared
HALF = {"bf16": jnp.bfloat16, "f16": jnp.float16}
BASE = "by hand"
MODELS = LARGE | DEEP | SMALL
DEEPER = {"gpt8": "gpt4"}  # by four layers
UNITS = {
    "MB a layer": (1e6, " MB"),
    "temporaries": (1e6, " MB"),
    "bytes": (1e9, " GB"),
    "kernels": (1, ""),
    "cycles": (1e6, " M"),
    "compile time": (1, " s"),
}


def _by_hand(model: Model, half: Any, *, checkpointed: bool = False) -> Any:
    return lambda params, batch: model.loss(params, batch, half, checkpointed)


def _saving_products(model: Model, half: Any) -> Any:
    policy = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(_by_hand(model, half), policy=policy)


def _autocast(
    model: Model, half: Any, *, checkpointed: bool = False, **options: Any
) -> Any:
    loss = _by_hand(model, None, checkpointed=checkpointed)
    return jmp_scale.autocast(loss, half, **model.options, **options)


# The loss of a model and a dtype. With a checkpoint: around each block, within.
PROGRAMS = {
    BASE: _by_hand,
    "by hand, dots_saveable": _saving_products,
    "by hand, checkpoint": functools.partial(_by_hand, checkpointed=True),
    "float32": lambda model, half: _by_hand(model, None),
    "autocast": _autocast,
    "autocast, checkpoint": functools.partial(_autocast, checkpointed=True),
    "autocast, recompute=False": functools.partial(_autocast, recompute=False),
    "autocast, backward=bf16": functools.partial(_autocast, backward="bfloat16"),
}


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    tables = []
    if "compiled" in args.parts:
        tables += _compiled(args)
    if "traced" in args.parts:
        tables += [_traced(args, dtype) for dtype in args.dtypes]
    if "error" in args.parts:
        tables += [_errors(args, dtype) for dtype in args.dtypes]
    _harness.report(tables, args.json, "compiled and traced, not run")


def _compiled(args: Any) -> list[Table]:
    targets = [name for name in args.targets if not _is_missing(name)]
    cases = list(itertools.product(targets, args.dtypes))
    rows = list(itertools.product(_chosen(args, LARGE), args.programs))
    file = args.resume
    found = json.loads(file.read_text()) if file and file.exists() else {}
    for (target, dtype), row in tqdm(list(itertools.product(cases, rows))):
        key = _key(target, dtype, *row)
        if key not in found:
            found[key] = _measured(target, dtype, *row)
            if file:
                file.write_text(json.dumps(found, indent=1) + "\n")
    return [_table(found, target, dtype, rows) for target, dtype in cases]


def _measured(target: str, dtype: str, model: str, program: str) -> dict[str, float]:
    loss = PROGRAMS[program](LARGE[model], HALF[dtype])
    placed = _targets.Target(target).replicated(types(LARGE[model]))
    lowered = jax.jit(jax.value_and_grad(loss)).lower(*placed)
    is_gpu = target == "h100"
    # Without this XLA:GPU may leave out a cast to half precision and back.
    options: Any = {"xla_allow_excess_precision": False} if is_gpu else {}
    start = time.process_time()
    compiled = lowered.compile(compiler_options=options)
    seconds = time.process_time() - start
    read = figures(compiled, _targets.Target(target))
    work = {"kernels": read.kernels} if is_gpu else {"cycles": read.cycles}
    memory = {"temporaries": read.temporaries, "bytes": read.bytes_accessed}
    return memory | work | {"compile time": seconds}


def _table(found: Any, target: str, dtype: str, rows: Any) -> Table:
    """The rows of one machine and dtype, of what was found of all."""
    work = "kernels" if target == "h100" else "cycles"
    columns = ["MB a layer", "temporaries", "bytes", work, "compile time"]
    table = Table(f"{target}, {{}}", ["model", "program", *columns], case=dtype)

    def values(model: str, program: str) -> dict[str, float]:
        of = dict(found.get(_key(target, dtype, model, program), {}))
        if less := found.get(_key(target, dtype, DEEPER.get(model, ""), program)):
            of["MB a layer"] = (of["temporaries"] - less["temporaries"]) / 4
        return of

    for model, program in rows:
        base = values(model, BASE) if program != BASE else {}
        own = values(model, program)
        cells = [_cell(own.get(name), base.get(name), *UNITS[name]) for name in columns]
        table.rows.append([model, program, *cells])
    return table


def _traced(args: Any, dtype: str) -> Table:
    table = Table("Trace time, {}", ["model", "program", "trace time"], case=dtype)
    for model in tqdm(_chosen(args, DEEP), dtype):
        seconds = {}
        for program in dict.fromkeys(["float32", *args.programs]):
            step = jax.value_and_grad(PROGRAMS[program](DEEP[model], HALF[dtype]))
            trace = functools.partial(jax.make_jaxpr(step), *types(DEEP[model]))
            seconds[program] = _seconds(trace)
        for program in args.programs:
            base = None if program == "float32" else seconds["float32"]
            cell = _cell(seconds[program], base, 1, " s")
            table.rows.append([model, program, cell])
    table.notes.append("Of value and gradient, over float32's; median of nine.")
    return table


def _errors(args: Any, dtype: str) -> Table:
    columns = ["model", "program", "error"]
    table = Table("Error of the gradient, {}", columns, case=dtype)
    keys = [jax.random.key(seed) for seed in range(SEEDS)]
    for model in tqdm(_chosen(args, SMALL), dtype):
        problems = [jax.device_get(SMALL[model].init(key)) for key in keys]
        with jax.enable_x64(True):
            exact = _gradients(
                _by_hand(SMALL[model], None), jax.tree.map(_wide, problems)
            )
        for program in args.programs:
            loss = PROGRAMS[program](SMALL[model], HALF[dtype])
            norms = np.linalg.norm([_gradients(loss, problems) - exact, exact], axis=2)
            table.rows.append([model, program, f"{np.mean(norms[0] / norms[1]):.2e}"])
    table.notes.append(
        "Norm of the difference from float64 over the norm, at S = 2^15, small models, "
        f"mean of {SEEDS} seeds, computed on a CPU."
    )
    return table


def types(model: Model) -> Any:
    """Parameters and batch; nothing is allocated."""
    return jax.eval_shape(model.init, jax.random.key(0))


def _gradients(loss: Any, problems: Sequence[Any]) -> np.ndarray:
    """A row for the parameters and the batch of each problem."""
    step = jax.jit(jax.grad(lambda *args: loss(*args) * LOSS_SCALE))
    rows = [jax.tree.leaves(step(*problem)) for problem in problems]
    return np.array([np.concatenate([np.ravel(x) for x in row], None) for row in rows])


def _wide(x: Any) -> Any:
    return x.astype(np.float64) if x.dtype == np.float32 else x


def _seconds(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(9):
        jax.clear_caches()
        gc.collect()  # else what was traced before is collected meanwhile
        gc.disable()
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
        gc.enable()
    return float(np.median(times))


def _cell(value: float | None, base: float | None, unit: float, name: str) -> str:
    """A ratio to `base`, or a value in its unit."""
    if value is None:
        return "-"
    if base is None:
        return f"{value / unit:.4g}{name}"
    return f"{value / base:.3f}" if base else ("inf" if value else "-")


def _key(*names: str) -> str:
    return " | ".join(names)


def _is_missing(target: str) -> bool:
    reason = _targets.missing(target)
    if reason:
        print(f"{target}: {reason}")
    return bool(reason)


def _chosen(args: Any, models: Any) -> list[str]:
    return [name for name in models if name in args.models]


def _parser() -> Any:
    parser = _harness.parser(__doc__)
    usual = [name for name in PROGRAMS if "=" not in name]
    for flag, choices, default, text in (
        ("--models", MODELS, MODELS, "compiled, traced or computed"),
        ("--programs", PROGRAMS, usual, "of each"),
        ("--dtypes", HALF, ["bf16"], "half-precision dtypes"),
        ("--targets", _targets.TARGETS, ["h100", "tpu-v5e"], "machines"),
        ("--parts", *[("compiled", "traced", "error")] * 2, "tables to make"),
    ):
        parser.add_argument(
            flag, nargs="+", choices=list(choices), default=list(default), help=text
        )
    text = "file of compiled rows, to go on from"
    parser.add_argument("--resume", type=pathlib.Path, help=text)
    return parser


if __name__ == "__main__":
    main()
