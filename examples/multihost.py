"""One training on several processes: all skip the same steps, and S is the same on all.

The digits autoencoder in float16, data-parallel over all devices of all processes, with
Orbax checkpoints. The same script runs alone, under a launcher that JAX knows, or by
hand:

  python examples/multihost.py
  mpirun -n 2 python examples/multihost.py
  srun -n 2 python examples/multihost.py
  python examples/multihost.py --coordinator HOST:9876 --num-processes 2 --process-id 0

At the steps of --overflow-at one image has a weight of 2^40, so that the float16
gradients of the device that holds it overflow. When a process is lost, JAX ends the
others within --heartbeat-timeout; start all again with --resume, on as many processes
as there are then.
"""

import functools
import os

import _digits
import _processes
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import jmp_scale

# Set by Open MPI's mpirun (as in Azure ML), Slurm's srun, Kubernetes' indexed jobs.
LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_ID", "JOB_COMPLETION_INDEX")


def train_step(tx, state, images, weights):
    """The step of one device: over a sharded batch, XLA takes the mean over all."""
    params, opt_state = state
    loss_fn = functools.partial(_digits.reconstruction_loss, weights=weights)
    value_and_grad = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)
    loss, grads = value_and_grad(params, images)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    return (optax.apply_updates(params, updates), opt_state), loss


def main(argv=None):
    args = _processes.command_line(__doc__).parse_args(argv)
    start_jax(args)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    everywhere, divided = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    dynamic = jmp_scale.DynamicLossScale(period=args.period)
    tx = jmp_scale.with_loss_scale(optax.adam(5e-3), dynamic)

    def start():
        params = _digits.init_autoencoder(args.seed)
        return params, tx.init(params)

    def on_devices(x):
        """The global array of which each process holds its own devices' part."""
        return jax.make_array_from_callback(x.shape, divided, lambda part: x[part])

    # Placed on all devices, as the step returns it, or the second step compiles again.
    state, first = jax.jit(start, out_shardings=everywhere)(), 0
    checkpoints = open_checkpoints(args)
    if args.resume and checkpoints and checkpoints.latest_step() is not None:
        first = checkpoints.latest_step()
        state = checkpoints.restore(first, args=ocp.args.StandardRestore(state))

    images, _ = _digits.load_images(args.seed)
    step = jax.jit(functools.partial(train_step, tx), donate_argnums=0)
    scales, silent = [float(state[1].loss_scale.loss_scale)], jax.process_index() > 0
    for i in tqdm(range(first, args.steps), disable=silent):
        picks = np.random.RandomState((args.seed, i)).randint(len(images), size=256)
        weights = np.ones((256, 1), np.float32)
        weights[-1] = 2.0**40 if i in args.overflow_at else 1
        state, _ = step(state, on_devices(images[picks]), on_devices(weights))
        scales.append(float(state[1].loss_scale.loss_scale))
        due = checkpoints and checkpoints.save(i + 1, args=ocp.args.StandardSave(state))
        if due and not silent:
            print(f"saved step {i + 1}", flush=True)
    _processes.report(state, scales, first)
    if checkpoints:
        checkpoints.close()


def start_jax(args):
    """Joins the other processes, if any; called before JAX looks for devices."""
    jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    timeout = {"heartbeat_timeout_seconds": args.heartbeat_timeout}
    if args.coordinator:
        by_hand = args.coordinator, args.num_processes, args.process_id
        jax.distributed.initialize(*by_hand, **timeout)
    elif any(name in os.environ for name in LAUNCHERS):
        jax.distributed.initialize(**timeout)


def open_checkpoints(args):
    if args.checkpoint_dir is None:
        return None
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=args.save_every,
        max_to_keep=2,
        enable_async_checkpointing=False,
    )
    return ocp.CheckpointManager(args.checkpoint_dir.resolve(), options=options)


if __name__ == "__main__":
    main()
