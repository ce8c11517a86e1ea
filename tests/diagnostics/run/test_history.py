"""What a history keeps of each step of a run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_bitwise_equal
from runs import recorded, state

import jmp_scale.linen
import jmp_scale.nnx
from jmp_scale.diagnostics import LossScaleHistory

pytestmark = pytest.mark.strict_promotion


def test_a_history_counts_skips():
    arrays = recorded([0, 0, 1, 1, 1, 1, 0, 1]).to_dict()
    assert arrays["log2_scale"].tolist() == [15, 14, 13, 13, 13, 14, 14, 13]
    assert arrays["applied"].tolist() == [False] * 2 + [True] * 4 + [False, True]
    for name in ("loss", "grad_norm", "lost_entries", "lost_magnitude"):
        assert np.isnan(arrays[name]).all()  # what is not passed is unknown


push = jax.jit(LossScaleHistory.push)


def test_a_step_that_a_guard_skips_is_a_spike_and_no_other():
    history, after = LossScaleHistory.create(2), state(None, 1, 1, spikes=np.int32(1))
    history = push(push(history, state(), after), after, after._replace())
    assert history.to_dict()["spike"].tolist() == [True, False]


def pushed(history, losses, norms):
    """The history with steps of these losses and gradient norms."""
    for loss, norm in zip(jnp.float32(losses), jnp.float32(norms), strict=True):
        history = push(history, state(), state(), loss=loss, grads=norm)
    return history


def test_a_full_history_keeps_the_last_steps_in_order():
    flags = [i % 3 > 0 for i in range(11)]
    history = recorded(flags, capacity=4).to_dict()
    assert history["step"].tolist() == [7, 8, 9, 10]
    assert history["grads_finite"].tolist() == flags[-4:]


def test_losses_norms_and_the_first_usable_ones_are_recorded():
    nan, inf, empty = float("nan"), float("inf"), LossScaleHistory.create(4)
    assert np.isnan([empty.first_loss, empty.first_norm]).all()
    losses, norms = [nan, -inf, 0.0, 5.0, 6.0], [inf, 0.0, nan, 0.0, 3.0]
    history = pushed(empty, losses, norms)
    arrays = history.to_dict()
    np.testing.assert_array_equal(arrays["loss"], losses[1:])
    assert arrays["grad_norm"].tolist() == [0, inf, 0, 3]  # a norm of NaN is infinite
    assert arrays["loss_finite"].tolist() == [False, True, True, True]
    assert (float(history.first_loss), float(history.first_norm)) == (0, 3)
    assert pushed(history, [7.0], [4.0]).first_norm == 3


@pytest.mark.parametrize(("counted", "loss"), [(1, 2.0), (0, jnp.nan), (1, None)])
def test_a_loss_is_not_finite_if_the_state_or_the_loss_says_so(counted, loss):
    history = LossScaleHistory.create(2)
    after = state(skipped=1, in_a_row=1, nonfinite_losses=np.int32(counted))
    history = push(history, state(), after, loss=loss)
    assert history.to_dict()["loss_finite"].tolist() == [False]
    assert push(history, after, after._replace()).to_dict()["loss_finite"][-1]


@pytest.mark.parametrize("log2", [-126, -3, 126])
def test_log2_of_s_is_exact_for_powers_of_two(log2):
    before = state(jmp_scale.StaticLossScale(2.0**log2))
    arrays = push(LossScaleHistory.create(2), before, state()).to_dict()
    assert arrays["log2_scale"].tolist() == [log2]


def test_a_history_keeps_its_types_and_buffers_through_a_donated_scan():
    def step(history, loss):
        after = before._replace(applied=loss > 0)
        sizes = {"params": loss.astype(jnp.bfloat16), "updates": loss}
        half = loss.astype(jnp.bfloat16)
        return history.push(before, after, loss=half, grads=2 * loss, **sizes), None

    before, start = state(), LossScaleHistory.create(4)
    run = jax.jit(lambda h, x: jax.lax.scan(step, h, x)[0], donate_argnums=0)
    expected, losses = start, jnp.arange(6, dtype=jnp.float32)
    for loss in losses:
        expected, _ = jax.jit(step)(expected, loss)
    assert_bitwise_equal(run(start, losses), expected)


def test_a_push_records_each_member_of_a_vmap():
    tx = jmp_scale.with_loss_scale(
        optax.sgd(0.5), jmp_scale.DynamicLossScale(), guard=jmp_scale.SpikeGuard()
    )
    params = {"w": jnp.float32([1, 2, 3])}

    def step(g):
        before, loss, grads = tx.init(params), jnp.sum(g), {"w": g}
        updates, after = tx.update(grads, before, params, value=loss)
        numbers = {"loss": loss, "grads": grads, "params": params, "updates": updates}
        return LossScaleHistory.create(3).push(before, after, **numbers)

    gs = jnp.float32([[3, 4, 0], [1, jnp.inf, 0], [1e-9, 0, 0]])
    with jax.numpy_dtype_promotion("standard"):  # on which optimizers rely
        columns = jax.jit(jax.vmap(step))(gs).columns
    assert columns["loss"][:, 0].tolist() == [7, np.inf, np.float32(1e-9)]
    assert columns["grad_norm"][:2, 0].tolist() == [5, np.inf]
    assert columns["applied"][:, 0].tolist() == [True, False, True]
    assert columns["lost_magnitude"][:, 0].tolist() == [0, 0, 1]


def train_states():
    """For each framework the states around a step that overflows, at S = 2^10."""
    scale = jmp_scale.DynamicLossScale(2.0**10)
    params, grads = {"w": jnp.ones(2)}, {"w": jnp.float32([1, jnp.inf])}
    linen = jmp_scale.linen.TrainState.create(
        apply_fn=None, params=params, tx=optax.sgd(0.1), loss_scale=scale
    )
    yield linen, linen.apply_gradients(grads=grads)
    tx = jmp_scale.with_loss_scale(optax.sgd(0.1), scale)
    before = tx.init(params)
    _, after = tx.update(grads, before, params)
    yield {"params": params, "nested": [(before,)]}, {"nested": [(after,)]}
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = jmp_scale.nnx.Optimizer(model, optax.sgd(0.1), loss_scale=scale)
    before = jax.tree.map(lambda x: x, nnx.state(optimizer))
    bad = jax.tree.map(lambda x: x * jnp.inf, nnx.state(model, nnx.Param))
    optimizer.update(model, bad)
    yield before, nnx.state(optimizer)
    yield before, optimizer
    for same in (optimizer, nnx.state(optimizer)):
        with pytest.raises(ValueError, match=r"take jax\.tree\.map\(lambda x: x, nnx"):
            LossScaleHistory.create(3).push(same, optimizer)


def test_the_states_of_every_framework_are_taken():
    with jax.numpy_dtype_promotion("standard"):
        for before, after in train_states():
            arrays = LossScaleHistory.create(3).push(before, after).to_dict()
            assert arrays["log2_scale"].tolist() == [10]
            assert arrays["applied"].tolist() == [False]
            assert arrays["loss_finite"].tolist() == [True]


S = state()
REFUSED = [
    (S, S, "got one state twice"),
    (S, {"w": 1.0}, "no state of with_loss_scale in after"),
    ({"a": S, "b": S}, state(), "in before, got 2;"),
]


@pytest.mark.parametrize(("before", "after", "words"), REFUSED)
def test_a_push_refuses_what_is_not_one_step(before, after, words):
    with pytest.raises(ValueError, match=f"^LossScaleHistory.push: .*{words}"):
        LossScaleHistory.create(3).push(before, after)
