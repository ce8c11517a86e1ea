"""What `autocast` makes of a float32 program, beside casting it by hand.

- compiled: what the compilers of GPUs and TPUs make of value and gradient of models at
  the size that people train. No such machine is needed; nothing is allocated or run. A
  GPU chooses for each product between Triton and cuBLAS, so a program is compiled with
  either for all of them, and the larger number of bytes is shown, all else of Triton.
- blocks: these bytes for one block of each usual kind.
- traced: trace time of twelve unrolled layers, over float32's.
- error: of the gradients of small models against float64, computed here.

Ratios are to casting by hand; where that is not known, there are none. One row alone:

    python benchmarks/autocast.py --parts compiled --targets h100 --models gpt4 \
        --programs autocast --resume rows.json

The TPU's compiler takes minutes for a transformer. Rows in the file of `--resume` are
not measured again, so a long run may be stopped; remove those of code that has changed.
"""

import functools
import gc
import itertools
import time
from collections.abc import Sequence
from typing import Any

import _harness
import jax
import jax.numpy as jnp
import numpy as np
from _blocks import BLOCKS
from _harness import MEMORY, Table
from _tables import compared
from compilers import AS_WRITTEN, figures, options, targets, with_cudnn
from models import Model
from models.catalog import DEEP, LARGE, SMALL
from tqdm import tqdm

import jmp_scale

LOSS_SCALE = 2.0**15  # of gradients that are computed
SEEDS = 20  # of the models whose errors are compared
HALF = {"bf16": jnp.bfloat16, "f16": jnp.float16}
MODELS = LARGE | BLOCKS | DEEP | SMALL
COMPILED = LARGE | BLOCKS
BYTES = "bytes, GB"
SAVED = jax.checkpoint_policies.dots_saveable


def by_hand(model: Model, half: Any, checkpointed: bool = False) -> Any:
    return lambda params, batch: model.loss(params, batch, half, checkpointed)


def _returning_half(model: Model, half: Any) -> Any:
    """A program whose blocks cast what they return, so that the stream is half too."""
    loss = lambda params, batch: model.loss(params, batch, None, False, half)  # noqa: E731
    return jmp_scale.autocast(loss, half)


def by_autocast(model: Model, half: Any, checkpointed: bool = False, **options: Any):
    loss = by_hand(model, None, checkpointed)
    return jmp_scale.autocast(loss, half, **options)


# Losses of a model and a dtype. A checkpoint is around each block.
PROGRAMS = {
    "by hand": by_hand,
    "by hand, checkpoint": functools.partial(by_hand, checkpointed=True),
    "float32": lambda model, half: by_hand(model, None),
    "autocast": by_autocast,
    "autocast, checkpoint": functools.partial(by_autocast, checkpointed=True),
    "autocast, recompute=False": functools.partial(by_autocast, recompute=False),
    "autocast, float32_results=head": functools.partial(
        by_autocast, float32_results="head"
    ),
    "autocast, result=half": _returning_half,  # of blocks
    "autocast, dots_saveable": lambda *of: jax.checkpoint(
        by_autocast(*of), policy=SAVED
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    kept = _harness.Kept(args.resume)
    tables = []
    for part, dtype in itertools.product(args.parts, args.dtypes):
        is_compiled = part in ("compiled", "blocks")
        for where in args.targets if is_compiled else [part]:
            if is_compiled and (reason := targets.missing(where)):
                print(f"{where}: {reason}")
                continue
            tables.append(_table(args, kept, part, where, dtype))
    _harness.report(tables, "compiled and traced, not run")


def _table(args: Any, kept: _harness.Kept, part: str, where: str, dtype: str) -> Table:
    """Rows of one machine and dtype."""
    measure, models, base = PARTS[part]
    rows = [(m, p) for m in models if m in args.models for p in args.programs]

    def key(model: str, program: str) -> str:
        return f"{where} | {dtype} | {model} | {program}"

    for row in tqdm(rows, f"{where}, {dtype}"):
        kept.measure(key(*row), measure, where, HALF[dtype], *row)
    columns = list(dict.fromkeys(name for row in rows for name in kept.rows[key(*row)]))
    kind = ", blocks" if part == "blocks" else ""
    table = Table(f"{where}{kind}, {{}}", ["model", "program", *columns], case=dtype)
    for model, program in rows:
        own = kept.rows[key(model, program)]
        bases = {} if program == base else kept.rows.get(key(model, base), {})
        cells = [compared(own.get(name), bases.get(name)) for name in columns]
        table.rows.append([model, program, *cells])
    return table


def _compiled(target: str, *of: Any) -> dict[str, float]:
    """Figures of the first form of products, with the bytes of the larger one."""
    forms = targets.FORMS.get(target, [target])
    found = [_compiled_for(form, *of) for form in forms]
    return found[0] | {BYTES: max(each[BYTES] for each in found)}


def _bytes_of_block(*of: Any) -> dict[str, float]:
    return {BYTES: _compiled(*of)[BYTES]}


def _compiled_for(target: str, half: Any, model: str, program: str) -> dict[str, float]:
    where = targets.Target(target)
    placed = where.replicated(types(COMPILED[model]))
    loss = PROGRAMS[program](COMPILED[model], half)
    with with_cudnn():
        lowered = jax.jit(jax.value_and_grad(loss)).lower(*placed)
    start = time.process_time()
    compiled = lowered.compile(compiler_options=options(where))
    seconds = time.process_time() - start
    read = figures(compiled, where)
    work = {"M cycles": read.cycles / 1e6}
    if targets.is_gpu(target):
        work = {"kernels": read.kernels}
    memory = {MEMORY: read.temporaries / 1e6, BYTES: read.bytes_accessed / 1e9}
    return memory | work | {"compile time, s": seconds}


def _traced(_: str, half: Any, model: str, program: str) -> dict[str, float]:
    step = jax.value_and_grad(PROGRAMS[program](DEEP[model], half))
    times = []
    for _ in range(5):
        jax.clear_caches()
        gc.collect()  # else what was traced before is collected meanwhile
        gc.disable()
        start = time.process_time()
        jax.make_jaxpr(step)(*types(DEEP[model]))
        times.append(time.process_time() - start)
        gc.enable()
    return {"trace time, s, median of five": float(np.median(times))}


def _error(_: str, half: Any, model: str, program: str) -> dict[str, float]:
    problems, exact = _exact(model)
    found = _gradients(PROGRAMS[program](SMALL[model], half), problems)
    norms = np.linalg.norm([found - exact, exact], axis=2)
    return {"error of the gradient": float(np.mean(norms[0] / norms[1]))}


@functools.cache
def _exact(model: str) -> Any:
    """Problems of all seeds, and their gradients in float64."""
    problems = [SMALL[model].init(key) for key in map(jax.random.key, range(SEEDS))]
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda x: x.astype(float) if x.dtype == np.float32 else x, problems
        )
        return problems, _gradients(by_hand(SMALL[model], None), wide)


def _gradients(loss: Any, problems: Sequence[Any]) -> np.ndarray:
    """A row for the parameters of each problem."""
    scaled = jax.grad(lambda *args: loss(*args) * LOSS_SCALE)
    step = jax.jit(scaled, compiler_options=AS_WRITTEN)
    rows = [jax.tree.leaves(step(*problem)) for problem in problems]
    return np.array([np.concatenate([np.ravel(x) for x in row]) for row in rows], float)


# How a row is measured, of which models, and what it is compared with.
PARTS = {
    "compiled": (_compiled, LARGE, "by hand"),
    "blocks": (_bytes_of_block, BLOCKS, "by hand"),
    "traced": (_traced, DEEP, "float32"),
    "error": (_error, SMALL, None),
}


def types(model: Model) -> Any:
    return jax.eval_shape(model.init, jax.random.key(0))


def _parser() -> Any:
    parser = _harness.parser(__doc__)
    usual = [name for name in PROGRAMS if "=" not in name]
    of_all = [name for name in MODELS if "cudnn" not in name]
    for flag, choices, default, text in (
        ("--models", MODELS, of_all, "compiled, traced or computed"),
        ("--programs", PROGRAMS, usual, "of each"),
        ("--dtypes", HALF, ["bf16"], "half-precision dtypes"),
        ("--targets", targets.TARGETS, ["h100", "tpu-v5e"], "machines"),
        ("--parts", PARTS, PARTS, "tables to make"),
    ):
        _harness.add_several(parser, flag, choices, default, text)
    _harness.add_resume(parser)
    return parser


if __name__ == "__main__":
    main()
