"""What a history keeps of each step, and what its summary counts."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_bitwise_equal
from runs import guard_of, history_of, recorded, state

import jmp_scale.linen
import jmp_scale.nnx
from jmp_scale import diagnostics
from jmp_scale.diagnostics import LossScaleHistory

pytestmark = pytest.mark.strict_promotion


def test_a_history_counts_skips():
    history = recorded([0, 0, 1, 1, 1, 1, 0, 1])
    assert history.to_dict()["log2_scale"].tolist() == [15, 14, 13, 13, 13, 14, 14, 13]
    counts = "3 by overflow, 0 by a broken loss, 0 by a spike"
    assert history.summary() == f"3 of 8 steps skipped: {counts}"


@pytest.mark.parametrize("steps", [3, 4, 11])
def test_a_full_history_keeps_the_last_steps_in_order(steps):
    flags = [i % 3 > 0 for i in range(steps)]
    history = recorded(flags, capacity=4).to_dict()
    assert history["step"].tolist() == list(range(steps))[-4:]
    assert history["grads_finite"].tolist() == flags[-4:]
    log2_scale = recorded(flags).to_dict()["log2_scale"].tolist()
    assert history["log2_scale"].tolist() == log2_scale[-4:]


def test_an_empty_history_has_a_summary_and_a_capacity_of_at_least_one():
    assert LossScaleHistory.create(3).summary().startswith("0 of 0 steps skipped")
    for capacity in (0, -1, 2.5):
        with pytest.raises(ValueError, match="create: expected capacity to be an int"):
            LossScaleHistory.create(capacity)
    with pytest.raises(TypeError, match="create: expected capacity to be a real num"):
        LossScaleHistory.create(True)


def test_what_is_not_passed_is_unknown_and_flags_are_those_of_the_gradients():
    history = recorded([1, 0, 1]).to_dict()
    assert history["applied"].tolist() == [True, False, True]
    for name in ("loss", "grad_norm", "lost_entries", "lost_magnitude", "norm_limit"):
        assert np.isnan(history[name]).all()


def test_each_step_is_recorded_with_its_loss_norm_and_causes():
    loss = jnp.float32([2.0, 8.0, 3.0, jnp.nan])
    history = history_of(
        grads_finite=jnp.bool_([1, 1, 0, 0]),
        applied=jnp.bool_([1, 0, 0, 0]),
        loss=loss,
        grad_norm=jnp.float32([0.5, 9.0, jnp.inf, jnp.nan]),
    )
    arrays = history.to_dict()
    np.testing.assert_array_equal(arrays["loss"], loss)
    expected = [0.5, 9, np.inf, np.inf]  # a norm of NaN is infinite
    np.testing.assert_allclose(arrays["grad_norm"], expected, rtol=1e-6)
    # Taken from the loss, which was given.
    assert arrays["loss_finite"].tolist() == [True, True, True, False]
    counts = "1 by overflow, 1 by a broken loss, 1 by a spike"
    assert history.summary() == f"3 of 4 steps skipped: {counts}"


@pytest.mark.parametrize(("counted", "loss"), [(1, 2.0), (0, jnp.nan), (1, None)])
def test_a_loss_is_not_finite_if_the_state_or_the_loss_says_so(counted, loss):
    history = LossScaleHistory.create(2)
    after = state(skipped=1, in_a_row=1, nonfinite_losses=np.int32(counted))
    history = history.push(state(), after, loss=loss)
    assert history.to_dict()["loss_finite"].tolist() == [False]
    assert history.push(after, after._replace()).to_dict()["loss_finite"][-1]


def test_the_first_usable_loss_and_norm_stay():
    nan, inf = float("nan"), float("inf")
    loss = jnp.float32([nan, -inf, 0.0, 5.0, 6.0, 7.0])
    norm = jnp.float32([inf, 0.0, nan, 0.0, 3.0, 4.0])
    history = history_of(capacity=2, loss=loss, grad_norm=norm)
    assert (float(history.first_loss), float(history.first_norm)) == (0, 3)
    empty = LossScaleHistory.create(2)
    assert np.isnan([empty.first_loss, empty.first_norm]).all()


def test_the_limits_of_a_guard_are_recorded():
    guard = guard_of(loss_mean=2, loss_deviation=0.5, norm_mean=3, norm_deviation=1)
    arrays = LossScaleHistory.create(2).push(state(guard=guard), state()).to_dict()
    assert arrays["loss_limit"].tolist() == [float(guard.loss_limit)]
    assert arrays["norm_limit"].tolist() == [float(guard.norm_limit)]


def test_a_history_keeps_its_types_and_buffers_through_a_donated_scan():
    def step(history, loss):
        after = before._replace(applied=loss > 0)
        sizes = {"params": loss.astype(jnp.bfloat16), "updates": loss}
        return history.push(before, after, loss=loss, grads=2 * loss, **sizes), None

    before, start = state(), LossScaleHistory.create(4)
    run = jax.jit(lambda h, x: jax.lax.scan(step, h, x)[0], donate_argnums=0)
    losses = jnp.arange(6, dtype=jnp.float32)
    expected = jax.lax.scan(step, start, losses)[0]
    assert_bitwise_equal(run(start, losses), expected)


def test_a_push_is_the_same_under_jit_and_vmap():
    tx = jmp_scale.with_loss_scale(
        optax.sgd(0.5), jmp_scale.DynamicLossScale(), guard=jmp_scale.SpikeGuard()
    )
    params = {"w": jnp.float32([1, 2, 3])}

    def step(g):
        before, loss = tx.init(params), jnp.sum(g)
        grads = {"w": g}
        updates, after = tx.update(grads, before, params, value=loss)
        numbers = {"loss": loss, "grads": grads, "params": params, "updates": updates}
        return LossScaleHistory.create(3).push(before, after, **numbers)

    gs = jnp.float32([[3, 4, 0], [1, jnp.inf, 0], [1e-9, 0, 0]])
    with jax.numpy_dtype_promotion("standard"):  # on which optimizers rely
        rows = [jax.jit(step)(g).to_dict() for g in gs]
        batch = jax.jit(jax.vmap(step))(gs)
    for i, row in enumerate(rows):
        member = jax.tree.map(lambda x, i=i: x[i], batch).to_dict()
        chex.assert_trees_all_close(member, row, rtol=1e-6)
    assert [row["grad_norm"][0] for row in rows[:2]] == [5, np.inf]
    assert [row["applied"][0] for row in rows] == [True, False, True]
    assert [row["lost_magnitude"][0] for row in rows] == [0, 0, 1]
    assert [row["log2_scale"][0] for row in rows] == [15, 15, 15]


def train_states():
    """For each framework the states around a step that overflows, at S = 2^10."""
    scale = jmp_scale.DynamicLossScale(2.0**10)
    params = {"w": jnp.ones(2)}
    grads = {"w": jnp.float32([1, jnp.inf])}
    linen = jmp_scale.linen.TrainState.create(
        apply_fn=None, params=params, tx=optax.sgd(0.1), loss_scale=scale
    )
    yield linen, linen.apply_gradients(grads=grads)
    tx = jmp_scale.with_loss_scale(optax.sgd(0.1), scale)
    state = tx.init(params)
    after = tx.update(grads, state, params)[1]
    yield {"params": params, "nested": [(state,)]}, {"nested": [(after,)]}
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = jmp_scale.nnx.Optimizer(model, optax.sgd(0.1), loss_scale=scale)
    before = jax.tree.map(lambda x: x, nnx.state(optimizer))
    bad = jax.tree.map(lambda x: x * jnp.inf, nnx.state(model, nnx.Param))
    optimizer.update(model, bad)
    yield before, nnx.state(optimizer)
    yield before, optimizer
    for same in ((optimizer, optimizer), (nnx.state(optimizer), optimizer)):
        with pytest.raises(ValueError, match=r"take jax\.tree\.map\(lambda x: x, nnx"):
            LossScaleHistory.create(3).push(*same)


def test_the_states_of_every_framework_are_taken():
    with jax.numpy_dtype_promotion("standard"):
        for before, after in train_states():
            history = LossScaleHistory.create(3).push(before, after)
            arrays = history.to_dict()
            assert arrays["log2_scale"].tolist() == [10]
            assert arrays["applied"].tolist() == [False]
            assert arrays["loss_finite"].tolist() == [True]
            (said,) = diagnostics.health(after, history)
            # nnx.state does not have the rule of S.
            assert said.endswith(("[warm-up]", "[occasional overflow]"))


S = state()
TWO = jax.tree.map(lambda x: jnp.stack([x, x]), S)
REFUSED = {
    "one object": ((S, S), {}, "got one state twice"),
    "nothing": ((S, {"w": 1.0}), {}, "no state of with_loss_scale in after"),
    "two": (({"a": S, "b": S}, state()), {}, r"in before, got 2, at \['a'\] and"),
    "a loss scale": ((S.loss_scale, S), {}, "no state of with_loss_scale in before"),
    "a batch": ((TWO, state()), {}, r"one step, got log2_scale of shape \(2,\)"),
    "losses": ((S, state()), {"loss": jnp.ones(2)}, r"got loss of shape \(2,\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_push_refuses_what_is_not_one_step(case):
    args, kwargs, words = REFUSED[case]
    with pytest.raises(ValueError, match=f"^LossScaleHistory.push: .*{words}"):
        LossScaleHistory.create(3).push(*args, **kwargs)
    with pytest.raises(ValueError, match="updates of the structure of params"):
        LossScaleHistory.create(3).push(S, state(), updates=jnp.ones(2))
