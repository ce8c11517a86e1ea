"""`python -m jmp_scale`: which dtype to take on this machine, and what it gains."""

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

import jax

from . import __version__
from . import _machine as machine
from .diagnostics._timing import compare, markdown

_SECONDS = 10.0, 25.0  # of the rounds, for the products and for each table of a model
_SEND = (
    'An issue of the form "Times on your device" in the repository takes the file that '
    "`python -m jmp_scale --measure --json > times.json` writes."
)


def main(
    argv: Sequence[str] | None = None,
    *,
    side: int | None = None,
    sizes: machine.ModelSizes | None = None,
    seconds: tuple[float, float] = _SECONDS,
) -> None:
    """Prints the report. The last three are for tests: small sizes, little time."""
    arguments = _parser().parse_args(argv)
    device = machine.device()
    on_cpu = device["platform"] == "cpu"
    products = machine.products(side or (512 if on_cpu else 8192), seconds[0])
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "versions": {"jmp_scale": __version__, **machine.versions()},
        "environment": machine.environment(),
        "advice": machine.advice(products, device["platform"]),
        "comparisons": [products],
    }
    if arguments.measure:
        model = machine.gpt(sizes or (machine.FOR_CPU if on_cpu else machine.USUAL))
        report["comparisons"] += [
            compare(
                *machine.gradients(model), seconds[1], gradient_of=lambda out: out[1]
            ),
            compare(*machine.steps(model), seconds[1]),
        ]
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
        description="Prints which half-precision dtype to take on this machine: "
        "products in float32 and half precision, and versions. Half a minute.",
        epilog="The output is Markdown, to paste into an issue or a table.",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="also measures what you would gain: times, memory and errors of the "
        "gradient of GPT-2, and of whole steps, in float32, cast by hand and with "
        "autocast (a minute, and the time to compile ten programs)",
    )
    parser.add_argument(
        "--json", action="store_true", help="prints all measurements as JSON"
    )
    return parser


def _text(report: dict[str, Any]) -> str:
    device = report["device"]
    where = f"{device['count']} x {device['kind']} ({device['platform']})"
    if memory := device["memory_bytes_each"]:
        where += f", {memory / 2**30:.1f} GiB each"
    named = ", ".join(map(" ".join, report["versions"].items()))
    blocks = [f"{where}, {report['date']}; {named}."]
    blocks += [f"{name}={value}" for name, value in report["environment"].items()]
    blocks += map(markdown, report["comparisons"])
    if peak := report.get("peak_bytes_of_first_device"):
        blocks.append(f"At its peak the first device held {peak / 2**30:.1f} GiB.")
    blocks.append(report["advice"])
    if send := report.get("send"):
        blocks.append(send)
    return "\n\n".join(blocks)


if __name__ == "__main__":
    main()
