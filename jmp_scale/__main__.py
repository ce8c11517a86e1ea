"""`python -m jmp_scale`: which dtype to take on this machine, and what it gains."""

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

import jax

from . import __version__
from ._machine import facts, gain
from ._machine.timing import Comparison, compare
from .diagnostics._tables import with_progress

_SECONDS = 10, 100  # of the products, and of the models
_EXCESS = (
    ". Where it is not, the compiler computes chains of operations in float32, and "
    "results are closer to float32's than on another machine; "
    "XLA_FLAGS=--xla_allow_excess_precision=false rounds them"
)


def main(
    argv: Sequence[str] | None = None,
    *,
    side: int | None = None,
    sizes: gain.Sizes | None = None,
    seconds: tuple[float, float] = _SECONDS,
) -> None:
    """Prints the report. The last three are for tests: small sizes, little time."""
    arguments = _parser().parse_args(argv)
    device = facts.device()
    on_cpu = device["platform"] == "cpu"
    products = facts.products(side or (512 if on_cpu else 8192), seconds[0])
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "versions": {"jmp_scale": __version__, **facts.versions()},
        "settings": facts.settings(),
        "keeps_roundings": facts.keeps_roundings(),
        "advice": facts.advice(products, device["platform"]),
        "comparisons": [products],
    }
    if arguments.measure:
        sizes = sizes or (gain.FOR_CPU if on_cpu else gain.USUAL)
        report["comparisons"] += _gains(sizes, seconds[1])
        stats = jax.local_devices()[0].memory_stats() or {}
        report["peak_bytes"] = stats.get("peak_bytes_in_use")
    if arguments.json:
        print(json.dumps(report, default=dataclasses.asdict, indent=1))
    else:
        print(_text(report))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jmp_scale",
        description="Prints which half-precision dtype to take on this machine and "
        "why: products in float32 and half precision, roundings, versions and "
        "settings. Half a minute at most.",
        epilog="The output is Markdown, to paste into an issue or a table.",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="also measures what you would gain: time and memory of the gradients of "
        "three models and of whole steps, in float32, cast by hand and with autocast "
        "(about two minutes)",
    )
    parser.add_argument("--json", action="store_true", help="prints JSON")
    return parser


def _gains(sizes: gain.Sizes, seconds: float) -> list[Comparison]:
    """Compares the gradients of each model, and whole steps, in `seconds`."""
    end, found = time.perf_counter() + seconds, []
    for programs_of, model_of in with_progress(gain.PARTS, "measuring"):
        left = (end - time.perf_counter()) / (len(gain.PARTS) - len(found))
        found.append(compare(*programs_of(model_of(sizes)), left))
    return found


def _text(report: dict[str, Any]) -> str:
    device, versions = report["device"], report["versions"]
    where = f"{device['count']} x {device['kind']} ({device['platform']})"
    if memory := device["memory_bytes"]:
        where += f", {memory / 2**30:.1f} GiB"
    if device["processes"] > 1:
        where += f", {device['processes']} processes"
    named = ", ".join(map(" ".join, versions.items()))
    blocks = [f"{where}, {report['date']}; {named}."]
    blocks += map(_table, report["comparisons"])
    if peak := report.get("peak_bytes"):
        blocks.append(f"At its peak the device held {peak / 2**30:.1f} GiB.")
    blocks.append(f"Take: {report['advice']}.")
    kept = [f"{k} {'yes' if v else 'no'}" for k, v in report["keeps_roundings"].items()]
    note = "" if all(report["keeps_roundings"].values()) else _EXCESS
    blocks.append(f"Each half-precision operation is rounded: {', '.join(kept)}{note}.")
    if settings := report["settings"]:
        lines = [f"- {name} = {value}" for name, value in settings.items()]
        blocks.append("\n".join(["Settings that are not JAX's defaults:", "", *lines]))
    return "\n\n".join(blocks)


def _table(comparison: Comparison) -> str:
    """Formats a Markdown table, whose columns are aligned for a terminal too."""
    cells = [(comparison.title, "ms", "times as fast", "MiB")]
    for row in comparison.rows:
        milliseconds = "" if row.milliseconds is None else f"{row.milliseconds:.3g}"
        mebibytes = "" if row.mebibytes is None else f"{row.mebibytes:.1f}"
        gain = str(row.gain or row.note or "1")
        cells.append((row.program, milliseconds, gain, mebibytes))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for first, *others in [cells[0], rule, *cells[1:]]:
        padded = map(str.rjust, others, widths[1:])
        lines.append(f"| {' | '.join([first.ljust(widths[0]), *padded])} |")
    if comparison.believable is not None:
        noise = f"Believe no gain below {comparison.believable:.2f}: "
        lines += ["", f"{noise}float32 beside itself differs by as much."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
