"""Four ways to train on eight devices: each skips the same step, and ends with one S.

The digits autoencoder in float16 by pmap, by jit with a sharded batch (data-parallel),
by jit with sharded parameters as well (FSDP), and by shard_map. Half-way one image has
a weight of 2^40, so that the float16 gradients of the device that holds it overflow:
all devices skip that step. On a CPU the eight devices are virtual.
"""

import functools

import _digits
import _show
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import jmp_scale

jax.config.update("jax_num_cpu_devices", 8)  # before JAX looks for devices
EVERYWHERE, DIVIDED = P(), P("data")
MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
TX = jmp_scale.with_loss_scale(
    optax.adam(5e-3), jmp_scale.DynamicLossScale(2.0**15, period=50)
)


def train_step(state, images, weights, mean=lambda x: x, local=lambda x: x):
    """The step of one device. Under jit the arrays are global: also that of eight."""
    params, opt_state = state
    loss_fn = functools.partial(_digits.reconstruction_loss, weights=weights)
    value_and_grad = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)
    loss, grads = mean(value_and_grad(local(params), images))
    updates, opt_state = TX.update(grads, opt_state, params, value=loss)
    return (optax.apply_updates(params, updates), opt_state), loss


def step_of_one_device(*args, **kwargs):
    """In pmap and shard_map: averages unscaled float32 gradients over the devices."""
    mean = functools.partial(lax.pmean, axis_name="data")
    return train_step(*args, mean=mean, **kwargs)


def with_pmap(params):
    """Arrays have a first axis of devices; `init` has the axis name of the step."""
    copies = jax.tree.map(lambda x: jnp.stack([x] * 8), params)
    state = jax.pmap(lambda params: (params, TX.init(params)), "data")(copies)
    step = jax.pmap(step_of_one_device, "data")
    return state, step, lambda x: np.stack(np.split(x, 8))


def with_jit(params, spec):
    return state_on_mesh(params, spec), jax.jit(train_step), on_mesh


def with_shard_map(params):
    """JAX checks that what the step of one device returns is equal on all."""
    # Without `varying` JAX sums the gradients itself: in float16, and still scaled.
    step = functools.partial(step_of_one_device, local=varying)
    in_specs = EVERYWHERE, DIVIDED, DIVIDED
    step = jax.shard_map(step, mesh=MESH, in_specs=in_specs, out_specs=EVERYWHERE)
    return state_on_mesh(params, EVERYWHERE), jax.jit(step), on_mesh


def varying(params):
    """The same values, which JAX takes to differ between devices."""
    if hasattr(lax, "pcast"):
        return lax.pcast(params, "data", to="varying")
    return jax.tree.map(lambda x: lax.pvary(x, "data"), params)  # jax 0.8


def on_mesh(x, spec=DIVIDED):
    return jax.device_put(x, NamedSharding(MESH, spec))


def state_on_mesh(params, spec):
    """Placed as the step returns it, or the second step would compile again."""
    params = on_mesh(params, spec)
    with jax.set_mesh(MESH):
        return params, TX.init(params)


WAYS = {
    "pmap": with_pmap,
    "jit, data-parallel": functools.partial(with_jit, spec=EVERYWHERE),
    "jit, FSDP": functools.partial(with_jit, spec=DIVIDED),
    "shard_map": with_shard_map,
}


def main(argv=None):
    args = _show.parser(__doc__, 100, seed=True).parse_args(argv)
    images, _ = _digits.load_images(args.seed)
    batches, rows = _digits.Batches(images, args.steps, 256, args.seed), []
    for name, way in WAYS.items():
        state, step, put = way(_digits.init_autoencoder(args.seed))
        losses = []
        for i in tqdm(range(args.steps), f"{name:24}"):
            weights = np.ones((256, 1), np.float32)
            weights[-1] = 2.0**40 if i == args.steps // 2 else 1
            state, loss = step(state, put(batches[i]), put(weights))
            losses.append(np.mean(loss))
        shards = state[1].loss_scale.loss_scale.addressable_shards
        scales = {_show.power(np.squeeze(shard.data)) for shard in shards}
        loss, skipped = f"{np.median(losses[-20:]):.4f}", np.max(state[1].skipped)
        rows.append([name, loss, ", ".join(scales), skipped, len(shards)])
    _show.table(["", "loss", "S", "skipped", "devices"], rows)


if __name__ == "__main__":
    main()
