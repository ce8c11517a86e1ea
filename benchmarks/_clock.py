"""A clock for programs that take turns, and its rows: a line of JSON a figure."""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from _harness import PACKAGES
from clocked import SO_FAR
from compilers import figures

from jmp_scale._cpu import has_bfloat16_units, processor_name
from jmp_scale._machine import versions
from jmp_scale.diagnostics._timing import CONTROL, seconds_of

_SAMPLE = 0.1  # seconds that the calls of one sample take
_SPARE = 6  # seconds in which what is compiled can be clocked


class Program(NamedTuple):
    """A function and its arguments; results replace the first `carried` ones."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    carried: int = 0


class Clock:
    """The rows of one part, which ends by itself near its limit of seconds.

    A part that is cut off loses nothing: what is compiled so far is clocked after each
    compilation, and each row is written as soon as it is known.
    """

    def __init__(self, part: str, seconds: float, rows: pathlib.Path | None) -> None:
        self._part, self._rows = part, rows
        self._end = time.monotonic() + seconds

    def say(self, **row: Any) -> None:
        line = json.dumps({"part": self._part, **row})
        print(line, flush=True)
        if self._rows is not None:
            with self._rows.open("a") as file:
                file.write(line + "\n")

    def left(self) -> float:
        """The seconds that the part has left."""
        return self._end - time.monotonic()

    def say_machine(self) -> None:
        device = jax.devices()[0]
        self.say(
            device=f"{jax.device_count()} x {device.device_kind}",
            processor=processor_name(),
            bfloat16_units=has_bfloat16_units(),
            load=[round(each, 2) for each in os.getloadavg()],
            versions=versions(PACKAGES),
            date=time.strftime("%Y-%m-%d"),
            commit=_commit(),
        )

    def take_turns(
        self,
        title: str,
        programs: Mapping[str, Callable[[], Program]],
        rounds: int = 9,
    ) -> None:
        """Compiles programs, and runs them in turn, with the first beside itself."""
        runs: dict[str, Callable[[], Any]] = {}
        last = 0.0
        for name, program in programs.items():
            if self.left() < last + _SPARE:
                self.say(title=title, name=name, skipped="no time")
                continue
            start = time.monotonic()
            try:
                runs[name] = self._compiled(title, name, program())
            except Exception as error:  # of one row: the others are still wanted
                self.say(title=title, name=name, error=_short(error))
                continue
            last = time.monotonic() - start
            if len(runs) > 1:
                self.time_in_turn(title + SO_FAR, runs, rounds=3)
        self.time_in_turn(title, runs, rounds)

    def _compiled(self, title: str, name: str, program: Program) -> Callable[[], Any]:
        """Returns a function of no arguments, and says what the compiler made."""
        print(f"{title}: compiling {name}", file=sys.stderr, flush=True)
        fun, args, carried = program
        start = time.monotonic()
        lowered = jax.jit(fun, donate_argnums=tuple(range(carried))).lower(*args)
        traced = time.monotonic()
        compiled = lowered.compile()
        done, found = time.monotonic(), figures(compiled)
        self.say(
            title=title,
            name=name,
            temp_mb=round(found.temporaries / 1e6, 1),
            kernels=found.kernels,
            bytes=found.bytes_accessed,
            trace_s=round(traced - start, 2),
            compile_s=round(done - traced, 2),
        )
        state = args[:carried]

        def run() -> object:
            nonlocal state
            results = compiled(*state, *args[carried:])
            if carried:
                state = results[:carried]
            return results[carried:] if carried else results

        jax.block_until_ready(run())
        return run

    def time_in_turn(
        self, title: str, runs: Mapping[str, Callable[[], object]], rounds: int
    ) -> None:
        if not runs:
            return
        first = next(iter(runs))
        runs = {**runs, first + CONTROL: runs[first]}
        calls = {n: max(1, round(_SAMPLE / seconds_of(r, 1))) for n, r in runs.items()}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for i in range(rounds):
            # The order alternates, which cancels a drift of the clock.
            for name in list(runs)[:: -1 if i % 2 else 1]:
                times[name].append(1000 * seconds_of(runs[name], calls[name]))
        for name, own in times.items():
            ratios = [a / b for a, b in zip(times[first], own, strict=True)]
            self.say(
                title=title,
                name=name,
                ms=round(statistics.median(own), 4),
                low=round(min(own), 4),
                high=round(max(own), 4),
                to_first=round(statistics.median(ratios), 3),
            )


def gradient(loss: Callable[..., Any], *args: Any) -> Callable[[], Program]:
    """A program of value and gradient."""
    return lambda: Program(jax.value_and_grad(loss), args)


def step(make: Callable[[], Any], batch: Any) -> Callable[[], Program]:
    """A program of a training step, of what `_steps` makes; its state is donated."""

    def made() -> Program:
        carry, step_of = make()
        leaves, structure = jax.tree.flatten(carry)
        count = len(leaves)

        def of_leaves(*leaves: Any) -> tuple[Any, ...]:  # jmp's S cannot be lowered
            state = jax.tree.unflatten(structure, leaves[:count])
            new, loss = step_of(state, leaves[count])
            return (*jax.tree.leaves(new), loss)

        copies = [jax.numpy.array(leaf, copy=True) for leaf in leaves]
        return Program(of_leaves, (*copies, batch), carried=count)

    return made


def _commit() -> str:
    """The checkout's commit, with + after it if files differ; empty without git."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    here = pathlib.Path(__file__).parent
    try:
        found = subprocess.run(command, cwd=here, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return found.stdout.strip()


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


# Programs by name, of which each is made as soon as it is compiled.
Programs = dict[str, Callable[[], Program]]
