"""The processes of `multihost.py`: their command line, their devices, their reports."""

import hashlib
import os
import pathlib

import _show
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

# Set by Open MPI's mpirun (as in Azure ML), Slurm's srun, Kubernetes' indexed jobs.
LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_ID", "JOB_COMPLETION_INDEX")


def command_line(description):
    number, parser = _show.positive_int, _show.parser(description, 300, seed=True)
    add = parser.add_argument
    add("--period", type=number, default=50, help="finite steps until S grows (50)")
    add("--overflow-at", type=int, nargs="*", default=[70, 71, 180], help="steps")
    add("--checkpoint-dir", type=pathlib.Path, help="of all processes (no checkpoints)")
    add("--save-every", type=number, default=50, help="steps (50)")
    add("--resume", action="store_true", help="from the last checkpoint, if any")
    add("--coordinator", metavar="HOST:PORT", help="address of process 0, by hand")
    add("--num-processes", type=number, default=1, help="by hand (1)")
    add("--process-id", type=int, default=0, help="by hand: 0 to num-processes - 1 (0)")
    add("--heartbeat-timeout", type=number, default=30, help="seconds (30)")
    add("--cpu-devices", type=number, default=1, help="virtual, of each process (1)")
    return parser


def start_jax(args):
    """Joins the other processes, if any; called before JAX looks for devices."""
    jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    timeout = {"heartbeat_timeout_seconds": args.heartbeat_timeout}
    if args.coordinator:
        by_hand = args.coordinator, args.num_processes, args.process_id
        jax.distributed.initialize(*by_hand, **timeout)
    elif any(name in os.environ for name in LAUNCHERS):
        jax.distributed.initialize(**timeout)


def all_devices():
    """The sharding of what lies on all devices, and a function that divides a batch."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    divided = NamedSharding(mesh, P("data"))

    def on_devices(x):
        """The global array of which each process holds its own devices' part."""
        return jax.make_array_from_callback(x.shape, divided, lambda part: x[part])

    return NamedSharding(mesh, P()), on_devices


def report(state, scales, first):
    """One line of S and one of the weights from every process, to be compared."""
    changes = [
        f"{first + i}:{_show.power(s)}"
        for i, s in enumerate(scales)
        if i == 0 or s != scales[i - 1]
    ]
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        digest.update(np.asarray(leaf).tobytes())
    who = f"process {jax.process_index()} of {jax.process_count()}"
    skipped = int(state[1].skipped)
    print(f"{who}: S history (step:S) {' '.join(changes)}")
    print(f"{who}: skipped {skipped}, sha256 of the state {digest.hexdigest()}")
