"""Other frameworks' loss scales, with their own argument names and defaults.

A run that moves here keeps its loss scale to the step. Each function takes what that
framework takes and returns the `DynamicLossScale` with the same S after every step; its
docstring has the one rule. In all of them an overflow starts the count of finite steps
again, also where hysteresis absorbs it.

They differ from their originals in one thing. S and 1/S are always normal float32
numbers here, so a floor, a cap or an initial S beyond [2^-126, 2^126] becomes that end,
where S then holds. It is never 0, NaN or infinite, which most originals allow and which
silently makes every gradient zero or NaN. S is float32 even where an original computes
with Python numbers: the same for powers of two, and otherwise within 1e-5 over hundreds
of steps.

All raise `TypeError` for an argument that is not a number, and `ValueError` for one out
of range, under its own name. `dataclasses.replace(preset, min_loss_scale=1.0)` sets
what a preset has no argument for. It keeps `loss_scale`, `counter` and
`hysteresis_left`: give these too if the start changes.

A framework without a preset is written as a `DynamicLossScale`. If its counter is
compared with the interval before it counts the step, S grows one step late, which is
`period` + 1. DreamerV3 is an example: `DynamicLossScale(1e4, period=1001,
min_loss_scale=1e-4, max_loss_scale=1e5, at_max="clamp")`.

Examples:
  >>> from jmp_scale import presets
  >>> loss_scale = presets.deepspeed(initial_scale_power=10, loss_scale_window=2)
  >>> for finite in (True, True, True, False, False):  # late growth, then hysteresis
  ...     loss_scale = loss_scale.adjust(finite)
  ...     print(float(loss_scale.loss_scale))
  1024.0
  1024.0
  2048.0
  2048.0
  1024.0
"""

import math
from typing import Any

from . import _presets_others
from ._dynamic import DynamicLossScale
from ._presets_others import flax as flax
from ._presets_others import jmp as jmp
from ._presets_others import keras as keras
from ._presets_others import mindspore as mindspore
from ._presets_others import mpx as mpx
from ._presets_others import paddle as paddle
from ._presets_others import tensorflow as tensorflow
from ._presets_others import tf_keras as tf_keras
from ._presets_rule import dynamic, or_none, require_no_tolerance
from ._validation import Arguments, warn


def pytorch(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> DynamicLossScale:
    """PyTorch's `torch.amp.GradScaler` (2.13).

    S grows by `growth_factor` on the `growth_interval`-th unskipped iteration in a row
    and is multiplied by `backoff_factor` at every overflow. A growth that would be
    infinite is skipped.

    Trap: there is no floor. From 2^16, 166 NaN steps in a row take S to 0, and the next
    finite step writes NaN or infinity into the parameters; here S ends at 2^-126 and
    recovers. `ShardedGradScaler` on a CPU has no cap either. For one `GradScaler` with
    several optimizers take one loss scale, adjusted once by all flags.
    """
    return dynamic(
        "pytorch",
        loss_scale=("init_scale", init_scale),
        factor=("growth_factor", growth_factor),
        backoff_factor=("backoff_factor", backoff_factor),
        period=("growth_interval", growth_interval),
    )


def apex(
    init_scale: float = 2.0**16,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> DynamicLossScale:
    """NVIDIA Apex's `apex.amp`, dynamic (`apex/amp/scaler.py`, its last version).

    S doubles on the `scale_window`-th unskipped step in a row and halves at every
    overflow, both fixed. It is clamped at `max_loss_scale`, where most others skip a
    growth past theirs, and `init_scale` is clamped too.

    Trap: `min_loss_scale=None` means that there is no floor; S ends at 0 with a
    ZeroDivisionError, and here at 2^-126. For `amp.initialize(num_losses=n)` hold n of
    these in a list or dictionary. The older `apex.fp16_utils.DynamicLossScaler` is
    `fairseq(2.0**32, scale_window=1000, threshold=1.0)` here.
    """
    return dynamic(
        "apex",
        loss_scale=("init_scale", init_scale),
        period=("scale_window", scale_window),
        min_loss_scale=("min_loss_scale", or_none(min_loss_scale, 0.0)),
        max_loss_scale=("max_loss_scale", max_loss_scale),
        at_max="clamp",
        clamps_initial=True,
    )


def deepspeed(
    initial_scale_power: float = 16,
    loss_scale_window: int = 1000,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    min_loss_scale: float = 1.0,
) -> DynamicLossScale:
    """DeepSpeed's `fp16` section of the JSON configuration (`DynamicLossScaler`).

    S starts at 2^initial_scale_power, doubles after `loss_scale_window` stable steps
    and halves at the `hysteresis`-th overflow. What was absorbed is refilled when S
    grows, or with `consecutive_hysteresis` by every finite step; once used up, every
    overflow halves S. `get_loss_scale` reads the section itself.

    Differs from all others: the first growth after the start or an overflow is late by
    one step, since that step is not counted. The growths that follow are
    `loss_scale_window` steps apart.

    Traps: `initial_scale_power` is an exponent. With 0 or 1, S starts at 1 or 2, so
    small gradients stay zero until S has grown (15,000 steps to 2^15 with the default
    window), and it has no room to back off. At `min_loss_scale` DeepSpeed raises by
    default; here S stays there and `skipped_in_a_row` grows. `FP16_Optimizer` and
    `FP16_UnfusedOptimizer` ignore hysteresis: give `hysteresis=1` for them.
    """
    arguments = Arguments("presets.deepspeed")
    power = arguments.number("initial_scale_power", initial_scale_power)
    in_range = -126 <= power <= 126
    arguments.require(
        in_range, "initial_scale_power", initial_scale_power, "in [-126, 126]"
    )
    return dynamic(
        "deepspeed",
        loss_scale=("2**initial_scale_power", 2.0**power),
        period=("loss_scale_window", loss_scale_window),
        hysteresis=("hysteresis", hysteresis),
        min_loss_scale=("min_loss_scale", min_loss_scale),
        growth_delay=1,
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
    """Megatron-LM's `DynamicGradScaler` (`--initial-loss-scale`, ...).

    S grows on the `growth_interval`-th finite step in a row and backs off at the
    `hysteresis`-th overflow, with a floor of `min_scale`.

    Differs from Apex and Paddle: only a growth of S refills the hysteresis. So
    overflows need not be in a row to use it up, and from then on each one backs off.

    Traps: from 2^32 the first steps of a float16 run are all skipped (17 of them until
    S is 2^16). A single bad example that comes back before S can grow takes S down to
    `min_scale`, though no S can help; pass the loss as `value=` to `with_loss_scale` to
    avoid that. There is no cap (S can be infinite): here 2^126.
    """
    return dynamic(
        "megatron",
        loss_scale=("initial_scale", initial_scale),
        min_loss_scale=("min_scale", min_scale),
        factor=("growth_factor", growth_factor),
        backoff_factor=("backoff_factor", backoff_factor),
        period=("growth_interval", growth_interval),
        hysteresis=("hysteresis", hysteresis),
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

    As `megatron`, with hysteresis refilled by growth only, a lower start and optional
    ends: a growth past `max_scale` is clamped to it. Trap: by default there is neither
    floor nor cap, so S can reach 0 and infinity; here it holds at 2^-126 and 2^126.
    """
    return dynamic(
        "colossalai",
        loss_scale=("initial_scale", initial_scale),
        factor=("growth_factor", growth_factor),
        backoff_factor=("backoff_factor", backoff_factor),
        period=("growth_interval", growth_interval),
        min_loss_scale=("min_scale", or_none(min_scale, 0.0)),
        max_loss_scale=("max_scale", or_none(max_scale, math.inf)),
        hysteresis=("hysteresis", hysteresis),
        at_max="clamp",
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

    The command line starts at `--fp16-init-scale` 2^7 with a window of
    2^14 / world size / update_freq. S is multiplied by `scale_factor` on the
    `scale_window`-th finite step in a row and divided by it at every overflow;
    `threshold` is the floor (None: none, here 2^-126).

    Traps: at its `min_loss_scale` of 1e-4 fairseq raises FloatingPointError; here S
    continues to the floor and `skipped_in_a_row` grows. `tolerance` > 0 (backs off only
    above that share of overflows) is refused: the share depends on the steps since the
    last change of S, which this rule does not count.
    """
    require_no_tolerance(Arguments("presets.fairseq"), "tolerance", tolerance)
    return dynamic(
        "fairseq",
        loss_scale=("init_scale", init_scale),
        factor=("scale_factor", scale_factor),
        period=("scale_window", scale_window),
        min_loss_scale=("threshold", or_none(threshold, 0.0)),
    )


def cerebras(
    initial_loss_scale: float | None = None,
    steps_per_increase: int = 2000,
    min_loss_scale: float = 2.0**-14,
    max_loss_scale: float = 2.0**15,
) -> DynamicLossScale:
    """Cerebras' `cstorch.amp.GradScaler` (2.10), `loss_scale="dynamic"`.

    S doubles after `steps_per_increase` finite steps, halves at every overflow, and is
    clamped to [min_loss_scale, max_loss_scale], also at the start (None: at the cap).
    For cbfloat16 the cap is 2^31. `get_loss_scale` reads a section of its YAML.

    Differs from most: as in `flax`, S grows one step late, on finite step
    `steps_per_increase` + 1. The TensorFlow class `CSDynamicLossScale` does not: take
    one less for it.

    Trap: the documentation writes 2e15 and 2e-14 where it means 2^15 and 2^-14. Numbers
    of that form, 2e10 and above or 2e-10 and below, are read as powers of two, with a
    `UserWarning`.

    It has no `overflow_tolerance`, for the reason of `fairseq`.
    """
    floor = _meant("min_loss_scale", min_loss_scale)
    cap = initial = _meant("max_loss_scale", max_loss_scale)
    if initial_loss_scale is not None:
        initial = _meant("initial_loss_scale", initial_loss_scale)
    return dynamic(
        "cerebras",
        loss_scale=("initial_loss_scale", initial),
        period=("steps_per_increase", steps_per_increase),
        min_loss_scale=("min_loss_scale", floor),
        max_loss_scale=("max_loss_scale", cap),
        at_max="clamp",
        clamps_initial=True,
        grows_late=True,
    )


def _meant(argument: str, value: Any) -> float:
    """The power of two that is meant by a number written as 2e15 or 2e-14."""
    number = Arguments("presets.cerebras").number(argument, value)
    if not 0 < number < math.inf:
        return number
    exponent = round(math.log10(number / 2))
    if abs(exponent) < 10 or number != float(f"2e{exponent}"):
        return number
    meant = f"2e{exponent} is read as 2**{exponent}; write 2.0**{exponent}"
    warn(f"presets.cerebras: {argument} = {meant}")
    return 2.0**exponent


def __dir__() -> list[str]:
    # Completion shows the presets and nothing else.
    homes = (__name__, _presets_others.__name__)
    names = (n for n, x in globals().items() if getattr(x, "__module__", "") in homes)
    return [name for name in names if not name.startswith("_")]
