"""`compare_speed`: times the gradient of a loss in float32 and in half precision."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._types import Arrays, Function, PyTree
from ._backward import Backward, Loss, concrete_arrays, narrow_dtypes, start_of
from ._tables import percent, power, printed
from ._timing import Program, compare, markdown, mebibytes_of

_SECONDS = 10.0  # of the rounds


@printed
class SpeedComparison(NamedTuple):
    """The result of `compare_speed`, in Python values.

    Attributes:
      milliseconds: of one call in float32 and in half precision, the medians.
      gain: how many times as fast half precision is, the median of all rounds.
      gain_range: the quartiles of `gain`.
      believable: the smallest gain that is not noise: float32 beside itself differs by
        as much.
      mebibytes: arguments, results and temporary arrays of both on each device, as
        compiled; None if the compiler does not report it.
      error: norm of the difference of both gradients over the norm of the float32 one;
        infinite if it is not finite.
      loss_scale: S of the half-precision gradient; 1 without float16.
      table: all of these in Markdown, with float32 beside itself.
    """

    milliseconds: tuple[float, float]
    gain: float
    gain_range: tuple[float, float]
    believable: float
    mebibytes: tuple[float | None, float | None]
    error: float
    loss_scale: float
    table: str

    def summary(self) -> str:
        """Returns whether half precision is faster, and the table."""
        low, high = self.gain_range
        times = f"{self.gain:.2f} times as fast ({low:.2f} to {high:.2f})"
        if low > self.believable:
            text = f"Half precision is {times}"
        elif high < 1:
            text = f"Half precision is slower: {times}"
        else:
            text = f"No gain can be told from noise: {times}"
        full, half = self.mebibytes
        if full and half:
            text += f", in {percent(half / full)} of the memory"
        text += f", and its gradient is off by {percent(self.error)}"
        if self.loss_scale != 1:
            text += f" at loss scale {power(self.loss_scale)}"
        return f"{text}.\n\n{self.table}"


def compare_speed(
    half_loss: Function,
    loss: Function,
    *args: PyTree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    transform: Function | None = None,
) -> SpeedComparison:
    """Times the gradient of a loss in half precision and in float32, on this device.

    Use it to decide whether half precision is worth it for your own loss. It is called
    on the host. Both programs are compiled once, as `jax.jit` compiles them, and run in
    turn in alternating order for about ten seconds, three rounds at least; each sample
    waits for its result. Float32 also runs beside itself, as a control. The logger
    `jmp_scale` says at level INFO which program is compiled or timed.

    Args:
      half_loss: the whole loss in half precision. In float16 its gradient is scaled and
        unscaled, by the first S from 2^15 down at which it is finite.
      loss: the same loss in float32. The arguments of both, `argnums`, `has_aux` and
        `transform` are those of `precision_report`.

    Raises:
      TypeError: as `compare_gradients`.
    """
    function = "compare_speed"
    given = args, argnums, has_aux, transform
    half, full = (Loss(function, fun, *given) for fun in (half_loss, loss))
    arrays, rejoin = concrete_arrays(function, args)
    full_gradient = _Gradient(full, arrays, rejoin)
    half_gradient = _Gradient(half, arrays, rejoin)
    found = compare(
        "value and gradient",
        {"float32": full_gradient.compiled, "half precision": half_gradient.compiled},
        _SECONDS,
        gradient_of=lambda x: x.leaves,
    )
    full_row, half_row, *_ = found.rows
    gain = half_row.gain
    if gain is None:
        raise RuntimeError(
            "compare_speed: expected both programs to run, got "
            f"{full_row.note or half_row.note}; pass a smaller batch"
        )
    return SpeedComparison(
        milliseconds=(full_row.milliseconds or 0.0, half_row.milliseconds or 0.0),
        gain=gain.median,
        gain_range=(gain.low, gain.high),
        believable=found.believable or 1.0,
        mebibytes=(full_row.mebibytes, half_row.mebibytes),
        error=half_row.error if half_row.error is not None else float("inf"),
        loss_scale=half_gradient.s,
        table=markdown(found),
    )


class _Gradient:
    """The gradient of a loss, compiled once; in float16 at an S that is found then.

    An error of the loss comes out when it is made.
    """

    def __init__(
        self, loss: Loss, arrays: Arrays, rejoin: Callable[[Arrays], PyTree]
    ) -> None:
        def run(arrays: Arrays, s: ArrayLike = 1.0) -> Backward:
            return loss.run(s, rejoin(arrays))

        self.s, self._function, self._args = 1.0, loss.function, (arrays,)
        self._traced = jax.jit(run).trace(arrays)
        if "float16" in narrow_dtypes(self._traced.jaxpr):
            self._args = arrays, jnp.float32(1)
            self._traced = jax.jit(run).trace(*self._args)

    def compiled(self) -> Program:
        compiled = self._traced.lower().compile()
        arrays, *scaled = self._args
        if scaled:
            start = start_of(self._function, None, {"float16"})
            _, self.s = start.found(lambda s: compiled(arrays, s))
            self._args = arrays, jnp.float32(self.s)
        return Program(functools.partial(compiled, *self._args), mebibytes_of(compiled))
