"""Four ways to train on eight devices: each skips the same step, and ends with the same S.

The digits autoencoder in float16 by pmap, by jit with a sharded batch (data-parallel), by jit with sharded
parameters as well (FSDP), and by shard_map. Half-way one image gets a weight of 2^40, so that the float16
gradients of the one device that holds it overflow: all devices skip that step. On a CPU the eight devices
are virtual.
"""

import argparse
import time

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
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tqdm import tqdm

import jmp_scale

jax.config.update("jax_num_cpu_devices", 8)  # before the first array

BATCH_SIZE = 256
POLICY = policy_for("float16")
TX = jmp_scale.with_loss_scale(
    optax.adam(5e-3), jmp_scale.DynamicLossScale(2.0**15, period=50)
)


def main(argv=None):
    args = parse_args(argv)
    rows = [
        (name, *fit(name, prepare, args.steps, args.seed))
        for name, prepare in WAYS.items()
    ]
    print(f"\n{'':24}{'loss':>8}{'S':>7}{'skipped':>9}{'devices':>9}{'seconds':>9}")
    for name, loss, loss_scales, skipped, seconds in rows:
        s = ", ".join(f"2^{np.log2(s):.0f}" for s in set(loss_scales))
        print(
            f"{name:24}{loss:8.4f}{s:>7}{skipped:9}{len(loss_scales):9}{seconds:9.1f}"
        )
    return rows


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=100,
        help="optimizer steps of each way (100)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the split, the start and the batches (0)",
    )
    return parser.parse_args(argv)


def fit(name, prepare, steps, seed):
    """Trains one way; returns mean loss of the last 20 steps, S of each device, skipped steps, seconds."""
    train, _ = load_digits_split(seed)
    picks = np.random.RandomState(seed).randint(len(train), size=(steps, BATCH_SIZE))
    state, train_step, place = prepare(init_autoencoder(seed))
    losses, begin = [], time.perf_counter()
    with tqdm(picks, desc=f"{name:24}", unit="step") as progress:
        for i, pick in enumerate(progress):
            weights = np.ones(BATCH_SIZE, np.float32)
            weights[-1] = 2.0**40 if i == steps // 2 else 1
            state, loss = train_step(state, place(train[pick]), place(weights))
            losses.append(np.mean(loss))
            progress.set_postfix(loss=f"{losses[-1]:.4f}")
    s = optax.tree.get(state[1], "loss_scale").loss_scale
    loss_scales = [float(np.squeeze(shard.data)) for shard in s.addressable_shards]
    return (
        np.mean(losses[-20:]),
        loss_scales,
        np.max(state[1].skipped),
        time.perf_counter() - begin,
    )


def loss_fn(params, images, weights):
    reconstructions = autoencoder(POLICY.cast_to_compute(params), images)
    return jnp.mean(
        weights[:, None] * (reconstructions.astype(jnp.float32) - images) ** 2
    )


def step(state, images, weights):
    """The step of a single device; under jit also that of eight, since the arrays are global there."""
    params, opt_state = state
    loss, grads = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)(
        params, images, weights
    )
    return apply(state, loss, grads)


def step_of_one_device(state, images, weights):
    """In pmap and shard_map: the local gradients are unscaled to float32, then averaged over devices."""
    params, opt_state = state
    loss, grads = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)(
        params, images, weights
    )
    return apply(state, *lax.pmean((loss, grads), "data"))


def apply(state, loss, grads):
    params, opt_state = state
    updates, opt_state = TX.update(grads, opt_state, params, value=loss)
    return (optax.apply_updates(params, updates), opt_state), loss


def with_pmap(params):
    """Every array has a leading axis of devices; `init` has the axis name of the step: it compiles once."""
    devices = jax.local_device_count()
    copies = jax.tree.map(lambda x: jnp.stack([x] * devices), params)
    state = jax.pmap(lambda params: (params, TX.init(params)), "data")(copies)
    return (
        state,
        jax.pmap(step_of_one_device, "data"),
        lambda x: np.stack(np.split(x, devices)),
    )


def with_data_parallel_jit(params):
    """Parameters on all devices, the batch divided among them."""
    return with_jit(params, PartitionSpec())


def with_fsdp_jit(params):
    """The parameters, and with them the optimizer's moments, divided among the devices as well."""
    return with_jit(params, PartitionSpec("data"))


def with_jit(params, spec):
    mesh = device_mesh()
    params = jax.device_put(params, NamedSharding(mesh, spec))
    return init_on(mesh, params), jax.jit(step), divided(mesh)


def with_shard_map(params):
    """The function of one device; JAX checks that what it returns is equal on all."""
    mesh = device_mesh()
    everywhere, share = PartitionSpec(), PartitionSpec("data")

    def shard_step(state, images, weights):
        params, opt_state = state
        # Else JAX sums their gradients by itself: in float16, and before they are unscaled.
        params = varying(params)
        loss, grads = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)(
            params, images, weights
        )
        return apply(state, *lax.pmean((loss, grads), "data"))

    specs = {
        "in_specs": (everywhere, share, share),
        "out_specs": (everywhere, everywhere),
    }
    params = jax.device_put(params, NamedSharding(mesh, everywhere))
    return (
        init_on(mesh, params),
        jax.jit(jax.shard_map(shard_step, mesh=mesh, **specs)),
        divided(mesh),
    )


def varying(params):
    """The same values, which JAX takes to differ between devices."""
    if hasattr(lax, "pcast"):
        return lax.pcast(params, "data", to="varying")
    return jax.tree.map(lambda x: lax.pvary(x, "data"), params)  # jax 0.8


def device_mesh():
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def init_on(mesh, params):
    """Under `jax.set_mesh` new arrays are put where the step returns them: it compiles once."""
    with jax.set_mesh(mesh):
        return params, TX.init(params)


def divided(mesh):
    return lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))


WAYS = {
    "pmap": with_pmap,
    "jit, data-parallel": with_data_parallel_jit,
    "jit, FSDP": with_fsdp_jit,
    "shard_map": with_shard_map,
}

if __name__ == "__main__":
    main()
