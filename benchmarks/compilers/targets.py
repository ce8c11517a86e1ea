"""Machines that are not there: JAX compiles for them, and nothing is run.

The compilers are the groups `tpu-compile` and `cuda-compile`; no driver, CUDA
toolkit or device is needed. `jax.experimental.topologies` is called here alone.
"""

import dataclasses
import functools
import importlib.util
import math
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# Figures of NVIDIA's data sheet of the H100 SXM and of the CUDA programming guide's
# table of compute capability 9.0, in the form in which XLA describes a GPU.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 85899345920
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

# What libtpu asks a cloud machine for, and its lock for a single process: without these
# it waits for the network, and a second test process aborts.
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

# On a GPU XLA tries Triton and cuBLAS for each product; without one it takes Triton for
# all, or, as `h100-cublas`, cuBLAS.
TARGETS = ("tpu-v5e", "tpu-v6e", "h100", "h100-cublas")
FORMS = {"h100": ("h100", "h100-cublas")}
GROUPS = {
    "tpu": ("tpu-compile", "libtpu"),
    "h100": ("cuda-compile", "jax_cuda12_plugin"),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """Chips of one kind that a program is compiled for."""

    name: str  # one of `TARGETS`
    chips: int = 1  # or a power of 4, or 8, for TPUs

    @functools.cached_property
    def mesh(self) -> Mesh:
        """All chips on one axis, `chips`."""
        return self.mesh_of({"chips": self.chips})

    def mesh_of(self, axes: dict[str, int], kind: AxisType = AxisType.Auto) -> Mesh:
        """All chips, on axes of these names and sizes."""
        devices = np.array(_devices(self.name, self.chips))[: self.chips]
        devices = devices.reshape(tuple(axes.values()))
        return Mesh(devices, tuple(axes), axis_types=(kind,) * len(axes))

    def placed(self, tree: Any) -> Any:
        """Types of the leaves, each sharded over its first dimension that divides."""
        return jax.tree.map(self._placed_leaf, tree)

    def replicated(self, tree: Any) -> Any:
        """Types of the leaves, of which each chip holds a copy."""
        sharding = NamedSharding(self.mesh, PartitionSpec())
        place = functools.partial(_placed, sharding=sharding)
        return jax.tree.map(place, tree)

    def _placed_leaf(self, leaf: Any) -> jax.ShapeDtypeStruct:
        sizes = [0 if size % self.chips else size for size in leaf.shape]
        where = sizes.index(max(sizes)) if any(sizes) else None
        divided = where is not None and self.chips > 1
        parts = [None] * where + ["chips"] if divided else []
        return _placed(leaf, NamedSharding(self.mesh, PartitionSpec(*parts)))


def _placed(leaf, sharding):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def is_gpu(name: str) -> bool:
    return name.startswith("h100")


def missing(name: str) -> str | None:
    """Why programs cannot be compiled for a target here, None if they can."""
    group, module = GROUPS["h100" if is_gpu(name) else "tpu"]
    if importlib.util.find_spec(module) is not None:
        return None
    return f"needs the compiler: pip install --group {group}"


@functools.cache
def _devices(name: str, chips: int) -> list[Any]:
    if is_gpu(name):
        hosts = max(1, chips // 8)
        shape = f"1x{hosts}x{chips // hosts}"
        kind = {"topology": shape, "target_config": H100}
        return list(topologies.get_topology_desc(platform="cuda", **kind).devices)
    for variable, value in TPU_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    side = max(2, math.isqrt(chips))
    shape = f"{name.removeprefix('tpu-')}:{side}x{max(side, chips // side)}"
    topology = topologies.get_topology_desc(platform="tpu", topology_name=shape)
    return list(topology.devices)
