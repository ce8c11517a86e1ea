"""What `autocast` makes of a float32 program, beside casting it by hand.

Five models: what is kept for the backward pass and the dtype of all products, read from
the traced program; memory, traffic and kernels or cycles as the compilers of GPUs and
TPUs make value and gradient of the scaled loss, on machines that are not there; and the
error of the gradient, which is computed here. Ratios are to casting by hand.
"""

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import _half_models
import _harness
import _targets
import jax
import jax.numpy as jnp
import numpy as np
from _compiled import figures
from _harness import Table
from tqdm import tqdm

import jmp_scale
from jmp_scale._jaxpr import is_literal, size
from jmp_scale.diagnostics import precision_report

LOSS_SCALE = 2.0**15
SEEDS = 20  # of the models whose errors are compared
HALF = {"f16": jnp.float16, "bf16": jnp.bfloat16}
BASE = "by hand"


def program(make: Callable[..., Any], name: str, half: Any, large: bool) -> Any:
    """A problem whose loss is that of one of `PROGRAMS`."""
    problem = make(large, half if name.startswith(BASE) else None)
    return problem._replace(loss=PROGRAMS[name](problem.loss, half))


def _saving_products(loss: Any, half: Any) -> Any:
    del half
    return jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable)


PROGRAMS = {
    BASE: lambda loss, half: loss,
    "by hand, dots_saveable": _saving_products,
    "float32": lambda loss, half: loss,
    "autocast": jmp_scale.autocast,
    "autocast, recompute=False": lambda loss, half: jmp_scale.autocast(
        loss, half, recompute=False
    ),
    "autocast, backward=bf16": lambda loss, half: jmp_scale.autocast(
        loss, half, backward="bfloat16"
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    _half_models.LARGE = _half_models.LARGE._replace(layers=args.layers)
    jax.config.update("jax_platforms", "cpu")
    tables = []
    for name in args.dtypes if "traced" in args.parts else ():
        tables.append(_traced(args, name))
    for target in args.targets if "compiled" in args.parts else ():
        if reason := _targets.missing(target):
            print(f"{target}: {reason}")
            continue
        tables += [_compiled(args, _targets.Target(target), n) for n in args.dtypes]
    if "error" in args.parts:
        tables += [_errors(args, name) for name in args.dtypes]
    _harness.report(tables, args.json, "traced and compiled, not run")


def _traced(args: Any, name: str) -> Table:
    columns = ["model", "program", "residuals", "half products", "trace time"]
    title = "Residuals, dtypes of products and trace time, {}"
    table = Table(title, columns, case=name)
    for model, row, problem, base in _cases(args, name):
        step = _scaled(problem.loss)
        seconds = _seconds(lambda: jax.make_jaxpr(step)(*problem[1:]))  # noqa: B023
        values = residuals(problem), seconds
        base.setdefault("values", values)
        ratios = [_ratio(a, b) for a, b in zip(values, base["values"], strict=True)]
        share = precision_report(problem.loss, *problem[1:]).half_share
        table.rows.append([model, row, ratios[0], share, ratios[1]])
    table.notes.append(
        "residuals: bytes that the backward pass reads and that are neither parameters "
        "nor batch. half products: share of the matrix work with half-precision "
        "operands, forward and backward. trace time: median of nine, of value and "
        "gradient."
    )
    return table


def _compiled(args: Any, target: Any, name: str) -> Table:
    is_gpu = target.name == "h100"
    columns = ["model", "program", "temporaries", "bytes"]
    columns += ["kernels" if is_gpu else "cycles", "compile time"]
    table = Table(f"{target.name}, {{}}", columns, case=name)
    for model, row, problem, base in _cases(args, name):
        placed = target.replicated(problem[1:])
        lowered = jax.jit(_scaled(problem.loss)).lower(*placed)
        start = time.process_time()
        # Without this XLA:GPU may leave out a cast to half precision and back.
        options: Any = {"xla_allow_excess_precision": False} if is_gpu else {}
        found = figures(lowered.compile(compiler_options=options), target)
        seconds = time.process_time() - start
        work = found.kernels if is_gpu else found.cycles
        values = found.temporaries, found.bytes_accessed, work, seconds
        base.setdefault("values", values)
        ratios = [_ratio(a, b) for a, b in zip(values, base["values"], strict=True)]
        table.rows.append([model, row, *ratios])
    return table


def _errors(args: Any, name: str) -> Table:
    table = Table("Error of the gradient, {}", ["model", "program", "error"], case=name)
    names = [n for n in args.programs if n != "float32"]
    for model in tqdm(args.models, name):
        make = _half_models.MODELS[model]
        problems = [make(False, None, seed) for seed in range(SEEDS)]
        with jax.enable_x64(True):
            exact = _gradients(problems[0].loss, problems, jnp.float64)
        for row in names:
            found = _gradients(program(make, row, HALF[name], False).loss, problems)
            norms = np.linalg.norm([found - exact, exact], axis=2)
            table.rows.append([model, row, f"{np.mean(norms[0] / norms[1]):.2e}"])
    table.notes.append(
        "Norm of the difference from float64 over the norm, at S = 2^15, small models, "
        f"mean of {SEEDS} seeds, computed on a CPU."
    )
    return table


def _cases(args: Any, name: str) -> Any:
    """(model, program's name, problem, dict of the model) of each program."""
    cases = [(m, p) for m in args.models for p in PROGRAMS if p in args.programs]
    bases: Any = {}
    for model, row in tqdm(cases, name):
        problem = program(_half_models.MODELS[model], row, HALF[name], True)
        yield model, row, problem, bases.setdefault(model, {})


def _scaled(loss: Any) -> Any:
    return jax.value_and_grad(lambda *args: loss(*args) * LOSS_SCALE, allow_int=True)


def residuals(problem: Any) -> int:
    """Bytes kept for the backward pass that are neither parameters nor batch."""

    def kept(params: Any, batch: Any) -> Any:
        return jax.tree.leaves(jax.vjp(lambda p: problem.loss(p, batch), params)[1])

    jaxpr = jax.make_jaxpr(kept)(*problem[1:]).jaxpr
    found = {id(v): v for v in jaxpr.outvars if not is_literal(v)}
    for v in jaxpr.invars:
        found.pop(id(v), None)
    return sum(size(v) * getattr(v.aval.dtype, "itemsize", 8) for v in found.values())


def _gradients(loss: Any, problems: Sequence[Any], dtype: Any = None) -> np.ndarray:
    """A row for the parameters and the batch of each problem, in `dtype` if given."""
    step, rows = jax.jit(_scaled(loss)), []
    for problem in problems:
        leaves = [
            x.astype(dtype) if dtype is not None and x.dtype == jnp.float32 else x
            for x in jax.tree.leaves(problem[1:])
        ]
        arguments = jax.tree.unflatten(jax.tree.structure(problem[1:]), leaves)
        grads = jax.tree.leaves(step(*arguments)[1])
        rows.append(np.concatenate([np.ravel(np.asarray(g, float)) for g in grads]))
    return np.array(rows)


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


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.3f}" if base else ("inf" if value else "-")


def _parser() -> Any:
    parser = _harness.parser(__doc__)
    for flag, choices, default, text in (
        ("--models", _half_models.MODELS, _half_models.MODELS, "to compare"),
        ("--programs", PROGRAMS, [p for p in PROGRAMS if "=" not in p], "of each"),
        ("--dtypes", HALF, HALF, "half-precision dtypes"),
        ("--targets", _targets.TARGETS, ["h100", "tpu-v5e"], "machines"),
        ("--parts", *[("traced", "compiled", "error")] * 2, "tables to make"),
    ):
        parser.add_argument(
            flag, nargs="+", choices=list(choices), default=list(default), help=text
        )
    layers = _half_models.LARGE.layers
    text = "of the transformers, traced or compiled"
    parser.add_argument("--layers", type=int, default=layers, help=text)
    return parser


if __name__ == "__main__":
    main()
