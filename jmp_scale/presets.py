"""Other frameworks' loss scales, with their own argument names and defaults.

A run that moves here keeps its loss scale to the step: each function takes what that framework takes and
returns the `DynamicLossScale` with the same S after every step; the one rule stands in that class. An
overflow starts the count of finite steps again in all of them, also where hysteresis absorbs it.

They differ from their originals in one thing. S and 1/S are always normal float32 numbers here, so a floor,
a cap or an initial S beyond [2^-126, 2^126] becomes that end, where S then holds: it is never 0, NaN or
infinite, which most originals allow and which makes every gradient zero or NaN without a word. S is
float32 also where an original computes with Python floats: the same for powers of two, and within 1e-5
over hundreds of steps otherwise.

All raise `TypeError` for an argument that is no number and `ValueError` for one out of range, under its own
name. What a preset has no argument for is set with `dataclasses.replace(preset, min_loss_scale=1.0)`, which
keeps `loss_scale`, `counter` and `hysteresis_left` as they are: give these too if the start changes.

Example:
  >>> from jmp_scale import presets
  >>> loss_scale = presets.deepspeed(initial_scale_power=10, loss_scale_window=2)
  >>> for finite in (True, True, True, False, False):  # grows one step late, then absorbs an overflow
  ...     loss_scale = loss_scale.adjust(finite)
  ...     print(float(loss_scale.loss_scale))
  1024.0
  1024.0
  2048.0
  2048.0
  1024.0
"""

import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec

from ._loss_scale import DynamicLossScale
from ._validation import LARGEST, SMALLEST, number

P = ParamSpec("P")


def _own_names(
    **own: str,
) -> Callable[[Callable[P, DynamicLossScale]], Callable[P, DynamicLossScale]]:
    """Makes the errors about a field of `DynamicLossScale` speak of the preset's own argument."""

    def decorate(
        preset: Callable[P, DynamicLossScale],
    ) -> Callable[P, DynamicLossScale]:
        @functools.wraps(preset)
        def named_preset(*args: P.args, **kwargs: P.kwargs) -> DynamicLossScale:
            try:
                return preset(*args, **kwargs)
            except (TypeError, ValueError) as error:
                field, must_be, allowed = str(error).partition(" must be ")
                if not must_be:
                    raise
                name = f"presets.{preset.__name__}: {own.get(field, field)}"
                raise type(error)(name + must_be + allowed) from error

        return named_preset

    return decorate


def _in_range(
    initial: Any,
    *,
    floor: Any = 0.0,
    cap: Any = math.inf,
    at_max: str = "hold",
    clamps_initial: bool = False,
    **rule: Any,
) -> DynamicLossScale:
    """A `DynamicLossScale` whose initial S, floor and cap are brought into [2^-126, 2^126]."""
    initial, floor = number("loss_scale", initial), number("min_loss_scale", floor)
    cap = number("max_loss_scale", cap)
    if cap > LARGEST:
        cap, at_max = LARGEST, "hold"
    if clamps_initial and initial > 0:
        initial = min(max(initial, floor), cap)
    if not 0 < initial < math.inf:
        raise ValueError(f"loss_scale must be a finite number > 0, got {initial!r}")
    initial = min(max(initial, SMALLEST), LARGEST)
    return DynamicLossScale(
        initial, min_loss_scale=floor, max_loss_scale=cap, at_max=at_max, **rule
    )


def _one_late(name: str, interval: Any) -> float:
    """The period of a framework that compares its counter with the interval before it counts the step."""
    if number(name, interval) < 0:
        raise ValueError(f"{name} must be an integer >= 0, got {interval!r}")
    return number(name, interval) + 1


def _no_tolerance(name: str, tolerance: Any) -> None:
    if number(name, tolerance) != 0:
        raise ValueError(
            f"{name} must be 0: a tolerated share of overflows depends on how many steps have passed since "
            f"S last changed, which this rule does not count; use hysteresis (as presets.megatron or "
            f"presets.deepspeed) to absorb single overflows, got {tolerance!r}"
        )


@_own_names(loss_scale="init_scale", factor="growth_factor", period="growth_interval")
def pytorch(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> DynamicLossScale:
    """PyTorch's `torch.amp.GradScaler` (2.13).

    S grows by `growth_factor` on the `growth_interval`-th unskipped iteration in a row and is multiplied by
    `backoff_factor` at every overflow. A growth that would be infinite is not made.

    Trap: there is no floor. From 2^16, 166 NaN steps in a row take S to 0, and the next finite step writes
    NaN or infinity into the parameters; here S ends at 2^-126 and recovers. `ShardedGradScaler` on a CPU has
    no cap either. One `GradScaler` for several optimizers: one loss scale, adjusted once by all flags.
    """
    return _in_range(
        init_scale,
        period=growth_interval,
        factor=growth_factor,
        backoff_factor=backoff_factor,
    )


@_own_names(loss_scale="initial_scale", period="dynamic_growth_steps")
def keras(
    initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
) -> DynamicLossScale:
    """Keras 3's `keras.optimizers.LossScaleOptimizer` (3.15).

    S doubles on the `dynamic_growth_steps`-th finite step in a row and halves at every overflow; both
    factors are fixed.

    Trap: neither floor nor cap. S can reach infinity, and 0: on the JAX backend as soon as it is under
    2^-126, since XLA flushes subnormal numbers; then a parameter becomes NaN. Here S holds at the ends.
    """
    return _in_range(initial_scale, period=dynamic_growth_steps)


@_own_names(loss_scale="initial_scale", period="dynamic_growth_steps")
def tf_keras(
    initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
) -> DynamicLossScale:
    """Keras 2's `LossScaleOptimizer` (tf_keras 2.21).

    As `keras`, but with a floor of 1, and a growth that would be infinite is not made. Trap: with S at 1
    and gradients that overflow still, every step is skipped and nothing says so; `skipped_in_a_row` of
    `with_loss_scale` does here.
    """
    return _in_range(initial_scale, floor=1.0, period=dynamic_growth_steps)


@_own_names(
    loss_scale="initial_loss_scale", period="increment_period", factor="multiplier"
)
def tensorflow(
    initial_loss_scale: float = 2.0**15,
    increment_period: int = 2000,
    multiplier: float = 2.0,
) -> DynamicLossScale:
    """TensorFlow 1's `tf.compat.v1.mixed_precision.DynamicLossScale` (2.21).

    S is multiplied by `multiplier` on the `increment_period`-th finite step in a row and divided by it at
    every overflow, with a floor of 1; a growth that would be infinite is not made. Traps: as `tf_keras`.
    """
    return _in_range(
        initial_loss_scale, floor=1.0, period=increment_period, factor=multiplier
    )


@_own_names(loss_scale="init_scale", period="scale_window")
def apex(
    init_scale: float = 2.0**16,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> DynamicLossScale:
    """NVIDIA Apex's `apex.amp`, dynamic (`apex/amp/scaler.py`, its last version).

    S doubles on the `scale_window`-th unskipped step in a row and halves at every overflow, both fixed. It
    is clamped at `max_loss_scale` where most others make no growth past theirs, and so is `init_scale`.

    Trap: `min_loss_scale=None` is no floor; S ends at 0 with a ZeroDivisionError, and here at 2^-126. For
    `amp.initialize(num_losses=n)` hold n of these in a list or dictionary. The older
    `apex.fp16_utils.DynamicLossScaler` is `fairseq(2.0**32, scale_window=1000, threshold=1.0)` here.
    """
    floor = 0.0 if min_loss_scale is None else min_loss_scale
    return _in_range(
        init_scale,
        floor=floor,
        cap=max_loss_scale,
        at_max="clamp",
        clamps_initial=True,
        period=scale_window,
    )


@_own_names(period="loss_scale_window")
def deepspeed(
    initial_scale_power: float = 16,
    loss_scale_window: int = 1000,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    min_loss_scale: float = 1.0,
) -> DynamicLossScale:
    """DeepSpeed's `fp16` section of the JSON configuration (`DynamicLossScaler`).

    S starts at 2^initial_scale_power, doubles after `loss_scale_window` stable steps and halves at the
    `hysteresis`-th overflow. What is absorbed is refilled when S grows, or with `consecutive_hysteresis` by
    every finite step; once used up, every overflow halves S.

    Differs from all others: the first growth after the start or an overflow is late by one step, since
    that step is not counted; the growths that follow are `loss_scale_window` steps apart.

    Traps: at `min_loss_scale` DeepSpeed raises by default; here S stays there and `skipped_in_a_row` grows.
    `FP16_Optimizer` and `FP16_UnfusedOptimizer` ignore hysteresis: give `hysteresis=1` for them.
    """
    power = number("initial_scale_power", initial_scale_power)
    if not -126 <= power <= 126:
        raise ValueError(
            f"initial_scale_power must be in [-126, 126], got {initial_scale_power!r}"
        )
    return _in_range(
        2.0**power,
        floor=min_loss_scale,
        period=loss_scale_window,
        growth_delay=1,
        hysteresis=hysteresis,
        hysteresis_reset="finite" if consecutive_hysteresis else "growth",
    )


@_own_names(
    loss_scale="initial_scale",
    min_loss_scale="min_scale",
    factor="growth_factor",
    period="growth_interval",
)
def megatron(
    initial_scale: float = 2.0**32,
    min_scale: float = 1.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
) -> DynamicLossScale:
    """Megatron-LM's `DynamicGradScaler` (flags `--initial-loss-scale`, `--loss-scale-window`, ...).

    S grows on the `growth_interval`-th finite step in a row and backs off at the `hysteresis`-th overflow,
    with a floor of `min_scale`.

    Differs from Apex and Paddle: only a growth of S refills the hysteresis. So overflows need not be in a
    row to use it up, and from then on each one backs off.

    Traps: from 2^32 the first steps of a float16 run are all skipped (17 of them until S is 2^16). A single
    bad example that keeps coming back before S can grow walks S down to `min_scale`, though no S can help;
    pass the loss as `value=` to `with_loss_scale` and it does not. There is no cap (S can be infinite):
    here 2^126.
    """
    return _in_range(
        initial_scale,
        floor=min_scale,
        period=growth_interval,
        factor=growth_factor,
        backoff_factor=backoff_factor,
        hysteresis=hysteresis,
    )


@_own_names(
    loss_scale="initial_scale",
    min_loss_scale="min_scale",
    max_loss_scale="max_scale",
    factor="growth_factor",
    period="growth_interval",
)
def colossalai(
    initial_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    min_scale: float | None = None,
    max_scale: float | None = None,
    hysteresis: int = 2,
) -> DynamicLossScale:
    """ColossalAI's `DynamicGradScaler`.

    As `megatron`, hysteresis refilled by growth only, with a lower start and optional ends: a growth past
    `max_scale` is clamped to it. Trap: by default there is neither floor nor cap, so S can reach 0 and
    infinity; here it holds at 2^-126 and 2^126.
    """
    return _in_range(
        initial_scale,
        floor=0.0 if min_scale is None else min_scale,
        cap=math.inf if max_scale is None else max_scale,
        at_max="clamp",
        period=growth_interval,
        factor=growth_factor,
        backoff_factor=backoff_factor,
        hysteresis=hysteresis,
    )


@_own_names(
    loss_scale="init_scale",
    factor="scale_factor",
    period="scale_window",
    min_loss_scale="threshold",
)
def fairseq(
    init_scale: float = 2.0**15,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    threshold: float | None = None,
    *,
    tolerance: float = 0.0,
) -> DynamicLossScale:
    """fairseq's `DynamicLossScaler`, with the class's defaults.

    The command line starts at `--fp16-init-scale` 2^7 with a window of 2^14 / world size / update_freq. S
    is multiplied by `scale_factor` on the `scale_window`-th finite step in a row and divided by it at every
    overflow; `threshold` is the floor (None: none, here 2^-126).

    Traps: at its `min_loss_scale` of 1e-4 fairseq raises FloatingPointError; here S goes on to the floor
    and `skipped_in_a_row` grows. `tolerance` > 0 (backs off only above that share of overflows) is refused:
    the share depends on the steps since the last change of S, which this rule does not count.
    """
    _no_tolerance("tolerance", tolerance)
    floor = 0.0 if threshold is None else threshold
    return _in_range(init_scale, floor=floor, period=scale_window, factor=scale_factor)


@_own_names(loss_scale="initial_loss_scale", period="steps_per_increase")
def cerebras(
    initial_loss_scale: float | None = None,
    steps_per_increase: int = 2000,
    min_loss_scale: float = 2.0**-14,
    max_loss_scale: float = 2.0**15,
    *,
    overflow_tolerance: float = 0.0,
) -> DynamicLossScale:
    """Cerebras' `cstorch.amp.GradScaler` (2.10), `loss_scale="dynamic"`.

    S doubles after `steps_per_increase` finite steps, halves at every overflow, and is clamped to
    [min_loss_scale, max_loss_scale], also at the start (None: at the cap). For cbfloat16 the cap is 2^31.

    Differs from most: as in `flax`, S grows one step late, on finite step `steps_per_increase` + 1. The
    TensorFlow class `CSDynamicLossScale` does not: take one less for it.

    `overflow_tolerance` > 0 (0.05 by default in the TensorFlow class) is refused, for the reason given in
    `fairseq`.
    """
    _no_tolerance("overflow_tolerance", overflow_tolerance)
    return _in_range(
        max_loss_scale if initial_loss_scale is None else initial_loss_scale,
        floor=min_loss_scale,
        cap=max_loss_scale,
        at_max="clamp",
        clamps_initial=True,
        period=_one_late("steps_per_increase", steps_per_increase),
    )


@_own_names(
    loss_scale="init_loss_scaling",
    factor="incr_ratio",
    backoff_factor="decr_ratio",
    period="incr_every_n_steps",
    hysteresis="decr_every_n_nan_or_inf",
)
def paddle(
    init_loss_scaling: float = 65536.0,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
) -> DynamicLossScale:
    """PaddlePaddle's `paddle.amp.GradScaler` (3.3, dynamic graph).

    S grows on the `incr_every_n_steps`-th finite step in a row and backs off at the
    `decr_every_n_nan_or_inf`-th overflow in a row. Differs from Megatron and DeepSpeed: that count starts
    again at every finite step and at every backoff.

    Trap: neither floor nor cap, here 2^-126 and 2^126. The static graph's kernel has a floor of 1, which
    `dataclasses.replace(paddle(...), min_loss_scale=1.0)` gives.
    """
    return _in_range(
        init_loss_scaling,
        period=incr_every_n_steps,
        factor=incr_ratio,
        backoff_factor=decr_ratio,
        hysteresis=decr_every_n_nan_or_inf,
        hysteresis_reset="finite_or_backoff",
    )


@_own_names(loss_scale="scale_value", factor="scale_factor", period="scale_window")
def mindspore(
    scale_value: float, scale_factor: float, scale_window: int
) -> DynamicLossScale:
    """MindSpore's `mindspore.amp.DynamicLossScaler` (2.10), which has no defaults.

    S is multiplied by `scale_factor` on the `scale_window`-th finite step in a row and divided by it at
    every overflow, with a floor of 1; a growth that would be infinite is not made. The classes
    `DynamicLossScaleManager` (which raises after 1000 overflows in a row) and `DynamicLossScaleUpdateCell`
    have the same rule without the cap. Traps: as `tf_keras`.
    """
    return _in_range(scale_value, floor=1.0, period=scale_window, factor=scale_factor)


@_own_names(
    loss_scale="scale",
    factor="growth_factor",
    period="growth_interval",
    min_loss_scale="minimum_scale",
)
def flax(
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    scale: float = 65536.0,
    minimum_scale: float | None = 2.0**-126,
) -> DynamicLossScale:
    """Flax's `flax.training.dynamic_scale.DynamicScale` (0.12).

    S grows by `growth_factor` after `growth_interval` finite steps and is multiplied by `backoff_factor` at
    every overflow, down to `minimum_scale` (None: no floor, here 2^-126).

    Differs from most: S grows one step late, on finite step `growth_interval` + 1, because the counter is
    compared before it counts.

    Traps: past float32's maximum Flax clamps S to 3.4e38, where 1/S is flushed to 0 and with it every
    gradient; here S holds at 2^126. From the default floor it takes 141 growths back to 2^15: a long
    stretch of NaN costs 282,141 steps. Raise `minimum_scale`, or pass `value=` to `with_loss_scale`.
    """
    return _in_range(
        scale,
        floor=0.0 if minimum_scale is None else minimum_scale,
        period=_one_late("growth_interval", growth_interval),
        factor=growth_factor,
        backoff_factor=backoff_factor,
    )


@_own_names()
def jmp(
    loss_scale: float,
    period: int = 2000,
    factor: float = 2,
    min_loss_scale: float = 1.0,
) -> DynamicLossScale:
    """jmp's `DynamicLossScale` (0.0.4), which is also this library's first five arguments.

    S is multiplied by `factor` on the `period`-th finite step in a row and divided by it at every overflow,
    down to `min_loss_scale`; a growth that would be infinite is not made. Differs from `DynamicLossScale`
    here only by its cap, 2^126 instead of 2^24. Trap: under `jit` jmp forgets `min_loss_scale` and takes
    1; here it is kept.
    """
    return _in_range(loss_scale, floor=min_loss_scale, period=period, factor=factor)


@_own_names(loss_scale="loss_scaling", min_loss_scale="min_loss_scaling")
def mpx(
    loss_scaling: float, min_loss_scaling: float, factor: float = 2, period: int = 2000
) -> DynamicLossScale:
    """MPX's `DynamicLossScaling` (mixed_precision_for_jax 0.1.8).

    As `jmp`, with S clamped to [min_loss_scaling, 65504], the largest float16, also at the start.

    Traps: 65504 is no power of two, so from there on scaling rounds; take `jmp`, or `apex` with a cap of
    2^15, for a new run. MPX unscales by the adjusted S, so its gradients are too small by `factor`
    whenever S grows; here the S that scaled also unscales.
    """
    return _in_range(
        loss_scaling,
        floor=min_loss_scaling,
        cap=65504.0,
        at_max="clamp",
        clamps_initial=True,
        period=period,
        factor=factor,
    )
