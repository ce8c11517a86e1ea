"""The scalars of a loss-scale state, wherever it stands in a tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import state

import jmp_scale
from jmp_scale import diagnostics

pytestmark = pytest.mark.strict_promotion


def test_metrics_are_scalars_that_stay_on_the_device():
    grads = {
        "w": jnp.array([3.0, 4.0]),
        "h": jnp.full(1, 300, jnp.float16),
        "step": jnp.array(7),
    }

    @jax.jit
    def step(opt_state, grads):
        return diagnostics.metrics(opt_state, grads)

    with jax.transfer_guard_device_to_host("disallow"):
        scalars = step({"opt": state(skipped=5, in_a_row=2)}, grads)
    assert all(isinstance(x, jax.Array) and x.shape == () for x in scalars.values())
    assert {name: x.item() for name, x in scalars.items()} == {
        "loss_scale": 2.0**15,
        "skipped": 5,
        "skipped_in_a_row": 2,
        "grads_finite": False,
        "grad_norm": float(np.float32(np.sqrt(90025))),
    }


def test_metrics_without_gradients_have_no_norm_and_know_every_loss_scale():
    for loss_scale in (jmp_scale.NoOpLossScale(), jmp_scale.StaticLossScale(1)):
        scalars = diagnostics.metrics(state(loss_scale))
        assert (scalars["loss_scale"].dtype, float(scalars["loss_scale"])) == (
            jnp.float32,
            1.0,
        )
        assert "grad_norm" not in scalars
