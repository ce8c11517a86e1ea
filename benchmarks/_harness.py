"""What all benchmarks share: arguments, a timing loop, the report."""

import argparse
import json
import os
import pathlib
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

import _tables
import jax
from _tables import Table as Table
from tqdm import tqdm

import jmp_scale
from jmp_scale._cpu import processor_name
from jmp_scale._machine import versions
from jmp_scale.diagnostics._timing import Ratio, seconds_of

PACKAGES = "jax jaxlib libtpu jax-cuda12-plugin optax flax jmp mixed-precision-for-JAX"
PACKAGES += " equinox torch keras"
MEMORY = "temporaries, MB"
PAIRS = 9  # of times


def paired_ratio(run, base, label) -> Ratio:
    """Time of `run` over that of `base`, each pair measured as base, run, base.

    The mean of the two outer times is the pair's base time, which cancels a linear
    drift of the clock.
    """
    calls = max(1, round(0.1 / max(_warm_up(base), 1e-5)))
    _warm_up(run)
    ratios = []
    for _ in tqdm(range(PAIRS), desc=label, leave=False):
        before, own, after = (seconds_of(f, calls) for f in (base, run, base))
        ratios.append(2 * own / (before + after))
    return Ratio.of(ratios)


def parser(description: str) -> argparse.ArgumentParser:
    """A parser that says the defaults."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )


def add_several(arguments, flag, choices, default, text) -> None:
    """An argument of one or more of the choices."""
    given = {"choices": list(choices), "default": list(default)}
    arguments.add_argument(flag, nargs="+", **given, help=text)


def round_as_written() -> None:
    """Keeps XLA from leaving out a cast to float16 and back.

    On a GPU it may, and then nothing rounds or overflows. Call it before the first
    array is made.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = flags + " --xla_allow_excess_precision=false"


class Kept:
    """Rows of a benchmark, as JSON in a file if there is one.

    Those that are in it are not measured again.
    """

    def __init__(self, path: pathlib.Path | None) -> None:
        is_there = path is not None and path.exists()
        self.path = path
        self.rows: dict[str, Any] = json.loads(path.read_text()) if is_there else {}

    def measure(self, name: str, measure: Callable[..., Any], *args: Any) -> None:
        """Adds the figures `measure(*args)` as a row."""
        if name in self.rows:
            return
        try:
            self.rows[name] = measure(*args)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self.rows[name] = {MEMORY: float("inf")}  # more than the machine has
        if self.path is not None:
            self.path.write_text(json.dumps(self.rows, indent=1) + "\n")


def add_resume(arguments) -> None:
    """The argument of the file of `Kept`."""
    arguments.add_argument("--resume", type=pathlib.Path, help="file of measured rows")


def report(tables, device=None):
    """Prints the tables as Markdown, below the machine and the versions."""
    if device is None:
        kind = jax.devices()[0].device_kind
        device = f"{jax.device_count()} x {kind} ({processor_name()})"
    command = shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]])
    found = {"jmp_scale": jmp_scale.__version__} | versions(PACKAGES)
    used = ", ".join(" ".join(pair) for pair in found.items())
    date = time.strftime("%Y-%m-%d")
    print(f"`python benchmarks/{command}`, {date}, {device}; {used}.\n")
    print(_tables.markdown(tables))


def _warm_up(run: Callable[[], Any]) -> float:
    """Runs twice, the first time to compile; seconds of the second."""
    seconds_of(run, 1)
    return seconds_of(run, 1)
