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

from ._others import flax as flax
from ._others import jmp as jmp
from ._others import keras as keras
from ._others import mindspore as mindspore
from ._others import mpx as mpx
from ._others import paddle as paddle
from ._others import tensorflow as tensorflow
from ._others import tf_keras as tf_keras
from ._pytorch import apex as apex
from ._pytorch import cerebras as cerebras
from ._pytorch import colossalai as colossalai
from ._pytorch import deepspeed as deepspeed
from ._pytorch import fairseq as fairseq
from ._pytorch import megatron as megatron
from ._pytorch import pytorch as pytorch


def __dir__() -> list[str]:
    # Without the submodules, so that completion shows the presets and nothing else.
    names = list(globals())
    return [name for name in names if name.startswith("__") or not name.startswith("_")]
