"""Where the arrays of `data_parallel.py` lie: a mesh of eight devices."""

import _show
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)  # before JAX looks for devices
# Steps one after the other: with fewer cores than devices, one that has begun on some
# may leave no thread for another to end on the rest, and both would wait forever.
jax.config.update("jax_cpu_enable_async_dispatch", False)
EVERYWHERE, DIVIDED = P(), P("data")
MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def on_mesh(x, spec=DIVIDED):
    return jax.device_put(x, NamedSharding(MESH, spec))


def state_on_mesh(tx, params, spec):
    """Placed as the step returns it, or the second step would compile again."""
    params = on_mesh(params, spec)
    with jax.set_mesh(MESH):
        return params, tx.init(params)


def copies(params):
    """With a first axis of devices, as `jax.pmap` takes them."""
    return jax.tree.map(lambda x: jnp.stack([x] * 8), params)


def parts(x):
    """A batch with a first axis of devices."""
    return np.stack(np.split(x, 8))


def varying(params):
    """The same values, which JAX takes to differ between devices."""
    if hasattr(lax, "pcast"):
        return lax.pcast(params, "data", to="varying")
    return jax.tree.map(lambda x: lax.pvary(x, "data"), params)  # jax 0.8


def cells(losses, opt_state):
    """The last losses, S on the devices, skipped steps and the number of devices."""
    shards = opt_state.loss_scale.loss_scale.addressable_shards
    scales = {_show.power(np.squeeze(shard.data)) for shard in shards}
    loss = f"{np.median(losses[-20:]):.4f}"
    return [loss, ", ".join(scales), np.max(opt_state.skipped), len(shards)]
