"""`sensitive_products`: finds matrix products that must stay float32, by a search."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
from jax.typing import ArrayLike, DTypeLike

from ..._policy import checked_half
from ..._scaling.finite import all_finite
from ..._scaling.loss_scale import LossScale
from ..._types import Function, PyTree
from .._backward import Loss, Start, start_of
from .._tables import percent, power, printed, table, with_progress
from .comparison import NOT_FINITE, judged_error
from .probe import Probe, ProductGroup, where


class SensitiveProduct(NamedTuple):
    """The matrix products and convolutions of one line, in one name scope.

    Attributes:
      file: path of the user's source file, or None if it is unknown.
      line: line in that file, from 1, or None.
      library: their line in a library, such as "ott/costs.py:560", or "".
      scope: names of their scopes and modules, joined by "/".
      share: their share of the program's matrix work, from 0 to 1.
      alone: error of the gradient if only they are half precision.
      without: error of the gradient if all other products are half precision.
    """

    file: str | None
    line: int | None
    library: str
    scope: str
    share: float
    alone: float
    without: float


@printed
class SensitiveProducts(NamedTuple):
    """The result of `sensitive_products`, in Python values.

    Errors are those of `GradientComparison`: `error`, or a third of `scaled_error` if
    that is more; infinite if anything is not finite.

    Attributes:
      products: the products that `autocast` would cast, in program order.
      keep: names for `autocast`'s `keep_float32=`; () if none is needed, or something
        else is at fault.
      half_share: share of the program's matrix work that is then in half precision.
      error_before: error of the gradient with all products in half precision.
      error_after: error of the gradient with the products of `keep` in float32.
      advice: the code to write, or other remedies, in sentences.
    """

    products: tuple[SensitiveProduct, ...]
    keep: tuple[str, ...]
    half_share: float
    error_before: float
    error_after: float
    advice: str

    def summary(self, k: int = 20) -> str:
        """Returns the advice, and the k lines that change the gradient most."""
        if not self.products:
            return self.advice
        rows: list[tuple[str, ...]] = [("line", "scope", "share", "alone", "without")]
        for row in sorted(self.products, key=lambda row: -row.alone):
            shares = map(percent, (row.share, row.alone, row.without))
            rows.append((where(row), row.scope, *shares))
        return "\n".join([self.advice, *table(rows, names=2, k=k)])


def sensitive_products(
    loss: Function,
    *args: PyTree,
    dtype: DTypeLike = "float16",
    backward: DTypeLike | None = None,
    loss_scale: LossScale | ArrayLike | None = None,
    tolerance: float = 0.05,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    transform: Function = jax.value_and_grad,
) -> SensitiveProducts:
    """Finds the matrix products that must stay float32 for a precise gradient.

    Use it if `compare_gradients` says that half precision is not precise enough: pass
    the names that it finds to `autocast` as `keep_float32=`.

    ```
    for each line:  measure the error with only this line in half precision, and the
                    error with all other lines in half precision
    float32 := none       if all lines in half precision are precise enough, else
               all lines  without each that need not, the smallest errors first
    ```

    It is called on the host, compiles the loss once, and runs it two or three times per
    line, in float32 with the roundings of `autocast`. The result holds for these
    parameters and this batch. Lines in different modules are different lines.

    Args:
      loss: the whole loss in float32, without `autocast`. Its arguments, `argnums`,
        `has_aux` and `transform` are those of `precision_report`.
      dtype: as in `autocast`.
      backward: as in `autocast`.
      loss_scale: as in `compare_gradients`.
      tolerance: the largest error of the gradient, relative to its norm; default 5 %,
        half of the limit of `compare_gradients`.

    Raises:
      TypeError: as `compare_gradients`.
      ValueError: `dtype` or `backward` is not float16 or bfloat16.
    """
    function = "sensitive_products"
    checked = Loss(function, loss, args, argnums, has_aux, transform)
    forward = checked_half("dtype", dtype)
    back = forward if backward is None else checked_half("backward", backward)
    start = start_of(function, loss_scale)
    probe = Probe(checked, forward, back, start)
    if not all_finite(probe.reference.backward):
        return SensitiveProducts((), (), 0.0, math.inf, math.inf, NOT_FINITE)
    groups, total = probe.groups, max(probe.work, 1)
    rows = [
        SensitiveProduct(
            file=group.place.file,
            line=group.place.line,
            library=group.place.library,
            scope="/".join(group.scopes),
            share=group.work / total,
            alone=probe.error([group]),
            without=probe.error([other for other in groups if other is not group]),
        )
        for group in with_progress(groups, function)
    ]
    whole = probe.compared(groups, start)
    before = after = judged_error(whole)
    keep, half = (), groups
    advice = f"Half precision changes the gradient by {percent(before)}"
    if before <= tolerance:
        advice += ", which is precise enough."
    elif cure := _loss_scale_at_fault(probe, start, tolerance):
        advice += cure
    else:
        keep = _names(_required(probe, rows, tolerance), groups)
        half = [group for group in groups if not any(map(group.is_kept, keep))]
        after = probe.error(half)
        options = f', backward="{back.name}"' if backward is not None else ""
        advice += (
            f", and by {percent(after)} where this stays float32:\n"
            f'  jmp_scale.autocast(loss, "{forward.name}"{options}, '
            f"keep_float32={keep})"
        )
        if not half and forward == "float16" and not math.isfinite(whole.half_loss):
            advice += "\nThe forward pass leaves float16's range: try bfloat16."
    share = sum(group.work for group in half) / total
    advice += f"\n{100 * share:.1f} % of the matrix work is half precision."
    return SensitiveProducts(tuple(rows), keep, share, before, after, advice)


def _required(
    probe: Probe, rows: Iterable[SensitiveProduct], tolerance: float
) -> list[ProductGroup]:
    """Returns few products whose float32 is precise enough."""
    required = probe.groups
    pairs = [*zip(rows, required, strict=True)]
    for _, group in sorted(pairs, key=lambda pair: (pair[0].alone, -pair[0].share)):
        fewer = [other for other in required if other is not group]
        half = [other for other in probe.groups if other not in fewer]
        if probe.error(half) <= tolerance:
            required = fewer
    return required


def _loss_scale_at_fault(probe: Probe, start: Start, tolerance: float) -> str:
    """Returns advice if another loss scale helps, else ""."""
    other = Start(2.0**24 if start.settles else 2.0**15, settles=True)
    found = probe.compared(probe.groups, other)
    error = judged_error(found)
    if error > tolerance:
        return ""
    return (
        f". The loss scale is at fault: at {power(found.loss_scale)} it is "
        f"{percent(error)}. compare_gradients finds where to start."
    )


def _names(
    required: Sequence[ProductGroup], groups: Sequence[ProductGroup]
) -> tuple[str, ...]:
    """Returns names that match the required groups, and as few others as possible."""

    def others(name: str) -> int:
        kept = [g for g in groups if g.is_kept(name) and g not in required]
        return sum(group.work for group in kept)

    chosen: list[str] = []
    for group in required:
        if not any(map(group.is_kept, chosen)):
            chosen.append(min(filter(group.is_kept, group.names()), key=others))
    return tuple(chosen)
