"""`sum_gradients`: communicates half precision and adds in float32.

Each of n devices computes the sum of an n-th of each leaf:

    part   = the leaf on this device, rounded once, and cut into n
    share  = float32 sum of the n parts that the devices send (all-to-all)
    sum    = all shares, rounded once more (all-gather), or the own share, unrounded

So no error grows with n, and 2 + 2 bytes an element are communicated; 2 if each device
needs its own share only.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from .. import _mesh
from .._policy import name_to_dtype
from .._tree import are_next_values, is_array, is_inexact, promote_to_float32
from .._types import KeyPath, Mesh, PyTree

T = TypeVar("T")

# Elements per device below which a leaf is added in float32, because the latency of two
# collectives costs more than its bytes.
SMALLEST = 1024
WIRES = (jnp.bfloat16, jnp.float16, jnp.float32)


def sum_gradients(
    grads: T,
    axis_name: _mesh.AxisName = None,
    *,
    like: PyTree = None,
    wire: DTypeLike = "bfloat16",
    mean: bool = False,
) -> T:
    """Adds up gradients over devices: half precision communicated, float32 sums.

    Use it once a step, after `unscale`, where the step waits for communication: on
    GPUs, between hosts, and between TPU slices. Within one TPU slice `lax.psum` is
    faster, because casts and sums take longer than the bytes that they save.

    Of independent gradients the norm of the error is at most 2.8e-3 of the norm of the
    sum in bfloat16 and 3.5e-4 in float16, for any number of devices. That of a bfloat16
    all-reduce of the same bytes grows: 4e-3 with 8 devices, 1e-2 with 64.

    JAX must not have added up the gradients already:

    | where | gradients are each device's own |
    | --- | --- |
    | `shard_map(check_vma=False)`, `pmap` | always |
    | `shard_map(check_vma=True)` | if parameters vary, by `jax.lax.pcast` |
    | `jit`, Explicit mesh axes | if parameters are typed `reduced` over the axis |
    | `jit`, Auto mesh axes | never: use a `shard_map` |

    Leaves with fewer than 1,024 elements per device, and float64 and complex ones, are
    added in their own precision, at least float32. Results are bit-identical on all
    devices, and infinity and NaN stay not finite. Of Flax's float8 collection
    `_overwrite_with_gradient`, which holds next values, the result is the maximum.

    Args:
      grads: a pytree; leaves that are not arrays are returned unchanged.
      axis_name: mesh axes, a name or a tuple, over which to add up. None (default): the
        manual axes over which a leaf varies, or those over which it is `unreduced`.
        With tensor parallelism name the axis of the batch.
      like: parameters, or their `PartitionSpec`s or `NamedSharding`s. A gradient whose
        parameter is split over the axes (FSDP, ZeRO) is returned split, and is not
        gathered. None (default): all sums are whole.
      wire: dtype that is communicated, "bfloat16", "float16" or "float32". For float16
        each leaf is multiplied by a power of two of its own; elements below 2^-39 of
        the largest become 0.
      mean: whether the sum is divided by the number of devices.

    Returns:
      The sums (or means), with the dtypes of `grads`. Integers are added, not divided.
      On Explicit axes leaves that are not `unreduced` are sums, returned unchanged.

    Raises:
      TypeError: `axis_name`, or a leaf of `like`, has another type.
      ValueError: no such axis or `wire`; a leaf that JAX has added up already; `like`
        has another structure or shape; a `shard_map` over some axes only, where XLA
        would gather leaves that the others split.

    Source: Megatron-LM's `reduce_scatter_with_fp32_accumulation`; DeepSpeed's ZeRO++
    (Wang et al., 2023) adds up after an all-to-all too.
    """
    _mesh.agreement("sum_gradients", axis_name)  # refuses what is not a name
    sent = name_to_dtype.get(wire) if isinstance(wire, str) else wire
    if sent not in WIRES:
        raise ValueError(
            "sum_gradients: expected wire to be 'bfloat16', 'float16' or 'float32', "
            f"got {wire!r}"
        )
    names = None if axis_name is None else _mesh.names_of(axis_name)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    is_in_map = manual or (names and _are_bound(names))
    found, structure = jax.tree_util.tree_flatten_with_path(grads)
    has_parts = any(_mesh.unreduced_axes(leaf) for _, leaf in found)
    add = functools.partial(_total, wire=sent, mean=mean)

    def combined(
        leaf_at: tuple[KeyPath, PyTree], own_like: PyTree, is_next_value: bool
    ) -> PyTree:
        path, leaf = leaf_at
        if not is_array(leaf) or leaf.dtype == jax.dtypes.float0:
            return leaf
        name = jax.tree_util.keystr(path) or "(the whole tree)"
        gradient = _Gradient(name, jnp.asarray(leaf), _placement(name, own_like))
        combine = _largest if is_next_value else add
        if not is_in_map:
            return _sum_of_parts(gradient, names, combine, has_parts and not mean)
        if sent != jnp.float32:
            _refuse_other_axes(gradient)
        return _sum_in_map(gradient, names, combine)

    likes = _leaves_like(like, structure)
    sums = map(combined, found, likes, are_next_values(grads))
    return jax.tree.unflatten(structure, sums)


class _Gradient(NamedTuple):
    """A leaf, its name, and the array or spec whose sharding its sum gets, or None."""

    name: str
    array: jax.Array
    like: PyTree

    def error(self, expected: str, got: str, cure: str) -> ValueError:
        return ValueError(
            f"sum_gradients: expected {expected}, got {self.name} {got}; {cure}"
        )


class _Way(NamedTuple):
    """The axes that a leaf is summed over, and those that shard the sum."""

    axes: _mesh.Axes
    kept: _mesh.Axes = ()  # of the axes, those that split the sum
    dimension: int = 0  # that they split

    @property
    def gathered(self) -> _mesh.Axes:
        return tuple(axis for axis in self.axes if axis not in self.kept)


_Add = Callable[[jax.Array, _Way], jax.Array]


def _sum_in_map(gradient: _Gradient, names: _mesh.Axes | None, add: _Add) -> jax.Array:
    """Sums a leaf in a map, where each device holds its own."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if names is not None and not _are_bound(names):
        raise gradient.error(
            f"an axis_name of a map around the call, of {manual or 'none'}",
            f"over {names}",
            "write one of these, or leave it out",
        )
    axes = _mesh.disagreeing_axes(gradient.array) if names is None else names
    if names != ():
        _require_own(gradient, axes)
    return add(gradient.array, _way_in_map(gradient, axes))


def _require_own(gradient: _Gradient, axes: _mesh.Axes) -> None:
    """Raises an error for a leaf that JAX has added up over the axes."""
    known = _mesh.varying_axes(gradient.array)
    is_tracked = not axes or _mesh.varying_axes(lax.axis_index(axes))
    if is_tracked and not (axes and known.issuperset(axes)):
        over = axes or jax.sharding.get_abstract_mesh().manual_axes
        raise gradient.error(
            f"each device's own gradients over {over}",
            "which JAX has added up already",
            f"write jax.lax.pcast(params, {over!r}, to='varying') (in jax 0.8 pvary) "
            "and take the gradient of that, or let shard_map add up, in the dtype of "
            "the computation",
        )


def _sum_of_parts(
    gradient: _Gradient, names: _mesh.Axes | None, add: _Add, may_be_sum: bool
) -> jax.Array:
    """Sums a leaf that is `unreduced`. Others are sums already."""
    total = gradient.array
    sharding: NamedSharding = jax.typeof(total).sharding
    axes = _mesh.unreduced_axes(total)
    kind = getattr(sharding.spec, "unreduced_kind", None)  # since jax 0.12
    if kind is not None and kind.name != "sum":
        raise gradient.error(
            "parts of a sum",
            f"unreduced over {axes} by {kind.name}",
            "jax.sharding.reshard it to the parameters' shardings",
        )
    _require_axes(gradient, axes, names, may_be_sum)
    spec = _spec_like(gradient)
    if spec is not None:
        _check_split(gradient, spec, sharding.mesh)
    if axes:
        way = _way_of_spec(spec or PartitionSpec(), axes) or _Way(axes)
        total = jax.shard_map(
            lambda part: add(part, way),
            mesh=sharding.mesh,
            in_specs=sharding.spec,
            out_specs=_spec_of_sum(sharding.spec, way),
            check_vma=False,
        )(total)
    if spec is None or sharding.mesh.empty:
        return total
    # A sum that could not be made in shares is cut here.
    return jax.sharding.reshard(total, NamedSharding(sharding.mesh, spec))


def _require_axes(
    gradient: _Gradient, axes: _mesh.Axes, names: _mesh.Axes | None, may_be_sum: bool
) -> None:
    """Raises an error for a leaf that is unreduced over other axes than `names`."""
    is_wanted = set(axes) == set(names or axes) if axes else may_be_sum
    if not is_wanted:
        raise gradient.error(
            f"each device's own gradients over {names or 'an axis'}",
            f"unreduced over {axes}" if axes else "which JAX has added up already",
            "take gradients in a shard_map over the axis of the batch, or on "
            "Explicit axes of parameters that are typed reduced over it; a mean is "
            "of such leaves alone",
        )


def _spec_like(gradient: _Gradient) -> PartitionSpec | None:
    """Returns how a parameter is split, whether or not it is typed `reduced`."""
    like = gradient.like
    if like is not None and not isinstance(like, PartitionSpec):
        like = jax.typeof(like).sharding.spec
    return None if like is None else PartitionSpec(*_mesh.dimensions(like))


def _total(x: jax.Array, way: _Way, wire: DTypeLike | None, mean: bool) -> jax.Array:
    """Returns the sum over the devices that hold `x`, or this device's share of it."""
    dtype, count = x.dtype, lax.axis_size(way.axes)
    has_fractions = is_inexact(x)
    x = promote_to_float32(x)
    is_sent = x.dtype == jnp.float32 and wire != jnp.float32 and count > 1
    if is_sent and _is_worth_its_wire(x, way, count):
        total = _half_on_the_wire(x, way, wire, count)
    elif way.kept:
        dimension = way.dimension
        total = lax.psum_scatter(x, way.kept, scatter_dimension=dimension, tiled=True)
        total = lax.psum(total, way.gathered)
    else:
        total = lax.psum(x, way.axes)
    if mean and has_fractions:
        total = total * (1 / count)
    return total.astype(dtype)


def _is_worth_its_wire(x: jax.Array, way: _Way, count: int) -> bool:
    has_shares = not way.kept or x.shape[way.dimension] % count == 0
    return has_shares and x.size >= count * SMALLEST


def _largest(x: jax.Array, way: _Way) -> jax.Array:
    """Returns the maximum over the devices that hold `x`, or this device's share."""
    if is_inexact(x):
        # As infinity a NaN is the largest, also where a collective ignores NaNs.
        x = jnp.where(jnp.isnan(x), jnp.inf, x)
    largest = lax.pmax(x, way.axes)
    if not way.kept:
        return largest
    size = x.shape[way.dimension] // lax.axis_size(way.kept)
    start = lax.axis_index(way.kept) * size
    return lax.dynamic_slice_in_dim(largest, start, size, way.dimension)


def _half_on_the_wire(
    x: jax.Array, way: _Way, wire: DTypeLike | None, count: int
) -> jax.Array:
    axes = (*way.kept, *way.gathered)
    up, back, room = 1.0, 1.0, 1.0
    if wire == jnp.float16:
        up, back = _powers_of_two(x, axes)
        # A sum of n numbers up to 2^15 has to fit into a float16.
        room = 2.0 ** -math.ceil(math.log2(count))
    # Along a dimension that divides: a TPU lays out a flat array anew.
    dividing = (at for at, size in enumerate(x.shape) if size % count == 0)
    where = way.dimension if way.kept else next(dividing, None)
    whole = x * up
    if where is None:
        whole = jnp.pad(whole.ravel(), (0, -x.size % count))
    at = where or 0
    shape = whole.shape
    parts = whole.reshape(*shape[:at], count, shape[at] // count, *shape[at + 1 :])
    parts = jnp.moveaxis(parts, at, 0).astype(wire)
    # With tiled=True a TPU takes seven times as long.
    parts = lax.all_to_all(parts, axes, split_axis=0, concat_axis=0)
    total = parts.astype(jnp.float32).sum(axis=0)
    if way.gathered:
        total = _mesh.all_gather((total * room).astype(wire), way.gathered, at)
        total = total.astype(jnp.float32) / room
    total = total * back
    return total if where is not None else total[: x.size].reshape(x.shape)


def _powers_of_two(x: jax.Array, axes: _mesh.Axes) -> tuple[jax.Array, jax.Array]:
    """Returns powers of two that take the largest finite entry to 2^14, and back."""
    largest = lax.pmax(jnp.where(jnp.isfinite(x), jnp.abs(x), 0).max(), axes)
    exponent = lax.bitcast_convert_type(largest, jnp.int32) >> 23  # 127 is that of 1
    up = jnp.minimum(127 + 14 + 127 - exponent, 253)  # both powers are normal numbers
    powers = [power << 23 for power in (up, 254 - up)]
    up, back = (lax.bitcast_convert_type(bits, jnp.float32) for bits in powers)
    return up, back


def _way_in_map(gradient: _Gradient, axes: _mesh.Axes) -> _Way:
    """Whether the sum is whole or a share: what `like` is, by its spec or its shape."""
    like, shape = gradient.like, gradient.array.shape
    if like is None:
        return _Way(axes)
    if isinstance(like, PartitionSpec):
        way = _way_of_spec(like, axes)
    else:
        way = _way_of_shape(tuple(like.shape), shape, axes)
    if way is None:
        raise gradient.error(
            f"like to be split along one dimension, over {axes} or one of them, last",
            f"of shape {shape} and like {getattr(like, 'shape', like)}",
            "give the parameters of this map, or their PartitionSpecs; of a leaf that "
            "is split along two dimensions, add up over one axis after the other",
        )
    if way.kept:
        _check_equal_parts(gradient, way.dimension, lax.axis_size(way.kept))
    return way


def _check_split(gradient: _Gradient, spec: PartitionSpec, mesh: Mesh) -> None:
    for dimension, part in enumerate(_mesh.dimensions(spec)):
        count = math.prod(mesh.shape[name] for name in _mesh.names_of(part))
        if count > 1:
            _check_equal_parts(gradient, dimension, count)


def _check_equal_parts(gradient: _Gradient, dimension: int, count: int) -> None:
    """Raises an error that names the leaf, which JAX's does not."""
    shape = gradient.array.shape
    if dimension >= len(shape) or shape[dimension] % count:
        raise gradient.error(
            f"like to split dimension {dimension} into {count} equal parts",
            f"of shape {shape}",
            "give a PartitionSpec of another dimension, or PartitionSpec() for all",
        )


def _way_of_spec(spec: PartitionSpec, axes: _mesh.Axes) -> _Way | None:
    """Returns None if several dimensions are split, or other axes split a share."""
    way = _Way(axes)
    for at, part in enumerate(_mesh.dimensions(spec)):
        names = _mesh.names_of(part)
        kept = tuple(name for name in names if name in axes)
        if kept and (way.kept or names[-len(kept) :] != kept):
            return None
        way = _Way(axes, kept, at) if kept else way
    return way


def _way_of_shape(
    share: tuple[int, ...], whole: tuple[int, ...], axes: _mesh.Axes
) -> _Way | None:
    """Returns None if a share is not an equal part of one dimension and of the axes."""
    if share == whole:
        return _Way(axes)
    choices = {axes, *((axis,) for axis in axes)}
    ways = [
        _Way(axes, kept, at)
        for kept in choices
        for at, size in enumerate(share)
        if (*share[:at], size * lax.axis_size(kept), *share[at + 1 :]) == whole
    ]
    return ways[0] if len(ways) == 1 else None


def _spec_of_sum(spec: PartitionSpec, way: _Way) -> PartitionSpec:
    parts = list(_mesh.dimensions(spec))
    if way.kept:
        parts += [None] * (way.dimension + 1 - len(parts))
        parts[way.dimension] = (*_mesh.names_of(parts[way.dimension]), *way.kept)
    return PartitionSpec(*parts)


def _leaves_like(like: PyTree, structure: PyTree) -> list[PyTree]:
    """Returns the leaves of `like`, one for each of the gradients."""
    if like is None:
        return [None] * structure.num_leaves
    try:
        return structure.flatten_up_to(like)
    except ValueError as error:
        raise ValueError(
            "sum_gradients: expected like to have the structure of grads, "
            f"{structure}, got {like!r}: {error}"
        ) from None


def _placement(name: str, like: PyTree) -> PyTree:
    """Returns the array or spec whose placement a leaf gets, or None."""
    like = like.spec if isinstance(like, NamedSharding) else like
    if like is None or isinstance(like, PartitionSpec) or hasattr(like, "shape"):
        return like
    raise TypeError(
        "sum_gradients: expected like to have a parameter, a PartitionSpec or a "
        f"NamedSharding for {name}, got {like!r}"
    )


def _are_bound(names: _mesh.Axes) -> bool:
    try:
        lax.axis_size(names)
    except NameError:
        return False
    return True


def _refuse_other_axes(gradient: _Gradient) -> None:
    """Refuses leaves split over axes that are not manual, which XLA would gather."""
    mesh = jax.sharding.get_abstract_mesh()
    spec = jax.typeof(gradient.array).sharding.spec
    names = _mesh.named_axes(spec)  # Auto axes do not tell
    others = [a for a in mesh.auto_axes if mesh.shape[a] > 1]
    others += [a for a in mesh.explicit_axes if a in names]
    if mesh.manual_axes and others:
        raise gradient.error(
            "a map over all mesh axes",
            f"in one over {mesh.manual_axes} alone, where {tuple(others)} may split it",
            "return g[None] from this map, out_specs=PartitionSpec('data') for the "
            "axis of the batch, and add up g[0] in a second shard_map over all axes",
        )
