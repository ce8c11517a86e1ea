"""Four ways to train on eight devices: each skips the same step, and ends with one S.

The digits autoencoder in float16 by pmap, by jit with a sharded batch (data-parallel),
by jit with sharded parameters as well (FSDP), and by shard_map. Half-way one image has
a weight of 2^40, so that the float16 gradients of the device that holds it overflow:
all devices skip that step. On a CPU the eight devices are virtual.
"""

import functools

import _devices
import _digits
import _show
import jax
import numpy as np
import optax
from _devices import DIVIDED, EVERYWHERE, on_mesh, state_on_mesh
from tqdm import tqdm

import jmp_scale

DYNAMIC = jmp_scale.DynamicLossScale(2.0**15, period=50)
TX = jmp_scale.with_loss_scale(optax.adam(5e-3), DYNAMIC)


def train_step(state, images, weights, mean=lambda x: x, local=lambda x: x):
    """The step of one device. Under jit the arrays are global: also that of eight."""
    params, opt_state = state
    loss_fn = functools.partial(_digits.half_loss, weights=weights)
    value_and_grad = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)
    loss, grads = mean(value_and_grad(local(params), images))
    updates, opt_state = TX.update(grads, opt_state, params, value=loss)
    return (optax.apply_updates(params, updates), opt_state), loss


# In pmap and shard_map: averages unscaled float32 gradients over the devices.
mean_of_devices = functools.partial(jax.lax.pmean, axis_name="data")
step_of_one_device = functools.partial(train_step, mean=mean_of_devices)


def with_pmap(params):
    """Arrays have a first axis of devices; `init` has the axis name of the step."""
    state = jax.pmap(lambda p: (p, TX.init(p)), "data")(_devices.copies(params))
    return state, jax.pmap(step_of_one_device, "data"), _devices.parts


def with_jit(spec, params):
    return state_on_mesh(TX, params, spec), jax.jit(train_step), on_mesh


def with_shard_map(params):
    """JAX checks that what the step of one device returns is equal on all."""
    # Without `varying` JAX sums the gradients itself, and they are still scaled.
    step = functools.partial(step_of_one_device, local=_devices.varying)
    specs = {"in_specs": (EVERYWHERE, DIVIDED, DIVIDED), "out_specs": EVERYWHERE}
    step = jax.jit(jax.shard_map(step, mesh=_devices.MESH, **specs))
    return state_on_mesh(TX, params, EVERYWHERE), step, on_mesh


def main(argv=None):
    args = _show.parser(__doc__, 100, seed=True).parse_args(argv)
    batches, rows = _digits.image_batches(args.steps, 256, args.seed), []
    ways = {
        "pmap": with_pmap,
        "jit, data-parallel": functools.partial(with_jit, EVERYWHERE),
        "jit, FSDP": functools.partial(with_jit, DIVIDED),
        "shard_map": with_shard_map,
    }
    for name, way in ways.items():
        losses, (state, step, put) = [], way(_digits.init_autoencoder(args.seed))
        for i in tqdm(range(args.steps), f"{name:24}"):
            weights = _digits.weights(256, heavy=i == args.steps // 2)
            state, loss = step(state, put(batches[i]), put(weights))
            losses.append(np.mean(loss))
        rows.append([name, *_devices.cells(losses, state[1])])
    _show.table(["", "loss", "S", "skipped", "devices"], rows)


if __name__ == "__main__":
    main()
