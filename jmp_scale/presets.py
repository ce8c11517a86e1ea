"""Other frameworks' loss scales, with their own argument names and defaults.

Use one to reproduce a run of another framework. Each function returns a
`DynamicLossScale` that has the framework's S after every step. "After n finite steps"
means on the n-th finite step in a row: an overflow restarts the count, even if
hysteresis absorbs it.

One thing differs from the originals: S and 1/S are always normal float32 numbers here.
In Apex, ColossalAI, Flax, Keras 3, Paddle and PyTorch S can become 0 or infinite, which
silently turns every gradient into zero or NaN. Here a floor, cap or initial S beyond
[2^-126, 2^126] means the nearer end of this range, as does a floor or cap of None. S is
float32: equal for powers of two, otherwise within 1e-5 over hundreds of steps.

All functions raise `TypeError` for an argument that is not a number, and `ValueError`
for one out of range. `dataclasses.replace(preset, min_loss_scale=1.0)` sets fields for
which a preset has no argument.

Examples:
  >>> from jmp_scale import presets
  >>> loss_scale = presets.deepspeed(initial_scale_power=10, loss_scale_window=1)
  >>> for finite in (True, True, False, False):  # late growth, then hysteresis
  ...     loss_scale = loss_scale.adjust(finite)
  ...     print(float(loss_scale.loss_scale))
  1024.0
  2048.0
  2048.0
  1024.0
"""

import math
from collections.abc import Mapping
from typing import Any

from . import _validation
from ._scaling.loss_scale import DynamicLossScale
from ._validation import LARGEST, SMALLEST, Arguments

# The frameworks' names of the fields of `DynamicLossScale`, if they differ.
_NAMES = {
    "loss_scale": "init_scale initial_scale 2**initial_scale_power scale scale_value "
    "initial_loss_scale init_loss_scaling loss_scaling",
    "factor": "growth_factor scale_factor incr_ratio multiplier",
    "backoff_factor": "decr_ratio",
    "period": "growth_interval scale_window loss_scale_window steps_per_increase "
    "dynamic_growth_steps increment_period incr_every_n_steps",
    "hysteresis": "decr_every_n_nan_or_inf",
    "hysteresis_reset": "consecutive_hysteresis",
    "min_loss_scale": "min_scale minimum_scale min_loss_scaling threshold",
    "max_loss_scale": "max_scale",
}
_FIELDS = {name: field for field, names in _NAMES.items() for name in names.split()}


def pytorch(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> DynamicLossScale:
    """PyTorch's `torch.amp.GradScaler` (2.13).

    S grows after `growth_interval` finite steps and backs off at every overflow. With
    several optimizers, adjust one loss scale by the flags of all.
    """
    return _dynamic("pytorch", locals())


def apex(
    init_scale: float = 2.0**16,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> DynamicLossScale:
    """NVIDIA Apex's `apex.amp`, dynamic (`apex/amp/scaler.py`, its last version).

    S doubles after `scale_window` finite steps, halves at every overflow, and is
    clamped at `max_loss_scale`, even at the start. For `num_losses=n` use a list of n
    loss scales. The older `fp16_utils` is
    `fairseq(2.0**32, scale_window=1000, threshold=1.0)`.
    """
    return _dynamic("apex", locals(), at_max="clamp")


def deepspeed(
    initial_scale_power: float = 16,
    loss_scale_window: int = 1000,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    min_loss_scale: float = 1.0,
) -> DynamicLossScale:
    """DeepSpeed's `fp16` section of the JSON configuration (`DynamicLossScaler`).

    S doubles after `loss_scale_window` finite steps, one step later after the start or
    an overflow. It halves at the `hysteresis`-th overflow and at each further one until
    S grows (with `consecutive_hysteresis`, until a step is finite).

    At `min_loss_scale` DeepSpeed raises an error by default; here S stays there. Pass
    `hysteresis=1` for `FP16_Optimizer` and `FP16_UnfusedOptimizer`, which ignore it.
    """
    arguments = Arguments("presets.deepspeed")
    power = arguments.number("initial_scale_power", initial_scale_power)
    arguments.require(abs(power) <= 126, "initial_scale_power", power, "in [-126, 126]")
    given = {
        "2**initial_scale_power": 2.0**power,
        "loss_scale_window": loss_scale_window,
        "hysteresis": hysteresis,
        "consecutive_hysteresis": "finite" if consecutive_hysteresis else "growth",
        "min_loss_scale": min_loss_scale,
    }
    return _dynamic("deepspeed", given, growth_delay=1)


def megatron(
    initial_scale: float = 2.0**32,
    min_scale: float = 1.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
) -> DynamicLossScale:
    """Megatron-LM's `DynamicGradScaler` (`--initial-loss-scale`, ...).

    S grows after `growth_interval` finite steps. It backs off at the `hysteresis`-th
    overflow, consecutive or not, and at each further one until S grows.

    Traps: a float16 run skips its first steps (17 until S is 2^16). A bad example that
    recurs before S can grow takes S down to `min_scale`, although no S can help; pass
    `value=` to prevent that.
    """
    return _dynamic("megatron", locals())


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

    It is `megatron` with a lower initial S and optional bounds, to which S is clamped,
    even at the start, where ColossalAI would refuse it.
    """
    return _dynamic("colossalai", locals(), at_max="clamp")


def fairseq(
    init_scale: float = 2.0**15,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    threshold: float | None = None,
) -> DynamicLossScale:
    """fairseq's `DynamicLossScaler`, with the class's defaults.

    S is multiplied by `scale_factor` after `scale_window` finite steps and divided by
    it at every overflow, down to `threshold`. The command line starts at 2^7 with a
    window of 2^14 / world size / update_freq.

    There is no `tolerance` for a share of overflows; to absorb single ones use
    `megatron`. Below 1e-4 fairseq raises an error; here S continues to the floor.
    """
    return _dynamic("fairseq", locals())


def cerebras(
    initial_loss_scale: float | None = None,
    steps_per_increase: int = 2000,
    min_loss_scale: float = 2.0**-14,
    max_loss_scale: float = 2.0**15,
) -> DynamicLossScale:
    """Cerebras' `cstorch.amp.GradScaler` (2.10), `loss_scale="dynamic"`.

    S doubles after `steps_per_increase` + 1 finite steps (TensorFlow's
    `CSDynamicLossScale` does not add 1), halves at every overflow, and is clamped to
    [min_loss_scale, max_loss_scale], even at the start. An `initial_loss_scale` of None
    means the cap. For cbfloat16 the cap is 2^31. There is no `overflow_tolerance`.

    Trap: the documentation of Cerebras writes 2e15 and 2e-14 for 2^15 and 2^-14.
    """
    if initial_loss_scale is None:
        initial_loss_scale = max_loss_scale
    return _dynamic("cerebras", locals(), at_max="clamp", grows_late=True)


def keras(
    initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
) -> DynamicLossScale:
    """Keras 3's `keras.optimizers.LossScaleOptimizer` (3.15).

    S doubles after `dynamic_growth_steps` finite steps and halves at every overflow.
    """
    return _dynamic("keras", locals())


def tf_keras(
    initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
) -> DynamicLossScale:
    """Keras 2's `LossScaleOptimizer` (tf_keras 2.21).

    It is `keras` with a floor of 1.
    """
    return _dynamic("tf_keras", locals(), min_loss_scale=1.0)


def tensorflow(
    initial_loss_scale: float = 2.0**15,
    increment_period: int = 2000,
    multiplier: float = 2.0,
) -> DynamicLossScale:
    """TensorFlow 1's `tf.compat.v1.mixed_precision.DynamicLossScale` (2.21).

    S is multiplied by `multiplier` after `increment_period` finite steps and divided by
    it at every overflow, with a floor of 1.
    """
    return _dynamic("tensorflow", locals(), min_loss_scale=1.0)


def paddle(
    init_loss_scaling: float = 65536.0,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
) -> DynamicLossScale:
    """PaddlePaddle's `paddle.amp.GradScaler` (3.3, dynamic graph).

    S is multiplied by `incr_ratio` after `incr_every_n_steps` finite steps and by
    `decr_ratio` at the `decr_every_n_nan_or_inf`-th overflow in a row. Every finite
    step and every backoff restarts this count. The static graph has a floor of 1:
    `dataclasses.replace(paddle(...), min_loss_scale=1.0)`.
    """
    return _dynamic("paddle", locals(), hysteresis_reset="finite_or_backoff")


def mindspore(
    scale_value: float, scale_factor: float, scale_window: int
) -> DynamicLossScale:
    """MindSpore's `mindspore.amp.DynamicLossScaler` (2.10); it has no defaults.

    S is multiplied by `scale_factor` after `scale_window` finite steps and divided by
    it at every overflow, with a floor of 1, as in `DynamicLossScaleManager` (which
    raises after 1000 overflows in a row) and `DynamicLossScaleUpdateCell`.
    """
    return _dynamic("mindspore", locals(), min_loss_scale=1.0)


def flax(
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    scale: float = 65536.0,
    minimum_scale: float | None = 2.0**-126,
) -> DynamicLossScale:
    """Flax's `flax.training.dynamic_scale.DynamicScale` (0.12).

    S is multiplied by `growth_factor` after `growth_interval` + 1 finite steps and by
    `backoff_factor` at every overflow, down to `minimum_scale`.

    Trap: from the default floor S needs 282,141 steps to return to 2^15. Raise
    `minimum_scale`, or pass `value=`.
    """
    return _dynamic("flax", locals(), grows_late=True)


def jmp(
    loss_scale: float, period: int = 2000, factor: float = 2, min_loss_scale: float = 1
) -> DynamicLossScale:
    """jmp's `DynamicLossScale` (0.0.4): this library's first five arguments.

    S is multiplied by `factor` after `period` finite steps and divided by it at every
    overflow, down to `min_loss_scale` (under `jit` jmp forgets this and uses 1).
    """
    return _dynamic("jmp", locals())


def mpx(
    loss_scaling: float, min_loss_scaling: float, factor: float = 2, period: int = 2000
) -> DynamicLossScale:
    """MPX's `DynamicLossScaling` (mixed_precision_for_jax 0.1.8).

    It is `jmp` with S clamped to [min_loss_scaling, 65504], even at the start.

    Trap: 65504 is not a power of two, so that from there on scaling rounds; use `jmp`
    for a new run. MPX unscales by the adjusted S, unlike this library.
    """
    return _dynamic("mpx", locals(), max_loss_scale=65504.0, at_max="clamp")


def _dynamic(
    preset: str, given: Mapping[str, Any], grows_late: bool = False, **fields: Any
) -> DynamicLossScale:
    """Creates the loss scale of a preset from its arguments, by their names.

    With `at_max="clamp"` an initial S beyond the floor or cap is clamped; otherwise it
    is an error. With `grows_late` the counter is compared before it is incremented.
    """
    names = {_FIELDS.get(word, word): word for word in given}
    arguments = Arguments(f"presets.{preset}", names)
    # A preset without a floor or cap in its arguments and fields has none.
    no_ends = {"min_loss_scale": 0.0, "max_loss_scale": math.inf}
    fields = no_ends | fields
    for field, word in names.items():
        fields[field] = no_ends.get(field) if given[word] is None else given[word]
    numbers = ("loss_scale", "min_loss_scale", "max_loss_scale")
    s, floor, cap = (arguments.number(name, fields[name]) for name in numbers)
    if fields.get("at_max") == "clamp" and s > 0:
        s = min(max(s, floor), cap, LARGEST)
    allowed = "a finite number > 0"
    arguments.require(0 < s < math.inf, "loss_scale", fields["loss_scale"], allowed)
    if cap > LARGEST:
        cap, fields["at_max"] = LARGEST, "hold"
    if grows_late:
        fields["period"] = arguments.integer("period", fields["period"], 0) + 1
    s = min(max(s, SMALLEST), LARGEST)
    fields |= {"loss_scale": s, "min_loss_scale": floor, "max_loss_scale": cap}
    # Fields are checked here, so that errors use the framework's argument names.
    rule = _validation.rule(arguments, vars(DynamicLossScale) | fields)
    ends = rule["min_loss_scale"], rule["max_loss_scale"]
    _validation.float32_leaf(arguments, s, *ends)
    return DynamicLossScale(s, **rule)
