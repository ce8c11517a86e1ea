"""What a loss-scale state says about a run, in sentences for people."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._loss_scale import number_of
from .._tree import is_inexact
from ._history import LossScaleHistory
from ._metrics import find_states

_NORMAL_SKIP_RATE = (
    0.05  # of steps; with the default period S itself causes about 0.0005
)
_LONG_RUN = 10  # skipped steps in a row that a broken batch does not explain

_SENTENCES = {
    "loss not finite": (
        "{last}, and the loss scale stays at {s}: the loss itself is not finite, which no loss scale "
        "changes. {diagnose} finds the broken batch or parameter."
    ),
    "stuck at the floor": (
        "The loss scale is stuck at its floor of {floor}. {last}: {diagnose} tells apart a NaN, a forward "
        "pass out of range, and an overflow that a lower min_loss_scale cures."
    ),
    "warm-up": (
        "{last}, the only ones so far, and the loss scale came down to {s}: an expected warm-up if this is "
        "the start. At most {more} more skips take it to its floor of {floor}."
    ),
    "every step skipped": (
        "{last}, after others were not, and the loss scale is now {s}: something broke, and {diagnose} "
        "tells what."
    ),
    "every step skipped at a fixed loss scale": (
        "{last}, with a loss scale that does not adapt: take a DynamicLossScale, unless {diagnose} finds a "
        "NaN."
    ),
    "skipped step": "{last}, with a loss scale that does not adapt: normal if it stays the only one.",
    "occasional overflow": (
        "{last}, {total} in total: normal if rare, since the loss scale grows until gradients overflow."
    ),
    "normal rate of overflow": (
        "{skips} of the last {steps} steps were skipped ({rate:.1%}): normal, since the loss scale grows "
        "until gradients overflow."
    ),
    "broken batches": (
        "{skips} of the last {steps} steps were skipped ({rate:.1%}), most of them since the loss itself "
        "was not finite: look for broken data in those batches."
    ),
    "frequent overflow": (
        "{skips} of the last {steps} steps were skipped ({rate:.1%}), where a few in a thousand are normal: "
        "see with grad_report which leaf overflows, and take a longer period."
    ),
    "loss scale below 1": (
        "The loss scale is {s}, below 1: unscaled gradients overflow, so the forward pass is nearly out of "
        "range. Scale down its inputs or weights, or use bfloat16."
    ),
    "float16 parameters": (
        "{leaf} is {dtype}{others}: keep master parameters in float32 and cast them inside the loss "
        "(Policy.cast_to_compute), or small updates and Adam's epsilon are lost."
    ),
}
_DIAGNOSE = "diagnose_nonfinite(loss_fn, loss_scale, params, batch)"


def health(opt_state: Any, history: LossScaleHistory | None = None) -> list[str]:
    """What is to be said of a run, of the host: one sentence per finding, and nothing when all is well.

    It tells the expected warm-up, an occasional overflow, frequent ones, S at its floor, every step
    skipped, S below 1, and float16 parameters apart, and says what to run next. Called every few hundred
    steps it waits for the device once. For one line per change rather than one per call, use `HealthLog`.

    Args:
      opt_state: state of `with_loss_scale`, at any depth of any pytree. If that holds the parameters too (a
        Flax `TrainState`, a tuple), these are looked at as well; else the optimizer's moments stand for them.
      history: the last steps. Without it only the current run of skipped steps is known.

    Returns:
      Sentences, the most urgent first.

    Raises:
      ValueError: there is no such state in `opt_state`, or it is one of several replicas or of a `vmap`.

    Example:
      >>> import jax.numpy as jnp, jmp_scale, optax
      >>> from jmp_scale import diagnostics
      >>> tx = jmp_scale.with_loss_scale(optax.sgd(0.1), jmp_scale.StaticLossScale(2.0**-3))
      >>> for sentence in diagnostics.health(tx.init(jnp.ones(2))):
      ...     print(sentence[:65], "...")
      The loss scale is 2^-3, below 1: unscaled gradients overflow, ...
    """
    return list(_findings("health", opt_state, history).values())


class HealthLog:
    """`health`, told once per change: each finding when it begins, and a line when it is over.

    A callable for the host, with the findings of its last call as its only memory.

    Example:
      >>> import jax.numpy as jnp, jmp_scale, optax
      >>> from jmp_scale import diagnostics
      >>> tx = jmp_scale.with_loss_scale(optax.sgd(0.1))
      >>> state, log = tx.init(jnp.ones(())), diagnostics.HealthLog()
      >>> for gradient in (jnp.nan, jnp.nan, 1.0):
      ...     _, state = tx.update(jnp.float32(gradient), state)
      ...     print(log(state))
      ['The last step was skipped, with a loss scale that does not adapt: normal if it stays the only one.']
      []
      ['Over: skipped step.']
    """

    def __init__(self) -> None:
        self._kinds: frozenset[str] = frozenset()

    def __call__(
        self, opt_state: Any, history: LossScaleHistory | None = None
    ) -> list[str]:
        """New sentences since the last call; arguments and errors are those of `health`."""
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
    """Sentences by what they are about."""
    states = find_states(function, opt_state)
    findings = [("", *_narrow_leaves(opt_state))]
    for path, state in states:
        if np.ndim(state.skipped) != 0 or np.ndim(number_of(state.loss_scale)) != 0:
            shape = np.shape(state.skipped)
            raise ValueError(
                f"{function}: expected one state, got {shape} of them; index one"
            )
        prefix = f"{path}: " if len(states) > 1 else ""
        findings = [
            (prefix, *_skips(state, history)),
            (prefix, *_range(state)),
            *findings,
        ]
    return {
        p + kind: p + _SENTENCES[kind].format(**values)
        for p, kind, values in findings
        if kind
    }


def _skips(state: Any, history: LossScaleHistory | None) -> tuple[str, dict[str, Any]]:
    in_a_row, total = int(state.skipped_in_a_row), int(state.skipped)
    loss_scale, s = state.loss_scale, float(number_of(state.loss_scale))
    if in_a_row == 0:
        return _rate(history)
    last = (
        "The last step was skipped"
        if in_a_row == 1
        else f"The last {in_a_row} steps were all skipped"
    )
    values = {"last": last, "s": _power(s), "total": total, "diagnose": _DIAGNOSE}
    if _loss_not_finite(in_a_row, history):
        return "loss not finite", values
    if not hasattr(loss_scale, "min_loss_scale"):
        run = "every step skipped at a fixed loss scale"
        return (run if in_a_row >= _LONG_RUN else "skipped step"), values
    floor, cap = loss_scale.min_loss_scale, loss_scale.max_loss_scale
    values |= {"floor": _power(floor), "more": _most_skips(loss_scale, s, floor)}
    if s <= floor and in_a_row > 1:
        return "stuck at the floor", values
    if (
        in_a_row > _most_skips(loss_scale, cap, s) + _LONG_RUN
    ):  # skips that cannot all have lowered S
        return "loss not finite", values
    if in_a_row == total and (history is None or int(history.pushed) in (0, total)):
        return "warm-up", values
    if in_a_row >= _LONG_RUN:
        return "every step skipped", values
    return _rate(history) if history is not None else ("occasional overflow", values)


def _rate(history: LossScaleHistory | None) -> tuple[str, dict[str, Any]]:
    if history is None:
        return "", {}
    recorded = history.to_dict()
    skipped, loss_finite = ~recorded["grads_finite"], recorded["loss_finite"]
    if (
        skipped.size and recorded["step"][0] == 0
    ):  # skips before the first applied step were to be expected
        warm_up = int(np.argmin(skipped))
        skipped, loss_finite = skipped[warm_up:], loss_finite[warm_up:]
    if not skipped.any():
        return "", {}
    rate = float(skipped.mean())
    kind = (
        "normal rate of overflow" if rate <= _NORMAL_SKIP_RATE else "frequent overflow"
    )
    kind = "broken batches" if loss_finite[skipped].mean() < 0.5 else kind
    return kind, {"skips": int(skipped.sum()), "steps": skipped.size, "rate": rate}


def _range(state: Any) -> tuple[str, dict[str, Any]]:
    s = float(number_of(state.loss_scale))
    return ("loss scale below 1" if s < 1 else ""), {"s": _power(s)}


def _narrow_leaves(opt_state: Any) -> tuple[str, dict[str, Any]]:
    """Leaves of less range than float32. (bfloat16 has the same, and is chosen on purpose.)"""
    pairs = jax.tree_util.tree_flatten_with_path(opt_state)[0]
    arrays = [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in pairs
        if hasattr(leaf, "dtype")
    ]
    dtypes = {path: leaf.dtype for path, leaf in arrays if is_inexact(leaf)}
    narrow = [path for path, dtype in dtypes.items() if jnp.finfo(dtype).maxexp < 128]
    if not narrow:
        return "", {}
    others = f", and so are {len(narrow) - 1} more leaves" if len(narrow) > 1 else ""
    return "float16 parameters", {
        "leaf": narrow[0],
        "dtype": dtypes[narrow[0]],
        "others": others,
    }


def _loss_not_finite(in_a_row: int, history: LossScaleHistory | None) -> bool:
    """Whether the loss of every step of the present run of skips is recorded as not finite."""
    if history is None:
        return False
    loss_finite = history.to_dict()["loss_finite"][-in_a_row:]
    return bool(loss_finite.size and not loss_finite.any())


def _most_skips(loss_scale: Any, start: float, end: float) -> int:
    """Overflows that bring S from `start` down to `end`, if each counts."""
    backoff = loss_scale.backoff_factor or 1 / loss_scale.factor
    return math.ceil(math.log(start / end) / -math.log(backoff)) * loss_scale.hysteresis


def _power(s: float) -> str:
    return f"2^{math.log2(s):.4g}"
