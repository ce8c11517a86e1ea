"""Where a transformer's arrays lie on the devices of a mesh.

`data` is the axis of the batch, `model` that of tensor parallelism.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import _targets
import jax
from _models import Model, Transformer, transformer
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MODEL_DEVICES = 4  # of the axis `model`

# The dimension of a weight that is split over `model`, from the last.
COLUMNS = {"q": -1, "k": -1, "v": -1, "up": -1}
SPLIT = COLUMNS | {"o": -2, "down": -2}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model is dealt out; the batch always is.

    Attributes:
      fsdp: each parameter is split over `data`.
      tensor_parallel: weights and vocabulary are split over `model`.
      sequence_parallel: so are positions, between the parts of a block.
      shard_map: the program is that of one device, and averages gradients itself.
    """

    fsdp: bool = False
    tensor_parallel: bool = False
    sequence_parallel: bool = False
    shard_map: bool = False

    def mesh(self, target: _targets.Target, kind: AxisType = AxisType.Auto) -> Mesh:
        axes = {"data": target.chips}
        if self.tensor_parallel:
            axes = {"data": target.chips // MODEL_DEVICES, "model": MODEL_DEVICES}
        return target.mesh_of(axes, kind)

    def model(self, sizes: Transformer, mesh: Mesh, *, scanned: bool) -> Model:
        """Pins the stream of a scanned model, whose place XLA does not guess well."""
        pinned: Any = {}
        if self.sequence_parallel:
            pinned["stream"] = pin(mesh, "data", "model", None)
            pinned["branch"] = pin(mesh, "data", None, None)
        elif scanned and not self.shard_map:
            pinned["stream"] = pin(mesh, "data", None, None)
        return transformer(sizes, scanned=scanned, **pinned)

    def place(self, params: Any, mesh: Mesh) -> Any:
        """Types of the parameters, with their shardings."""

        def place_leaf(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
            names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
            return placed(leaf, mesh, *self._axes(names, leaf.shape, mesh))

        return jax.tree_util.tree_map_with_path(place_leaf, params)

    def _axes(self, names: list[str], shape: Any, mesh: Mesh) -> list[str | None]:
        """The axis of the mesh that each dimension of a parameter is split over."""
        axes: list[str | None] = [None] * len(shape)
        *_, layer, name = ["", *names]
        if self.tensor_parallel:
            if name == "tokens":
                axes[0] = "model"
            elif name == "kernel":
                axes[SPLIT[layer]] = "model"
            elif layer in COLUMNS:
                axes[-1] = "model"
        if self.fsdp:
            stacked = names[0] == "layers" and not names[1].isdigit()
            sizes = [
                (size, at)
                for at, size in enumerate(shape)
                if axes[at] is None and size % mesh.shape["data"] == 0
            ]
            sizes = [size for size in sizes if size[1] > 0 or not stacked]
            if sizes:
                axes[max(sizes)[1]] = "data"
        return axes


LAYOUTS = {
    "DP": Layout(),
    "FSDP": Layout(fsdp=True),
    "TP": Layout(tensor_parallel=True),
    "FSDPxTP": Layout(fsdp=True, tensor_parallel=True),
    "sequence": Layout(tensor_parallel=True, sequence_parallel=True),
    "shard_map": Layout(shard_map=True),
}


def placed(leaf: Any, mesh: Mesh, *axes: str | None) -> jax.ShapeDtypeStruct:
    """A type with its sharding."""
    sharding = NamedSharding(mesh, P(*axes))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def place_state(state: Any, params: Any, mesh: Mesh) -> Any:
    """Types of an optimizer's state: what looks like the parameters lies like them."""
    structure = jax.tree.structure(params)

    def is_like_params(tree: Any) -> bool:
        return jax.tree.structure(tree) == structure

    def place(tree: Any) -> Any:
        if not is_like_params(tree):
            return placed(tree, mesh)
        return jax.tree.map(
            lambda x, p: placed(x, mesh, *p.sharding.spec), tree, params
        )

    return jax.tree.map(place, state, is_leaf=is_like_params)


def pin(mesh: Mesh, *axes: str | None) -> Callable[[jax.Array], jax.Array]:
    """Says over which axes the dimensions of an array are split."""
    sharding = NamedSharding(mesh, P(*axes))
    if AxisType.Explicit in mesh.axis_types:
        return lambda x: jax.sharding.reshard(x, sharding)
    return lambda x: lax.with_sharding_constraint(x, sharding)
