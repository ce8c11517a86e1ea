"""Compares programs that run in turn, with the first one beside itself as a control."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .._scaling.finite import finite_and_norm
from .._tree import promote_to_float32
from .._types import Function, PyTree

CONTROL = " beside itself"  # the first program's name goes before

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

    Compilations are not counted, so that a slow compiler leaves out no program. A
    gradient is found by `gradient_of` in results; `flops` are those of one call.
    """
    base, reference = next(iter(programs)), None
    control = base + CONTROL
    rows = {name: Row(name) for name in programs}
    samples: dict[str, Callable[[], float]] = {}
    for name, compile_ in programs.items():
        try:
            run, rows[name].mebibytes = compile_()
            results = jax.block_until_ready(run())
            calls = min(max(round(_SAMPLE / seconds_of(run, 1)), 1), 1000)
        except _REFUSALS as error:
            rows[name].note = f"refused: {type(error).__name__}"
            continue
        samples[name] = functools.partial(seconds_of, run, calls)
        if gradient_of is not None and name == base:
            reference = gradient_of(results)
        elif gradient_of is not None and reference is not None:
            rows[name].error = relative_error(gradient_of(results), reference)
    if base in samples:
        # The control runs at the end of a round, as far from the base as the others.
        samples[control] = samples[base]
        rows[control] = dataclasses.replace(rows[base], program=control)
    times = _times(samples, seconds, rows)
    for name, own in times.items():
        median = statistics.median(own)
        rows[name].milliseconds = 1000 * median
        if flops is not None:
            rows[name].teraflops = flops / median / 1e12
        if name != base and base in times:
            pairs = zip(times[base], own, strict=True)
            rows[name].gain = Ratio.of([a / b for a, b in pairs])
    noise = rows[control].gain if control in rows else None
    believable = max(noise.high, 1 / noise.low) if noise else None
    return Comparison(title, tuple(rows.values()), believable)


def markdown(comparison: Comparison) -> str:
    """Formats a Markdown table, whose columns are aligned for a terminal too."""
    rows = comparison.rows
    columns = {
        comparison.title: [row.program for row in rows],
        "ms": [_cell(row.milliseconds, ".3g") for row in rows],
        "times as fast": [
            str(row.gain or row.note or ("1" if row is rows[0] else "-"))
            for row in rows
        ],
        "MiB per device": [_cell(row.mebibytes, ".1f") for row in rows],
        "gradient off by": [_cell(row.error, ".2%") for row in rows],
        "TFLOP/s": [_cell(row.teraflops, ".3g") for row in rows],
    }
    shown = [[head, *cells] for head, cells in columns.items() if any(cells)]
    widths = [max(map(len, column)) for column in shown]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for index, (first, *others) in enumerate(zip(*shown, strict=True)):
        padded = map(str.rjust, others, widths[1:])
        lines.append(f"| {' | '.join([first.ljust(widths[0]), *padded])} |")
        if index == 0:
            lines.append(f"| {' | '.join(rule)} |")
    if comparison.believable is not None:
        noise = f"Believe no gain below {comparison.believable:.2f}: "
        lines += ["", f"{noise}{rows[0].program} beside itself differs by as much."]
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


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

        found, mebibytes = compiled.memory_analysis(), None
        if found is not None:
            results = found.output_size_in_bytes - found.alias_size_in_bytes
            count = found.argument_size_in_bytes + results + found.temp_size_in_bytes
            mebibytes = count / 2**20
        return Program(run, mebibytes)

    return compile_


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
