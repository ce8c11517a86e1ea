"""The scalars of a loss-scale state, wherever it is and in whatever form."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from runs import state

import jmp_scale.nnx
from jmp_scale import diagnostics
from jmp_scale._state import START

LOSS_SCALES = {
    "dynamic": jmp_scale.DynamicLossScale(8.0, hysteresis=2),
    "static": jmp_scale.StaticLossScale(8.0),
    "none": jmp_scale.NoOpLossScale(),
}
FORMS = {
    "optimizer": lambda optimizer: optimizer,
    "opt_state": lambda optimizer: {"opt": optimizer.opt_state},
    "nnx.state": nnx.state,
    "pure dict": lambda optimizer: nnx.to_pure_dict(nnx.state(optimizer)),
    "state dict": lambda optimizer: flax.serialization.to_state_dict(
        state(optimizer.loss_scale, inner=optax.adam(0.1).init(jnp.ones(2)))
    ),
}


@pytest.mark.strict_promotion
def test_metrics_are_scalars_that_stay_on_the_device():
    grads = {"w": jnp.array([3.0, 4.0]), "step": jnp.array(7)}
    grads["h"] = jnp.full(1, 300, jnp.float16)
    counted = state(None, 5, 2, nonfinite_losses=np.int32(1), spikes=np.int32(3))
    with jax.transfer_guard_device_to_host("disallow"):
        scalars = jax.jit(diagnostics.metrics)({"opt": counted}, grads)
    assert all(isinstance(x, jax.Array) and x.shape == () for x in scalars.values())
    found = {name: x.item() for name, x in scalars.items()}
    expected = {
        "loss_scale": 2.0**15,
        "skipped": 5,
        "skipped_in_a_row": 2,
        "grads_finite": False,
        "applied": False,
        "nonfinite_losses": 1,
        "spikes": 3,
        "grad_norm": pytest.approx(float(np.sqrt(90025)), rel=1e-6),
    }
    assert found.keys() == {"loss_scale", "grad_norm", *START}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("loss_scale", LOSS_SCALES)
@pytest.mark.parametrize("form", FORMS)
def test_the_state_of_an_nnx_optimizer_is_found_in_each_form(form, loss_scale):
    how = {"loss_scale": LOSS_SCALES[loss_scale], "wrt": nnx.Param}
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = jmp_scale.nnx.Optimizer(model, optax.adam(0.1), **how)
    tree = FORMS[form](optimizer)
    scalars = diagnostics.metrics(tree)
    assert all(isinstance(x, jax.Array) for x in scalars.values())
    assert (int(scalars["skipped"]), bool(scalars["applied"])) == (0, True)
    # A mapping holds no static configuration, and so no constant S.
    known = loss_scale == "dynamic" or form in ("optimizer", "opt_state")
    expected = 1.0 if loss_scale == "none" else 8.0
    assert "grad_norm" not in scalars
    assert scalars.get("loss_scale", None) == (expected if known else None)
    assert diagnostics.HealthLog()(tree) == []


def test_a_population_has_one_number_for_each_member():
    tx = jmp_scale.with_loss_scale(optax.sgd(0.1), jmp_scale.DynamicLossScale())
    opt_state = jax.vmap(tx.init)(jnp.ones((3, 2)))
    scalars = diagnostics.metrics(opt_state)
    assert {x.shape for x in scalars.values()} == {(3,)}
