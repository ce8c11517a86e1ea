"""`check_step` in one of two processes: parameters and batch are split over both."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jmp_scale
from jmp_scale.diagnostics import check_step

PORT, INDEX = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, INDEX, initialization_timeout=60)
MESH = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
TX = jmp_scale.with_loss_scale(optax.adam(1e-3), jmp_scale.DynamicLossScale())


def split(x):
    spec = PartitionSpec("data") if np.ndim(x) else PartitionSpec()
    sharding = NamedSharding(MESH, spec)
    return jax.make_array_from_callback(
        np.shape(x), sharding, lambda i: np.asarray(x)[i]
    )


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) - 1) ** 2)


def step_with(mistake):
    @jax.jit
    def step(params, old, mean, x):
        half = jmp_scale.autocast(loss_fn, "float16")
        loss, grads = jmp_scale.value_and_grad(half, old.loss_scale)(params, x)
        if mistake == "unscaled twice":
            grads = old.loss_scale.unscale(grads)
        updates, opt = TX.update(grads, old, params, value=loss)
        new = {"x": 0.9 * mean["x"] + 0.1 * x.mean(0)}
        if mistake != "NaN stays":
            new = jmp_scale.select_tree(opt.applied, new, mean)
        return optax.apply_updates(params, updates), opt, new, loss

    return step


random = np.random.RandomState(0)
params = {"w": random.normal(size=(8, 4)).astype("f")}
x = random.normal(size=(16, 8)).astype("f")
args = jax.tree.map(split, (params, TX.init(params), {"x": np.zeros(8, "f")}, x))
for mistake in ("", "unscaled twice", "NaN stays"):
    found = check_step(step_with(mistake), *args)
    print([finding.rule for finding in found.findings], found.not_checked)
