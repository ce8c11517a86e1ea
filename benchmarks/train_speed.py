"""Step time and memory of training in each precision, and what the loss scale adds.

ResNet-50, BERT-base and GPT-2-small-sized models in float32, bfloat16 and float16, on
synthetic data, with AdamW and donated state. The headline is the time of the float16
step with a dynamic loss scale over that of the same step without.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import _harness
import _models
import _steps
import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

MODELS: dict[str, dict[str, Callable[[], _models.Model]]] = {
    "full": {
        "ResNet-50": lambda: _models.resnet50(224, batch_size=128),
        "BERT-base": lambda: _models.transformer(_models.BERT_BASE, batch_size=16),
        "GPT-2-small": lambda: _models.transformer(_models.GPT2_SMALL, batch_size=8),
    },
    "reduced": {
        "ResNet-50": lambda: _models.resnet50(64, 16, width=16, blocks=(1, 1, 1, 1)),
        "BERT-base": lambda: _models.transformer(
            _models.Transformer(2, 128, 4, 1024, 64, causal=False), 4
        ),
        "GPT-2-small": lambda: _models.transformer(
            _models.Transformer(2, 128, 4, 1024, 64), 4
        ),
    },
}
HEADLINE = ("f16, no scaling", "f16 dynamic")
CONFIGURATIONS = {  # name: (dtype, matrix product precision, step)
    "f32 highest": (jnp.float32, "highest", _steps.unscaled),
    "f32 default": (jnp.float32, "default", _steps.unscaled),
    "bf16": (jnp.bfloat16, "default", _steps.unscaled),
    "f16, no scaling": (jnp.float16, "default", _steps.unscaled),
    "f16 static": (jnp.float16, "default", _steps.static),
    "f16 dynamic": (jnp.float16, "default", _steps.with_loss_scale),
}


def compiled_step(model: _models.Model, name: str) -> tuple[Callable[[], Any], float]:
    """`(one step of a configuration, GB of its compiled program's peak memory)`."""
    dtype, precision, build = CONFIGURATIONS[name]
    params = jax.tree.map(jnp.copy, model.params)
    batch = jax.device_put(model.batch)
    carry, step = build(lambda p, b: model.loss(p, b, dtype), optax.adamw(1e-4), params)
    with jax.default_matmul_precision(precision):
        compiled = jax.jit(step, donate_argnums=0).lower(carry, batch).compile()
    memory = compiled.memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
    )
    peak -= memory.alias_size_in_bytes

    def run():
        nonlocal carry
        carry, loss = compiled(carry, batch)
        return carry, loss

    return run, peak / 1e9


def measure(
    name: str, size: str, steps: int, pairs: int
) -> tuple[_harness.Table, list[Any]]:
    """A model's table of configurations, and its row of the headline."""
    model = MODELS[size][name]()
    columns = [
        "configuration",
        "ms a step (quartiles)",
        "time over f32 default (quartiles)",
        "peak GB",
    ]
    table = _harness.Table(f"{name}, {size} size", columns)
    base = compiled_step(model, "f32 default")[0]
    ratios = {}
    for configuration in tqdm(CONFIGURATIONS, desc=name, leave=False):
        run, peak = compiled_step(model, configuration)
        ratios[configuration] = _harness.paired_ratio(run, base, pairs, configuration)
        table.rows.append(
            [
                configuration,
                step_time(run, steps),
                str(ratios[configuration]),
                f"{peak:.3f}",
            ]
        )
    if not _harness.is_quiet(ratios["f32 default"]):
        table.notes.append(
            "Rejected: busy machine, as the A/A control in the row of f32 default "
            "shows."
        )
    base, scaled = (
        compiled_step(model, configuration)[0] for configuration in HEADLINE
    )
    again = compiled_step(model, HEADLINE[0])[0]
    before = _harness.paired_ratio(again, base, pairs, "A/A control")
    ratio = _harness.paired_ratio(scaled, base, pairs, "overhead")
    after = _harness.paired_ratio(again, base, pairs, "A/A control")
    quiet = _harness.is_quiet(before) and _harness.is_quiet(after)
    return table, [name, str(ratio) if quiet else "rejected", f"{before}, {after}"]


def step_time(run: Callable[[], Any], steps: int) -> str:
    """Median and quartiles of single steps; "-" on a CPU, whose times say little."""
    if jax.default_backend() == "cpu":
        return "-"
    times = [1e3 * _harness.seconds(run, 1) for _ in range(steps)]
    low, median, high = statistics.quantiles(times, n=4)
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def main(argv: Sequence[str] | None = None) -> None:
    _harness.round_as_written()
    on_cpu = jax.default_backend() == "cpu"
    parser = _harness.parser(__doc__)
    parser.add_argument(
        "--size",
        choices=list(MODELS),
        default="reduced" if on_cpu else "full",
        help="size of the models",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=list(MODELS["full"]),
        choices=list(MODELS["full"]),
        help="models to run",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=50,
        help="single steps of each configuration to time, except on a CPU",
    )
    _harness.add_pairs(parser)
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error(f"argument --steps: expected at least 2 steps, got {args.steps}")

    headline = _harness.Table(
        f"Overhead of dynamic loss scaling, {args.size} size",
        ["model", "f16 dynamic over f16 without scaling", "A/A control before, after"],
        notes=[
            "Medians with quartiles of the paired ratios of step times; rejected where "
            "the A/A control is outside 0.9 to 1.1."
        ],
    )
    tables = [headline]
    for name in args.models:
        start = time.perf_counter()
        table, row = measure(name, args.size, args.steps, args.pairs)
        table.notes.append(
            f"{time.perf_counter() - start:.0f} s in all. "
            "Peak memory as the compiler plans it."
        )
        headline.rows.append(row)
        tables.append(table)
    _harness.report(tables, args.json)


if __name__ == "__main__":
    main()
