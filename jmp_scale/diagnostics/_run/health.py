"""`HealthLog`: what is wrong in the state of a run and in its last steps."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._scaling.finite import all_finite
from ..._scaling.loss_scale import number_of
from ..._state import LossScaleState
from ..._tree import is_inexact
from ..._types import PyTree
from .._findings import Finding, Rule, finding
from .history import LossScaleHistory
from .metrics import find_states

_DIAGNOSE = "diagnose_nonfinite(loss_fn, loss_scale, params, batch)"
_error, _warning = (functools.partial(Rule, level) for level in ("error", "warning"))
# The most urgent first.
RULES = {
    "loss scale not finite": _error(
        "The loss scale is {last}, with which no step is applied.",
        "Load it from a checkpoint, or put a new DynamicLossScale() in its place.",
    ),
    "loss not finite": _error(
        "{last}: the loss itself is not finite, which no loss scale changes.",
        f"{_DIAGNOSE} names the operation or the argument at fault. If the parameters "
        "are not finite although the gradients before were, the optimizer's update was "
        "not.",
    ),
    "parameters not finite": _error(
        "{last}: the parameters are not finite although the gradients before were: the "
        "optimizer's update was not.",
        "Go back to a checkpoint; check_step(train_step, ...) finds an update that is "
        "not finite at the first step.",
    ),
    "stuck at the floor": _error(
        "The loss scale is stuck at its floor. {last}.",
        f"{_DIAGNOSE} distinguishes a NaN, a forward pass out of range, and an "
        "overflow that a lower min_loss_scale fixes. If it finds none, ask "
        "check_step(train_step, ...).",
    ),
    "every step skipped": _error(
        "{last}: something broke.", f"{_DIAGNOSE} finds the cause."
    ),
    "loss diverges": _error(
        "The loss diverges: it is {current:.3g}, after {best:.3g} around step "
        "{best_step} and {first:.3g} at the start.",
        "Go back to a checkpoint from before, and lower the learning rate or clip the "
        "gradients.",
    ),
    "growing norm": _warning(
        "The gradient norm has grown from {first:.3g} to {norm:.3g}, and is growing: "
        "the run will diverge.",
        "Lower the learning rate, clip the gradients, or add weight decay.",
    ),
    "loss oscillates": _warning(
        "The loss swings by {swing:.0%} of its level up and down, every {period:.0f} "
        "steps.",
        "Lower the learning rate or the momentum. If an epoch takes as many steps, "
        "shuffle the data.",
    ),
    "bursts": _warning(
        "The loss leaps above twice its level {bursts} times in {steps} steps, "
        "typically every {every} steps, and comes back.",
        "Look at the data of those steps; if it is good, lower the learning rate or "
        "Adam's b2, or raise its eps.",
    ),
    "no progress": _warning(
        "The loss is near its start after {steps} steps ({current:.3g} after "
        "{first:.3g}{more}).",
        "If it was far above it, lower the learning rate; else raise it or shorten the "
        "warm-up, if the model is untrained. check_step(train_step, ...) tells whether "
        "the parameters change.",
    ),
    "lost updates": _warning(
        "In the last {steps} steps {entries:.0%} of the updates, and {magnitude:.0%} "
        "of their size, were lost in rounding.",
        "Keep the parameters in float32 or, if they are, raise the learning rate.",
    ),
    "frequent skips": _warning(
        "{last}; more than 1 % is too many.",
        f"{_DIAGNOSE} names the operation that overflows: take a longer period, or a "
        "lower S if it is constant. Look at the data of spikes.",
    ),
}

_NORMAL_RATE = 0.01  # of skipped steps; a default period causes 0.0005

# The checks of losses and norms were tuned on runs that go wrong and runs that do not:
# `benchmarks/faulty_runs.py` prints how often each is right on other runs.
_LEAST_STEPS = 40  # with fewer, an early bump looks like a run that goes wrong
_RECENT = 100  # steps that the checks of updates and of norms cover
_WIDE = 101  # steps of a running median: longer than an oscillation or a burst

Steps = dict[str, np.ndarray]  # of `LossScaleHistory.to_dict`
RuleAndValues = tuple[str, dict[str, Any]]


class HealthLog:
    """Tells what is wrong in a run when it begins, and when it is over.

    Use it in the training loop, every hundred steps or so, or once on any state:
    `HealthLog()(opt_state)` returns all findings. It is a callable for the host, which
    remembers its last findings. A skipped step that is normal is not a finding.

    Attributes:
      rules: those of the last findings, such as "loss diverges", for code that reacts
        to them. With several states each starts with a path, "['generator']: ".
    """

    def __init__(self) -> None:
        self.rules: frozenset[str] = frozenset()

    def __call__(
        self, opt_state: PyTree, history: LossScaleHistory | None = None
    ) -> list[Finding]:
        """Returns the findings that are new since the last call, most urgent first.

        What has ended comes last, as a note "over: ...".

        Args:
          opt_state: state of `with_loss_scale`, at any depth of any pytree. If the
            parameters are in it too, it is told that they are not finite.
          history: the last steps; findings on losses, norms and updates need 40 to 300
            steps with these numbers. Omit losses of adversarial training: they rise and
            fall by design.

        Raises:
          ValueError: there is no such state in `opt_state`.
          TypeError: the state has a leading axis of replicas or of a `vmap`.
        """
        found = _found(opt_state, history)
        new = [each for name, each in found.items() if name not in self.rules]
        for name in sorted(self.rules - found.keys()):
            path, _, rule = name.rpartition(": ")
            new.append(Finding(rule, "note", path, f"over: {rule}.", ""))
        self.rules = frozenset(found)
        return new


def _found(opt_state: PyTree, history: LossScaleHistory | None) -> dict[str, Finding]:
    """Returns findings by rule, after the path of the state if there are more."""
    states = find_states("HealthLog", opt_state)
    steps, where, told = None, "", []
    if history is not None and history.pushed > 0:
        steps = history.to_dict()
        where = f"steps {steps['step'][0]} to {steps['step'][-1]}"
        told += [("", *trend) for trend in _trends(history, steps)]
    for path, state in states:
        # What is said of the last steps replaces the recorded rate.
        skips = _present(state, steps) or _frequent(steps)
        if skips:
            told.append((path if states[1:] else "", *_caused(skips, opt_state)))
    order, found = [*RULES], {}
    for path, rule, values in sorted(told, key=lambda each: order.index(each[1])):
        name = ": ".join(filter(None, (path, rule)))
        place = ", ".join(filter(None, (path, where)))
        found[name] = finding(RULES, rule, place, **values)
    return found


def _caused(skips: tuple[str, str], tree: PyTree) -> RuleAndValues:
    """Returns what is told of skips: of a loss, whether parameters are the cause."""
    rule, last = skips
    # Parameters are the arrays beside states and histories.
    nodes = LossScaleState, LossScaleHistory
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nodes))
    # Masks are -inf, and what an update breaks is NaN or of both signs.
    known = [jnp.where(x == -jnp.inf, 0, x) for x in leaves if is_inexact(x)]
    if rule == "loss not finite" and not all_finite(known):
        rule = "parameters not finite"
    return rule, {"last": last}


def _present(state: LossScaleState, steps: Steps | None) -> tuple[str, str] | None:
    """Returns the finding on S, or on the steps that were skipped until now."""
    number = number_of(state.loss_scale)  # None if constant, in a mapping of Flax
    s = 1.0 if number is None else float(number)
    if not math.isfinite(s):
        return "loss scale not finite", str(s)
    in_a_row = int(state.skipped_in_a_row)
    # int, because a Variable of Flax 0.12.0 has no truth value. A spike may overflow.
    if in_a_row == 0 or int(state.grads_finite) > int(state.applied):
        return None
    many = f"The last {in_a_row} steps were all skipped"
    last = "The last step was skipped" if in_a_row == 1 else many
    rule = _rule_of_skips(state, s, in_a_row, steps)
    return (rule, last) if rule else None


def _rule_of_skips(
    state: LossScaleState, s: float, in_a_row: int, steps: Steps | None
) -> str | None:
    losses, overflows = _causes(state, in_a_row, steps)
    if overflows:
        return _rule_of_overflows(state, s, in_a_row, losses)
    return "loss not finite" if losses else None


def _rule_of_overflows(
    state: LossScaleState, s: float, in_a_row: int, losses: int
) -> str | None:
    # A class of the user's own may have no floor, and a mapping of Flax has none.
    floor = getattr(state.loss_scale, "min_loss_scale", None)
    if floor is not None and s <= floor:
        return "stuck at the floor" if in_a_row > 1 else None
    # A large S needs some steps at first, and a broken batch explains a few later.
    is_start = floor is not None and in_a_row == int(state.skipped) and not losses
    return "every step skipped" if in_a_row >= 10 and not is_start else None


def _causes(
    state: LossScaleState, in_a_row: int, steps: Steps | None
) -> tuple[int, int]:
    """Counts skips by losses that are not finite, and by overflows.

    The last ones in a row with a history, which knows the cause of each, else all.
    """
    if steps is None:
        losses = int(state.nonfinite_losses)
        return losses, int(state.skipped) - losses - int(state.spikes)
    spike, finite = steps["spike"][-in_a_row:], steps["loss_finite"][-in_a_row:]
    return int((~finite).sum()), int((finite & ~spike).sum())


def _frequent(steps: Steps | None) -> tuple[str, str] | None:
    """Returns the finding on too many skipped steps, of which one is always normal."""
    if steps is None:
        return None
    skipped, size = ~steps["applied"], len(steps["step"])
    if steps["step"][0] == 0:  # skips before the first applied step are expected
        skipped[: int(np.argmin([*skipped, False]))] = False
    broken, spike = skipped & ~steps["loss_finite"], skipped & steps["spike"]
    count, is_of_loss = skipped.sum(), 2 * broken.sum() > skipped.sum()
    if count <= max(1, _NORMAL_RATE * size) and not is_of_loss:
        return None
    listed = ", ".join(map(str, steps["step"][skipped][-5:]))
    last = f"{count} of the last {size} steps were skipped ({count / size:.1%}"
    last += f", {spike.sum()} as spikes; last at step {listed})"
    return "loss not finite" if is_of_loss else "frequent skips", last


def _trends(history: LossScaleHistory, steps: Steps) -> Iterator[RuleAndValues]:
    """Yields what goes wrong with finite losses and norms, of the applied steps."""
    keep = steps["applied"]
    columns = {name: x[keep].astype(np.float64) for name, x in steps.items()}
    yield from _norm_findings(columns, float(history.first_norm))
    keep = np.isfinite(columns["loss"])
    if keep.sum() >= _LEAST_STEPS:
        loss, step = columns["loss"][keep], columns["step"][keep].astype(int)
        yield from _loss_findings(loss, step, float(history.first_loss))
        yield from _unsteady(loss, step, float(history.first_loss))


def _norm_findings(columns: Steps, first: float) -> Iterator[RuleAndValues]:
    """Findings on updates that rounding loses, and on gradient norms that grow."""
    norms = columns["grad_norm"][np.isfinite(columns["grad_norm"])]
    known = np.isfinite(columns["lost_magnitude"])
    magnitude = columns["lost_magnitude"][known][-_RECENT:]
    entries = columns["lost_entries"][known][-_RECENT:]
    # Near a minimum small updates are lost too, but not needed.
    is_steep = len(norms) == 0 or np.median(norms[-_RECENT:]) > 0.2 * first
    if len(magnitude) >= _LEAST_STEPS and np.median(magnitude) > 0.7 and is_steep:
        values = {"entries": np.median(entries), "magnitude": np.median(magnitude)}
        yield "lost updates", {"steps": len(magnitude), **values}

    # The norm has grown a hundredfold, and is still growing.
    if len(norms) >= 2 * _RECENT:
        now, before = np.median(norms[-_LEAST_STEPS:]), np.median(norms[:-_RECENT])
        if now > 100 * first and now > 10 * before:
            yield "growing norm", {"first": first, "norm": now}


def _loss_findings(
    loss: np.ndarray, step: np.ndarray, first: float
) -> Iterator[RuleAndValues]:
    """Findings on finite losses, by their medians over blocks of steps."""
    block = max(3, min(20, len(loss) // 10))  # steps of a median
    blocks = loss[len(loss) % block :].reshape(-1, block)
    medians = np.median(blocks, 1)
    # The lower of the last two blocks, so that a single burst does not count.
    current = float(medians[-2:].min())
    best, best_block = float(min(medians[:-2].min(), first)), np.argmin(medians[:-2])
    best_step = int(step[len(loss) % block :][best_block * block + block - 1])
    values = {"first": first, "current": current, "steps": len(loss), "more": ""}

    # The loss has lost a quarter of what training had gained. In a fresh history of a
    # trained model nothing has been gained. The limit is then a quarter of the loss or,
    # if the loss is near zero, six standard deviations within the blocks.
    scatter = np.median([_scatter(x) for x in blocks])
    if current - best > max(0.25 * (first - best), 0.25 * abs(best), 6 * scatter):
        yield "loss diverges", {"best": best, "best_step": best_step, **values}

    # The loss rose to a multiple of its start, and stayed near it for 150 steps.
    peak = int(np.argmax(loss))
    rose = loss[peak] > first + 2 * abs(first) and len(loss) - peak > 150
    if rose and first - current < 0.25 * abs(first):
        more = f", and {loss[peak]:.3g} at step {step[peak]}"
        yield "no progress", {**values, "more": more}

    start, now = np.median(loss[:20]), np.median(loss[-_RECENT:])
    if step[0] == 0 and len(loss) >= 3 * _WIDE and start - now < 0.02 * abs(start):
        yield "no progress", values


def _unsteady(
    loss: np.ndarray, step: np.ndarray, first: float
) -> Iterator[RuleAndValues]:
    """Findings on a loss that swings or leaps."""
    if len(loss) < 3 * _WIDE:
        return
    ends = np.pad(loss, _WIDE // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(ends, _WIDE)
    mean, level = windows.mean(1), np.median(windows, 1)
    swing, period = _swing((loss - mean) / np.where(mean, np.abs(mean), 1))
    if swing > 0.3:
        yield "loss oscillates", {"swing": swing, "period": period}

    # What training has gained counts, so that noise near a loss of zero does not.
    size = np.maximum(np.abs(level), 0.25 * (first - level))
    leaps = np.divide(loss - level, size, out=np.zeros_like(loss), where=size > 0)
    burst = leaps > max(1, 10 * _scatter(leaps))
    if loss.min() > 0:  # the losses of many batches spread like exp of noise
        ratio = np.log(loss / level)
        burst &= ratio > 5 * _scatter(ratio)
    starts = step[1:][burst[1:] & ~burst[:-1]]
    if len(starts) >= max(5, 0.015 * len(loss)):
        values = {"bursts": len(starts), "every": int(np.median(np.diff(starts)))}
        yield "bursts", {"steps": len(loss), **values}


def _swing(leaps: np.ndarray) -> tuple[float, float]:
    """Returns amplitude and period of a swing of any shape, or zeros.

    By the autocorrelation of parts of the run, whose periods may differ: far below 0
    at half a period, and far above at a whole one. Bursts are near 0 between.
    """
    swings, periods = [], []
    for start in range(0, len(leaps) - 2 * _WIDE, _WIDE // 2):
        part = np.clip(leaps[start : start + 2 * _WIDE], -2, 2)
        part -= part.mean()
        products = np.correlate(part, part, "full")[len(part) - 1 :]
        powers = (products / np.arange(len(part), 0, -1))[:_WIDE]  # by lag
        half = int(np.argmax(powers < 0.75 * powers.min()))
        whole = half + int(np.argmax(powers[half : 4 * half + 1]))
        if powers[half] < -0.3 * powers[0] and powers[whole] > 0.4 * powers[0]:
            swings.append(np.sqrt(2 * powers[whole]))
            periods.append(whole)
        else:
            swings.append(0.0)
    return float(np.median(swings)), float(np.median(periods or 0))


def _scatter(x: np.ndarray) -> float:
    """Returns the standard deviation, as that of most entries."""
    return 1.4826 * float(np.median(np.abs(x - np.median(x))))
