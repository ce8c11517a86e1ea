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

import inspect
import math
from collections.abc import Callable
from typing import Any

from . import _validation
from ._scaling.loss_scale import DynamicLossScale
from ._validation import LARGEST, SMALLEST, Arguments

Preset = Callable[..., DynamicLossScale]
Values = dict[str, Any]  # of arguments or fields, by name

# The frameworks' names of the fields of `DynamicLossScale`, if they differ.
_NAMES = {
    "loss_scale": "init_scale initial_scale initial_scale_power scale scale_value "
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
_REQUIRED = inspect.Parameter.empty


def _preset(name: str, source: str, defaults: Values, **fixed: Any) -> Preset:
    """Returns the function of a row: its source, its arguments with their defaults.

    `fixed` are fields of `DynamicLossScale` that the framework fixes, or `grows_late`.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature(
        [inspect.Parameter(k, kind, default=x) for k, x in defaults.items()],
        return_annotation=DynamicLossScale,
    )

    def preset(*args: Any, **kwargs: Any) -> DynamicLossScale:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return _dynamic(name, given.arguments, **fixed)

    preset.__name__ = preset.__qualname__ = name
    preset.__doc__ = f"Returns the loss scale of {source}."
    preset.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return preset


def _dynamic(
    preset: str, given: Values, grows_late: bool = False, **fixed: Any
) -> DynamicLossScale:
    """Creates the loss scale of a preset; errors name the framework's arguments.

    With `at_max="clamp"` an initial S beyond the floor or cap is clamped; otherwise it
    is an error. With `grows_late` the counter is compared before it is incremented.
    """
    names = {_FIELDS.get(word, word): word for word in given}
    arguments = Arguments(f"presets.{preset}", names)
    # A preset without a floor or cap in its arguments and fields has none.
    no_ends = {"min_loss_scale": 0.0, "max_loss_scale": math.inf}
    fields = vars(DynamicLossScale) | no_ends | fixed
    for field, word in names.items():
        fields[field] = no_ends.get(field) if given[word] is None else given[word]
    if preset == "cerebras" and fields["loss_scale"] is None:
        fields["loss_scale"] = fields["max_loss_scale"]
    numbers = ("loss_scale", "min_loss_scale", "max_loss_scale")
    s, floor, cap = (arguments.number(name, fields[name]) for name in numbers)
    if preset == "deepspeed":
        arguments.require(abs(s) <= 126, "loss_scale", s, "in [-126, 126]")
        is_refilled = fields["hysteresis_reset"]
        fields["hysteresis_reset"] = "finite" if is_refilled else "growth"
        s = 2.0**s
    if fields["at_max"] == "clamp" and s > 0:
        s = min(max(s, floor), cap, LARGEST)
    allowed = "a finite number > 0"
    arguments.require(0 < s < math.inf, "loss_scale", fields["loss_scale"], allowed)
    if cap > LARGEST:
        cap, fields["at_max"] = LARGEST, "hold"
    if grows_late:
        fields["period"] = arguments.integer("period", fields["period"], 0) + 1
    s = min(max(s, SMALLEST), LARGEST)
    fields |= {"loss_scale": s, "min_loss_scale": floor, "max_loss_scale": cap}
    rule = _validation.rule(arguments, fields)
    ends = rule["min_loss_scale"], rule["max_loss_scale"]
    _validation.float32_leaf(arguments, s, *ends)
    return DynamicLossScale(s, **rule)


# The table: a framework's class, its arguments and defaults, and our fields that it
# fixes. `docs/api/presets.md` says what is particular to each.
_FACTORS = {"growth_factor": 2.0, "backoff_factor": 0.5}

pytorch = _preset(
    "pytorch",
    "PyTorch's `torch.amp.GradScaler` (2.13)",
    {"init_scale": 2.0**16, **_FACTORS, "growth_interval": 2000},
)
apex = _preset(
    "apex",
    "NVIDIA Apex's `apex.amp`, dynamic (`apex/amp/scaler.py`, its last version)",
    {"init_scale": 2.0**16, "scale_window": 2000}
    | {"min_loss_scale": None, "max_loss_scale": 2.0**24},
    at_max="clamp",
)
deepspeed = _preset(
    "deepspeed",
    "DeepSpeed's `DynamicLossScaler`, the `fp16` section of its configuration",
    {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2}
    | {"consecutive_hysteresis": False, "min_loss_scale": 1.0},
    growth_delay=1,
)
megatron = _preset(
    "megatron",
    "Megatron-LM's `DynamicGradScaler` (`--initial-loss-scale`, ...)",
    {"initial_scale": 2.0**32, "min_scale": 1.0, **_FACTORS}
    | {"growth_interval": 1000, "hysteresis": 2},
)
colossalai = _preset(
    "colossalai",
    "ColossalAI's `DynamicGradScaler`",
    {"initial_scale": 2.0**16, **_FACTORS, "growth_interval": 1000}
    | {"min_scale": None, "max_scale": None, "hysteresis": 2},
    at_max="clamp",
)
fairseq = _preset(
    "fairseq",
    "fairseq's `DynamicLossScaler`, with the class's defaults",
    {"init_scale": 2.0**15, "scale_factor": 2.0}
    | {"scale_window": 2000, "threshold": None},
)
cerebras = _preset(
    "cerebras",
    'Cerebras\' `cstorch.amp.GradScaler` (2.10), `loss_scale="dynamic"`',
    {"initial_loss_scale": None, "steps_per_increase": 2000}
    | {"min_loss_scale": 2.0**-14, "max_loss_scale": 2.0**15},
    at_max="clamp",
    grows_late=True,
)
keras = _preset(
    "keras",
    "Keras 3's `keras.optimizers.LossScaleOptimizer` (3.15)",
    {"initial_scale": 2.0**15, "dynamic_growth_steps": 2000},
)
tf_keras = _preset(
    "tf_keras",
    "Keras 2's `LossScaleOptimizer` (tf_keras 2.21)",
    {"initial_scale": 2.0**15, "dynamic_growth_steps": 2000},
    min_loss_scale=1.0,
)
tensorflow = _preset(
    "tensorflow",
    "TensorFlow 1's `tf.compat.v1.mixed_precision.DynamicLossScale` (2.21)",
    {"initial_loss_scale": 2.0**15, "increment_period": 2000, "multiplier": 2.0},
    min_loss_scale=1.0,
)
paddle = _preset(
    "paddle",
    "PaddlePaddle's `paddle.amp.GradScaler` (3.3, dynamic graph)",
    {"init_loss_scaling": 65536.0, "incr_ratio": 2.0, "decr_ratio": 0.5}
    | {"incr_every_n_steps": 2000, "decr_every_n_nan_or_inf": 1},
    hysteresis_reset="finite_or_backoff",
)
mindspore = _preset(
    "mindspore",
    "MindSpore's `mindspore.amp.DynamicLossScaler` (2.10), without defaults",
    dict.fromkeys(("scale_value", "scale_factor", "scale_window"), _REQUIRED),
    min_loss_scale=1.0,
)
flax = _preset(
    "flax",
    "Flax's `flax.training.dynamic_scale.DynamicScale` (0.12)",
    {**_FACTORS, "growth_interval": 2000}
    | {"scale": 65536.0, "minimum_scale": SMALLEST},
    grows_late=True,
)
jmp = _preset(
    "jmp",
    "jmp's `DynamicLossScale` (0.0.4)",
    {"loss_scale": _REQUIRED, "period": 2000, "factor": 2, "min_loss_scale": 1},
)
mpx = _preset(
    "mpx",
    "MPX's `DynamicLossScaling` (mixed_precision_for_jax 0.1.8)",
    dict.fromkeys(("loss_scaling", "min_loss_scaling"), _REQUIRED)
    | {"factor": 2, "period": 2000},
    max_loss_scale=65504.0,
    at_max="clamp",
)
