"""Other frameworks' loss scales, with their own argument names and defaults.

Use one to reproduce a run of another framework. Each function returns a
`DynamicLossScale` that has the framework's S after every step. "After n finite steps"
means on the n-th finite step in a row: an overflow restarts the count, even if
hysteresis absorbs it.

One thing differs from the originals: S and 1/S are always normal float32 numbers here.
In Apex, ColossalAI, Flax, Keras 3, Paddle and PyTorch S can become 0 or infinite, which
silently turns every gradient into zero or NaN. Here a floor or cap beyond
[2^-126, 2^126], or of None, means the nearer end of this range. S is float32: equal for
powers of two, otherwise within 1e-5 over hundreds of steps.

Errors are those of `DynamicLossScale`, with its names of the arguments.
`dataclasses.replace(preset, min_loss_scale=1.0)` sets fields for which a preset has no
argument.

Examples:
  >>> from jmp_scale import presets
  >>> loss_scale = presets.pytorch(init_scale=1024.0, growth_interval=1)
  >>> float(loss_scale.adjust(True).loss_scale)
  2048.0
"""

import inspect
from collections.abc import Callable
from typing import Any

from ._scaling.loss_scale import DynamicLossScale
from ._validation import LARGEST, SMALLEST

Preset = Callable[..., DynamicLossScale]

# The frameworks' names of the fields of `DynamicLossScale`, if they differ.
_NAMES = {
    "loss_scale": "init_scale initial_scale scale scale_value initial_loss_scale "
    "init_loss_scaling loss_scaling",
    "factor": "growth_factor scale_factor incr_ratio multiplier",
    "backoff_factor": "decr_ratio",
    "period": "growth_interval scale_window steps_per_increase dynamic_growth_steps "
    "increment_period incr_every_n_steps",
    "hysteresis": "decr_every_n_nan_or_inf",
    "min_loss_scale": "min_scale minimum_scale min_loss_scaling threshold",
    "max_loss_scale": "max_scale",
}
_FIELDS = {name: field for field, names in _NAMES.items() for name in names.split()}
# Without an argument, or with None: no floor and no cap, and S starts at the cap.
_OPEN = {"loss_scale": LARGEST, "min_loss_scale": SMALLEST, "max_loss_scale": LARGEST}
_REQUIRED = inspect.Parameter.empty


def _preset(
    name: str, framework: str, late: int = 0, **fixed: Any
) -> Callable[..., Preset]:
    """Returns a function of the defaults of a framework's arguments, in their order.

    `fixed` are our fields that the framework fixes. S grows `late` steps later.
    """

    def with_defaults(**defaults: Any) -> Preset:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature(
            [inspect.Parameter(k, kind, default=x) for k, x in defaults.items()],
            return_annotation=DynamicLossScale,
        )

        def preset(*args: Any, **kwargs: Any) -> DynamicLossScale:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            fields = {_FIELDS.get(k, k): x for k, x in given.arguments.items()} | fixed
            for field, end in _OPEN.items():
                if fields.get(field) is None:
                    fields[field] = end
            # What clamps S to the cap does so at the start too.
            if fields.get("at_max") == "clamp":
                fields["loss_scale"] = min(
                    fields["loss_scale"], fields["max_loss_scale"]
                )
            if late:
                fields["period"] += late
            return DynamicLossScale(**fields)

        preset.__name__ = preset.__qualname__ = name
        preset.__doc__ = f"Returns the loss scale of {framework}."
        preset.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
        return preset

    return with_defaults


# The table: a framework's class, its arguments and defaults, and our fields that it
# fixes. `docs/api/presets.md` says what is particular to each.
pytorch = _preset("pytorch", "PyTorch's `torch.amp.GradScaler` (2.13)")(
    init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000
)
apex = _preset("apex", "NVIDIA Apex's `apex.amp`, dynamic", at_max="clamp")(
    init_scale=2.0**16, scale_window=2000, min_loss_scale=None, max_loss_scale=2.0**24
)
megatron = _preset("megatron", "Megatron-LM's `DynamicGradScaler`")(
    initial_scale=2.0**32,
    min_scale=1.0,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=1000,
    hysteresis=2,
)
colossalai = _preset("colossalai", "ColossalAI's `DynamicGradScaler`", at_max="clamp")(
    initial_scale=2.0**16,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=1000,
    min_scale=None,
    max_scale=None,
    hysteresis=2,
)
fairseq = _preset("fairseq", "fairseq's `DynamicLossScaler`")(
    init_scale=2.0**15, scale_factor=2.0, scale_window=2000, threshold=None
)
cerebras = _preset("cerebras", "Cerebras' `GradScaler`", late=1, at_max="clamp")(
    initial_loss_scale=None,
    steps_per_increase=2000,
    min_loss_scale=2.0**-14,
    max_loss_scale=2.0**15,
)
keras = _preset("keras", "Keras 3's `LossScaleOptimizer` (3.15)")(
    initial_scale=2.0**15, dynamic_growth_steps=2000
)
tf_keras = _preset(
    "tf_keras", "Keras 2's `LossScaleOptimizer` (tf_keras 2.21)", min_loss_scale=1.0
)(initial_scale=2.0**15, dynamic_growth_steps=2000)
tensorflow = _preset(
    "tensorflow", "TensorFlow 1's `DynamicLossScale` (2.21)", min_loss_scale=1.0
)(initial_loss_scale=2.0**15, increment_period=2000, multiplier=2.0)
paddle = _preset(
    "paddle", "Paddle's `GradScaler` (3.3)", hysteresis_reset="finite_or_backoff"
)(
    init_loss_scaling=65536.0,
    incr_ratio=2.0,
    decr_ratio=0.5,
    incr_every_n_steps=2000,
    decr_every_n_nan_or_inf=1,
)
mindspore = _preset(
    "mindspore", "MindSpore's `DynamicLossScaler` (2.10)", min_loss_scale=1.0
)(scale_value=_REQUIRED, scale_factor=_REQUIRED, scale_window=_REQUIRED)
flax = _preset("flax", "Flax's `DynamicScale` (0.12)", late=1)(
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=2000,
    scale=65536.0,
    minimum_scale=SMALLEST,
)
jmp = _preset("jmp", "jmp's `DynamicLossScale` (0.0.4)")(
    loss_scale=_REQUIRED, period=2000, factor=2, min_loss_scale=1
)
mpx = _preset(
    "mpx", "MPX's `DynamicLossScaling`", max_loss_scale=65504.0, at_max="clamp"
)(loss_scaling=_REQUIRED, min_loss_scaling=_REQUIRED, factor=2, period=2000)


def deepspeed(
    initial_scale_power: int = 16,
    loss_scale_window: int = 1000,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    min_loss_scale: float = 1.0,
) -> DynamicLossScale:
    """Returns the loss scale of the `fp16` section of DeepSpeed's configuration."""
    return DynamicLossScale(
        2.0**initial_scale_power,
        period=loss_scale_window,
        min_loss_scale=min_loss_scale,
        max_loss_scale=LARGEST,
        growth_delay=1,
        hysteresis=hysteresis,
        hysteresis_reset="finite" if consecutive_hysteresis else "growth",
    )
