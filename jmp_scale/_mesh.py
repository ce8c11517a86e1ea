"""Mesh axes: where devices may disagree, and how they reach one answer."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

AxisName = str | Sequence[str] | None
Specs = tuple[PartitionSpec, ...]  # of the leaves

# Takes a reduction (`lax.pmin`: all agree, `lax.pmax`: the largest) and a number that
# may differ between devices, and returns what all of them go on with.
Agreement = Callable[[Callable[..., Any], jax.Array], jax.Array]


def agreement(function: str = "", axis_name: Any = None) -> Agreement:
    """An agreement over the `axis_name` of `all_finite`."""
    # A set is refused: its order differs between processes, and the program with it.
    is_valid = axis_name is None or isinstance(axis_name, (str, tuple, list))
    if not is_valid or not all(isinstance(name, str) for name in names_of(axis_name)):
        raise TypeError(
            f"{function}: expected axis_name to be the name of a mesh axis, a tuple of "
            f"names, or None, got {axis_name!r}; write axis_name='data' or "
            "axis_name=('data', 'model')"
        )

    # A minimum or maximum is idempotent: a sum counts an equal number once per device,
    # and the result of all_gather is not known to be equal, as out_specs=P() requires.
    def agree(reduction: Callable[..., Any], x: jax.Array) -> jax.Array:
        axes = disagreeing_axes(x) if axis_name is None else names_of(axis_name)
        return reduction(x, axes) if axes else x

    return agree


def reshard_like(x: Any, like: Any) -> Any:
    """`x` with the sharding of `like`, where that is a type (Explicit mesh axes)."""
    if not (isinstance(x, jax.Array) and isinstance(like, jax.Array)):
        return x
    got, wanted = jax.typeof(x).sharding, jax.typeof(like).sharding
    # Otherwise a state on Explicit axes gets the gradients' sharding, another type.
    if x.shape != like.shape or wanted.mesh.empty or got.spec == wanted.spec:
        return x
    return jax.sharding.reshard(x, wanted)


def if_on_one_device(
    alone: Callable[[Any], Any], sharded: Callable[[Any], Any], arrays: Any
) -> Any:
    """`alone(arrays)` if all arrays of a tree lie on one device, else `sharded`.

    The two give equal results; `alone` may use operations that XLA partitions badly.
    Inside `pmap` and `shard_map` over all mesh axes the arrays are a device's shards,
    so they lie on one. If their types name no mesh, it is decided in lowering.
    """
    mesh = _mesh_of(jax.tree.leaves(arrays))
    if mesh.empty:
        return lax.cond(_is_for_one_device.bind(), alone, sharded, arrays)
    # If some axis is not manual, XLA still partitions the arrays along it.
    is_alone = mesh.size == 1 or set(mesh.manual_axes) == set(mesh.axis_names)
    return (alone if is_alone else sharded)(arrays)


# bool[] constant in lowering; XLA removes the untaken branch.
_is_for_one_device = Primitive("is_for_one_device")
_is_for_one_device.def_impl(lambda: np.True_)
_is_for_one_device.def_abstract_eval(lambda: ShapedArray((), np.dtype(bool)))


def _lower_is_for_one_device(context: Any) -> Any:
    devices = getattr(context.module_context.axis_context, "num_devices", None)
    constant = mlir.lower_fun(lambda: jnp.array(devices == 1), multiple_results=False)
    return constant(context)


mlir.register_lowering(_is_for_one_device, _lower_is_for_one_device)


def sharding_specs(leaves: Sequence[Any]) -> Specs:
    """The leaves' own specs: empty except on Explicit mesh axes, which types show."""
    return tuple(jax.typeof(leaf).sharding.spec for leaf in leaves)


def on_shards(
    fun: Callable[[Sequence[jax.Array], tuple[Any, ...]], Any],
    leaves: Sequence[Any],
    specs: Specs,
    mesh: Any = None,
) -> Any:
    """What `fun` makes of the leaves' shards on each device, and joins over the axes.

    `fun` takes the shards and the mesh axes that the leaves' `specs` name (none: the
    shards are the leaves), and returns arrays that are equal on all devices.
    """
    # Only axes that shard a leaf: over the others all devices have the same answer.
    axes = {axis for spec in specs for axis in named_axes(spec)}
    if not axes:
        return fun(leaves, ())
    mesh = _mesh_of(leaves) if mesh is None else mesh
    # In the mesh's order: that of a set differs between processes, and the program.
    ordered = tuple(axis for axis in mesh.axis_names if axis in axes)
    # Parts of a sum that is not made yet are arrays like others only unchecked.
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
    """The axes over which an array is split, or a sum that is not made yet."""
    split = {axis for part in dimensions(spec) for axis in names_of(part)}
    return split | set(spec.unreduced)


def dimensions(spec: PartitionSpec) -> tuple[Any, ...]:
    """The parts of a spec. Newer JAX does not iterate one that is unreduced."""
    return spec.partitions if hasattr(spec, "partitions") else tuple(spec)


def unreduced_axes(leaf: Any) -> tuple[str, ...]:
    """The mesh axes over which an array is a sum that is not made yet.

    Only the types of Explicit axes say so: devices then hold parts of the sum.
    """
    if not isinstance(leaf, jax.Array):
        return ()
    sharding: Any = jax.typeof(leaf).sharding
    axes = sharding.spec.unreduced
    return tuple(axis for axis in sharding.mesh.axis_names if axis in axes)


def on_parts(fun: Callable[..., jax.Array], x: jax.Array, *others: Any) -> jax.Array:
    """`fun(x, *others)`, linear in x; of each device's part where x is unreduced.

    JAX has no rules for most operations on such arrays, jax 0.8 not even for a select.
    """
    if not unreduced_axes(x):
        return fun(x, *others)
    sharding: Any = jax.typeof(x).sharding
    manual = set(sharding.mesh.manual_axes)
    return jax.shard_map(
        fun,
        mesh=sharding.mesh,
        in_specs=tuple(jax.typeof(a).sharding.spec for a in (x, *others)),
        out_specs=sharding.spec,
        axis_names=set(sharding.mesh.axis_names) - manual,
        check_vma=False,
    )(x, *others)


def refuse_unreduced(function: str, grads: Any) -> None:
    """Raises for gradients that are not added up, of which optimizers make no sense."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        if axes := unreduced_axes(leaf):
            raise ValueError(
                f"{function}: expected gradients that are added up over devices, got "
                f"{jax.tree_util.keystr(path) or '(the whole tree)'} unreduced over "
                f"{axes}; add them up first: jmp_scale.sum_gradients(grads, "
                "like=params) sends half precision, jax.sharding.reshard to the "
                "shardings of the parameters float32"
            )


def replicated(fun: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`fun(x)` on every device, if JAX cannot infer its shardings on Explicit axes."""
    sharding: Any = jax.typeof(x).sharding
    if not named_axes(sharding.spec):
        return fun(x)
    out = jax.sharding.NamedSharding(sharding.mesh, PartitionSpec())
    on_auto_axes: Any = jax.sharding.auto_axes(fun, out_sharding=out)
    return on_auto_axes(x)


def names_of(part: Any) -> tuple[str, ...]:
    """The axes of an axis name, of several, or of one dimension of a PartitionSpec."""
    if part is None:
        return ()
    return (part,) if isinstance(part, str) else tuple(part)


def _mesh_of(leaves: Sequence[Any]) -> Any:
    meshes = [jax.typeof(leaf).sharding.mesh for leaf in leaves]
    return next(
        (mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh()
    )


def disagreeing_axes(flag: jax.Array) -> tuple[Any, ...]:
    """The manual axes over which devices may hold different values."""
    # With check_vma=False and in pmap JAX does not track what varies: even the device's
    # own index counts as equal everywhere. There the flag is always reduced.
    known = varying_axes(flag)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(
        a for a in manual if a in known or a not in varying_axes(lax.axis_index(a))
    )


def varying_axes(x: jax.Array) -> frozenset[Any]:
    aval: Any = jax.typeof(x)
    if hasattr(aval, "manual_axis_type"):
        return aval.manual_axis_type.varying
    return aval.vma  # until jax 0.9


def all_gather(x: jax.Array, axes: tuple[Any, ...], dimension: int) -> jax.Array:
    """All devices' shares one after the other, equal on all of them also for JAX."""
    if not varying_axes(x):
        return lax.all_gather(x, axes, axis=dimension, tiled=True)
    if _GATHERS_EQUAL:
        return lax.all_gather(x, axes, axis=dimension, tiled=True, to="invarying")
    # Until jax 0.9 only a sum was known to be equal: of shares among zeros.
    size = x.shape[dimension]
    shape = list(x.shape)
    shape[dimension] *= lax.axis_size(axes)
    start = lax.axis_index(axes) * size
    among_zeros = lax.dynamic_update_slice_in_dim(
        jnp.zeros(shape, x.dtype), x, start, dimension
    )
    return lax.psum(among_zeros, axes)


_GATHERS_EQUAL = "to" in inspect.signature(lax.all_gather).parameters
