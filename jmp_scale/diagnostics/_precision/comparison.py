"""`compare_gradients`: compares gradients in half precision and float32, by leaf."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._jaxpr import Program, bytes_per_entry, equations, is_floating
from ..._scaling.finite import all_finite, finite_and_norm
from ..._scaling.loss_scale import LossScale
from ..._tree import promote_to_float32
from ..._types import Arrays, Function, PyTree
from .._backward import (
    ALL_ROUNDINGS,
    Backward,
    Loss,
    concrete_arrays,
    described,
    start_of,
)
from .._tables import leaf_name, percent, power, printed, table

# Training tolerates an error of this share of a gradient's norm. Gradients of two
# batches differ by far more. Ports with errors of up to 7 % trained as in float32, and
# ports with 50 % did not.
_BEARABLE = 0.1

NOT_FINITE = "Float32 is not finite itself: run diagnose_nonfinite(loss, 1, ...)."


@printed
class LeafComparison(NamedTuple):
    """One leaf of the gradient in half precision, compared with float32.

    Attributes:
      path: name of the leaf, as `jax.tree_util.keystr` writes it.
      norm: norm of the float32 gradient.
      error: norm of the difference over `norm`; infinite if it is not finite.
      lost: share of the elements that are zero in half precision, but not in float32.
      finite: whether all elements are finite in half precision.
      float32_error: the error of float32 itself, as in `GradientComparison`.
    """

    path: str
    norm: float
    error: float
    lost: float
    finite: bool
    float32_error: float


@printed
class GradientComparison(NamedTuple):
    """The result of `compare_gradients`, in Python values.

    Attributes:
      loss: the float32 loss.
      half_loss: the loss of the half-precision program, unscaled.
      error: norm of the difference of the two gradients over the norm of the float32
        one, of the whole tree; infinite if anything is not finite.
      scaled_error: the same after scaling all leaves to equal root mean square, roughly
        as Adam does. A leaf counts at most 1; leaves whose own `float32_error` exceeds
        10 % are left out.
      leaves: the same for each leaf, in the order of the tree.
      float32_error: the error between two float32 gradients: of the arguments, and of
        the arguments with each element changed in its last digit.
      loss_scale: S of the half-precision gradient.
      holds_half: whether any number of `half_loss` and its backward pass is narrower
        than float32.
    """

    loss: float
    half_loss: float
    error: float
    scaled_error: float
    leaves: tuple[LeafComparison, ...]
    float32_error: float
    loss_scale: float
    holds_half: bool = True

    @property
    def is_precise(self) -> bool:
        """Whether `error` and a third of `scaled_error` are small enough for training.

        The limit is 10 % or, if that is more, twice `float32_error`. False if a loss or
        a gradient is not finite, or if nothing was half precision.
        """
        error = judged_error(self)
        limit = max(_BEARABLE, 2 * self.float32_error)
        return self.holds_half and math.isfinite(error) and error <= limit

    def summary(self, k: int = 20) -> str:
        """Returns whether half precision is precise enough, and the k worst leaves."""

        def badness(leaf: LeafComparison) -> tuple[bool, float]:
            return leaf.float32_error <= _BEARABLE or not leaf.finite, leaf.error

        head = "leaf", "norm", "error", "of float32", "lost", "finite"
        rows: list[tuple[str, ...]] = [head]
        for leaf in sorted(self.leaves, key=badness, reverse=True):
            shares = map(percent, (leaf.error, leaf.float32_error, leaf.lost))
            cells = f"{leaf.norm:.2e}", *shares, "yes" if leaf.finite else "no"
            rows.append((leaf_name(leaf.path), *cells))
        return "\n".join([_verdict(self), *table(rows, k=k)])


def compare_gradients(
    half_loss: Function,
    loss: Function,
    *args: PyTree,
    loss_scale: LossScale | ArrayLike | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    transform: Function = jax.value_and_grad,
) -> GradientComparison:
    """Compares the gradients of a half-precision and a float32 program.

    Use it to decide whether half precision is precise enough for a loss. It is called
    on the host, and compiles each program once, with all roundings
    (`xla_allow_excess_precision`). The result holds for these arguments.

    Args:
      half_loss: the whole loss in half precision.
      loss: the same loss in float32. The arguments of both, `argnums`, `has_aux` and
        `transform` are those of `precision_report`.
      loss_scale: the loss scale of the half-precision gradient, or S as a number. With
        a `DynamicLossScale`, S is divided by 8, down to 1, as long as the gradient is
        not finite. None, the default, means `DynamicLossScale()`.

    Raises:
      TypeError: as `precision_report`; also if `loss_scale` is not a loss scale.
    """
    function = "compare_gradients"
    given = args, argnums, has_aux, transform
    if callable(half_loss) and not callable(loss):
        raise TypeError(
            f"{function}: expected two functions before their arguments, got one and "
            f"{described(loss)}; write {function}(half_loss, loss, params, batch)"
        )
    half, full = (Loss(function, fun, *given) for fun in (half_loss, loss))
    start = start_of(function, loss_scale)
    arrays, rejoin = concrete_arrays(function, args)
    # JAX adds up the cotangents of an array in its own dtype.
    wide = promote_to_float32(arrays)
    compiled = functools.partial(jax.jit, compiler_options=ALL_ROUNDINGS)
    run = compiled(lambda arrays: full.run(1.0, rejoin(arrays)))
    run_half = compiled(lambda s, arrays: half.run(s, rejoin(arrays)))
    found = start.found(lambda s: run_half(s, arrays))
    compared = Reference(run, wide).compared(*found)
    program = run_half.trace(jnp.float32(1.0), arrays).jaxpr
    return compared._replace(holds_half=_holds_half(program))


def _holds_half(program: Program) -> bool:
    made = (v for eqn in equations(program) for v in eqn.outvars)
    return any(is_floating(v) and bytes_per_entry(v) < 4 for v in made)


class Reference:
    """A float32 gradient, and the error of float32 itself."""

    def __init__(self, run: Callable[[Arrays], Backward], arrays: Arrays) -> None:
        self.backward = run(arrays)
        self._own = _differences(run(_changed_in_the_last_digit(arrays)), self.backward)

    def compared(self, found: Backward, s: float) -> GradientComparison:
        """Compares a half-precision gradient with this one; `s` is its loss scale."""
        rows = _differences(found, self.backward)
        leaves, squares, entries = [], 0.0, 0
        by_leaf = zip(found.paths, found.leaves, rows, self._own, strict=True)
        for path, x, row, own in by_leaf:
            norm, _, lost, finite = row
            error, of_float32 = _error([row]), _error([own])
            leaf = LeafComparison(path, norm, error, lost, bool(finite), of_float32)
            leaves.append(leaf)
            if of_float32 <= _BEARABLE:
                squares += x.size * min(error, 1) ** 2
                entries += x.size
        return GradientComparison(
            loss=float(self.backward.loss),
            half_loss=float(found.loss),
            error=_error(rows),
            scaled_error=math.sqrt(squares / max(entries, 1)),
            leaves=tuple(leaves),
            float32_error=_error(self._own),
            loss_scale=s,
        )


def judged_error(found: GradientComparison) -> float:
    """Returns the error to compare with a tolerance: the larger of two.

    They are `error` and a third of `scaled_error`. The result is infinite if a loss is
    not finite, because such a step is skipped, whatever its gradient.
    """
    if not math.isfinite(found.loss) or not math.isfinite(found.half_loss):
        return math.inf
    return max(found.error, found.scaled_error / 3)


def _changed_in_the_last_digit(arrays: Arrays) -> list[jax.Array]:
    changed = list(arrays)
    for i, x in enumerate(arrays):
        if x.dtype in (jnp.float32, jnp.float64):
            signs = jax.random.rademacher(jax.random.key(i), x.shape, x.dtype)
            changed[i] = x * (1 + signs * jnp.finfo(x.dtype).eps)
    return changed


def _error(rows: Sequence[Sequence[float]]) -> float:
    """Returns the norm of the difference over the norm of the reference.

    It is infinite if it is not finite.
    """
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
    lost = jnp.sum((x == 0) & (reference != 0)) / np.float32(max(x.size, 1))
    pair = [y.astype(jnp.promote_types(y.dtype, jnp.float32)) for y in (x, reference)]
    _, norm = finite_and_norm(pair[1])
    _, distance = finite_and_norm(pair[0] - pair[1])
    return norm, distance, lost, all_finite(x)


def _verdict(found: GradientComparison) -> str:
    at = f"at loss scale {power(found.loss_scale)}"
    search = "sensitive_products finds what must stay float32."
    if not all(map(math.isfinite, (found.loss, *(x.norm for x in found.leaves)))):
        text = NOT_FINITE
    elif not found.holds_half:
        text = "Nothing was compared: no number of half_loss is half precision."
    elif not math.isfinite(found.half_loss):
        text = f"Half precision is not precise enough: its loss is not finite. {search}"
    elif not all(leaf.finite for leaf in found.leaves):
        text = f"Half precision gives a gradient that is not finite, {at}: "
        text += "run diagnose_nonfinite(half_loss, ...)."
    else:
        text = (
            f"Half precision is {'' if found.is_precise else 'not '}precise enough "
            f"here: it changes the gradient by {percent(found.error)} (of which "
            f"training bears 10 %), and with leaves of one size, as in Adam, by "
            f"{percent(found.scaled_error)} (30 %), {at}. Float32's own rounding, or "
            f"another order of its sums, makes {percent(found.float32_error)}."
        )
        text += "" if found.is_precise else f" {search}"
    return f"{text}\nloss {found.half_loss:.6g}, in float32 {found.loss:.6g}"
