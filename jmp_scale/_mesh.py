"""What differs between devices: manual mesh axes, and one answer for all of them.

The only module that calls JAX interfaces whose names drift between releases.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

AxisName = str | Sequence[str] | None


def agree(flag: jax.Array, axis_name: AxisName = None) -> jax.Array:
    """Logical AND of a boolean over mesh axes, so that every replica reads the same answer.

    Args:
      flag: bool[] (any shape works), possibly different on each device.
      axis_name: a name or names to reduce over; `()` to leave the flag local; None to reduce over
        every manual axis (`pmap`, `shard_map`) on which it may differ.

    Returns:
      bool of the same shape, equal along the reduced axes.
    """
    axes = _disagreeing_axes(flag) if axis_name is None else axis_name
    # pmin, since it is idempotent: psum counts an already equal flag once per device, and the
    # result of all_gather is not known to be equal, which out_specs=P() requires.
    return lax.pmin(flag, axes) if axes else flag


def on_shards(fun: Any, mesh: Any, specs: Sequence[PartitionSpec]) -> Any:
    """`fun` of the leaves' local shards, with a result that is equal on all devices."""
    return jax.shard_map(fun, mesh=mesh, in_specs=tuple(specs), out_specs=PartitionSpec())


def _disagreeing_axes(flag: jax.Array) -> tuple[Any, ...]:
    # With check_vma=False and in pmap JAX does not track what varies: even the device's own index
    # counts as equal everywhere. On such an axis nothing is known, so the flag is always reduced.
    known = _varying_axes(flag)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(a for a in manual if a in known or a not in _varying_axes(lax.axis_index(a)))


def _varying_axes(x: jax.Array) -> frozenset[Any]:
    aval: Any = jax.typeof(x)
    if hasattr(aval, "manual_axis_type"):
        return aval.manual_axis_type.varying
    return aval.vma  # until jax 0.9
