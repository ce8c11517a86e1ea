"""`python -m jmp_scale`: which dtype to take on this machine, and what it gains."""

import argparse
import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from . import __version__
from . import _machine as machine
from ._cpu import has_bfloat16_units, processor_name
from .diagnostics._timing import Comparison, compare, markdown

_SEND = (
    'An issue of the form "Times on your device" in the repository takes the file that '
    "`python -m jmp_scale --measure --json > times.json` writes."
)


def main(
    argv: Sequence[str] | None = None, *, sizes: machine.Sizes | None = None
) -> None:
    """Prints the report. `sizes` is for tests."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(format="%(message)s")  # on stderr
    logging.getLogger("jmp_scale").setLevel(logging.INFO)  # which says the progress
    device, has_units = machine.device(), has_bfloat16_units()
    kind = machine.kind(device["platform"], has_units=has_units)
    sizes = sizes or machine.SIZES[kind]
    products = machine.products(sizes)
    model = _measured(sizes) if arguments.measure else []
    # The gradients of a model say more than a product does.
    shown = next((found for found in model if found.believable), products)
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "processor": {"name": processor_name(), "bfloat16_units": has_units},
        "versions": {"jmp_scale": __version__, **machine.versions()},
        "environment": machine.environment(),
        "advice": machine.advice(shown, kind),
        "comparisons": [products, *model],
    }
    if arguments.measure:
        report["send"] = _SEND
    if arguments.json:
        print(json.dumps(report, default=dataclasses.asdict, indent=1))
    else:
        print(_text(report))


def _measured(sizes: machine.Sizes) -> list[Comparison]:
    """Compares the gradients, and then whole steps, of a model."""
    model = machine.gpt(sizes)
    gradients = compare(*machine.gradients(model), 25, gradient_of=lambda out: out[1])
    return [gradients, compare(*machine.steps(model), 25)]


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
        "autocast (a minute, and the time to compile ten programs, which are named)",
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
    if device["platform"] == "cpu":
        where += f", {report['processor']['name']}"
    named = ", ".join(map(" ".join, report["versions"].items()))
    blocks = [f"{where}, {report['date']}; {named}."]
    blocks += [f"{name}={value}" for name, value in report["environment"].items()]
    blocks += map(markdown, report["comparisons"])
    blocks += [report[last] for last in ("advice", "send") if last in report]
    return "\n\n".join(blocks)


if __name__ == "__main__":
    main()
