"""Where a transformer's arrays lie on the devices of a mesh.

The batch is split over the axis `data`, layers are over the axis `model`.
"""

from typing import Any, NamedTuple

import jax
from compilers import targets
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import Model, Transformer, transformer

MODEL_DEVICES = 4  # that share a layer

# The dimension of a weight that is split over `model`, from the last.
COLUMNS = {"q": -1, "k": -1, "v": -1, "up": -1}
SPLIT = COLUMNS | {"o": -2, "down": -2}


class Layout(NamedTuple):
    """How a model is dealt out, besides the batch.

    Attributes:
      fsdp: parameters are split over `data`.
      tensor_parallel: weights and the vocabulary are split over `model`.
      shard_map: the program is that of one device, and averages gradients itself.
    """

    fsdp: bool = False
    tensor_parallel: bool = False
    shard_map: bool = False

    def mesh(self, target: targets.Target) -> Mesh:
        shared = MODEL_DEVICES if self.tensor_parallel else 1
        axes = {"data": target.chips // shared}
        return target.mesh_of(axes | ({"model": shared} if shared > 1 else {}))

    def model(self, sizes: Transformer, mesh: Mesh, *, scanned: bool) -> Model:
        """Pins the stream of a scan, which XLA does not place well by itself."""
        if not scanned or self.shard_map:
            return transformer(sizes, scanned=scanned)
        sharding = NamedSharding(mesh, P("data", None, None))
        pin = lambda x: lax.with_sharding_constraint(x, sharding)  # noqa: E731
        return transformer(sizes, scanned=scanned, stream=pin)

    def place(self, params: Any, mesh: Mesh) -> Any:
        """Types of the parameters with their shardings."""

        def place_leaf(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
            names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
            return placed(leaf, mesh, *self._axes(names, leaf.shape, mesh))

        return jax.tree_util.tree_map_with_path(place_leaf, params)

    def _axes(self, names: list[str], shape: Any, mesh: Mesh) -> list[str | None]:
        """The axis that each dimension of a parameter is split over."""
        axes: list[str | None] = [None] * len(shape)
        *_, layer, name = ["", *names]
        if self.tensor_parallel and name == "tokens":
            axes[0] = "model"
        elif self.tensor_parallel and (name == "kernel" or layer in COLUMNS):
            axes[SPLIT[layer]] = "model"
        if self.fsdp:
            # A scan's layers, the first dimension, stay whole.
            first = int(names[0] == "layers" and not names[1].isdigit())
            free = [at for at in range(first, len(shape)) if axes[at] is None]
            fits = [at for at in free if shape[at] % mesh.shape["data"] == 0]
            if fits:
                axes[max(fits, key=lambda at: (shape[at], at))] = "data"
        return axes


LAYOUTS = {
    "DP": Layout(),
    "FSDP": Layout(fsdp=True),
    "TP": Layout(tensor_parallel=True),
    "FSDPxTP": Layout(fsdp=True, tensor_parallel=True),
    "shard_map": Layout(shard_map=True),
}


def placed(leaf: Any, mesh: Mesh, *axes: str | None) -> jax.ShapeDtypeStruct:
    """A type with its sharding."""
    sharding = NamedSharding(mesh, P(*axes))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
