"""Compares the times of programs, run in turn with the first one as a control."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

CONTROL = " beside itself"  # the first program's name goes before

_ROUNDS = range(3, 16)  # as many as time allows
_SAMPLE = 0.03  # seconds that the calls of one sample take
_COMPILING = 0.75  # of the time; a program that is not compiled by then is left out
# What JAX raises for a dtype or a size that a device does not support.
_REFUSALS = (jax.errors.JaxRuntimeError, NotImplementedError, TypeError, ValueError)


class Program(NamedTuple):
    """A compiled program, and its memory in bytes if the compiler reports it."""

    run: Callable[[], object]
    memory: int | None = None


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
    """The measurements of one program.

    Attributes:
      program: its name.
      milliseconds: median time of a call.
      gain: time of the first program over this one's, round by round.
      mebibytes: arguments, results and temporary arrays, as compiled.
      note: the reason if it was not measured, or "".
    """

    program: str
    milliseconds: float | None = None
    gain: Ratio | None = None
    mebibytes: float | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The rows of several programs, and of the first one against itself at the end.

    Attributes:
      title: the task of the programs.
      rows: one for each program.
      believable: the smallest gain that is not noise: the farther quartile of the first
        program's time over its own. None if the first one was not measured.
    """

    title: str
    rows: tuple[Row, ...]
    believable: float | None


def compare(
    title: str,
    programs: Mapping[str, Callable[[], Program]],
    *,
    seconds: float,
    tick: Callable[[], object] = lambda: None,
) -> Comparison:
    """Compiles programs and runs them in turn, for about `seconds` in all.

    Args:
      title: as in `Comparison`.
      programs: functions that compile a program, by name; the first is the base.
      seconds: the time to spend. At least three rounds are run, however long they take.
      tick: a function to call after each compilation and each round.
    """
    start, base = time.perf_counter(), next(iter(programs))
    compiled: dict[str, Program] = {}
    notes: dict[str, str] = {}
    for name, compile_ in programs.items():
        late = time.perf_counter() - start > _COMPILING * seconds
        if late and name != base:
            notes[name] = "not measured: out of time"
            continue
        try:
            compiled[name] = compile_()
            seconds_of(compiled[name].run, 1)
        except _REFUSALS as error:
            compiled.pop(name, None)
            notes[name] = f"refused: {type(error).__name__}"
        tick()
    if base in compiled:
        # The control runs at the end of a round, as far from the base as the others.
        compiled[base + CONTROL] = compiled[base]
    times = _times(compiled, start + seconds, tick)
    rows = [_row(name, base, times, compiled, notes) for name in programs]
    believable = None
    if base in compiled:
        rows.append(control := _row(base + CONTROL, base, times, compiled, notes))
        if control.gain is not None:
            believable = max(control.gain.high, 1 / control.gain.low)
    return Comparison(title, tuple(rows), believable)


def memory_of(compiled: jax.stages.Compiled) -> int | None:
    """Returns the bytes of a program's arguments, results and temporary arrays."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + results + found.temp_size_in_bytes


def _times(
    programs: Mapping[str, Program], end: float, tick: Callable[[], object]
) -> dict[str, list[float]]:
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
        tick()
    return times


def seconds_of(run: Callable[[], object], calls: int) -> float:
    """Returns the mean seconds of a call, and waits for the last result."""
    start = time.perf_counter()
    result = None
    for _ in range(calls):
        result = run()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def _row(
    name: str,
    base: str,
    times: Mapping[str, list[float]],
    programs: Mapping[str, Program],
    notes: Mapping[str, str],
) -> Row:
    if name not in programs:
        return Row(name, note=notes[name])
    gain, memory = None, programs[name].memory
    if name != base and base in times:
        pairs = zip(times[base], times[name], strict=True)
        ratios = [own_base / own for own_base, own in pairs]
        gain = Ratio.of(ratios)
    milliseconds = 1000 * statistics.median(times[name])
    mebibytes = None if memory is None else memory / 2**20
    return Row(name, milliseconds, gain, mebibytes)
