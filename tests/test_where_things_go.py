"""Where things go, line by line: inside or outside of the wrapper, when skipped."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bitwise_equal
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

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


@pytest.mark.slow
def test_multi_steps_outside_never_recovers_from_one_infinite_micro_batch():
    history = run(accumulated(dynamic(optax.sgd(1.0))), [BAD, *[ONES] * 39])
    _, state = history[-1]
    assert_bitwise_equal(w(history), np.asarray(PARAMS["w"]))
    assert not np.isfinite(state.acc_grads["w"]).all()
    assert int(state.inner_opt_state.skipped) == 20
    inside = run(dynamic(accumulated(optax.sgd(1.0))), [BAD, *[ONES] * 39])
    assert int(inside[-1][1].skipped) == 1


def test_apply_if_finite_left_around_the_wrapper_rejects_the_state_that_backs_off():
    _, state = run(optax.apply_if_finite(dynamic(optax.sgd(1.0)), 1000), [BAD] * 20)[-1]
    inner = state.inner_state
    assert (float(inner.loss_scale.loss_scale), int(inner.skipped)) == (2.0**10, 0)
    _, alone = run(dynamic(optax.sgd(1.0)), [BAD] * 20)[-1]
    assert (float(alone.loss_scale.loss_scale), int(alone.skipped)) == (1.0, 20)


def test_a_framework_with_its_own_grad_scales_in_the_loss_and_unscales_by_hand():
    def own_grad(loss_fn, x):  # creates its parameters itself, and takes no transform
        params = jnp.full(2, 2.0**-14, jnp.float16)
        return jax.grad(loss_fn)(params, x)

    def loss_fn(params, x):
        return jnp.sum((params * x).astype(jnp.float32) ** 2)

    x, s = jnp.float16(2.0**-6), jmp_scale.DynamicLossScale()
    assert not own_grad(loss_fn, x).any()
    grads = s.unscale(own_grad(lambda *args: s.scale(loss_fn(*args)), x))
    assert_bitwise_equal(grads, jnp.full(2, 2.0**-25))


def test_what_was_the_optimizer_s_state_is_the_inner_state():
    plain, wrapped = optax.adam(0.1), dynamic(optax.adam(0.1))
    before, after = run(plain, [ONES])[-1][1], run(wrapped, [ONES])[-1][1]
    assert_bitwise_equal(after.inner_state[0].count, before[0].count)
    assert callable(after.count)  # a tuple's method, so that old code does not raise
    assert callable(before.count)


def test_several_loss_scales_are_found_by_metrics_and_not_by_a_bare_name():
    tx = dynamic(optax.sgd(1.0))
    states = {"generator": tx.init(PARAMS), "discriminator": tx.init(PARAMS)}
    with pytest.raises(KeyError, match="multiple values"):
        optax.tree.get(states, "loss_scale")
    metrics = jmp_scale.diagnostics.metrics(states)
    assert float(metrics["['generator'].loss_scale"]) == 2.0**10
    assert float(metrics["['discriminator'].loss_scale"]) == 2.0**10


@pytest.mark.parametrize("s", [0.5, 2.0**25])
def test_an_initial_loss_scale_outside_of_floor_and_cap_is_an_error(s):
    with pytest.raises(ValueError, match="min_loss_scale, max_loss_scale"):
        jmp_scale.DynamicLossScale(s)
    widened = jmp_scale.DynamicLossScale(s, min_loss_scale=s, max_loss_scale=s)
    assert float(widened.loss_scale) == s


COMPILATIONS = []


@jax.monitoring.register_event_duration_secs_listener
def count_compilations(event, *_, **__):
    if event.endswith("backend_compile_duration"):
        COMPILATIONS.append(event)


@pytest.mark.parametrize(("axis", "again"), [("batch", 0), ("other", 1)])
def test_a_replicated_state_under_pmap_compiles_once_on_a_mesh_of_its_axis_name(
    axis, again
):
    tx = dynamic(optax.sgd(1.0))

    def step(params, opt_state, x):
        grads = lax.pmean(jax.tree.map(lambda p: p * x, params), "batch")
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    mesh = jax.make_mesh((8,), (axis,), axis_types=(AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())
    state = jax.device_put((PARAMS, tx.init(PARAMS)), replicated)
    x = jnp.ones((8, 1))
    train_step = jax.pmap(step, "batch", in_axes=(None, None, 0), out_axes=None)
    state = train_step(*state, x)
    COMPILATIONS.clear()
    for _ in range(2):
        state = train_step(*state, x)
    assert len(COMPILATIONS) == again


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


def test_the_wrapper_counts_skipped_steps_in_total_and_in_a_row():
    history = run(dynamic(optax.sgd(1.0)), [BAD, ONES, BAD, BAD])
    counts = [(int(s.skipped), int(s.skipped_in_a_row)) for _, s in history]
    assert counts == [(1, 1), (1, 0), (2, 1), (3, 2)]
