"""What skipping may cost, as XLA:CPU counts it: the same on every run."""

import compilers
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import on_devices
from models import problems

import jmp_scale

pytestmark = pytest.mark.targets

PARAMS = {
    f"layer{i}": {"kernel": jnp.ones((128, 128)), "bias": jnp.ones(128)}
    for i in range(4)
}
PARAM_BYTES = sum(leaf.nbytes for leaf in jax.tree.leaves(PARAMS))

# Of the unscaled step's bytes, by gradients and by whether XLA may shard them.
BYTES = {
    ("f32", "one device"): 1.11,
    ("f16", "one device"): 1.07,
    ("f32", "eight devices"): 1.16,
    ("f16", "eight devices"): 1.12,
}
TEMPORARIES = {"one device": 0.01, "eight devices": 0.26}  # of the parameters' bytes


def of_adamw(peer, dtype, devices="one device"):
    """Figures of AdamW alone."""
    loss_fn, params, batch = problems.optimizer_only(problems.DTYPES[dtype], PARAMS)
    with on_devices(devices):
        carry, step = problems.build(peer, loss_fn, params, "adamw")
        return compilers.compile_step(step, carry, batch)[1]


@pytest.mark.parametrize("case", BYTES, ids=" on ".join)
def test_the_step_moves_and_stores_little_more_than_the_unscaled_one(case):
    unscaled, scaled = (of_adamw(x, *case) for x in ("unscaled", "with_loss_scale"))
    assert 1 < scaled.bytes_accessed / unscaled.bytes_accessed <= BYTES[case]
    assert scaled.temporaries / PARAM_BYTES <= TEMPORARIES[case[1]]
    assert scaled.copied_arrays == 0
    tx = jmp_scale.with_loss_scale(optax.adamw(1e-3), jmp_scale.DynamicLossScale())
    scalars = [leaf for leaf in jax.tree.leaves(tx.init(PARAMS)) if leaf.ndim == 0]
    assert len(scaled.copies) <= len(scalars)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_the_verbs_select_late_but_read_less_than_jmp_s(dtype):
    unscaled, verbs, jmp = (
        of_adamw(peer, dtype) for peer in ("unscaled", "jmp_scale verbs", "jmp")
    )
    assert verbs.bytes_accessed / unscaled.bytes_accessed <= 1.61
    assert verbs.bytes_accessed < jmp.bytes_accessed
    assert verbs.temporaries < 1.001 * jmp.temporaries  # but for some scalars
    assert verbs.kernels < jmp.kernels
