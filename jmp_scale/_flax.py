"""Shared by `linen` and `nnx`: requires Flax, wraps optimizers, adds state dicts."""

import optax

from . import _pytree
from ._scaling.spike_guard import SpikeGuard
from ._scaling.transform import LossScaleTransformation, with_loss_scale
from ._state import LossScale

try:
    import flax.serialization  # noqa: F401  (`_pytree` looks for it)
except ImportError as error:
    raise ImportError(
        "jmp_scale.linen and jmp_scale.nnx need Flax: pip install 'flax>=0.12'"
    ) from error


def wrap_once(
    function: str,
    tx: optax.GradientTransformation,
    loss_scale: LossScale | None,
    guard: SpikeGuard | None,
) -> LossScaleTransformation:
    """Wraps `tx` in `with_loss_scale`; returns it as it is if it is wrapped already."""
    if not isinstance(tx, LossScaleTransformation):
        return with_loss_scale(tx, loss_scale, guard=guard)
    for name, value in {"loss_scale": loss_scale, "guard": guard}.items():
        if value is not None:
            raise ValueError(
                f"{function}: expected {name} in one place, got {name}={value!r} and a "
                "tx that is already wrapped in with_loss_scale; give it there"
            )
    return tx


for _cls in _pytree.Pytree.subclasses:
    _pytree.register_state_dict(_cls)  # objects may be from before Flax was imported
