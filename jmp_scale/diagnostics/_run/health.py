"""`HealthLog`: describes the state of a run and its last steps, by sentences."""

import math

import numpy as np

from ..._scaling.loss_scale import number_of
from ..._state import LossScaleState
from ..._types import PyTree
from .history import LossScaleHistory
from .metrics import find_states
from .trends import trend_findings

_DIAGNOSE = "diagnose_nonfinite(loss_fn, loss_scale, params, batch)"

# Sentences by kind, the most urgent first.
_SENTENCES = {
    "loss scale not finite": "The loss scale is {last}, with which no step is applied: "
    "load it from a checkpoint, or put a new DynamicLossScale() in its place.",
    "loss not finite": "{last}: the loss itself is not finite, which no loss scale "
    "changes. {diagnose} names the operation or the argument at fault.",
    "stuck at the floor": "The loss scale is stuck at its floor. {last}: "
    "{diagnose} distinguishes a NaN, a forward pass out of range, and an overflow that "
    "a lower min_loss_scale fixes. If it finds none, ask check_step(train_step, ...).",
    "every step skipped": "{last}: something broke. {diagnose} finds the cause.",
    "loss diverges": "The loss diverges: it is {current:.3g}, after {best:.3g} around "
    "step {best_step} and {first:.3g} at the start. Go back to a checkpoint from "
    "before, and lower the learning rate or clip the gradients.",
    "growing norm": "The gradient norm has grown from {first:.3g} to {norm:.3g}, and "
    "is growing: the run will diverge. Lower the learning rate, clip the gradients, or "
    "add weight decay.",
    "loss oscillates": "The loss swings by {swing:.0%} of its level up and down, every "
    "{period:.0f} steps: lower the learning rate or the momentum. If an epoch takes as "
    "many steps, shuffle the data.",
    "bursts": "The loss leaps above twice its level {bursts} times in {steps} steps, "
    "typically every {every} steps, and comes back. Look at the data of those steps; "
    "if it is good, lower the learning rate or Adam's b2, or raise its eps.",
    "no progress": "The loss is near its start after {steps} steps ({current:.3g} "
    "after {first:.3g}{more}). If it was far above it, lower the learning rate; else "
    "raise it or shorten the warm-up, if the model is untrained. "
    "check_step(train_step, ...) tells whether the parameters change.",
    "lost updates": "In the last {steps} steps {entries:.0%} of the updates, and "
    "{magnitude:.0%} of their size, were lost in rounding. Keep the parameters in "
    "float32 or, if they are, raise the learning rate.",
    "frequent skips": "{last}; more than 1 % is too many. {diagnose} names the "
    "operation that overflows: take a longer period, or a lower S if it is constant. "
    "Look at the data of spikes.",
}

_NORMAL_RATE = 0.01  # of skipped steps; a default period causes 0.0005

Steps = dict[str, np.ndarray]  # of `LossScaleHistory.to_dict`


class HealthLog:
    """Describes the health of a run: a sentence when a finding begins, one at its end.

    Use it in the training loop, every hundred steps or so, or once on any state:
    `HealthLog()(opt_state)` returns all findings. It is a callable for the host, which
    remembers its last findings. A skipped step that is normal is not a finding. Each
    sentence has its section in `docs/troubleshoot.md`.

    Attributes:
      kinds: names of the last findings, such as "loss diverges", for code that reacts
        to them. With several states each starts with a path, "['generator']: ".
    """

    def __init__(self) -> None:
        self.kinds: frozenset[str] = frozenset()

    def __call__(
        self, opt_state: PyTree, history: LossScaleHistory | None = None
    ) -> list[str]:
        """Returns the sentences that are new since the last call, most urgent first.

        Args:
          opt_state: state of `with_loss_scale`, at any depth of any pytree.
          history: the last steps; findings on losses, norms and updates need 40 to 300
            steps with these numbers. Omit losses of adversarial training: they rise and
            fall by design.

        Raises:
          ValueError: there is no such state in `opt_state`.
          TypeError: the state has a leading axis of replicas or of a `vmap`.
        """
        findings = _findings(opt_state, history)
        new = [text for kind, text in findings.items() if kind not in self.kinds]
        over = [f"Over: {kind}." for kind in sorted(self.kinds - findings.keys())]
        self.kinds = frozenset(findings)
        return new + over


def _findings(opt_state: PyTree, history: LossScaleHistory | None) -> dict[str, str]:
    """Returns sentences by kind."""
    states = find_states("HealthLog", opt_state)
    steps, found = None, []
    if history is not None and history.pushed > 0:
        steps = history.to_dict()
        found += [("", *finding) for finding in trend_findings(history)]
    for path, state in states:
        prefix = f"{path}: " if len(states) > 1 else ""
        # What is said of the last steps replaces the recorded rate.
        finding = _present(state, steps) or (steps and _frequent(steps))
        if finding:
            kind, last = finding
            found.append((prefix, kind, {"last": last}))
    order, sentences = list(_SENTENCES), {}
    for prefix, kind, values in sorted(found, key=lambda f: order.index(f[1])):
        text = _SENTENCES[kind].format(diagnose=_DIAGNOSE, **values)
        sentences[prefix + kind] = f"{prefix}{text} [{kind}]"
    return sentences


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
    losses, spikes = int(state.nonfinite_losses), int(state.spikes)
    others = int(state.skipped) - losses - spikes
    if steps is not None:  # the history knows the cause of each skip
        spike, finite = (steps[name][-in_a_row:] for name in ("spike", "loss_finite"))
        others, losses = (finite & ~spike).sum(), (~finite).sum()
    if others == 0:
        return ("loss not finite", last) if losses else None
    # A class of the user's own may have no floor, and a mapping of Flax has none.
    floor = getattr(state.loss_scale, "min_loss_scale", None)
    if floor is not None and s <= floor:
        return ("stuck at the floor", last) if in_a_row > 1 else None
    # A large S needs some steps at first, and a broken batch explains a few later.
    is_start = floor is not None and in_a_row == int(state.skipped) and not losses
    return ("every step skipped", last) if in_a_row >= 10 and not is_start else None


def _frequent(steps: Steps) -> tuple[str, str] | None:
    """Returns the finding on too many skipped steps, of which one is always normal."""
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
