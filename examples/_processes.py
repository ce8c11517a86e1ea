"""The command line of `multihost.py`, and what each of its processes reports."""

import hashlib
import pathlib

import _show
import jax
import numpy as np


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
