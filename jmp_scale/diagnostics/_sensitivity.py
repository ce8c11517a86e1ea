"""Which matrix products of a float32 program must stay float32: found by running it."""

import bisect
import dataclasses
import math
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.typing import DTypeLike

from .._finite import all_finite
from .._loss_scale import scale_value
from .._marks import Names
from .._policy import checked_half
from ._backward import Loss
from ._comparison import percent, table
from ._probe import NumberedProduct, Probe

# Lines that are measured one by one, at two steps each.
_MOST = 128


class SensitiveProduct(NamedTuple):
    """The matrix products and convolutions of one line, in one scope.

    Attributes:
      file: path of the user's source file, or None if it is unknown.
      line: line in that file, from 1, or None.
      library: the line of a library that they are in, as "ott/costs.py:560", or "".
      scope: names of the scopes and modules that they are in, joined by "/".
      share: their share of the program's matrix work.
      alone: error of the gradient if they alone are half precision.
      without: error of the gradient if all but they are half precision.
    """

    file: str | None
    line: int | None
    library: str
    scope: str
    share: float
    alone: float
    without: float


class SensitiveProducts(NamedTuple):
    """What `sensitive_products` found, in Python values on the host.

    Errors are those of `GradientComparison`: `error`, or a third of `scaled_error` if
    that is more; infinite if anything is not finite.

    Attributes:
      products: those that `autocast` would make half precision, in program order.
      keep: names and places for `autocast`'s `keep_float32=`; () if none is needed, or
        something else is at fault.
      half_share: share of the program's matrix work that is half precision then.
      error_before: error of the gradient with all products in half precision.
      error_after: the same with those that `keep` names in float32.
      advice: what to write, or do, in sentences.
    """

    products: tuple[SensitiveProduct, ...]
    keep: tuple[str, ...]
    half_share: float
    error_before: float
    error_after: float
    advice: str

    def summary(self, k: int = 20) -> str:
        """What to write, and the k lines that change the gradient most."""
        if not self.products:
            return self.advice
        rows = [("line", "scope", "share", "alone", "without")]
        for row in sorted(self.products, key=lambda row: -row.alone):
            place = row.library or _place(row.file, row.line)
            shares = map(percent, (row.share, row.alone, row.without))
            rows.append((place, row.scope, *shares))
        return "\n".join([self.advice, *table(rows, 2, k)])


def sensitive_products(
    loss: Callable[..., Any],
    *args: Any,
    dtype: DTypeLike = "float16",
    backward: DTypeLike | None = None,
    loss_scale: Any = None,
    tolerance: float = 0.05,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> SensitiveProducts:
    """Finds the matrix products that must stay float32 for a gradient that is precise.

    ```
    for each line:       error if it alone is half, error if all but it are
    float32 := none      if that is precise enough
               one line  with which it is, of those the one of least matrix work
               lines     in the order of their own error, as many as it takes;
                         then each goes back to half precision that may
    ```

    Runs on the host, on real values: the answer holds for these parameters and this
    batch. The program is compiled once, with the dtype of each product as an input, and
    runs twice a line: in float32, with rounded operands, results and cotangents where
    `autocast` has them, so it needs up to twice the memory and the time of a float32
    step, on every machine. Lines in different modules count as different ones, up to
    128 in all; of more, equal lines are measured together, then neighbors.

    Args:
      loss: the whole loss in float32, to which `autocast` is to be applied. Its
        arguments, `argnums`, `has_aux` and `transform` are those of `precision_report`.
      dtype: as in `autocast`.
      backward: as in `autocast`.
      loss_scale: as in `compare_gradients`.
      tolerance: the largest error of the gradient, relative to its norm; default 5 %,
        half of what `compare_gradients` calls precise enough. Up to twice as much, no
        set that holds most of the work is recommended.

    Returns:
      A `SensitiveProducts`; print its `.summary()`.

    Raises:
      TypeError: as `compare_gradients`.
      ValueError: also if `dtype` or `backward` is not float16 or bfloat16.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jmp_scale import diagnostics
      >>> def squared_distances(x, y):
      ...     return (x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T
      >>> def loss(w, x):
      ...     return jnp.mean(jnp.exp(-squared_distances(20 + x @ w, 20 + x)))
      >>> x = jnp.linspace(0, 1, 32).reshape(8, 4)
      >>> found = diagnostics.sensitive_products(loss, jnp.eye(4), x)
      >>> found.keep, found.error_before > 0.05 > found.error_after
      (('squared_distances',), True)
    """
    function = "sensitive_products"
    checked = Loss(function, loss, args, argnums, has_aux, transform)
    forward = checked_half("dtype", dtype)
    back = forward if backward is None else checked_half("backward", backward)
    s = None if loss_scale is None else float(scale_value(function, loss_scale))
    search = _Search(Probe(checked, forward, back), s, tolerance)
    call = f'jmp_scale.autocast(loss, "{forward.name}"'
    if backward is not None:
        call += f', backward="{back.name}"'
    return search.result(call)


@dataclasses.dataclass(frozen=True)
class _Line:
    """Products of one line in one scope."""

    product: NumberedProduct  # one of them
    numbers: tuple[int, ...]
    work: int

    @property
    def where(self) -> str:
        place = self.product.place
        return place.library or _place(place.file, place.line)

    def is_kept(self, name: str) -> bool:
        """Whether `keep_float32=` of this name keeps them."""
        return any(map(Names(frozenset({name})).keep, self.product.equations))

    def names(self) -> list[str]:
        """What keeps them: their function, their line, their scopes."""
        parts = self.product.place.function.split(".")
        functions = [p for p in parts if p.isidentifier() and not p.startswith("__")]
        scopes = self.product.scopes
        paths = [".".join(scopes[-n:]) for n in range(1, len(scopes) + 1)]
        return [*functions[-1:], self.where, *paths]


class _Search:
    """The lines of a program, and the fewest whose float32 is precise enough."""

    def __init__(self, probe: Probe, s: float | None, tolerance: float) -> None:
        self._probe, self._s, self._tolerance = probe, s, tolerance
        self._lines = _lines(probe)

    def result(self, call: str) -> SensitiveProducts:
        """What was found, with the advice to write `call, keep_float32=...)`."""
        lines, probe = self._lines, self._probe
        total = max(probe.work, 1)
        if not all_finite(probe.reference.backward):
            advice = (
                "Float32 is not finite itself: run diagnose_nonfinite(loss, 1, ...)."
            )
            return SensitiveProducts((), (), 0.0, math.inf, math.inf, advice)
        before, errors = self._error(lines), self._measured()
        cure = self._other_loss_scale() if before > self._tolerance else ""
        required = [] if cure else self._required(before, errors)
        keep = _names(required, lines)
        kept = [line for line in lines if any(map(line.is_kept, keep))]
        after = self._error_without(kept) if kept else before
        share = _work(line for line in lines if line not in kept) / total
        advice = f"Half precision changes the gradient by {percent(before)}"
        if before <= self._tolerance:
            advice += ", which is precise enough."
        elif keep:
            advice += f", and by {percent(after)} where this stays float32:"
            advice += f"\n  {call}, keep_float32={keep})"
        else:
            advice += f". {cure or self._way_out()}"
        if keep and not share:
            advice += f"\nNo smaller set of products helps. {self._way_out()}"
        advice += f"\n{100 * share:.1f} % of the matrix work is half precision."
        rows = []
        for line in lines:
            place, scope = line.product.place, "/".join(line.product.scopes)
            where = place.file, place.line, place.library, scope
            rows.append(SensitiveProduct(*where, line.work / total, *errors[line]))
        return SensitiveProducts(tuple(rows), keep, share, before, after, advice)

    def _error(self, half: Iterable[_Line]) -> float:
        """That of the gradient with some lines in half precision."""
        numbers = [n for line in half for n in line.numbers]
        return self._probe.error(numbers, self._s)

    def _error_without(self, float32: Collection[_Line]) -> float:
        return self._error([line for line in self._lines if line not in float32])

    def _measured(self) -> dict[_Line, tuple[float, float]]:
        """For each line the errors `alone` and `without`."""
        found = {}
        for group in _with_progress(_groups(self._lines)):
            errors = self._error(group), self._error_without(group)
            found |= dict.fromkeys(group, errors)
        return found

    def _required(self, before: float, errors: dict[_Line, Any]) -> list[_Line]:
        """The fewest found, by their matrix work, whose float32 is precise enough."""

        def is_enough(float32: Collection[_Line]) -> bool:
            return self._error_without(float32) <= self._tolerance

        if before <= self._tolerance:
            return []
        order = sorted(self._lines, key=lambda line: (-errors[line][0], line.work))
        first = range(len(order))  # so many of them; all are enough
        count = bisect.bisect_left(first, True, key=lambda n: is_enough(order[:n]))
        required = order[:count]
        for line in sorted(required, key=lambda line: -line.work)[:_MOST]:
            rest = [other for other in required if other is not line]
            required = rest if is_enough(rest) else required
        singles = [line for line in order if errors[line][1] <= self._tolerance]
        single = min(singles, key=lambda line: line.work, default=None)
        if single and single.work < _work(required) and is_enough([single]):
            required = [single]
        is_mild = before <= 2 * self._tolerance
        return [] if is_mild and 2 * _work(required) > _work(order) else required

    def _other_loss_scale(self) -> str:
        """What to say if another loss scale helps, "" if none does."""
        others = (2.0**24,) if self._s is None else (None, 2.0**24)
        for s in others:
            error = self._probe.error(sorted(self._probe.candidates), s)
            if error <= self._tolerance:
                what = "a DynamicLossScale" if s is None else "loss scale 2^24"
                return (
                    f"The loss scale is at fault: at {what} it is {percent(error)}. "
                    "calibrate_loss_scale finds where to start."
                )
        return ""

    def _way_out(self) -> str:
        """What to say where no set of products helps."""
        dtype, every = self._probe.forward, sorted(self._probe.candidates)
        if dtype == "float16" and not all_finite(self._probe.run(every, 1.0).loss):
            return "The forward pass leaves float16's range: try bfloat16."
        finer = "; float16 has 8 times the digits" if dtype == "bfloat16" else ""
        return f"No few products are at fault, their roundings add up{finer}."


def _place(file: str | None, line: int | None) -> str:
    return f"{os.path.basename(file or '<unknown>')}:{line}"


def _work(lines: Iterable[_Line]) -> int:
    return sum(line.work for line in lines)


def _lines(probe: Probe) -> list[_Line]:
    groups: dict[Any, list[int]] = {}
    for number in sorted(probe.candidates):
        product = probe.products[number]
        key = *product.place[:2], product.place.library, product.scopes
        groups.setdefault(key, []).append(number)
    return [
        _Line(probe.products[n[0]], tuple(n), sum(probe.products[i].work for i in n))
        for n in groups.values()
    ]


def _groups(lines: Sequence[_Line]) -> list[list[_Line]]:
    """Lines that are measured together, which are at most 128 groups."""
    if len(lines) <= _MOST:
        return [[line] for line in lines]
    equal: dict[Any, list[_Line]] = {}
    for line in lines:
        equal.setdefault((line.product.place[:2], line.where), []).append(line)
    if len(equal) <= _MOST:
        return [*equal.values()]
    size = -(-len(lines) // _MOST)
    return [[*lines[i : i + size]] for i in range(0, len(lines), size)]


def _names(required: Sequence[_Line], lines: Sequence[_Line]) -> tuple[str, ...]:
    """Names that keep the required lines, and as few others as possible."""
    names = [name for line in required for name in line.names()]
    matched = {n: [line for line in lines if line.is_kept(n)] for n in names}
    left, chosen = {*required}, list[str]()

    def cost(name: str) -> tuple[int, int, int]:
        others = {*matched[name]}.difference(required)
        return _work(others), len(others), -len(left.intersection(matched[name]))

    while left:
        name = min((n for n in names if left.intersection(matched[n])), key=cost)
        chosen.append(name)
        left.difference_update(matched[name])
    return tuple(chosen)


def _with_progress(items: list[Any]) -> Iterable[Any]:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return items
    return tqdm(items, "sensitive_products", leave=False)
