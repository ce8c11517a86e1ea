"""What a run's state and its last steps show, in one sentence per finding."""

from typing import Any

import numpy as np

from .._loss_scale import number_of
from ._history import LossScaleHistory
from ._leaves import leaf_findings
from ._skips import scale_finding, skip_finding, spike_finding
from ._states import find_states
from ._trends import trend_findings

_DIAGNOSE = "diagnose_nonfinite(loss_fn, loss_scale, params, batch)"

# By kind, the most urgent first.
_SENTENCES = {
    "loss scale out of range": (
        "The loss scale is {s}, which no step changes, so that all will be skipped: "
        "put a new DynamicLossScale into the state, or go back to a checkpoint."
    ),
    "loss not finite": (
        "{last}, and the loss scale stays at {s}: the loss itself is not finite, "
        "which no loss scale changes. {diagnose} finds the broken batch or parameter."
    ),
    "stuck at the floor": (
        "The loss scale is stuck at its floor of {floor}. {last}: {diagnose} "
        "distinguishes a NaN, a forward pass out of range, and an overflow that a "
        "lower min_loss_scale cures."
    ),
    "every step skipped": (
        "{last}, after others were not, and the loss scale is now {s}: something "
        "broke. {diagnose} finds the cause."
    ),
    "every step skipped at a fixed loss scale": (
        "{last}, with a loss scale that does not adapt: take a DynamicLossScale, "
        "unless {diagnose} finds a NaN."
    ),
    "loss diverges": (
        "The loss diverges: it is {current}, after {best} around step {step} and "
        "{first} at the start. Go back to a checkpoint from before, and lower the "
        "learning rate or clip the gradients."
    ),
    "loss blew up": (
        "The loss rose to {peak} at step {step}, and at {current} it has not come far "
        "below its start of {first}: start again with a lower learning rate, a "
        "warm-up or clipped gradients."
    ),
    "gradients vanished": (
        "The gradient norm {change} while the loss stays near its start ({current} "
        "after {first}): units are saturated or dead, or the gradients underflow. "
        "Start again with a lower learning rate; see calibrate_loss_scale if the "
        "gradients are computed in half precision."
    ),
    "gradient norm grows": (
        "The gradient norm grows steadily: from {begin} to {end} in the last {steps} "
        "steps, doubling every {rate} steps. Lower the learning rate or clip the "
        "gradients before the loss follows."
    ),
    "lost updates": (
        "In the last {steps} steps {entries:.0%} of the updates, and {magnitude:.0%} "
        "of their size, were lost in rounding: they are too small beside the "
        "parameters. Keep the parameters in float32 or, where they are, raise the "
        "learning rate."
    ),
    "frequent spikes": (
        "{skips} of the last {steps} steps {were} skipped as {spikes} ({rate:.1%}; "
        "{listed}), where one in a hundred is a lot: look at the data of those "
        "batches, or lower the learning rate."
    ),
    "spikes in a row": (
        "The last {in_a_row} steps were all skipped as spikes of the loss or the "
        "gradient norm, {total} in total: the data or the model changed. After "
        "{limit} in a row the guard takes the new level for normal."
    ),
    "spike": (
        "The last step was skipped as a spike of the loss or the gradient norm, "
        "{total} in total: normal if rare. Look at the data of that batch."
    ),
    "rare spikes": (
        "{skips} of the last {steps} steps {were} skipped as {spikes} ({rate:.1%}; "
        "{listed}): normal if rare. Look at the data of {those}."
    ),
    "broken batches": (
        "{skips} of the last {steps} steps {were} skipped ({rate:.1%}), most of them "
        "since the loss itself was not finite: look for broken data in those batches."
    ),
    "frequent overflow": (
        "{skips} of the last {steps} steps {were} skipped ({rate:.1%}), where a few "
        "in a thousand are normal: see with grad_report which leaf overflows, and "
        "take a longer period."
    ),
    "warm-up": (
        "{last}, the only ones so far, and the loss scale came down to {s}: an "
        "expected warm-up if this is the start. At most {more} more skips take it to "
        "its floor of {floor}."
    ),
    "warm-up to the floor": (
        "{last}, the only ones so far, and the loss scale is at its floor of {floor}: "
        "if the next step is skipped too, no loss scale is small enough."
    ),
    "skipped step": (
        "{last}, with a loss scale that does not adapt: normal if it stays the only "
        "one."
    ),
    "occasional overflow": (
        "{last}, {total} in total: normal if rare, since the loss scale grows until "
        "gradients overflow."
    ),
    "normal rate of overflow": (
        "{skips} of the last {steps} steps {were} skipped ({rate:.1%}): normal, since "
        "the loss scale grows until gradients overflow."
    ),
    "loss scale below 1": (
        "The loss scale is {s}, below 1: unscaled gradients overflow, so the forward "
        "pass is nearly out of range. Scale down its inputs or weights, or use "
        "bfloat16."
    ),
    "float16 parameters": (
        "{leaf} is {dtype}{others}: keep master parameters in float32 and cast them "
        "inside the loss (Policy.cast_to_compute), or small updates and Adam's "
        "epsilon are lost."
    ),
    "bfloat16 moments": (
        "{leaf} is bfloat16{others}{evidence}: with a b2 above 0.998 a second moment "
        "in bfloat16 cannot decay, since each step's change is rounded away. "
        "Initialize the optimizer on float32 parameters, or take a b2 of 0.99."
    ),
}
_ORDER = {kind: place for place, kind in enumerate(_SENTENCES)}


def health(opt_state: Any, history: LossScaleHistory | None = None) -> list[str]:
    """Describes the state of a run, one sentence per finding, most urgent first.

    Runs on the host; returns an empty list if there is nothing to report. It
    distinguishes the expected warm-up of S, occasional and frequent overflows, S at its
    floor, losses that are not finite, spikes, every step skipped, S below 1, and
    parameters and moments of too few digits, and says what to run next. Given a history
    with losses and gradient norms it also sees a run that goes wrong with finite
    numbers: a loss that diverges or blew up, a gradient norm that grows steadily or has
    vanished, updates that are lost in rounding. How often each is right is measured in
    the project's benchmarks, under "Health".

    Called every few hundred steps it waits for the device once. For one line per change
    rather than one per call, use `HealthLog`.

    Args:
      opt_state: state of `with_loss_scale`, at any depth of any pytree. If that holds
        the parameters too (a Flax `TrainState`, a tuple), their dtypes are checked
        too; otherwise those of the optimizer's moments are.
      history: the last steps. Without it only the current run of skipped steps is
        known. The trends need 40 steps with `loss`, `grad_norm` or `lost_updates`. Do
        not record the losses of an adversarial training, which rise and fall by design.

    Returns:
      Sentences, the most urgent first.

    Raises:
      ValueError: there is no such state in `opt_state`, or it is one of several
        replicas or of a `vmap`.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale, optax
      >>> from jmp_scale import diagnostics
      >>> static = jmp_scale.StaticLossScale(2.0**-3)
      >>> tx = jmp_scale.with_loss_scale(optax.sgd(0.1), static)
      >>> for sentence in diagnostics.health(tx.init(jnp.ones(2))):
      ...     print(sentence[:65], "...")
      The loss scale is 2^-3, below 1: unscaled gradients overflow, ...
    """
    return list(_findings("health", opt_state, history).values())


class HealthLog:
    """`health`, once per change: each finding when it begins, and a line when it ends.

    A callable for the host, whose only memory is the findings of its last call.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale, optax
      >>> from jmp_scale import diagnostics
      >>> tx = jmp_scale.with_loss_scale(optax.sgd(0.1))
      >>> state, log = tx.init(jnp.ones(())), diagnostics.HealthLog()
      >>> for gradient in (jnp.nan, jnp.nan, 1.0):
      ...     _, state = tx.update(jnp.float32(gradient), state)
      ...     print([sentence[:26] for sentence in log(state)], sorted(log.kinds))
      ['The last step was skipped,'] ['skipped step']
      [] ['skipped step']
      ['Over: skipped step.'] []
    """

    def __init__(self) -> None:
        self._kinds: frozenset[str] = frozenset()

    @property
    def kinds(self) -> frozenset[str]:
        """The findings of the last call by name, such as "loss diverges".

        For code that acts on them. Where a tree has several states, a name starts with
        the path of its state, as in "['generator']: spike".
        """
        return self._kinds

    def __call__(
        self, opt_state: Any, history: LossScaleHistory | None = None
    ) -> list[str]:
        """New sentences since the last call; arguments and errors as in `health`."""
        findings = _findings("HealthLog", opt_state, history)
        new = [
            sentence for kind, sentence in findings.items() if kind not in self._kinds
        ]
        over = [f"Over: {kind}." for kind in sorted(self._kinds - findings.keys())]
        self._kinds = frozenset(findings)
        return new + over


def _findings(
    function: str, opt_state: Any, history: LossScaleHistory | None
) -> dict[str, str]:
    """Sentences by kind."""
    states = find_states(function, opt_state)
    findings = []
    for path, state in states:
        shape = np.shape(state.skipped) or np.shape(number_of(state.loss_scale))
        # Of a replicated state every number below is an array, and `float` fails far
        # from here (test_health_refuses_several_replicas_of_a_state).
        if shape != ():
            raise ValueError(
                f"{function}: expected one state, got {shape} of them; index one with "
                "jax.tree.map"
            )
        prefix = f"{path}: " if len(states) > 1 else ""
        for finding in (skip_finding, spike_finding):
            findings.append((prefix, *finding(state, history)))
        findings.append((prefix, *scale_finding(state)))
    # The recorded norms are those of one optimizer's gradients.
    norms = history if len(states) == 1 else None
    findings += [("", *finding) for finding in leaf_findings(opt_state, norms)]
    if history is not None:
        findings += [("", *finding) for finding in trend_findings(history)]
    findings = [finding for finding in findings if finding[1]]
    findings.sort(key=lambda finding: _ORDER[finding[1]])
    sentences = {}
    for prefix, kind, values in findings:
        text = _SENTENCES[kind].format(diagnose=_DIAGNOSE, **values)
        sentences[prefix + kind] = f"{prefix}{text} [{kind}]"
    return sentences
