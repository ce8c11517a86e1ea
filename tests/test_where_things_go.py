"""The README's section "Where things go", line by line: inside, on a skipped step, what counts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bitwise_equal

import jmp_scale

PARAMS = {"w": jnp.float32([1.0, -2.0])}
ONES = {"w": jnp.float32([1.0, 1.0])}
BAD = {"w": jnp.float32([jnp.inf, 1.0])}


def run(tx, grads, params=PARAMS):
    """Parameters and state after each of several gradients."""
    state, history = tx.init(params), []
    for g in grads:
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
        history.append((params, state))
    return history


def dynamic(inner, **kwargs):
    return jmp_scale.with_loss_scale(
        inner, jmp_scale.DynamicLossScale(2.0**10, **kwargs)
    )


def accumulated(inner):
    return optax.MultiSteps(inner, 2).gradient_transformation()


def w(history, step=-1):
    return np.asarray(history[step][0]["w"])


# Gradient accumulation


def test_accumulation_inside_averages_the_micro_batches_that_are_finite():
    twos = {"w": jnp.float32([3.0, 3.0])}
    history = run(dynamic(accumulated(optax.sgd(1.0))), [ONES, BAD, twos])
    assert_bitwise_equal(w(history, 1), np.asarray(PARAMS["w"]))
    assert_bitwise_equal(w(history), np.float32([-1.0, -4.0]))


def test_accumulation_inside_adjusts_the_loss_scale_at_every_micro_batch():
    history = run(
        dynamic(accumulated(optax.sgd(1.0)), period=3), [ONES, BAD, ONES, ONES, ONES]
    )
    scales = [float(state.loss_scale.loss_scale) for _, state in history]
    assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**9, 2.0**10]


def test_accumulation_inside_counts_finite_micro_batches_and_applied_steps():
    _, state = run(dynamic(accumulated(optax.adam(1.0))), [ONES, BAD, ONES, ONES])[-1]
    assert (int(state.inner_state.mini_step), int(state.inner_state.gradient_step)) == (
        1,
        1,
    )
    assert (
        int(optax.tree_utils.tree_get(state.inner_state.inner_opt_state, "count")) == 1
    )


def test_accumulation_by_hand_sums_true_gradients_though_the_loss_scale_differs():
    def gradient(s):
        loss_scale = jmp_scale.StaticLossScale(s)
        return jmp_scale.grad(lambda p: (p["w"] * 3.0).sum(), loss_scale)(PARAMS)

    mean = jax.tree.map(lambda a, b: (a + b) / 2, gradient(8.0), gradient(16.0))
    assert_bitwise_equal(mean, {"w": jnp.float32([3.0, 3.0])})


def test_accumulation_outside_would_keep_an_overflow_for_the_whole_window():
    outside = accumulated(dynamic(optax.sgd(1.0)))
    history = run(outside, [BAD, ONES, ONES, ONES])
    assert_bitwise_equal(w(history, 1), np.asarray(PARAMS["w"]))
    assert_bitwise_equal(
        w(run(dynamic(accumulated(optax.sgd(1.0))), [BAD, ONES, ONES])),
        np.float32([0, -3]),
    )


# Clipping


def test_clipping_inside_sees_true_gradients():
    params = {"w": jnp.zeros(2)}

    def loss_fn(params):
        return params["w"] @ jnp.float32([3.0, 4.0])

    grads = jmp_scale.grad(loss_fn, jmp_scale.StaticLossScale(2.0**15))(params)
    tx = dynamic(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    np.testing.assert_allclose(w(run(tx, [grads], params)), [-0.6, -0.8], rtol=1e-6)


def test_clipping_inside_hides_no_overflow():
    history = run(dynamic(optax.chain(optax.clip(1.0), optax.sgd(1.0))), [BAD])
    assert_bitwise_equal(w(history), np.asarray(PARAMS["w"]))
    assert float(history[-1][1].loss_scale.loss_scale) == 2.0**9


def test_clipping_outside_would_hide_the_overflow():
    outside = optax.chain(optax.clip(1.0), dynamic(optax.sgd(1.0)))
    _, state = run(outside, [BAD])[-1]
    assert int(state[1].skipped) == 0


# Averages of the parameters


def test_an_ema_is_selected_and_stays_on_a_skipped_step():
    tx = dynamic(optax.sgd(1.0))

    def step(params, ema, state, grads):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        new_ema = optax.incremental_update(params, ema, 0.5)
        return params, jmp_scale.select_tree(state.grads_finite, new_ema, ema), state

    params, ema, state = step(PARAMS, PARAMS, tx.init(PARAMS), ONES)
    _, after_skip, _ = step(params, ema, state, BAD)
    assert_bitwise_equal(ema, {"w": jnp.float32([0.5, -2.5])})
    assert_bitwise_equal(after_skip, ema)


def test_an_ema_that_is_not_selected_would_move_on_a_skipped_step():
    params, ema = {"w": PARAMS["w"] - 1}, PARAMS
    assert (optax.incremental_update(params, ema, 0.5)["w"] != ema["w"]).any()


def test_an_ema_of_the_updates_inside_counts_applied_steps():
    _, state = run(
        dynamic(optax.chain(optax.sgd(1.0), optax.ema(0.9))), [ONES, BAD, ONES]
    )[-1]
    assert int(optax.tree_utils.tree_get(state.inner_state, "count")) == 2


# Regularization, weight decay, gradient penalties


@pytest.mark.parametrize("s", [1.0, 2.0**10, 2.0**20])
def test_a_regularizer_is_part_of_the_loss(s):
    def loss_fn(w):
        return 3.0 * w + 0.5 * w**2

    assert (
        float(jmp_scale.grad(loss_fn, jmp_scale.StaticLossScale(s))(jnp.float32(1.0)))
        == 4.0
    )


@pytest.mark.parametrize("s", [1.0, 2.0**10, 2.0**20])
def test_a_gradient_penalty_is_taken_inside_the_loss_with_the_plain_gradient(s):
    def loss_fn(w):  # w^2 + (d/dw w^2)^2 = 5 w^2
        return w**2 + jax.grad(lambda w: w**2)(w) ** 2

    loss, grad = jmp_scale.value_and_grad(loss_fn, jmp_scale.StaticLossScale(s))(
        jnp.float32(1.0)
    )
    assert (float(loss), float(grad)) == (5.0, 10.0)


def test_a_penalty_on_scaled_gradients_would_be_wrong_by_the_square_of_the_loss_scale():
    inner = jax.grad(lambda w: jmp_scale.StaticLossScale(2.0**10).scale(w**2))
    assert float(inner(jnp.float32(1.0)) ** 2) == 2.0**20 * 4.0


def test_weight_decay_inside_does_not_decay_on_a_skipped_step():
    history = run(dynamic(optax.adamw(0.1, weight_decay=0.5)), [ONES, BAD])
    assert_bitwise_equal(w(history, 1), w(history, 0))


def test_zeroed_gradients_would_still_decay_and_move():
    history = run(
        optax.adamw(0.1, weight_decay=0.5), [ONES, jax.tree.map(jnp.zeros_like, ONES)]
    )
    assert (w(history, 1) != w(history, 0)).all()


# Schedules


def rates(tx, grads):
    history = [(PARAMS, None), *run(tx, grads)]
    return [
        float(a["w"][1] - b["w"][1]) for (a, _), (b, _) in itertools.pairwise(history)
    ]


def schedule(count):
    return 2.0 ** -jnp.float32(count)


def test_a_schedule_inside_counts_applied_steps():
    assert rates(dynamic(optax.sgd(schedule)), [ONES, BAD, BAD, ONES]) == [
        1.0,
        0.0,
        0.0,
        0.5,
    ]


def test_a_schedule_outside_counts_every_call():
    tx = optax.chain(dynamic(optax.identity()), optax.scale_by_learning_rate(schedule))
    assert rates(tx, [ONES, BAD, BAD, ONES]) == [1.0, 0.0, 0.0, 0.125]


# Counters


def test_the_wrapper_counts_skipped_steps_in_total_and_in_a_row():
    history = run(dynamic(optax.sgd(1.0)), [BAD, ONES, BAD, BAD])
    counts = [(int(s.skipped), int(s.skipped_in_a_row)) for _, s in history]
    assert counts == [(1, 1), (1, 0), (2, 1), (3, 2)]
