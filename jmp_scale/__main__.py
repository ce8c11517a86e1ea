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
from .diagnostics._timing import Comparison, compare, markdown

_SECONDS = 10, 100  # of the rounds, for the products and for the models
_SEND = (
    'An issue of the form "Times on your device" in the repository takes the file that '
    "`python -m jmp_scale --measure --json > times.json` writes."
)
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
        report["peak_bytes_of_first_device"] = stats.get("peak_bytes_in_use")
        report["send"] = _SEND
    if arguments.json:
        print(json.dumps(report, default=dataclasses.asdict, indent=1))
    else:
        print(_text(report))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jmp_scale",
        description="Prints which half-precision dtype to take on this machine and "
        "why: products in float32 and half precision, roundings, versions and "
        "settings. Half a minute, and the time to compile four programs.",
        epilog="The output is Markdown, to paste into an issue or a table.",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="also measures what you would gain: times, memory and errors of the "
        "gradients of three models, and whole steps, in float32, cast by hand and with "
        "autocast (two minutes, and the time to compile 20 programs)",
    )
    parser.add_argument(
        "--json", action="store_true", help="prints all measurements as JSON"
    )
    return parser


def _gains(sizes: gain.Sizes, seconds: float) -> list[Comparison]:
    """Compares the gradients of each model, and whole steps."""
    each = seconds / (len(gain.MODELS) + 1)
    found = []
    for model_of in gain.MODELS:
        title, programs = gain.gradients(model_of(sizes))
        part = compare(title, programs, each, gradient_of=lambda results: results[1])
        found.append(part)
    title, programs = gain.steps(gain.blocks(sizes))
    return [*found, compare(title, programs, each)]


def _text(report: dict[str, Any]) -> str:
    device, versions = report["device"], report["versions"]
    where = f"{device['count']} x {device['kind']} ({device['platform']})"
    if memory := device["memory_bytes_each"]:
        where += f", {memory / 2**30:.1f} GiB each"
    if device["processes"] > 1:
        where += f", {device['processes']} processes"
    named = ", ".join(map(" ".join, versions.items()))
    blocks = [f"{where}, {report['date']}; {named}."]
    blocks += map(markdown, report["comparisons"])
    if peak := report.get("peak_bytes_of_first_device"):
        blocks.append(f"At its peak the first device held {peak / 2**30:.1f} GiB.")
    blocks.append(report["advice"])
    kept = [f"{k} {'yes' if v else 'no'}" for k, v in report["keeps_roundings"].items()]
    note = "" if all(report["keeps_roundings"].values()) else _EXCESS
    blocks.append(f"Each half-precision operation is rounded: {', '.join(kept)}{note}.")
    if settings := report["settings"]:
        lines = [f"- {name} = {value}" for name, value in settings.items()]
        blocks.append("\n".join(["Settings that are not JAX's defaults:", "", *lines]))
    if send := report.get("send"):
        blocks.append(send)
    return "\n\n".join(blocks)


if __name__ == "__main__":
    main()
