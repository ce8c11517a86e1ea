"""The scalars of a loss-scale state in any form, and the share of lost updates."""

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from runs import state

import jmp_scale.nnx
from jmp_scale import diagnostics
from jmp_scale._state import START

FORMS = {
    "optimizer": lambda optimizer: optimizer,
    "nnx.state": nnx.state,
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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "rule", [jmp_scale.DynamicLossScale, jmp_scale.StaticLossScale]
)
def test_the_state_of_an_nnx_optimizer_is_found_in_each_form(form, rule):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    how = {"loss_scale": rule(8.0), "wrt": nnx.Param}
    tree = FORMS[form](jmp_scale.nnx.Optimizer(model, optax.adam(0.1), **how))
    scalars = diagnostics.metrics(tree)
    assert all(isinstance(x, jax.Array) for x in scalars.values())
    assert (int(scalars["skipped"]), bool(scalars["applied"])) == (0, True)
    # A mapping holds no static configuration, and so no constant S.
    known = rule is jmp_scale.DynamicLossScale or form == "optimizer"
    assert scalars.get("loss_scale") == (8.0 if known else None)
    assert diagnostics.HealthLog()(tree) == []


def test_a_population_has_one_number_for_each_member():
    tx = jmp_scale.with_loss_scale(optax.sgd(0.1), jmp_scale.DynamicLossScale())
    scalars = diagnostics.metrics(jax.vmap(tx.init)(jnp.ones((3, 2))))
    assert {x.shape for x in scalars.values()} == {(3,)}


@jax.jit
def lost_updates(params, updates):
    found = diagnostics.metrics(state(), params=params, updates=updates)
    return found["lost_entries"], found["lost_magnitude"]


@pytest.mark.strict_promotion
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_an_update_is_lost_where_the_rounded_sum_is_the_parameter(dtype):
    random = np.random.RandomState(0)
    params = np.exp2(random.uniform(-4, 4, 4000)) * random.choice([-1, 1], 4000)
    params = params.astype(dtype)
    # Around the size at which they begin to be lost, of both signs; every tenth is 0.
    epsilon = float(ml_dtypes.finfo(dtype).eps)
    sizes = epsilon * np.exp2(random.uniform(-4, 2, 4000))
    sizes *= random.choice([-1, 1], 4000)
    updates = (sizes * np.abs(params.astype(np.float64))).astype(np.float32)
    updates[::10] = 0
    sums = params.astype(np.float32) + updates
    lost = (sums.astype(dtype) == params) & (updates != 0)
    assert 0.2 < lost.sum() / (updates != 0).sum() < 0.8
    entries, magnitude = lost_updates(params, updates)
    np.testing.assert_allclose(entries, lost.sum() / (updates != 0).sum(), 1e-6)
    sizes = np.abs(np.float64(updates))
    # A float32 sum of 4,000 numbers.
    np.testing.assert_allclose(magnitude, sizes[lost].sum() / sizes.sum(), 1e-4)


BF16, F32 = jnp.bfloat16, jnp.float32
# A parameter, its update, and the share of that which is lost.
EXACT = {
    "a tie goes to the even neighbor": (BF16(1), F32(2.0**-8), 1),
    "and not to the odd one": (BF16(1 + 2.0**-7), F32(2.0**-8), 0),
    "zero takes every update": (BF16(0.0), F32(1e-30), 0),
    "so does negative zero": (BF16(-0.0), F32(-1e-30), 0),
    "but not one below the range": (jnp.float16(0.0), F32(-1e-9), 1),
    "what changes the sign counts": (BF16(1), F32(-2), 0),
    "half the size is enough towards zero": (BF16(1), F32(-1.1 * 2.0**-9), 0),
    "but not away from it": (BF16(1), F32(1.1 * 2.0**-9), 1),
    "updates of zero do not count": (jnp.ones(2), jnp.float32([1e-9, 0.0]), 1),
    "nor do integers and complex numbers": (
        {"w": F32(1), "step": jnp.array(3), "z": jnp.complex64(1)},
        {"w": F32(1e-9), "step": jnp.array(1), "z": jnp.complex64(0)},
        1,
    ),
    "zeros alone": (jnp.ones(3), -jnp.zeros(3), 0),
    "nothing": ({}, {}, 0),
}


@pytest.mark.strict_promotion
@pytest.mark.parametrize("case", EXACT)
def test_which_updates_are_lost(case):
    params, updates, share = EXACT[case]
    assert lost_updates(params, updates) == (share, share)


def test_a_share_of_more_than_two_to_the_24_entries_is_counted_exactly():
    def share():  # never in memory: XLA fuses the constants into the sums
        params = jnp.ones((2**13, 2**12), jnp.bfloat16)
        return lost_updates(params, jnp.full(params.shape, 1e-4))

    assert float(jax.jit(share)()[0]) == 1


def test_updates_of_another_structure_are_refused():
    with pytest.raises(ValueError, match=r"structure|key mismatch"):
        lost_updates({"w": jnp.ones(2)}, {"b": jnp.ones(2)})
