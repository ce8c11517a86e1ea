"""Compares the times of programs, run in turn with the first one as a control."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from .._types import Function, PyTree

CONTROL = " beside itself"  # the first program's name goes before

_ROUNDS = range(3, 16)  # as many as time allows
_SAMPLE = 0.03  # seconds that the calls of one sample take
_COMPILING = 0.75  # of the time; a program that is not compiled by then is left out
# What JAX raises for a dtype or a size that a device does not support.
_REFUSALS = (jax.errors.JaxRuntimeError, NotImplementedError, TypeError, ValueError)


class Program(NamedTuple):
    """A compiled program, and its memory if the compiler reports it."""

    run: Callable[[], object]
    mebibytes: float | None = None


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


@dataclasses.dataclass(frozen=True)
class Row:
    """The measurements of one program."""

    program: str
    milliseconds: float | None = None  # the median of a call
    gain: Ratio | None = None  # the first program's time over its own, round by round
    mebibytes: float | None = None  # arguments, results and temporaries, as compiled
    note: str = ""  # the reason if it was not measured


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The rows of several programs, and of the first one against itself at the end."""

    title: str
    rows: tuple[Row, ...]
    # The smallest gain that is not noise: the farther quartile of that last row. None
    # if the first program was refused.
    believable: float | None


def compare(title: str, programs: Mapping[str, Compile], seconds: float) -> Comparison:
    """Compiles programs by name, and runs them in turn, for about `seconds` in all."""
    start, base = time.perf_counter(), next(iter(programs))
    compiled: dict[str, Program] = {}
    rows = {name: Row(name, note="not measured: out of time") for name in programs}
    for name, compile_ in programs.items():
        late = time.perf_counter() - start > _COMPILING * seconds
        if late and name != base:
            continue
        try:
            program = compile_()
            seconds_of(program.run, 1)
            compiled[name] = program
        except _REFUSALS as error:
            rows[name] = Row(name, note=f"refused: {type(error).__name__}")
    if base in compiled:
        # The control runs at the end of a round, as far from the base as the others.
        compiled[base + CONTROL] = compiled[base]
    times = _times(compiled, start + seconds)

    def gain_of(name: str) -> Ratio | None:
        if name == base or base not in times:
            return None
        return Ratio.of([a / b for a, b in zip(times[base], times[name], strict=True)])

    for name, program in compiled.items():
        milliseconds = 1000 * statistics.median(times[name])
        rows[name] = Row(name, milliseconds, gain_of(name), program.mebibytes)
    control = gain_of(base + CONTROL)
    believable = max(control.high, 1 / control.low) if control else None
    return Comparison(title, tuple(rows.values()), believable)


def compiling(fun: Function, *args: PyTree, carried: int = 0) -> Compile:
    """Returns a function that compiles `fun` to be run with these arguments.

    The first `carried` ones are donated, and replaced by the first results.
    """

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


def _times(programs: Mapping[str, Program], end: float) -> dict[str, list[float]]:
    """Returns the seconds of a call, by program and round."""
    calls = {}
    for name, program in programs.items():
        calls[name] = min(max(round(_SAMPLE / seconds_of(program.run, 1)), 1), 1000)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for i in range(_ROUNDS.stop - 1):
        if i >= _ROUNDS.start and time.perf_counter() > end:
            break
        # The order alternates, which cancels a drift of the clock.
        for name in list(programs)[:: -1 if i % 2 else 1]:
            times[name].append(seconds_of(programs[name].run, calls[name]))
    return times
