"""One training on several processes: every one skips the same steps, and S is the same on all.

The digits autoencoder in float16, data-parallel over all devices of all processes, with Orbax checkpoints.
The same script runs alone, under a launcher that JAX knows, or by hand:

  python examples/multihost.py
  mpirun -n 2 python examples/multihost.py
  srun -n 2 python examples/multihost.py
  python examples/multihost.py --coordinator 127.0.0.1:9876 --num-processes 2 --process-id 0 &
  python examples/multihost.py --coordinator 127.0.0.1:9876 --num-processes 2 --process-id 1

At the steps of --overflow-at one image gets a weight of 2^40, so that the float16 gradients of the one
device that holds it overflow. When a process is lost, JAX ends the others within --heartbeat-timeout;
start all again with --resume, on as many processes as there are then.
"""

import argparse
import functools
import hashlib
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import (
    autoencoder,
    init_autoencoder,
    load_digits_split,
    policy_for,
    positive_int,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tqdm import tqdm

import jmp_scale

# Set by Open MPI's mpirun (an Azure ML MPI job is one), by Slurm's srun and for Kubernetes' indexed jobs.
LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_ID", "JOB_COMPLETION_INDEX")
BATCH_SIZE = 256


def main(argv=None):
    args = parse_args(argv)
    start_jax(args)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    tx = jmp_scale.with_loss_scale(
        optax.adam(5e-3), jmp_scale.DynamicLossScale(2.0**15, period=args.period)
    )

    # Placed as the step returns it, on all devices: or the second step would compile again.
    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec()))
    def init():
        params = init_autoencoder(args.seed)
        return params, tx.init(params)

    state, first_step, checkpoints = init(), 0, None
    if args.checkpoint_dir:
        checkpoints = open_checkpoints(args.checkpoint_dir, args.save_every)
        if args.resume and checkpoints.latest_step() is not None:
            first_step = checkpoints.latest_step()
            state = restore(checkpoints, first_step, state)
    state, loss_scales = fit(tx, state, mesh, first_step, checkpoints, args)
    report(state, loss_scales, first_step)
    if checkpoints:
        checkpoints.close()
    return state, loss_scales


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=positive_int, default=300, help="optimizer steps in total (300)"
    )
    parser.add_argument(
        "--period",
        type=positive_int,
        default=50,
        help="finite steps after which S grows (50)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the split, the start and the batches (0)",
    )
    parser.add_argument(
        "--overflow-at",
        type=int,
        nargs="*",
        default=[70, 71, 180],
        help="steps that overflow (70 71 180)",
    )
    parser.add_argument(
        "--checkpoint-dir",
        type=pathlib.Path,
        help="folder of all processes (no checkpoints)",
    )
    parser.add_argument(
        "--save-every",
        type=positive_int,
        default=50,
        help="steps from checkpoint to checkpoint (50)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="start from the last checkpoint, if any"
    )
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="address of process 0, by hand"
    )
    parser.add_argument("--num-processes", type=int, default=1, help="by hand (1)")
    parser.add_argument(
        "--process-id", type=int, default=0, help="by hand: 0 to num-processes - 1 (0)"
    )
    parser.add_argument(
        "--heartbeat-timeout",
        type=int,
        default=30,
        help="seconds until a lost process is noticed (30)",
    )
    parser.add_argument(
        "--cpu-devices",
        type=int,
        default=1,
        help="virtual CPU devices of each process (1)",
    )
    return parser.parse_args(argv)


def start_jax(args):
    """Joins the other processes, if there are any; to be called before JAX looks for devices."""
    jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    if args.coordinator:
        jax.distributed.initialize(
            args.coordinator,
            args.num_processes,
            args.process_id,
            heartbeat_timeout_seconds=args.heartbeat_timeout,
        )
    elif any(name in os.environ for name in LAUNCHERS):
        jax.distributed.initialize(heartbeat_timeout_seconds=args.heartbeat_timeout)


def fit(tx, state, mesh, first_step, checkpoints, args):
    """Trains to step `args.steps`; returns the state, and S before each step and after the last."""
    train, _ = load_digits_split(args.seed)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    train_step = jax.jit(
        functools.partial(step, tx, policy_for("float16")), donate_argnums=0
    )
    loss_scales = [current_loss_scale(state)]
    silent = jax.process_index() > 0
    with tqdm(
        total=args.steps, initial=first_step, disable=silent, unit="step"
    ) as progress:
        for i in range(first_step, args.steps):
            picks = np.random.RandomState((args.seed, i)).randint(
                len(train), size=BATCH_SIZE
            )
            weights = np.ones(BATCH_SIZE, np.float32)
            weights[-1] = 2.0**40 if i in args.overflow_at else 1
            batch = (on_devices(x, sharding) for x in (train[picks], weights))
            state, loss = train_step(state, *batch)
            loss_scales.append(current_loss_scale(state))
            progress.set_postfix(
                loss=f"{loss:.4f}", S=f"2^{np.log2(loss_scales[-1]):.0f}"
            )
            progress.update()
            if checkpoints and save(checkpoints, i + 1, state) and not silent:
                print(f"saved step {i + 1}", flush=True)
    return state, loss_scales


def step(tx, policy, state, images, weights):
    """The step of a single device: over a sharded batch, XLA takes the mean over all devices."""
    params, opt_state = state

    def loss_fn(params):
        reconstructions = autoencoder(policy.cast_to_compute(params), images)
        squared_error = (reconstructions.astype(jnp.float32) - images) ** 2
        return jnp.mean(weights[:, None] * squared_error)

    loss, grads = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)(params)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    return (optax.apply_updates(params, updates), opt_state), loss


def on_devices(batch, sharding):
    """The global array of which every process holds its own devices' part."""
    return jax.make_array_from_callback(
        batch.shape, sharding, lambda index: batch[index]
    )


def current_loss_scale(state):
    return float(optax.tree.get(state[1], "loss_scale").loss_scale)


def open_checkpoints(folder, save_every):
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(
        save_interval_steps=save_every, max_to_keep=2, enable_async_checkpointing=False
    )
    return ocp.CheckpointManager(folder.resolve(), options=options)


def save(checkpoints, i, state):
    """Whether the state was due to be saved, and was. Parameters, moments, S and its counter: all of it."""
    import orbax.checkpoint as ocp

    return checkpoints.save(i, args=ocp.args.StandardSave(state))


def restore(checkpoints, i, like):
    """The state of step `i`, on the devices of `like`, whatever number of processes saved it."""
    import orbax.checkpoint as ocp

    def placed(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    return checkpoints.restore(
        i, args=ocp.args.StandardRestore(jax.tree.map(placed, like))
    )


def report(state, loss_scales, first_step):
    """One line of S and one of the weights from every process, to be compared."""
    changes = [
        f"{first_step + i}:2^{np.log2(s):.0f}"
        for i, s in enumerate(loss_scales)
        if i == 0 or s != loss_scales[i - 1]
    ]
    leaves = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(state))
    who = f"process {jax.process_index()} of {jax.process_count()}"
    print(f"{who}: S history (step:S) {' '.join(changes)}")
    print(
        f"{who}: skipped {int(state[1].skipped)}, sha256 of the state {hashlib.sha256(leaves).hexdigest()}"
    )


if __name__ == "__main__":
    main()
