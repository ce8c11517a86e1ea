"""Other frameworks' loss scales, with their own argument names and defaults.

Use one to reproduce a run of another framework. Each function returns a
`DynamicLossScale` that has the framework's S after every step. "After n finite steps"
means on the n-th finite step in a row: an overflow restarts the count, even if
hysteresis absorbs it. S is float32: equal for powers of two, otherwise within 1e-5 over
hundreds of steps.

One thing differs from the originals: S and 1/S are always normal numbers. In Apex,
ColossalAI, Flax, Keras 3, Paddle and PyTorch S can become 0 or infinite, which silently
turns every gradient into zero or NaN. Here a floor or cap beyond [2^-126, 2^126], or of
None, means the nearer end of this range.

Errors are those of `DynamicLossScale`, mostly with its names of the arguments. A field
without an argument is set by `dataclasses.replace(preset, min_loss_scale=1.0)`.

Examples:
  >>> from jmp_scale import presets
  >>> loss_scale = presets.pytorch(init_scale=1024.0, growth_interval=1)
  >>> float(loss_scale.adjust(True).loss_scale)
  2048.0
"""

from typing import Any

from ._scaling.loss_scale import DynamicLossScale
from ._validation import LARGEST, SMALLEST, Arguments

__all__ = [
    "pytorch",
    "apex",
    "deepspeed",
    "megatron",
    "colossalai",
    "fairseq",
    "cerebras",
    "keras",
    "tf_keras",
    "tensorflow",
    "paddle",
    "mindspore",
    "flax",
    "jmp",
    "mpx",
]


def _within(
    initial: float | None,
    low: float | None = None,
    high: float | None = None,
    **rule: Any,
) -> DynamicLossScale:
    """Returns a loss scale between bounds, of which None is an end of the range."""
    low = SMALLEST if low is None else low
    high = LARGEST if high is None else high
    initial = high if initial is None else initial
    if rule.get("at_max") == "clamp":  # at the start too
        number = Arguments("DynamicLossScale").number
        initial = min(number("loss_scale", initial), number("max_loss_scale", high))
    return DynamicLossScale(initial, min_loss_scale=low, max_loss_scale=high, **rule)


def pytorch(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> DynamicLossScale:
    """Returns the loss scale of PyTorch's `torch.amp.GradScaler` (2.13).

    With several optimizers, adjust one loss scale by the flags of all.
    """
    rule = {"factor": growth_factor, "backoff_factor": backoff_factor}
    return _within(init_scale, period=growth_interval, **rule)


def apex(
    init_scale: float = 2.0**16,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
) -> DynamicLossScale:
    """Returns the loss scale of NVIDIA Apex's `apex.amp`, dynamic.

    S is clamped at the cap, even at the start. For `num_losses=n` use a list of n loss
    scales. The older `fp16_utils` is
    `fairseq(2.0**32, scale_window=1000, threshold=1.0)`.
    """
    rule = {"period": scale_window, "at_max": "clamp"}
    return _within(init_scale, min_loss_scale, max_loss_scale, **rule)


def deepspeed(
    initial_scale_power: int = 16,
    loss_scale_window: int = 1000,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    min_loss_scale: float = 1.0,
) -> DynamicLossScale:
    """Returns the loss scale of the `fp16` section of DeepSpeed's configuration.

    S grows one step later after the start or an overflow. It halves at the
    `hysteresis`-th overflow and at each further one until S grows (with
    `consecutive_hysteresis`, until a step is finite). At the floor S stays, where
    DeepSpeed raises an error. `FP16_Optimizer` and `FP16_UnfusedOptimizer` ignore
    hysteresis: pass 1.
    """
    arguments, name = Arguments("deepspeed"), "initial_scale_power"
    power = arguments.number(name, initial_scale_power)
    arguments.require(abs(power) <= 126, name, power, "a number in [-126, 126]")
    return _within(
        2.0**power,
        min_loss_scale,
        period=loss_scale_window,
        growth_delay=1,
        hysteresis=hysteresis,
        hysteresis_reset="finite" if consecutive_hysteresis else "growth",
    )


def megatron(
    initial_scale: float = 2.0**32,
    min_scale: float = 1.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
) -> DynamicLossScale:
    """Returns the loss scale of Megatron-LM's `DynamicGradScaler`.

    S backs off at the `hysteresis`-th overflow, consecutive or not, and at each further
    one until S grows. A float16 run skips its first steps (17 until S is 2^16). A bad
    example that recurs before S can grow takes S down to the floor, although no S can
    help: pass `value=`.
    """
    rule = {"factor": growth_factor, "backoff_factor": backoff_factor}
    rule |= {"period": growth_interval, "hysteresis": hysteresis}
    return _within(initial_scale, min_scale, **rule)


def colossalai(
    initial_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    min_scale: float | None = None,
    max_scale: float | None = None,
    hysteresis: int = 2,
) -> DynamicLossScale:
    """Returns the loss scale of ColossalAI's `DynamicGradScaler`.

    It is `megatron` with optional bounds, to which S is clamped, even at the start.
    """
    rule = {"factor": growth_factor, "backoff_factor": backoff_factor}
    rule |= {"period": growth_interval, "hysteresis": hysteresis, "at_max": "clamp"}
    return _within(initial_scale, min_scale, max_scale, **rule)


def fairseq(
    init_scale: float = 2.0**15,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    threshold: float | None = None,
) -> DynamicLossScale:
    """Returns the loss scale of fairseq's `DynamicLossScaler`.

    The command line starts at 2^7 with a window of 2^14 / world size / update_freq.
    There is no `tolerance`: to absorb single overflows use `megatron`. Below 1e-4
    fairseq raises an error; here S continues to the floor.
    """
    return _within(init_scale, threshold, factor=scale_factor, period=scale_window)


def cerebras(
    initial_loss_scale: float | None = None,
    steps_per_increase: int = 2000,
    min_loss_scale: float | None = 2.0**-14,
    max_loss_scale: float | None = 2.0**15,
) -> DynamicLossScale:
    """Returns the loss scale of Cerebras' `cstorch.amp.GradScaler`.

    S grows after `steps_per_increase` + 1 finite steps (TensorFlow's
    `CSDynamicLossScale` does not add 1), and is clamped, even at the start. It starts
    at the cap. For cbfloat16 the cap is 2^31. There is no `overflow_tolerance`. Their
    documentation writes 2e15 and 2e-14 for 2^15 and 2^-14.
    """
    name = "steps_per_increase"
    steps = Arguments("cerebras").integer(name, steps_per_increase, 0)
    rule = {"period": steps + 1, "at_max": "clamp"}
    return _within(initial_loss_scale, min_loss_scale, max_loss_scale, **rule)


def keras(
    initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
) -> DynamicLossScale:
    """Returns the loss scale of Keras 3's `LossScaleOptimizer` (3.15)."""
    return _within(initial_scale, period=dynamic_growth_steps)


def tf_keras(
    initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
) -> DynamicLossScale:
    """Returns the loss scale of Keras 2's `LossScaleOptimizer` (2.21), floor 1."""
    return _within(initial_scale, 1.0, period=dynamic_growth_steps)


def tensorflow(
    initial_loss_scale: float = 2.0**15,
    increment_period: int = 2000,
    multiplier: float = 2.0,
) -> DynamicLossScale:
    """Returns the loss scale of TensorFlow 1's `DynamicLossScale` (2.21), floor 1."""
    return _within(initial_loss_scale, 1.0, period=increment_period, factor=multiplier)


def paddle(
    init_loss_scaling: float = 65536.0,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
) -> DynamicLossScale:
    """Returns the loss scale of PaddlePaddle's `paddle.amp.GradScaler` (3.3).

    S backs off at the `decr_every_n_nan_or_inf`-th overflow in a row; every finite step
    and every backoff restarts this count. The static graph has a floor of 1:
    `dataclasses.replace(paddle(...), min_loss_scale=1.0)`.
    """
    return _within(
        init_loss_scaling,
        factor=incr_ratio,
        backoff_factor=decr_ratio,
        period=incr_every_n_steps,
        hysteresis=decr_every_n_nan_or_inf,
        hysteresis_reset="finite_or_backoff",
    )


def mindspore(
    scale_value: float, scale_factor: float, scale_window: int
) -> DynamicLossScale:
    """Returns the loss scale of MindSpore's `mindspore.amp.DynamicLossScaler` (2.10).

    It has a floor of 1, like `DynamicLossScaleManager` (which raises an error after
    1000 overflows in a row) and `DynamicLossScaleUpdateCell`.
    """
    return _within(scale_value, 1.0, factor=scale_factor, period=scale_window)


def flax(
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    scale: float = 65536.0,
    minimum_scale: float = 2.0**-126,
) -> DynamicLossScale:
    """Returns the loss scale of Flax's `DynamicScale` (0.12).

    S grows after `growth_interval` + 1 finite steps. From the default floor it needs
    282,141 steps to return to 2^15: raise `minimum_scale`, or pass `value=`.
    """
    interval = Arguments("flax").integer("growth_interval", growth_interval, 0)
    rule = {"factor": growth_factor, "backoff_factor": backoff_factor}
    return _within(scale, minimum_scale, period=interval + 1, **rule)


def jmp(
    loss_scale: float, period: int = 2000, factor: float = 2, min_loss_scale: float = 1
) -> DynamicLossScale:
    """Returns the loss scale of jmp's `DynamicLossScale` (0.0.4).

    Under `jit` jmp forgets `min_loss_scale` and uses 1.
    """
    return _within(loss_scale, min_loss_scale, period=period, factor=factor)


def mpx(
    loss_scaling: float, min_loss_scaling: float, factor: float = 2, period: int = 2000
) -> DynamicLossScale:
    """Returns the loss scale of MPX's `DynamicLossScaling`.

    It is `jmp` with S clamped to [min_loss_scaling, 65504]; an initial S above it
    starts at 65504. 65504 is not a power of two, so that from there on scaling rounds:
    use `jmp` for a new run. MPX unscales by the adjusted S, unlike this library.
    """
    rule = {"factor": factor, "period": period, "at_max": "clamp"}
    return _within(loss_scaling, min_loss_scaling, 65504.0, **rule)


def __dir__() -> list[str]:
    return __all__
