"""Compares programs that run in turn, with the first one beside itself as a control."""

import dataclasses
import functools
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .._scaling.finite import finite_and_norm
from .._tree import promote_to_float32
from .._types import Function, PyTree

CONTROL = " beside itself"  # the first program's name goes before

_LOG = logging.getLogger(__name__)
_ROUNDS = range(3, 15)  # as many as time allows
_SAMPLE = 0.03  # seconds that the calls of one sample take
# What JAX raises for a dtype or a size that a device does not support, or has no memory
# for.
_REFUSALS = (jax.errors.JaxRuntimeError, NotImplementedError, TypeError, ValueError)


class Program(NamedTuple):
    """A compiled program, and its memory if the compiler reports it."""

    run: Callable[[], Any]
    mebibytes: float | None = None  # on each device


Compile = Callable[[], Program]


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The median and the quartiles of ratios."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> "Ratio":
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclasses.dataclass
class Row:
    """The measurements of one program."""

    program: str
    milliseconds: float | None = None  # the median of a call
    gain: Ratio | None = None  # the first program's time over its own, round by round
    # Arguments, results and temporaries on each device, as compiled.
    mebibytes: float | None = None
    error: float | None = None  # of its gradient, as a share of the first program's
    teraflops: float | None = None  # 10^12 operations a second
    note: str = ""  # the reason if it was not measured


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The rows of several programs, and of the first one against itself at the end."""

    title: str
    rows: tuple[Row, ...]
    # The smallest gain that is not noise: the farther quartile of that last row. None
    # if the first program was refused.
    believable: float | None


def compare(
    title: str,
    programs: Mapping[str, Compile],
    seconds: float,
    *,
    gradient_of: Callable[[Any], PyTree] | None = None,
    flops: float | None = None,
) -> Comparison:
    """Runs programs in turn for about `seconds`, and compares them with the first one.

    Each is compiled once. Compilations are not counted, so that a slow compiler leaves
    out no program. A gradient is found by `gradient_of` in results; `flops` are those
    of one call. The log says what is compiled and timed.
    """
    base = next(iter(programs))
    rows = {name: Row(name) for name in programs}
    samples = _compiled(title, programs, rows, gradient_of)
    if base in samples:
        # The control runs at the end of a round, as far from the base as the others.
        control = base + CONTROL
        samples[control] = samples[base]
        rows[control] = dataclasses.replace(rows[base], program=control)
    _LOG.info("%s: %d programs in turn, %.0f s", title, len(samples), seconds)
    times = _times(samples, seconds, rows)
    for name, own in times.items():
        row, median = rows[name], statistics.median(own)
        row.milliseconds = 1000 * median
        row.teraflops = flops / median / 1e12 if flops else None
        if name != base and base in times:
            pairs = zip(times[base], own, strict=True)
            row.gain = Ratio.of([a / b for a, b in pairs])
    noise = [*rows.values()][-1].gain  # of the control
    believable = max(noise.high, 1 / noise.low) if noise else None
    return Comparison(title, tuple(rows.values()), believable)


def _compiled(
    title: str,
    programs: Mapping[str, Compile],
    rows: Mapping[str, Row],
    gradient_of: Callable[[Any], PyTree] | None,
) -> dict[str, Callable[[], float]]:
    """Returns what takes a sample of each program, in seconds; a refusal gets a note.

    Fills in memory and errors.
    """
    samples: dict[str, Callable[[], float]] = {}
    reference = None
    for name, compile_ in programs.items():
        _LOG.info("%s: compiling %s", title, name)
        try:
            run, rows[name].mebibytes = compile_()
            results = jax.block_until_ready(run())
            calls = min(max(round(_SAMPLE / seconds_of(run, 1)), 1), 1000)
        except _REFUSALS as error:
            rows[name].note = f"refused: {type(error).__name__}"
            continue
        samples[name] = functools.partial(seconds_of, run, calls)
        if gradient_of is None:
            continue
        if name == next(iter(programs)):
            reference = gradient_of(results)
        elif reference is not None:
            rows[name].error = relative_error(gradient_of(results), reference)
    return samples


def markdown(comparison: Comparison) -> str:
    """Formats a Markdown table, whose columns are aligned for a terminal too."""
    base, *others = rows = comparison.rows
    gains = [str(row.gain or row.note or "-") for row in others]
    columns = {
        comparison.title: [row.program for row in rows],
        "ms": _cells(rows, "milliseconds", ".3g"),
        "times as fast": [base.note or "1", *gains],
        "MiB per device": _cells(rows, "mebibytes", ".1f"),
        "gradient off by": _cells(rows, "error", ".2%"),
        "TFLOP/s": _cells(rows, "teraflops", ".3g"),
    }
    shown = [[head, *cells] for head, cells in columns.items() if any(cells)]
    lines = _aligned(shown)
    if comparison.believable is not None:
        noise = f"Believe no gain below {comparison.believable:.2f}: "
        lines += ["", f"{noise}{base.program} beside itself differs by as much."]
    return "\n".join(lines)


def _cells(rows: Sequence[Row], figure: str, form: str) -> list[str]:
    values = [getattr(row, figure) for row in rows]
    return ["" if value is None else format(value, form) for value in values]


def _aligned(columns: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table: the first column to the left, others to the right.

    The first cell of each column is its head.
    """
    widths = [max(map(len, column)) for column in columns]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for first, *others in zip(*columns, strict=True):
        padded = map(str.rjust, others, widths[1:])
        lines.append(f"| {' | '.join([first.ljust(widths[0]), *padded])} |")
    return [lines[0], f"| {' | '.join(rule)} |", *lines[1:]]


def relative_error(grads: PyTree, reference: PyTree) -> float:
    """Returns the norm of the difference of two trees over that of `reference`."""
    grads, reference = map(promote_to_float32, (grads, reference))
    difference = jax.tree.map(lambda x, y: x - y, grads, reference)
    finite, distance = finite_and_norm(difference)
    _, norm = finite_and_norm(reference)
    return float(distance) / float(norm) if finite and norm else float("inf")


def compiling(fun: Function, *args: PyTree, carried: int = 0) -> Compile:
    """Returns a function that compiles `fun`; results replace `carried` arguments."""

    def compile_() -> Program:
        state = args[:carried]
        jitted = jax.jit(fun, donate_argnums=tuple(range(carried)))
        compiled = jitted.lower(*args).compile()

        def run() -> PyTree:
            nonlocal state
            results = compiled(*state, *args[carried:])
            state = results[:carried] if carried else ()
            return results

        return Program(run, mebibytes_of(compiled))

    return compile_


def mebibytes_of(compiled: jax.stages.Compiled) -> float | None:
    """Returns the memory of a program on each device, None if it is not reported."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    count = found.argument_size_in_bytes + results + found.temp_size_in_bytes
    return count / 2**20


def seconds_of(run: Callable[[], object], calls: int) -> float:
    """Returns the mean seconds of a call, and waits for the last result."""
    start = time.perf_counter()
    result = None
    for _ in range(calls):
        result = run()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def _times(
    samples: Mapping[str, Callable[[], float]], seconds: float, rows: Mapping[str, Row]
) -> dict[str, list[float]]:
    """Returns the seconds of a call by program and round; a failure gets a note."""
    times: dict[str, list[float]] = {name: [] for name in samples}
    end = time.perf_counter() + seconds
    for i in range(_ROUNDS.stop):
        if i >= _ROUNDS.start and time.perf_counter() > end:
            break
        # The order alternates, which cancels a drift of the clock.
        for name in list(times)[:: -1 if i % 2 else 1]:
            try:
                times[name].append(samples[name]())
            except _REFUSALS as error:
                rows[name].note = f"failed: {type(error).__name__}"
                del times[name]
    return times
