"""An applied step, with which the passes of `check_step` compare others."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._tree import is_inexact
from .._findings import Finding
from .step_calls import FAR, Calls, Run
from .step_leaves import Named, Path, host, sampled
from .step_powers import Row

_MOST_CALLS = 16  # until a window of accumulation ends
_FEW_CALLS = 8  # after these, the call in which most leaves change is taken
# log2 of S in float32, whose range is 2^-126 to 2^127. Gradients are mostly about 1.
_POWERS = tuple(range(-37, 54, 10))
_MORE_POWERS = tuple(range(-37, 54, 5))
# Nine S, 2^3 apart, are 2^24 of the 2^30 between float16's least and largest number.
_OF_HALF = tuple(range(-24, 1, 3))
# Of a change: some operations of a GPU add in another order each time.
NOISE = 1e-2


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

    def after(self, run: Run, s: float | None = None) -> Run | None:
        """Calls the step that follows another one."""
        at = self.calls.at(self.s if s is None else s)
        return self.calls.run("later steps", at, run.after)

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
    def several_s(self) -> "SeveralS":
        """The step at several S: in float32 or, if it casts to float16, below overflow.

        There what underflows differs, though by no power of S.
        """
        exact, powers = self.exact, _POWERS if self.calls.scales else ()
        has_float16 = bool(powers) and self.calls.has_float16(
            exact.run, exact.in_float32
        )
        if powers and exact.at_power(powers[-1]) is None:
            powers = exact.below_overflow(powers[-1])
            has_float16 = True
        found = exact.at_powers(powers, not has_float16)
        # A clip behind the gradients leaves few S at which they show.
        return exact.at_powers(_MORE_POWERS, True) if found.is_unclear else found

    def at_powers(self, powers: Iterable[int], is_exact: bool) -> "SeveralS":
        runs = {power: self.at_power(power) for power in powers}
        return SeveralS({p: r for p, r in runs.items() if r}, is_exact)

    def below_overflow(self, high: int) -> list[int]:
        """Returns powers up to the last one before `high` that is not skipped."""
        low = round(np.log2(self.s))
        while high - low > 1:
            middle = (low + high) // 2
            is_low = self.at_power(middle) is not None
            low, high = (middle, high) if is_low else (low, middle)
        return [low + power for power in _OF_HALF]

    def at_power(self, power: int) -> Run | None:
        """Calls the step at an S of 2^power, once; None if it is not applied alike."""
        if power not in self._at_powers:
            s = 2.0**power
            run = self.run if s == self.s else self.call(f"S = 2^{power}", s=s)
            self._at_powers[power] = run if self.run.is_alike(run) else None
        return self._at_powers[power]

    @functools.cached_property
    def _at_powers(self) -> dict[int, Run | None]:
        return {}


@dataclasses.dataclass(frozen=True)
class SeveralS:
    """The same step at several S."""

    runs: dict[int, Run]  # by log2 of S
    is_exact: bool  # whether nothing underflows

    def rows(self, leaves_of: Callable[[Run], Named]) -> dict[Path, Row]:
        """Returns the floating-point leaves that all runs have, but S itself."""
        leaves = [leaves_of(run) for run in self.runs.values()]
        rows: dict[Path, Row] = {}
        for path, x in next(iter(leaves), {}).items():
            if is_inexact(x) and all(path in each for each in leaves):
                entries = np.stack([sampled(host(each[path])) for each in leaves])
                entries = entries[:, np.isfinite(entries).all(0)]
                eps = float(jnp.finfo(jnp.result_type(x)).eps)
                rows[path] = Row([*self.runs], entries, eps, self.is_exact)
        return {path: row for path, row in rows.items() if not row.is_s}

    @functools.cached_property
    def states(self) -> dict[Path, Row]:
        """Returns the leaves of the state."""
        return self.rows(lambda run: {path: run.after[path] for path in run.floats})

    @functools.cached_property
    def differing(self) -> list[Row]:
        """Returns the rows of those that depend on S."""
        rows = self.states.values()
        return [row for row in rows if (row.entries != row.entries[:1]).any()]

    @property
    def is_unclear(self) -> bool:
        """Whether one depends on S by no power, which no cause explains."""
        rows = self.differing
        has_cause = any(row.direction > 0 or row.falls_at_once for row in rows)
        return self.is_exact and not has_cause and not all(r.direction for r in rows)

    @functools.cached_property
    def changing(self) -> dict[Path, Row]:
        """Returns the leaves of the state that grow or fall by powers of S."""
        return {path: row for path, row in self.states.items() if row.direction}


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


def is_other(new: Run, old: Run, paths: Sequence[Path]) -> bool:
    """Whether leaves change otherwise in another call, by more than noise."""

    def steps(run: Run) -> np.ndarray:
        return np.concatenate([np.zeros(1), *(run.change(p).step for p in paths)])

    off = np.linalg.norm(steps(new) - steps(old))
    return not off <= NOISE * np.linalg.norm(steps(old))  # NaN differs, too
