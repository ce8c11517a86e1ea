"""An applied step, with which the passes of `check_step` compare others."""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._tree import is_inexact
from .._findings import Finding
from .step_calls import FAR, Calls, Run
from .step_leaves import Path, host, sampled
from .step_powers import Row

_MOST_CALLS = 16  # until a window of accumulation ends
_FEW_CALLS = 8  # after these, the call in which most leaves change is taken
# log2 of S in float32, whose range is 2^-126 to 2^127. Gradients are mostly about 1.
_POWERS = tuple(range(-37, 54, 10))
_MORE_POWERS = tuple(range(-37, 54, 5))
# Nine S, 2^3 apart, are 2^24 of the 2^30 between float16's least and largest number.
_OF_HALF = tuple(range(-24, 1, 3))


@dataclasses.dataclass(frozen=True)
class Base:
    """A step at a small S, and how it is called with other values."""

    run: Run
    s: float
    first: Run
    last: Run  # until most leaves have changed
    window: int = 1  # calls until an accumulated step ends
    in_float32: bool = False  # whether `autocast` is put into float32

    @property
    def calls(self) -> Calls:
        return self.run.calls

    @property
    def found(self) -> Callable[..., Iterator[Finding]]:
        return self.calls.found

    def call(
        self,
        what: str,
        values: Mapping[Path, ArrayLike] = {},
        s: float | None = None,
        counter: int = FAR,
    ) -> Run | None:
        """Calls the same step with other values of leaves, or another S."""
        at = self.calls.at(self.s if s is None else s, counter=counter)
        return self.calls.run(what, {**at, **values}, self.run.before, self.in_float32)

    def after(self, run: Run) -> Run | None:
        """Calls the step that follows another one."""
        return self.calls.run("later steps", self.calls.at(self.s), run.after)

    def window_after(self, run: Run) -> Run:
        """Returns the last of the steps that follow a run until a window ends."""
        for _ in range(self.window):
            run = self.after(run) or run
        return run

    def followed(self, run: Run | None) -> Iterator[Run]:
        """Yields a run and those that follow it, as long as they are applied."""
        while run is not None and run.is_applied:
            yield run
            run = self.after(run)

    def with_other_weights(self, s: float) -> Run | None:
        """Calls the step, if it is applied, with other values outside of optimizers."""
        values = {
            path: 1.5 * host(self.run.before[path]).astype(np.float64) + 0.01
            for path in self.run.weights
            if self.run.changes[path].ndim
        }
        run = self.call("other weights", values, s) if values else None
        return run if self.run.is_alike(run) else None

    @functools.cached_property
    def following(self) -> Run:
        return self.window_after(self.run)

    @functools.cached_property
    def later(self) -> "Base":
        """The step that follows: moments and averages are not as they start."""
        run = self.following
        return dataclasses.replace(self, run=run) if self.run.is_alike(run) else self

    @functools.cached_property
    def exact(self) -> "Base":
        """The same step with `autocast` in float32, where nothing underflows."""
        exact = dataclasses.replace(self, in_float32=True)
        run = exact.call(f"S = {self.s:g} in float32") if self.calls.scales else None
        return dataclasses.replace(exact, run=run) if self.run.is_alike(run) else self

    @functools.cached_property
    def several_s(self) -> "list[SeveralS]":
        """The step at several values of each S, of which one alone changes."""
        return [*map(self.exact.at_several, self.calls.scales)]

    @functools.cached_property
    def told(self) -> dict[Path, Row]:
        """Returns what grows or, else, falls by powers of an S, results too."""
        found = {-1: {}, 0: {}, 1: {}}
        for several in self.several_s:
            for path, row in several.rows.items():
                found[row.direction][path] = row
        return found[-1] | found[1]

    @functools.cached_property
    def changing(self) -> dict[Path, Row]:
        """Returns the leaves of the state that do."""
        floats = self.exact.run.floats
        return {path: row for path, row in self.told.items() if path in floats}

    def at_several(self, scale: Path) -> "SeveralS":
        """Returns the step in float32 or, if it casts to float16, below overflow.

        There what underflows differs, though by no power of S.
        """
        at = functools.cache(functools.partial(self.at_power, scale))
        powers, is_exact = _POWERS, at(_POWERS[-1]) is not None
        if not is_exact:
            tried = range(round(np.log2(self.s)), _POWERS[-1])
            first = bisect.bisect(tried, False, key=lambda power: at(power) is None)
            powers = [tried[first - 1] + power for power in _OF_HALF]
        found = SeveralS(at, powers, is_exact)
        # A clip behind the gradients leaves few S at which they show.
        is_unclear = is_exact and found.is_unclear
        return SeveralS(at, _MORE_POWERS, True) if is_unclear else found

    def at_power(self, scale: Path, power: int) -> Run | None:
        """Calls the step at one S of 2^power; None if it is not applied alike."""
        at = self.calls.at(2.0**power, [scale])
        run = self.run if 2.0**power == self.s else self.call(f"S = 2^{power}", at)
        return run if self.run.is_alike(run) else None


@dataclasses.dataclass(frozen=True)
class SeveralS:
    """The same step at several values of one S."""

    at: Callable[[int], Run | None]
    powers: Sequence[int]  # log2 of S
    is_exact: bool  # whether nothing underflows

    @functools.cached_property
    def runs(self) -> dict[int, Run]:
        runs = {power: self.at(power) for power in self.powers}
        return {power: run for power, run in runs.items() if run}

    @functools.cached_property
    def rows(self) -> dict[Path, Row]:
        """Returns the floating-point leaves that all runs have, but S itself."""
        leaves = [run.leaves for run in self.runs.values()]
        rows: dict[Path, Row] = {}
        for path, x in next(iter(leaves), {}).items():
            if is_inexact(x) and all(path in each for each in leaves):
                entries = np.stack([sampled(host(each[path])) for each in leaves])
                entries = entries[:, np.isfinite(entries).all(0)]
                eps = float(jnp.finfo(jnp.result_type(x)).eps)
                rows[path] = Row([*self.runs], entries, eps, self.is_exact)
        return {path: row for path, row in rows.items() if not row.is_s}

    @property
    def is_unclear(self) -> bool:
        """Whether a leaf depends on S by no power, which no cause explains."""
        floats = {path for run in self.runs.values() for path in run.floats}
        rows = [row for path, row in self.rows.items() if path in floats]
        has_cause = any(row.has_cause for row in rows)
        return not has_cause and any(row.is_unclear for row in rows)


def base_of(calls: Calls) -> Base:
    """Returns the step at S = 8 or, if it is skipped there, at a smaller S.

    Of the steps that follow it, it is the one in which most leaves change.
    """
    s, first = 8.0, calls.run("S = 8", calls.at(8.0))
    assert first is not None  # what the first call raises comes out
    for smaller in (2.0**-3, 2.0**-9) if calls.scales and first.skipped else ():
        run = calls.run(f"S = {smaller:g}", calls.at(smaller))
        if run is not None and run.is_applied:
            s, first = smaller, run
            break
    return _most_changed(Base(first, s, first, first))


def _most_changed(base: Base) -> Base:
    new, run, most = base, base.run, -1
    runs = itertools.islice(base.followed(run), _MOST_CALLS)
    for count, run in enumerate(runs, 1):
        learned = sum(map(run.moved, run.weights))
        counts = all(counted == "finite" for counted in run.counted.values())
        if counts and learned > most:
            new, most = dataclasses.replace(base, run=run, window=count), learned
        is_enough = most == len(run.weights) or (most > 0 and count >= _FEW_CALLS)
        if is_enough or not any(map(run.moved, run.after)):
            break
    return dataclasses.replace(new, last=run)
