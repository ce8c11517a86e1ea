"""One training on several processes: all skip the same steps, and S is the same on all.

The digits autoencoder in float16, data-parallel over all devices of all processes, with
Orbax checkpoints. The same script runs alone, under a launcher that JAX knows, or by
hand:

  python examples/multihost.py
  mpirun -n 2 python examples/multihost.py
  srun -n 2 python examples/multihost.py
  python examples/multihost.py --coordinator HOST:9876 --num-processes 2 --process-id 0

At the steps of --overflow-at the gradients of one device overflow. When a process is
lost, JAX ends the others within --heartbeat-timeout; start all again with --resume, on
as many processes as there are then.
"""

import functools

import _checkpoints
import _digits
import _processes
import jax
import numpy as np
import optax
from tqdm import tqdm

import jmp_scale


def train_step(tx, state, images, weights):
    """The step of one device: over a sharded batch, XLA takes the mean over all."""
    params, opt_state = state
    loss_fn = functools.partial(_digits.half_loss, weights=weights)
    value_and_grad = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)
    loss, grads = value_and_grad(params, images)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    return (optax.apply_updates(params, updates), opt_state), loss


def main(argv=None):
    args = _processes.command_line(__doc__).parse_args(argv)
    _processes.start_jax(args)
    everywhere, on_devices = _processes.all_devices()
    dynamic = jmp_scale.DynamicLossScale(period=args.period)
    tx = jmp_scale.with_loss_scale(optax.adam(5e-3), dynamic)

    def start():
        params = _digits.init_autoencoder(args.seed)
        return params, tx.init(params)

    # Placed on all devices, as the step returns it, or the second step compiles again.
    state, first = jax.jit(start, out_shardings=everywhere)(), 0
    images, _ = _digits.load_images(args.seed)
    step = jax.jit(functools.partial(train_step, tx), donate_argnums=0)
    silent = jax.process_index() > 0
    with _checkpoints.manager(args.checkpoint_dir, 2, args.save_every) as checkpoints:
        if args.resume and _checkpoints.latest(checkpoints):
            first = _checkpoints.latest(checkpoints)
            state = _checkpoints.restored(checkpoints, first, state)
        scales = [float(state[1].loss_scale.loss_scale)]
        for i in tqdm(range(first, args.steps), disable=silent):
            picks = np.random.RandomState((args.seed, i)).randint(len(images), size=256)
            weights = _digits.weights(256, heavy=i in args.overflow_at)
            state, _ = step(state, on_devices(images[picks]), on_devices(weights))
            scales.append(float(state[1].loss_scale.loss_scale))
            if _checkpoints.save(checkpoints, i + 1, state) and not silent:
                print(f"saved step {i + 1}", flush=True)
    _processes.report(state, scales, first)


if __name__ == "__main__":
    main()
