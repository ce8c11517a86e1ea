"""Mesh axes: finds where devices may disagree, and makes them agree."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from ._types import Function, Mesh, PyTree

T = TypeVar("T")
AxisName = str | Sequence[str] | None
Axes = tuple[str, ...]
Specs = tuple[PartitionSpec, ...]  # of the leaves

# Maps a reduction (`lax.pmin`, `lax.pmax`) and a number that may differ between devices
# to a number that is equal on all of them.
Agreement = Callable[[Function, jax.Array], jax.Array]


def agreement(function: str = "", axis_name: AxisName = None) -> Agreement:
    """Returns an agreement over the `axis_name` of `all_finite`."""
    # A set is refused: its order differs between processes, and so would the programs.
    is_valid = isinstance(axis_name, (str, tuple, list, type(None)))
    if not is_valid or not all(isinstance(name, str) for name in names_of(axis_name)):
        raise TypeError(
            f"{function}: expected axis_name to be the name of a mesh axis, a tuple of "
            f"names, or None, got {axis_name!r}; write axis_name=('data', 'model')"
        )

    # Reductions are minimum and maximum: a sum would count an equal number once per
    # device, and JAX does not know that all_gather's result is equal on all of them.
    def agree(reduction: Function, x: jax.Array) -> jax.Array:
        axes = disagreeing_axes(x) if axis_name is None else names_of(axis_name)
        return reduction(x, axes) if axes else x

    return agree


def reshard_like(x: PyTree, like: PyTree) -> PyTree:
    """Gives `x` the sharding of `like`, if types have one (Explicit mesh axes)."""
    if not (isinstance(x, jax.Array) and isinstance(like, jax.Array)):
        return x
    got, wanted = jax.typeof(x).sharding, jax.typeof(like).sharding
    # Otherwise a state on Explicit axes would get the sharding of the gradients.
    if x.shape != like.shape or wanted.mesh.empty or got.spec == wanted.spec:
        return x
    return jax.sharding.reshard(x, wanted)


def if_on_one_device(
    alone: Callable[[PyTree], T], sharded: Callable[[PyTree], T], arrays: PyTree
) -> T:
    """Returns `alone(arrays)` if all lie on one device, else `sharded(arrays)`."""
    mesh = _mesh_of(jax.tree.leaves(arrays))
    if mesh.empty:
        return lax.cond(_is_for_one_device.bind(), alone, sharded, arrays)
    # XLA partitions the arrays along any axis that is not manual. Over manual axes they
    # are the shards of one device.
    is_alone = mesh.size == 1 or set(mesh.manual_axes) == set(mesh.axis_names)
    return (alone if is_alone else sharded)(arrays)


# It becomes a constant, bool[], in lowering; XLA then removes the untaken branch.
_is_for_one_device = Primitive("is_for_one_device")
_is_for_one_device.def_impl(lambda: np.True_)
_is_for_one_device.def_abstract_eval(lambda: ShapedArray((), np.dtype(bool)))


def _lower_is_for_one_device(context: mlir.LoweringRuleContext) -> Any:
    devices = getattr(context.module_context.axis_context, "num_devices", None)
    constant = mlir.lower_fun(lambda: jnp.array(devices == 1), multiple_results=False)
    return constant(context)


mlir.register_lowering(_is_for_one_device, _lower_is_for_one_device)


def sharding_specs(leaves: Sequence[jax.Array]) -> Specs:
    """Returns the specs in the leaves' types: empty except on Explicit mesh axes."""
    return tuple(jax.typeof(leaf).sharding.spec for leaf in leaves)


def on_shards(
    fun: Callable[[Sequence[jax.Array], Axes], jax.Array],
    leaves: Sequence[jax.Array],
    specs: Specs,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Returns `fun(shards, axes)`, which reduces over the axes that `specs` name."""
    # All devices have the same answer over axes that shard no leaf.
    axes = {axis for spec in specs for axis in named_axes(spec)}
    if not axes:
        return fun(leaves, ())
    mesh = _mesh_of(leaves) if mesh is None else mesh
    # In the order of the mesh, because that of a set differs between processes.
    ordered = tuple(axis for axis in mesh.axis_names if axis in axes)
    # `shard_map` takes unreduced arrays only with check_vma=False.
    has_parts = any(spec.unreduced for spec in specs)
    return jax.shard_map(
        lambda *shards: fun(shards, ordered),
        mesh=mesh,
        in_specs=specs,
        out_specs=PartitionSpec(),
        axis_names=axes,
        check_vma=not has_parts,
    )(*leaves)


def named_axes(spec: PartitionSpec) -> set[str]:
    """Returns the axes over which an array is split, or an unreduced sum."""
    split = {axis for part in dimensions(spec) for axis in names_of(part)}
    return split | set(spec.unreduced)


def dimensions(spec: PartitionSpec) -> tuple[AxisName, ...]:
    """Returns the entries of a spec. Newer JAX does not iterate an unreduced spec."""
    return spec.partitions if hasattr(spec, "partitions") else tuple(spec)


def unreduced_axes(leaf: PyTree) -> Axes:
    """Returns the mesh axes over which devices hold parts of a sum (Explicit axes)."""
    if not isinstance(leaf, jax.Array):
        return ()
    sharding: NamedSharding = jax.typeof(leaf).sharding
    axes = sharding.spec.unreduced
    return tuple(axis for axis in sharding.mesh.axis_names if axis in axes)


def on_parts(fun: Function, x: jax.Array, *others: jax.Array) -> jax.Array:
    """Returns `fun(x, *others)`, linear in x, also of each part of an unreduced x."""
    if not unreduced_axes(x):
        return fun(x, *others)
    # JAX has no rules for most operations on unreduced arrays.
    sharding: NamedSharding = jax.typeof(x).sharding
    manual = set(sharding.mesh.manual_axes)
    return jax.shard_map(
        fun,
        mesh=sharding.mesh,
        in_specs=tuple(jax.typeof(a).sharding.spec for a in (x, *others)),
        out_specs=sharding.spec,
        axis_names=set(sharding.mesh.axis_names) - manual,
        check_vma=False,
    )(x, *others)


def refuse_unreduced(function: str, grads: PyTree) -> None:
    """Raises an error if gradients are unreduced, because optimizers need the sum."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        if axes := unreduced_axes(leaf):
            raise ValueError(
                f"{function}: expected gradients that are added up over devices, got "
                f"{jax.tree_util.keystr(path) or '(the whole tree)'} unreduced over "
                f"{axes}; add them up first: jmp_scale.sum_gradients(grads, "
                "like=params), or jax.sharding.reshard to the parameters' shardings"
            )


def names_of(part: AxisName) -> Axes:
    """Returns the axes of an axis name, of several, or of an entry of a spec."""
    if part is None:
        return ()
    return (part,) if isinstance(part, str) else tuple(part)


def _mesh_of(leaves: Sequence[jax.Array]) -> Mesh:
    """Returns the mesh in the leaves' types, or the current one."""
    for leaf in leaves:
        if not (mesh := jax.typeof(leaf).sharding.mesh).empty:
            return mesh
    return jax.sharding.get_abstract_mesh()


def disagreeing_axes(flag: jax.Array) -> Axes:
    """Returns the manual axes over which `flag` may differ between devices."""
    # With check_vma=False and in pmap JAX does not track varying values: even the index
    # of the device counts as equal on all. There the flag is always reduced.
    known = varying_axes(flag)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(
        a for a in manual if a in known or a not in varying_axes(lax.axis_index(a))
    )


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Returns the manual axes over which the type of `x` says that it varies."""
    aval: Any = jax.typeof(x)
    if hasattr(aval, "manual_axis_type"):
        return aval.manual_axis_type.varying
    return aval.vma  # until jax 0.9


def all_gather(x: jax.Array, axes: Axes, dimension: int) -> jax.Array:
    """Concatenates all devices' shares; JAX knows that the result is equal on all."""
    if not varying_axes(x):
        return lax.all_gather(x, axes, axis=dimension, tiled=True)
    if gather := getattr(lax, "all_gather_invariant", None):  # until jax 0.8.1
        return gather(x, axes, axis=dimension, tiled=True)
    return lax.all_gather(x, axes, axis=dimension, tiled=True, to="invarying")
