"""`compare_speed`: times the gradient of a loss in float32 and in half precision."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._types import Arrays, Function, PyTree
from ._backward import Backward, Loss, concrete_arrays, narrow_dtypes, start_of
from ._tables import percent, power, printed
from ._timing import Comparison, compare, compiling, markdown

_SECONDS = 10.0  # of the rounds


@printed
@dataclasses.dataclass(frozen=True)
class SpeedComparison:
    """The result of `compare_speed`, in Python values.

    Attributes:
      milliseconds: of one call of the float32 program, the median.
      half_milliseconds: the same in half precision.
      gain: how many times as fast half precision is, the median of all rounds.
      gain_range: the quartiles of `gain`.
      believable: the smallest gain that is not noise: float32 beside itself differs by
        as much.
      mebibytes: arguments, results and temporary arrays on each device, as compiled.
        None if the compiler does not report it.
      half_mebibytes: the same in half precision.
      error: norm of the difference of both gradients over the norm of the float32 one;
        infinite if it is not finite.
      loss_scale: S of the half-precision gradient; 1 without float16.
    """

    milliseconds: float
    half_milliseconds: float
    gain: float
    gain_range: tuple[float, float]
    believable: float
    mebibytes: float | None
    half_mebibytes: float | None
    error: float
    loss_scale: float
    _comparison: Comparison = dataclasses.field(kw_only=True, repr=False)

    def summary(self) -> str:
        """Returns whether half precision is faster, and the table."""
        low, high = self.gain_range
        times = f"{self.gain:.2f} times as fast ({low:.2f} to {high:.2f})"
        if low > self.believable:
            text = f"Half precision is {times}"
        elif high < 1 / self.believable:
            text = f"Half precision is slower: {times}"
        else:
            text = f"No gain can be told from noise: {times}"
        if self.mebibytes and self.half_mebibytes:
            share = percent(self.half_mebibytes / self.mebibytes)
            text += f", in {share} of the memory"
        text += f", and its gradient is off by {percent(self.error)}"
        if self.loss_scale != 1:
            text += f" at loss scale {power(self.loss_scale)}"
        return f"{text}.\n\n{markdown(self._comparison)}"


def compare_speed(
    half_loss: Function,
    loss: Function,
    *args: PyTree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    transform: Function = jax.value_and_grad,
) -> SpeedComparison:
    """Times the gradient of a loss in half precision and in float32, on this device.

    Use it to decide whether half precision is worth it for your own loss. It is called
    on the host. Both programs are compiled as `jax.jit` compiles them, and run in turn
    in alternating order for about ten seconds, three rounds at least; each sample waits
    for its result. Float32 also runs beside itself, as a control.

    Args:
      half_loss: the whole loss in half precision. In float16 its gradient is scaled and
        unscaled, by the first S from 2^15 down at which it is finite.
      loss: the same loss in float32. The arguments of both, `argnums`, `has_aux` and
        `transform` are those of `precision_report`.

    Raises:
      TypeError: as `compare_gradients`.
    """
    function = "compare_speed"
    half, full = (
        Loss(function, fun, args, argnums, has_aux, transform)
        for fun in (half_loss, loss)
    )
    arrays, rejoin = concrete_arrays(function, args)

    def run_half(s: jax.Array, arrays: Arrays) -> Backward:
        return half.run(s, rejoin(arrays))

    s = 1.0
    jitted = jax.jit(run_half)
    if "float16" in narrow_dtypes(jitted.trace(jnp.float32(1), arrays).jaxpr):
        start = start_of(function, None)
        _, s = start.found(lambda s: jitted(s, arrays))
        compile_half = compiling(run_half, jnp.float32(s), arrays)
    else:
        # S = 1 is a constant, which the compiler leaves out.
        compile_half = compiling(lambda arrays: half.run(1.0, rejoin(arrays)), arrays)
    compile_full = compiling(lambda arrays: full.run(1.0, rejoin(arrays)), arrays)
    # Compiled here, so that an error of the loss comes out.
    programs = {"float32": compile_full(), "half precision": compile_half()}
    found = compare(
        "value and gradient",
        {name: lambda program=program: program for name, program in programs.items()},
        _SECONDS,
        gradient_of=lambda found: found.leaves,
    )
    return _result(found, s)


def _result(found: Comparison, s: float) -> SpeedComparison:
    """Returns the measurements of both programs by name."""
    full, half, _ = found.rows
    if full.milliseconds is None or half.milliseconds is None or half.gain is None:
        raise RuntimeError(
            f"compare_speed: expected both programs to run, got for {full.program}: "
            f"{full.note or 'ran'}; for {half.program}: {half.note or 'ran'}; "
            "free memory on the device, or pass a smaller batch"
        )
    return SpeedComparison(
        milliseconds=full.milliseconds,
        half_milliseconds=half.milliseconds,
        gain=half.gain.median,
        gain_range=(half.gain.low, half.gain.high),
        believable=found.believable or 1.0,
        mebibytes=full.mebibytes,
        half_mebibytes=half.mebibytes,
        error=float("inf") if half.error is None else half.error,
        loss_scale=s,
        _comparison=found,
    )
