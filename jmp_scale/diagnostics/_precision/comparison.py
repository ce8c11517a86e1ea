"""`compare_gradients`: the errors of a half-precision gradient, and at which S."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._scaling.finite import all_finite, finite_and_norm
from ..._scaling.loss_scale import LossScale
from ..._tree import promote_to_float32
from ..._types import Arrays, Function, PyTree
from .. import _backward
from .._backward import Backward, Loss
from .._findings import Finding, Rule, are_notes, error_rule, finding, summary_of
from .._tables import leaf_name, percent, power, printed, table

# Training tolerates an error of this share of a gradient's norm. Gradients of two
# batches differ by far more. Ports with errors of up to 7 % trained as in float32, and
# ports with 50 % did not.
_BEARABLE = 0.1
_LOST = 0.5  # a leaf that loses more than this share of its elements is lost
_TRIED = tuple(2.0**k for k in range(-4, 25, 2))  # up to a `DynamicLossScale`'s cap
_LEAST, _MOST = 1.0, 2.0**24  # range of S of a `DynamicLossScale` by default
_ROOM = 4  # overflows lie at least this factor above a recommended S
_EXACT = 2.0**-8  # errors of a leaf that differ by less are those of rounding

RULES = {
    "float32 not finite": error_rule(
        "Float32 is not finite itself.", "Run diagnose_nonfinite(loss, 1, ...)."
    ),
    "nothing in half precision": Rule(
        "warning",
        "Nothing was compared: no number of half_loss is half precision.",
        "Pass what autocast returns; it warns if no product became half precision.",
    ),
    "backward rule sees S": error_rule(
        "The gradient is off by {error} at loss scale {s}, and so is that of float32, "
        "by {of_float32}: a backward rule in the loss depends on the loss scale, "
        "because it clips, normalizes, adds noise or has a tolerance.",
        "Clip outside of the loss, multiply the rule's bound by S, or train in "
        "bfloat16 without a loss scale.",
    ),
    "loss not finite": error_rule(
        "The loss is not finite at loss scale {s}.",
        "Run diagnose_nonfinite(half_loss, {number}, ...).",
    ),
    "gradient not finite": error_rule(
        "The gradient is not finite at loss scale {s}.",
        "Run diagnose_nonfinite(half_loss, {number}, ...). {cure}",
    ),
    "gradient lost": error_rule(
        "{lost} of its gradient becomes zero at loss scale {s}.", "{cure}"
    ),
    "not precise": error_rule("{judged} ({bearable} is bearable).", "{cure}"),
    "no loss scale works": Rule(
        "warning",
        "No loss scale from {low} to {high} works.",
        "bfloat16 needs none: try it, also in the backward pass alone.",
    ),
}


class LeafComparison(NamedTuple):
    """One leaf of the gradient in half precision, compared with float32.

    Attributes:
      path: name of the leaf, as `jax.tree_util.keystr` writes it.
      norm: norm of the float32 gradient.
      error: norm of the difference over `norm`; infinite if it is not finite.
      lost: share of the nonzero elements in float32 that half precision makes zero.
      finite: whether all elements are finite in half precision.
      float32_error: the error of float32 itself, as in `GradientComparison`.
    """

    path: str
    norm: float
    error: float
    lost: float
    finite: bool
    float32_error: float

    @property
    def is_noise(self) -> bool:
        """Whether float32's own rounding changes it by more than 10 %."""
        return self.float32_error > _BEARABLE

    @property
    def is_lost(self) -> bool:
        """Whether more than half of it is lost, and it is not noise."""
        return self.lost > _LOST and not self.is_noise


@printed
class Window(NamedTuple):
    """Loss scales that work, of those that were tried.

    At each of them the error is bearable, no leaf is lost, and the loss and all
    gradients are finite. S = 1 is among them only if each leaf is as exact at 1 as at
    its best S: within 2^-8 of its norm.

    Attributes:
      lowest: the lowest S of the window.
      highest: the highest S of the window.
      start: S to start from: a quarter of `highest`, but in the window and, if
        possible, in the range of a `DynamicLossScale()`.
    """

    lowest: float
    highest: float
    start: float

    def summary(self) -> str:
        """Returns the window in a sentence."""
        text = f"Loss scales from {power(self.lowest)} to {power(self.highest)} work"
        if self.lowest <= 1 < self.highest:  # else a rule in the loss may see S
            return f"{text}, including 1: loss scaling is not needed here."
        return f"{text}: start from {power(self.start)}."


@printed
class GradientComparison(NamedTuple):
    """The result of `compare_gradients`, in Python values.

    Attributes:
      loss: the float32 loss.
      half_loss: the loss of the half-precision program, unscaled.
      error: norm of the difference of the two gradients over the norm of the float32
        one, of the whole tree; infinite if anything is not finite.
      scaled_error: the same after scaling all leaves to equal root mean square, roughly
        as Adam does. A leaf counts at most 1; leaves that are noise are left out.
      leaves: the same for each leaf, in the order of the tree.
      float32_error: the error between two float32 gradients: of the arguments, and of
        the arguments with each element changed in its last digit.
      loss_scale: S of the half-precision gradient.
      holds_half: whether any number of `half_loss` and its backward pass is narrower
        than float32.
      loss_scales: the loss scales that were tried for `window`.
      window: the loss scales that work; None if none does, or none was tried.
      scaled_float32_error: the error of the float32 gradient at `loss_scale`. It is
        large if a backward rule in the loss, such as a clip, depends on S.
    """

    loss: float
    half_loss: float
    error: float
    scaled_error: float
    leaves: tuple[LeafComparison, ...]
    float32_error: float
    loss_scale: float
    holds_half: bool = True
    loss_scales: tuple[float, ...] = ()
    window: Window | None = None
    scaled_float32_error: float = 0.0

    @property
    def sees_scale(self) -> bool:
        """Whether a backward rule in the loss depends on the loss scale."""
        return _limit(self) < self.scaled_float32_error < math.inf

    @property
    def is_precise(self) -> bool:
        """Whether `error` and a third of `scaled_error` are small enough for training.

        The limit is 10 % or, if that is more, twice `float32_error`. False if a loss or
        a gradient is not finite, a leaf is lost, or nothing was half precision.
        """
        is_lost = any(leaf.is_lost for leaf in self.leaves)
        return self.holds_half and not is_lost and judged_error(self) <= _limit(self)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Why half precision is not precise enough, if it is not."""
        return tuple(_told(self))

    @property
    def ok(self) -> bool:
        """Whether there is no finding above a note."""
        return are_notes(self.findings)

    def summary(self, k: int = 20) -> str:
        """Returns whether half precision is precise enough, and the k worst leaves."""
        whole = math.hypot(*(leaf.norm for leaf in self.leaves))
        errors = percent(self.error), percent(self.float32_error)
        rows: list[tuple[str, ...]] = [
            ("leaf", "norm", "error", "of float32", "lost", "finite"),
            ("(all)", f"{whole:.2e}", *errors, "", ""),
            ("(all, scaled to one size)", "", percent(self.scaled_error), "", "", ""),
        ]
        worst = sorted(self.leaves, key=lambda x: (x.is_noise and x.finite, -x.error))
        for leaf in worst:
            shares = map(percent, (leaf.error, leaf.float32_error, leaf.lost))
            cells = f"{leaf.norm:.2e}", *shares, "yes" if leaf.finite else "no"
            rows.append((leaf_name(leaf.path), *cells))
        window = [self.window.summary()] if self.window and self.ok else []
        losses = f"loss {self.half_loss:.6g}, in float32 {self.loss:.6g}"
        losses += f", loss scale {power(self.loss_scale)}"
        details = *window, losses, *table(rows, k=k + 2)
        judged, bearable = _judged(self)
        fine = f"{judged}, which is precise enough ({bearable} is bearable)."
        return summary_of(fine, self.findings, *details)


@_backward.meets_nonfinite
def compare_gradients(
    half_loss: Function,
    loss: Function,
    *args: PyTree,
    loss_scale: LossScale | ArrayLike | None = None,
    loss_scales: Sequence[float] | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    transform: Function | None = None,
) -> GradientComparison:
    """Compares the gradients of a half-precision and a float32 program.

    Use it to decide whether half precision is precise enough for a loss, and with which
    loss scales float16 is. It is called on the host, and compiles each program once,
    with all roundings (`xla_allow_excess_precision`). The result holds for these
    arguments.

    Args:
      half_loss: the whole loss in half precision.
      loss: the same loss in float32. The arguments of both, `argnums`, `has_aux` and
        `transform` are those of `precision_report`.
      loss_scale: the loss scale of the half-precision gradient, or S as a number. With
        a `DynamicLossScale`, S is divided by 8, down to 1, as long as the gradient is
        not finite. None, the default, means `DynamicLossScale()` if anything is
        float16, else 1.
      loss_scales: numbers S; the backward pass runs at each of them, to find the window
        in which they work. None, the default, means 2^-4, 2^-2, ..., 2^24 if anything
        is float16, else none.

    Raises:
      TypeError: as `precision_report`; also if `loss_scale` is not a loss scale, or
        `loss` is under `autocast`, wherever in it.
    """
    function = "compare_gradients"
    given = args, argnums, has_aux, transform
    half, full = (Loss(function, fun, *given) for fun in (half_loss, loss))
    arrays, rejoin = _backward.concrete_arrays(function, args)
    # JAX adds up the cotangents of an array in its own dtype.
    wide = promote_to_float32(arrays)
    compiled = functools.partial(jax.jit, compiler_options=_backward.ALL_ROUNDINGS)
    run = compiled(lambda s, arrays: full.run(s, rejoin(arrays)))
    run_half = compiled(lambda s, arrays: half.run(s, rejoin(arrays)))
    one = jnp.float32(1.0)
    _backward.traced_in_float32(function, lambda: run.trace(one, wide).jaxpr)
    dtypes = _backward.narrow_dtypes(run_half.trace(one, arrays).jaxpr)
    start = _backward.start_of(function, loss_scale, dtypes)
    if loss_scales is None:
        loss_scales = _TRIED if "float16" in dtypes else ()
    tried = tuple(sorted(map(float, loss_scales)))
    reference = Reference(functools.partial(run, one), wide)
    found = reference.compared(*start.found(lambda s: run_half(s, arrays)))
    at = [reference.compared(run_half(jnp.float32(s), arrays), s) for s in tried]
    # In float32, S changes a gradient only through a rule that is not linear.
    s = found.loss_scale
    scaled = reference.compared(run(jnp.float32(s), wide), s)
    works = [each.is_precise for each in at]
    errors = [[leaf.error for leaf in each.leaves if not leaf.is_noise] for each in at]
    return found._replace(
        holds_half=bool(dtypes),
        loss_scales=tried,
        window=window_of(tried, works, errors),
        scaled_float32_error=scaled.error,
    )


def window_of(
    scales: Sequence[float], works: Sequence[bool], errors: Sequence[Sequence[float]]
) -> Window | None:
    """Returns the longest run of neighbors that work, the lower of two; None if none.

    `errors` has, for each of the increasing `scales`, the errors of the leaves.
    """
    groups = itertools.groupby(range(len(works)), works.__getitem__)
    runs = [[*group] for works_here, group in groups if works_here]
    run = _without_inexact_one(max(runs, key=len, default=[]), scales, errors)
    if not run:
        return None
    lowest, highest = scales[run[0]], scales[run[-1]]
    start = min(max(highest / _ROOM, _LEAST), _MOST)
    return Window(lowest, highest, min(max(start, lowest), highest))


def _without_inexact_one(
    run: list[int], scales: Sequence[float], errors: Sequence[Sequence[float]]
) -> list[int]:
    """Drops S = 1, and what is below or above it, if another S is more exact."""
    for one in (i for i in run if scales[i] == 1):
        for leaf, error in enumerate(errors[one]):
            best = min(reversed(run), key=lambda i: errors[i][leaf])
            if error - errors[best][leaf] > _EXACT:
                return [i for i in run if (i - one) * (best - one) > 0]
    return run


class Reference:
    """A float32 gradient, and the error of float32 itself."""

    def __init__(self, run: Callable[[Arrays], Backward], arrays: Arrays) -> None:
        self.backward = run(arrays)
        self._own = _differences(run(_changed_in_the_last_digit(arrays)), self.backward)

    def compared(self, found: Backward, s: float) -> GradientComparison:
        """Compares a half-precision gradient with this one; `s` is its loss scale."""
        rows = _differences(found, self.backward)
        leaves, sizes = [], []
        by_leaf = zip(found.paths, found.leaves, rows, self._own, strict=True)
        for path, x, row, own in by_leaf:
            norm, _, lost, finite = row
            shares = _error([row]), lost, bool(finite), _error([own])
            leaves.append(LeafComparison(path, norm, *shares))
            sizes.append(0 if leaves[-1].is_noise else x.size)
        squares = [min(leaf.error, 1) ** 2 for leaf in leaves]
        return GradientComparison(
            loss=float(self.backward.loss),
            half_loss=float(found.loss),
            error=_error(rows),
            scaled_error=math.sqrt(np.dot(squares, sizes) / max(sum(sizes), 1)),
            leaves=tuple(leaves),
            float32_error=_error(self._own),
            loss_scale=s,
        )


def judged_error(found: GradientComparison) -> float:
    """Returns the largest of `error`, a third of `scaled_error`, and a lost share.

    It is infinite if a loss is not finite, because such a step is skipped.
    """
    if not math.isfinite(found.loss) or not math.isfinite(found.half_loss):
        return math.inf
    lost = max((leaf.lost for leaf in found.leaves if leaf.is_lost), default=0.0)
    return max(found.error, found.scaled_error / 3, lost)


def _changed_in_the_last_digit(arrays: Arrays) -> list[jax.Array]:
    changed = list(arrays)
    for i, x in enumerate(arrays):
        if x.dtype in (jnp.float32, jnp.float64):
            signs = jax.random.rademacher(jax.random.key(i), x.shape, x.dtype)
            changed[i] = x * (1 + signs * jnp.finfo(x.dtype).eps)
    return changed


def _error(rows: Sequence[Sequence[float]]) -> float:
    """Returns the norm of the difference over that of the reference, or infinity."""
    norm, distance = (math.hypot(*(row[i] for row in rows)) for i in (0, 1))
    if not math.isfinite(distance) or norm == 0:
        return math.inf if distance else 0.0
    return distance / norm


def _differences(found: Backward, reference: Backward) -> list[list[float]]:
    rows = [*map(_difference, found.leaves, reference.leaves)]
    return np.array(jax.device_get(rows), np.float64).tolist()


@jax.jit
def _difference(x: jax.Array, reference: jax.Array) -> tuple[jax.Array, ...]:
    """Returns norms of reference and difference, the share lost, and if x is finite."""
    nonzero = reference != 0
    lost = jnp.sum((x == 0) & nonzero) / jnp.maximum(jnp.sum(nonzero), 1)
    _, norm = finite_and_norm(reference)
    _, distance = finite_and_norm(x - reference)
    return norm, distance, lost, all_finite(x)


def _limit(found: GradientComparison) -> float:
    return max(_BEARABLE, 2 * found.float32_error)


def _told(found: GradientComparison) -> Iterator[Finding]:
    """Yields the first of what is at fault, and whether no loss scale works."""
    norms = [leaf.norm for leaf in found.leaves]
    lost = [(leaf_name(x.path), percent(x.lost)) for x in found.leaves if x.is_lost]
    name, share = next(iter(lost), ("", ""))
    s, (judged, bearable) = power(found.loss_scale), _judged(found)
    # Another loss scale helps if any works.
    keep = "sensitive_products finds what must stay float32."
    values = {
        "s": s,
        "number": s.replace("^", "**"),
        "error": percent(found.error),
        "of_float32": percent(found.scaled_float32_error),
        "lost": share,
        "judged": judged,
        "bearable": bearable,
        "cure": found.window.summary() if found.window else keep,
    }
    faults = {
        "float32 not finite": not all(map(math.isfinite, (found.loss, *norms))),
        "nothing in half precision": not found.holds_half,
        "backward rule sees S": found.sees_scale,
        "loss not finite": not math.isfinite(found.half_loss),
        "gradient not finite": not all(leaf.finite for leaf in found.leaves),
        "gradient lost": bool(lost),
        "not precise": not found.is_precise,
    }
    if first := next(filter(faults.get, faults), None):
        where = name * (first == "gradient lost")
        yield finding(RULES, first, where, **values)
    if found.loss_scales and not found.window:
        low, high = map(power, (found.loss_scales[0], found.loss_scales[-1]))
        yield finding(RULES, "no loss scale works", low=low, high=high)


def _judged(found: GradientComparison) -> tuple[str, str]:
    """Returns words for the error that counts most, and the largest bearable one."""
    bearable = _limit(found)
    if found.scaled_error / 3 > found.error:
        what = "With leaves of one size, as in Adam, the gradient is off by"
        return f"{what} {percent(found.scaled_error)}", percent(3 * bearable)
    return f"The gradient is off by {percent(found.error)}", percent(bearable)
