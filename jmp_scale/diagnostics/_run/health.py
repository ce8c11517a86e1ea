"""`HealthLog`: describes the state of a run and its last steps, by sentences."""

import math
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from ..._scaling.loss_scale import number_of
from ..._state import LossScaleState, find_half_storage
from ..._tree import named_inexact_leaves
from ..._types import PyTree
from .._tables import power
from .history import LossScaleHistory
from .metrics import find_states
from .trends import KindAndValues, trend_findings

_DIAGNOSE = "diagnose_nonfinite(loss_fn, loss_scale, params, batch)"

# Sentences by kind, the most urgent first.
_SENTENCES = {
    "loss scale out of range": "The loss scale is {s}. No step can change that, so "
    "every step will be skipped: put a new loss scale into the state, or go back to a "
    "checkpoint.",
    "loss not finite": "{last}: the loss itself is not finite, which no loss scale "
    "changes. {diagnose} names the operation that left the range of its dtype, or the "
    "argument that is not finite itself.",
    "stuck at the floor": "The loss scale is stuck at its floor of {floor}. {last}: "
    "{diagnose} distinguishes a NaN, a forward pass out of range, and an overflow that "
    "a lower min_loss_scale fixes. If it finds none, the step may scale by another S "
    "than opt_state's, or not unscale: check_step(train_step, ...) shows it.",
    "every step skipped": "{last} (in total {causes}), and the loss scale is now at "
    "{s}: something broke. {diagnose} finds the cause.",
    "loss diverges": "The loss diverges: it is {current:.3g}, after {best:.3g} around "
    "step {best_step} and {first:.3g} at the start. Go back to a checkpoint from "
    "before, and lower the learning rate or clip the gradients.",
    "loss blew up": "The loss rose to {peak:.3g} at step {step}, and at {current:.3g} "
    "it has not come far below its start of {first:.3g}: start again with a lower "
    "learning rate, a warm-up or clipped gradients.",
    "growing norm": "The gradient norm has grown from {first:.3g} to {norm:.3g}, and "
    "is growing: the run will diverge, even if its loss still falls. Lower the "
    "learning rate, and clip the gradients or add weight decay.",
    "gradients vanished": "The gradient norm {change} while the loss stays near its "
    "start ({current:.3g} after {first:.3g}): units are saturated or dead, or the "
    "gradients underflow. Start again with a lower learning rate; see "
    "compare_gradients if the gradients are computed in half precision.",
    "loss oscillates": "The loss swings by {swing:.0%} of its level up and down, every "
    "{period:.0f} steps: lower the learning rate or the momentum. If an epoch takes as "
    "many steps, shuffle the data.",
    "bursts": "The loss leaps above twice its level {bursts} times in {steps} steps, "
    "typically every {every} steps, and comes back. Look at the data of those steps; "
    "if it is good, lower the learning rate or Adam's b2, or raise its eps.",
    "no progress": "The loss has not fallen in the {steps} steps since the start "
    "({current:.3g} after {first:.3g}). If the model is untrained, raise the learning "
    "rate or shorten the warm-up; check_step(train_step, ...) tells whether the "
    "parameters change.",
    "lost updates": "In the last {steps} steps {entries:.0%} of the updates, and "
    "{magnitude:.0%} of their size, were lost in rounding: they are too small "
    "compared with the parameters. Keep the parameters in float32 or, if they are, "
    "raise the learning rate.",
    "frequent spikes": "{last}; more than 1 % is too many. Look at the data of those "
    "batches, or lower the learning rate.",
    "spike": "The last step was skipped as a spike of the loss or the gradient norm "
    "({in_a_row} skipped in a row; in total {causes}): normal if rare. Look at the "
    "data of that batch. After max_in_a_row spikes in a row the guard accepts the new "
    "level as normal.",
    "frequent overflow": "{last}; more than 1 % is too many. {diagnose} names the "
    "operation that overflows; {cure}.",
    "warm-up": "{last}, the only ones so far, and the loss scale is now at {s}: an "
    "expected warm-up if no step was applied before; else see that gradients are "
    "unscaled. Its floor is {floor}.",
    "skipped step": "{last}; in total {causes}: normal if rare. {diagnose} finds the "
    "cause.",
    "loss scale below 1": "The loss scale is {s}, below 1: unscaled gradients "
    "overflow, so the forward pass is nearly out of range. Scale down its inputs or "
    "weights, or use bfloat16.",
    "loss scale at its cap": "The loss scale is at its cap of {s} and has never "
    "overflowed. That can be right; but do the gradients come from "
    "jmp_scale.value_and_grad? Those of jax.value_and_grad never see the loss scale: "
    "check_step(train_step, ...) tells.",
    "float16 parameters": "{leaf} is {dtype}{more}: keep master parameters "
    "in float32 and cast them inside the loss (Policy.cast_to_compute), or small "
    "updates and Adam's epsilon are lost.",
    "bfloat16 moments": "{leaf} is {dtype}{more}: with a b2 above 0.998 a "
    "second moment in bfloat16 cannot decay, because each step's change is rounded "
    "away. Initialize the optimizer on float32 parameters, or use a b2 of 0.99.",
}

_NORMAL_RATE = 0.01  # of overflows or spikes; a default period causes 0.0005
_LISTED = 5  # steps that a sentence lists
# A second moment in the state of an optimizer. The first moment of a parameter that is
# called v is none.
_SECOND_MOMENT = re.compile(
    r"inner_state((?!mu\b|trace\b).)*?(\.nu|\.v|\['nu'\])(?!\w)"
)

Steps = dict[str, np.ndarray] | None  # of `LossScaleHistory.to_dict`; None without any
Counts = np.ndarray  # i64[3], skipped steps: overflows, broken losses, spikes


class HealthLog:
    """Describes the health of a run: a sentence when a finding begins, one at its end.

    Use it in the training loop, every hundred steps or so, or once on any state:
    `HealthLog()(opt_state)` returns all findings. It is a callable for the host, which
    remembers its last findings and the counts of skipped steps, and so knows the cause
    of new skips. Each sentence has its section in `docs/troubleshoot.md`.

    Attributes:
      kinds: names of the last findings, such as "loss diverges", for code that reacts
        to them. With several states each starts with a path: "['generator']: spike".
    """

    def __init__(self) -> None:
        self.kinds: frozenset[str] = frozenset()
        self._seen: dict[str, Counts] = {}

    def __call__(
        self, opt_state: PyTree, history: LossScaleHistory | None = None
    ) -> list[str]:
        """Returns the sentences that are new since the last call, most urgent first.

        Args:
          opt_state: state of `with_loss_scale`, at any depth of any pytree. The
            parameters and moments in it are checked for narrow dtypes.
          history: the last steps; findings on losses, norms and updates need 40 to 300
            steps with these numbers. Omit losses of adversarial training: they rise and
            fall by design.

        Returns:
          Sentences; an empty list if there is nothing new to report.

        Raises:
          ValueError: there is no such state in `opt_state`, or it has a leading axis of
            replicas or of a `vmap`.
        """
        findings = _findings(opt_state, history, self._seen)
        new = [text for kind, text in findings.items() if kind not in self.kinds]
        over = [f"Over: {kind}." for kind in sorted(self.kinds - findings.keys())]
        self.kinds = frozenset(findings)
        return new + over


def _findings(
    opt_state: PyTree, history: LossScaleHistory | None, seen: dict[str, Counts]
) -> dict[str, str]:
    """Returns sentences by kind, and updates the counts of skips in `seen`."""
    states = find_states("HealthLog", opt_state)
    findings = [("", *found) for found in _leaf_findings(opt_state)]
    steps = history.to_dict() if history is not None and history.pushed > 0 else None
    if history is not None:
        findings += [("", *found) for found in trend_findings(history)]
    for path, state in states:
        shape = np.shape(state.skipped) or np.shape(number_of(state.loss_scale))
        # In a replicated state every number is an array, and `float` would fail.
        if shape != ():
            raise ValueError(
                f"HealthLog: expected one state, got {shape} of them; take one of "
                "them with jax.tree.map(lambda x: x[0], state)"
            )
        prefix = f"{path}: " if len(states) > 1 else ""
        counts = _counts(state)
        # After a return to a checkpoint, counts are smaller.
        new = np.maximum(counts - seen.get(path, counts), 0)
        seen[path] = counts
        findings += [(prefix, *found) for found in _state_findings(state, steps, new)]
    order, sentences = list(_SENTENCES), {}
    for prefix, kind, values in sorted(findings, key=lambda f: order.index(f[1])):
        text = _SENTENCES[kind].format(diagnose=_DIAGNOSE, **values)
        sentences[prefix + kind] = f"{prefix}{text} [{kind}]"
    return sentences


def _counts(state: LossScaleState) -> Counts:
    losses, spikes = int(state.nonfinite_losses), int(state.spikes)
    return np.array([int(state.skipped) - losses - spikes, losses, spikes])


def _listed(counts: Counts) -> str:
    """Lists the causes that occurred, as in "2 by overflow, 1 by a broken loss"."""
    causes = ("overflow", "a broken loss", "a spike")
    pairs = zip(counts, causes, strict=True)
    return ", ".join(f"{count} by {cause}" for count, cause in pairs if count)


def _state_findings(
    state: LossScaleState, steps: Steps, new: Counts
) -> Iterator[KindAndValues]:
    # `rule` may be a class of the user's own, and is S alone in a mapping of Flax.
    rule, s, counts = state.loss_scale, number_of(state.loss_scale), _counts(state)
    is_fixed = not jax.tree.leaves(rule)  # what follows the steps is a leaf
    cure = "take a lower S, or one that adapts" if is_fixed else "take a longer period"
    values = {
        "s": "its fixed value" if s is None else power(float(s)),
        "floor": power(getattr(rule, "min_loss_scale", 1)),
        "in_a_row": int(state.skipped_in_a_row),
        "causes": _listed(counts),
        "cure": cure,
    }
    found = {} if steps is None else _frequent(steps)
    kind, last = _present(state, steps, new, is_fixed)
    # The recorded rate of overflow says more than the last overflow.
    topic = "spikes" if kind == "spike" else "skips"
    if kind and (kind != "skipped step" or topic not in found):
        found[topic] = kind, last
    for kind, last in found.values():
        yield kind, {**values, "last": last}
    if s is None:
        return
    growth, cap = getattr(rule, "factor", 1), getattr(rule, "max_loss_scale", math.inf)
    if not 0 < s < math.inf:
        yield "loss scale out of range", values
    elif s < 1:
        yield "loss scale below 1", values
    elif s * growth > cap and not counts[0]:
        yield "loss scale at its cap", values


def _present(
    state: LossScaleState, steps: Steps, new: Counts, is_fixed: bool
) -> tuple[str, str]:
    """Returns the finding on consecutive skips until now, or since the last call."""
    in_a_row, rule = int(state.skipped_in_a_row), state.loss_scale
    if in_a_row == 0:
        overflows, losses, _ = new if steps is None else np.zeros(3)
        last = f"Steps were skipped since the last call ({_listed(new)})"
        if losses:
            return "loss not finite", last
        # An S that grows causes overflows itself: only their rate could tell.
        return ("skipped step" if overflows and is_fixed else ""), last
    many = f"The last {in_a_row} steps were all skipped"
    last = "The last step was skipped" if in_a_row == 1 else many
    overflows, losses, _ = new if new.any() else _counts(state)
    if steps is not None:  # the history knows the cause of each skip
        spike, finite = (steps[name][-in_a_row:] for name in ("spike", "loss_finite"))
        overflows, losses = (finite & ~spike).sum(), (~finite).sum()
    # int, because a Variable of Flax 0.12.0 has no truth value. A spike may overflow.
    is_spike = int(state.grads_finite) > int(state.applied)
    if is_spike or overflows == losses == 0:
        return "spike", last
    if overflows == 0:
        return "loss not finite", last
    floor = getattr(rule, "min_loss_scale", None)
    if floor is not None and float(number_of(rule)) <= floor and in_a_row > 1:
        return "stuck at the floor", last
    is_all = steps is None or len(steps["step"]) == in_a_row
    if floor is not None and in_a_row == int(state.skipped) and is_all and not losses:
        return "warm-up", last
    # More than a broken batch explains.
    return ("every step skipped" if in_a_row >= 10 else "skipped step"), last


def _frequent(steps: dict[str, np.ndarray]) -> dict[str, tuple[str, str]]:
    """Returns findings on too many spikes and other skips, by these two topics."""
    spike = steps["spike"]
    skipped = ~(steps["grads_finite"] | spike)
    if steps["step"][0] == 0:  # skips before the first applied step are expected
        skipped[: int(np.argmin([*skipped, False]))] = False
    found = {}
    for topic, flags, what, kind in (
        ("spikes", spike, "The guard skipped", "frequent spikes"),
        ("skips", skipped, "Gradients were not finite in", "frequent overflow"),
    ):
        numbers = [str(step) for step in steps["step"][flags]]
        count, size = len(numbers), flags.size
        is_of_loss = count > 0 and steps["loss_finite"][flags].mean() < 0.5
        # A single skip is always normal.
        if count > max(1, _NORMAL_RATE * size) or is_of_loss:
            listed = ", ".join(["..."] * (count > _LISTED) + numbers[-_LISTED:])
            share = f"({count / size:.1%}; at step {listed})"
            last = f"{what} {count} of the last {size} steps {share}"
            found[topic] = "loss not finite" if is_of_loss else kind, last
    return found


def _leaf_findings(opt_state: PyTree) -> Iterator[KindAndValues]:
    pairs = zip(*named_inexact_leaves(opt_state), strict=True)
    pairs = [(path, leaf) for path, leaf in pairs if hasattr(leaf, "dtype")]
    # bfloat16 has the range of float32, and users choose it for parameters on purpose.
    narrow = [pair for pair in pairs if jnp.finfo(pair[1].dtype).maxexp < 128]
    squares = [pair for pair in pairs if _SECOND_MOMENT.search(pair[0])]
    coarse = [pair for pair in squares if pair[1].dtype == jnp.bfloat16]
    if find_half_storage(opt_state):  # rounded stochastically: they lose nothing
        coarse = []
    for kind, leaves in (("float16 parameters", narrow), ("bfloat16 moments", coarse)):
        for path, leaf in leaves[:1]:
            more = f" (and {len(leaves) - 1} more)" if len(leaves) > 1 else ""
            yield kind, {"leaf": path, "dtype": leaf.dtype, "more": more}
