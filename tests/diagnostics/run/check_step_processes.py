"""`check_step` in one of two processes: parameters and batch are split over both."""

import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jmp_scale.diagnostics import check_step

PORT, INDEX = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, INDEX, initialization_timeout=60)
MESH = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


def split(x):
    spec = PartitionSpec("data") if np.ndim(x) else PartitionSpec()
    sharding = NamedSharding(MESH, spec)
    return jax.make_array_from_callback(
        np.shape(x), sharding, lambda i: np.asarray(x)[i]
    )


def main():
    from check_step_cases import copies, step_of, unscaled_twice  # computes arrays

    right, twice = step_of(), step_of(change=unscaled_twice)
    for step, args in (right, twice, copies(mistake="not selected")):
        found = check_step(step, *jax.tree.map(split, args))
        print([finding.rule for finding in found.findings], found.not_checked)


main()
