"""Mixed precision for JAX: autocast, and loss scaling for Optax and Flax."""

import typing as _typing

from . import diagnostics as diagnostics
from . import presets as presets
from ._autocast.autocast import autocast as autocast
from ._autocast.marks import in_half as in_half
from ._autocast.marks import keep_float32 as keep_float32
from ._half_storage.parameters import full_parameters as full_parameters
from ._half_storage.storage import with_half_storage as with_half_storage
from ._policy import Policy as Policy
from ._policy import cast_to_full as cast_to_full
from ._policy import cast_to_half as cast_to_half
from ._policy import get_policy as get_policy
from ._policy import half_dtype as half_dtype
from ._public import name_module as _name_module
from ._scaling.finite import all_finite as all_finite
from ._scaling.gradient_sums import sum_gradients as sum_gradients
from ._scaling.gradients import grad as grad
from ._scaling.gradients import value_and_grad as value_and_grad
from ._scaling.loss_scale import DynamicLossScale as DynamicLossScale
from ._scaling.loss_scale import NoOpLossScale as NoOpLossScale
from ._scaling.loss_scale import StaticLossScale as StaticLossScale
from ._scaling.loss_scale import adjust as adjust
from ._scaling.loss_scale import get_loss_scale as get_loss_scale
from ._scaling.loss_scale import scale as scale
from ._scaling.loss_scale import unscale as unscale
from ._scaling.spike_guard import SpikeGuard as SpikeGuard
from ._scaling.transform import with_loss_scale as with_loss_scale
from ._state import HalfStorageState as HalfStorageState
from ._state import LossScale as LossScale
from ._state import LossScaleState as LossScaleState
from ._tree import select_tree as select_tree

if not _typing.TYPE_CHECKING:  # which would take any name for one of the module
    from ._public import __getattr__ as __getattr__

__version__ = "0.2.0.dev0"
_name_module(globals())
