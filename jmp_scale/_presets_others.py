"""Presets for Keras, TensorFlow, PaddlePaddle, MindSpore, and for JAX's libraries."""

from ._dynamic import DynamicLossScale
from ._presets_rule import dynamic, or_none


def keras(
    initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
) -> DynamicLossScale:
    """Keras 3's `keras.optimizers.LossScaleOptimizer` (3.15).

    S doubles on the `dynamic_growth_steps`-th finite step in a row and halves at every
    overflow; both factors are fixed.

    Trap: there is neither floor nor cap. S can reach infinity, and 0: on the JAX
    backend as soon as it is under 2^-126, since XLA flushes subnormal numbers; then a
    parameter becomes NaN. Here S holds at the ends.
    """
    return dynamic(
        "keras",
        loss_scale=("initial_scale", initial_scale),
        period=("dynamic_growth_steps", dynamic_growth_steps),
    )


def tf_keras(
    initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
) -> DynamicLossScale:
    """Keras 2's `LossScaleOptimizer` (tf_keras 2.21).

    As `keras`, but with a floor of 1, and a growth that would be infinite is skipped.
    Trap: with S at 1 and gradients that still overflow, every step is skipped and
    nothing says so; here `skipped_in_a_row` of `with_loss_scale` does.
    """
    return dynamic(
        "tf_keras",
        loss_scale=("initial_scale", initial_scale),
        period=("dynamic_growth_steps", dynamic_growth_steps),
        min_loss_scale=1.0,
    )


def tensorflow(
    initial_loss_scale: float = 2.0**15,
    increment_period: int = 2000,
    multiplier: float = 2.0,
) -> DynamicLossScale:
    """TensorFlow 1's `tf.compat.v1.mixed_precision.DynamicLossScale` (2.21).

    S is multiplied by `multiplier` on the `increment_period`-th finite step in a row
    and divided by it at every overflow, with a floor of 1. A growth that would be
    infinite is skipped. Traps: as `tf_keras`.
    """
    return dynamic(
        "tensorflow",
        loss_scale=("initial_loss_scale", initial_loss_scale),
        period=("increment_period", increment_period),
        factor=("multiplier", multiplier),
        min_loss_scale=1.0,
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
    `decr_every_n_nan_or_inf`-th overflow in a row. Differs from Megatron and DeepSpeed:
    that count starts again at every finite step and at every backoff.

    Trap: there is neither floor nor cap, here 2^-126 and 2^126. The static graph's
    kernel has a floor of 1: `dataclasses.replace(paddle(...), min_loss_scale=1.0)`.
    """
    return dynamic(
        "paddle",
        loss_scale=("init_loss_scaling", init_loss_scaling),
        factor=("incr_ratio", incr_ratio),
        backoff_factor=("decr_ratio", decr_ratio),
        period=("incr_every_n_steps", incr_every_n_steps),
        hysteresis=("decr_every_n_nan_or_inf", decr_every_n_nan_or_inf),
        hysteresis_reset="finite_or_backoff",
    )


def mindspore(
    scale_value: float, scale_factor: float, scale_window: int
) -> DynamicLossScale:
    """MindSpore's `mindspore.amp.DynamicLossScaler` (2.10), which has no defaults.

    S is multiplied by `scale_factor` on the `scale_window`-th finite step in a row and
    divided by it at every overflow, with a floor of 1. A growth that would be infinite
    is skipped. The classes `DynamicLossScaleManager` (which raises after 1000 overflows
    in a row) and `DynamicLossScaleUpdateCell` have the same rule without the cap.
    Traps: as `tf_keras`.
    """
    return dynamic(
        "mindspore",
        loss_scale=("scale_value", scale_value),
        factor=("scale_factor", scale_factor),
        period=("scale_window", scale_window),
        min_loss_scale=1.0,
    )


def flax(
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    scale: float = 65536.0,
    minimum_scale: float | None = 2.0**-126,
) -> DynamicLossScale:
    """Flax's `flax.training.dynamic_scale.DynamicScale` (0.12).

    S grows by `growth_factor` after `growth_interval` finite steps and is multiplied by
    `backoff_factor` at every overflow, down to `minimum_scale` (None: none, here
    2^-126).

    Differs from most: S grows one step late, on finite step `growth_interval` + 1,
    because the counter is compared before it is incremented.

    Traps: past float32's maximum Flax clamps S to 3.4e38, where 1/S is flushed to 0 and
    with it every gradient; here S holds at 2^126. From the default floor it takes 141
    growths back to 2^15: a long stretch of NaN costs 282,141 steps. Raise
    `minimum_scale`, or pass `value=` to `with_loss_scale`.
    """
    return dynamic(
        "flax",
        loss_scale=("scale", scale),
        factor=("growth_factor", growth_factor),
        backoff_factor=("backoff_factor", backoff_factor),
        period=("growth_interval", growth_interval),
        min_loss_scale=("minimum_scale", or_none(minimum_scale, 0.0)),
        grows_late=True,
    )


def jmp(
    loss_scale: float,
    period: int = 2000,
    factor: float = 2,
    min_loss_scale: float = 1.0,
) -> DynamicLossScale:
    """jmp's `DynamicLossScale` (0.0.4): this library's first five arguments.

    S is multiplied by `factor` on the `period`-th finite step in a row and divided by
    it at every overflow, down to `min_loss_scale`. A growth that would be infinite is
    skipped. Differs from `DynamicLossScale` here only by its cap, 2^126 instead of
    2^24.

    Traps: under `jit` jmp forgets `min_loss_scale` and takes 1; here it is kept. An
    initial S below the floor is an error here; give a lower floor with it.
    """
    return dynamic(
        "jmp",
        loss_scale=("loss_scale", loss_scale),
        period=("period", period),
        factor=("factor", factor),
        min_loss_scale=("min_loss_scale", min_loss_scale),
    )


def mpx(
    loss_scaling: float, min_loss_scaling: float, factor: float = 2, period: int = 2000
) -> DynamicLossScale:
    """MPX's `DynamicLossScaling` (mixed_precision_for_jax 0.1.8).

    As `jmp`, with S clamped to [min_loss_scaling, 65504], also at the start; 65504 is
    the largest float16.

    Traps: 65504 is not a power of two, so from there on scaling rounds. Take `jmp`, or
    `apex` with a cap of 2^15, for a new run. MPX unscales by the adjusted S, so its
    gradients are too small by `factor` whenever S grows; here the S that scaled also
    unscales.
    """
    return dynamic(
        "mpx",
        loss_scale=("loss_scaling", loss_scaling),
        min_loss_scale=("min_loss_scaling", min_loss_scaling),
        factor=("factor", factor),
        period=("period", period),
        max_loss_scale=65504.0,
        at_max="clamp",
        clamps_initial=True,
    )
