"""Known failures of other loss scalers, one test each, with what those give instead.

Sources are the issue trackers of the systems named. Failures on several devices are in
test_sharding, those of BatchNorm and checkpoints in test_linen, test_nnx and
test_checkpoints.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bitwise_equal

import jmp_scale
from jmp_scale import DynamicLossScale, StaticLossScale


def train(tx, params, gradients):
    """Parameters and state after updates with the given unscaled gradients."""
    state, update = tx.init(params), jax.jit(tx.update)
    for grads in gradients:
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_gradients_on_a_growth_step_are_not_divided_by_the_grown_scale():
    """mpx 0.1.8 and DeepSpeed#8588 give gradients [1, 1, 1] and losses [.5, .5, .5]."""
    tx = jmp_scale.with_loss_scale(optax.sgd(0.0), DynamicLossScale(8.0, period=1))
    w, seen = jnp.float32(1.0), []
    state = tx.init(w)
    for _ in range(3):
        loss, grads = jmp_scale.value_and_grad(lambda w: w * w, state.loss_scale)(w)
        _, state = tx.update(grads, state, w, value=loss)
        seen.append((float(loss), float(grads)))
    assert seen == [(1.0, 2.0)] * 3


def test_a_long_overflow_leaves_a_scale_that_the_next_good_step_can_use():
    """torch 2.13, Keras 3.15: S = 0, and the next step writes NaN (pytorch#99640)."""
    tx = jmp_scale.with_loss_scale(optax.sgd(1.0), DynamicLossScale())
    gradients = [jnp.full(2, jnp.inf)] * 200 + [jnp.full(2, 0.5)]
    params, state = train(tx, jnp.ones(2), gradients)
    assert state.loss_scale.loss_scale == 1.0
    assert params.tolist() == [0.5, 0.5]


def test_finiteness_is_that_of_unscaled_gradients():
    """torch checks scaled gradients: 2e-39 is finite, and unscaled it steps to -inf."""
    with pytest.raises(ValueError, match="expected loss_scale to be"):
        StaticLossScale(1e-39)
    smallest = StaticLossScale(2.0**-126)
    assert not jmp_scale.all_finite(smallest.unscale(jnp.float32(1e10)))


def test_clipping_inside_does_not_hide_an_overflow():
    """optax.clip alone turns [inf, 1, -inf] into [1, 1, -1], and the step is taken."""
    tx = jmp_scale.with_loss_scale(
        optax.chain(optax.clip(1.0), optax.sgd(1.0)), DynamicLossScale(8.0)
    )
    params, state = train(tx, jnp.zeros(3), [jnp.array([jnp.inf, 1.0, -jnp.inf])])
    assert params.tolist() == [0, 0, 0]
    assert (state.skipped, state.loss_scale.loss_scale) == (1, 4)


def test_the_floor_is_kept_under_jit():
    """jmp 0.0.4 forgets min_loss_scale in its flatten: 1 under jit (jmp#44)."""
    adjust = jax.jit(jmp_scale.adjust)
    loss_scale = DynamicLossScale(2.0, min_loss_scale=2.0**-10)
    for _ in range(5):
        loss_scale = adjust(loss_scale, False)
    assert loss_scale.loss_scale == 0.0625


def test_gradients_accumulated_under_different_scales_average_correctly():
    """Sums of scaled gradients while S changes give .75 or 1.5 (neural_sp#136)."""
    inner = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    tx = jmp_scale.with_loss_scale(inner, DynamicLossScale(8.0, period=1))
    w = jnp.float32(0.0)
    state = tx.init(w)
    for s in (8, 16):
        assert state.loss_scale.loss_scale == s
        grads = jmp_scale.grad(lambda w: w, state.loss_scale)(w)
        updates, state = tx.update(grads, state, w)
    assert float(updates) == -1.0


def test_one_bad_micro_batch_does_not_poison_the_accumulator():
    """MultiSteps outside the skip keeps the NaN in its accumulator."""
    inner = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    tx = jmp_scale.with_loss_scale(inner, DynamicLossScale())
    gradients = [jnp.float32(g) for g in (1.0, jnp.nan, 3.0)]
    params, state = train(tx, jnp.float32(0.0), gradients)
    assert params == -2.0
    assert state.skipped == 1


def test_weight_decay_and_momentum_do_not_move_weights_on_a_skipped_step():
    """Skipping by zeroing the gradients moves adamw by -0.077 here (levanter#973)."""
    tx = jmp_scale.with_loss_scale(
        optax.adamw(0.1, weight_decay=0.1), DynamicLossScale()
    )
    good, bad = jnp.ones(2), jnp.full(2, jnp.nan)
    once, _ = train(tx, jnp.ones(2), [good])
    twice, _ = train(tx, jnp.ones(2), [good, bad])
    assert_bitwise_equal(twice, once)


def test_many_non_finite_steps_are_never_accepted():
    """apply_if_finite applies the NaN after max_consecutive_errors (optax#1746)."""
    tx = jmp_scale.with_loss_scale(optax.sgd(1.0), DynamicLossScale())
    params, state = train(tx, jnp.ones(2), [jnp.full(2, jnp.nan)] * 100)
    assert params.tolist() == [1, 1]
    assert state.skipped_in_a_row == 100


def test_s_is_back_after_a_bad_stretch_within_the_documented_time():
    """From Flax's floor of 2^-126 it takes 282,141 steps; here period * log2(2^15)."""
    tx = jmp_scale.with_loss_scale(optax.sgd(0.0), DynamicLossScale(2.0**15, period=10))
    gradients = [jnp.float32(jnp.nan)] * 200 + [jnp.float32(1.0)] * 150
    _, state = train(tx, jnp.float32(1.0), gradients)
    assert state.loss_scale.loss_scale == 2.0**15


def test_growth_stops_at_a_scale_that_is_useful():
    """jmp grows to 1.7e38, torch's sharded scaler to inf (flax#2547, pytorch#98828)."""
    loss_scale, adjust = DynamicLossScale(period=1), jax.jit(jmp_scale.adjust)
    for _ in range(300):
        loss_scale = adjust(loss_scale, True)
    assert loss_scale.loss_scale == 2.0**24


def test_a_float16_initial_scale_works():
    """jmp#47: "lax.select requires same dtypes" from the README's own example."""
    s = DynamicLossScale(jnp.float16(2**15)).adjust(jnp.array(False)).loss_scale
    assert (s.dtype, float(s)) == (jnp.float32, 16384.0)


def test_zero_gradients_of_half_precision_masters_do_not_become_nan():
    """Adam's eps of 1e-8 is 0 in float16, and 0 / 0 is NaN (optax#1754)."""
    tx = jmp_scale.with_loss_scale(optax.adam(1e-3), DynamicLossScale())
    masters = jnp.ones(2, jnp.float16)
    updates, _ = tx.update(jnp.zeros(2, jnp.float16), tx.init(masters), masters)
    assert updates.tolist() == [0, 0]


def test_float16_gradients_of_float32_parameters_cause_no_dtype_error():
    """apply_if_finite(adamw) is a TypeError in optax 0.2.8 (optax#377, #1038)."""
    tx = jmp_scale.with_loss_scale(optax.adamw(1e-3), DynamicLossScale())
    gradients = [jnp.ones(2, jnp.float16), jnp.full(2, jnp.inf, jnp.float16)]
    params, state = train(tx, jnp.ones(2), gradients)
    assert params.dtype == jnp.float32
    assert state.skipped == 1


def test_an_integer_leaf_is_not_unscaled():
    """jmp makes 0.375 of it; flax makes complex gradients real."""
    tree = {"i": jnp.int32(3), "c": jnp.complex64(8 + 16j)}
    unscaled = DynamicLossScale(8.0).unscale(tree)
    assert (int(unscaled["i"]), complex(unscaled["c"])) == (3, 1 + 2j)


def test_gradients_cannot_be_unscaled_twice():
    """torch: "unscale_() has already been called"; here gradients have no stage."""
    loss_scale = StaticLossScale(8.0)
    grads = jmp_scale.grad(lambda w: w * 3, loss_scale)(jnp.float32(1.0))
    assert type(grads) is type(jnp.float32(1.0))
    assert float(grads) == 3.0


def test_a_step_without_gradients_is_applied():
    """torch: "No inf checks were recorded for this optimizer"."""
    tx = jmp_scale.with_loss_scale(optax.adam(1e-3), DynamicLossScale(8.0, period=1))
    params, state = train(tx, {}, [{}])
    assert params == {}
    assert (state.skipped, state.loss_scale.loss_scale) == (0, 16)


def test_a_nan_that_no_scale_cures_is_found_with_debug_nans_at_scale_one():
    """With a loss scale an overflow is by design; at S = 1 what is left is the bug."""

    def loss_fn(w):
        return jnp.log(w - 2.0)

    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="log"):
        jmp_scale.grad(loss_fn, StaticLossScale(1.0))(jnp.float32(1.0))


def test_a_finite_loss_with_a_nan_gradient_is_skipped():
    """Checking the loss alone misses where(x > 0, sqrt(x), 0) at 0 (numpyro#956)."""

    def root(x):
        return jnp.where(x > 0, jnp.sqrt(x), 0.0)

    loss, grads = jmp_scale.value_and_grad(root, DynamicLossScale())(0.0)
    assert float(loss) == 0.0
    assert np.isnan(grads)
    tx = jmp_scale.with_loss_scale(optax.sgd(1.0))
    _, state = train(tx, jnp.float32(1.0), [grads])
    assert state.skipped == 1


def test_s_grows_on_the_period_th_step_and_not_one_late():
    """Flax 0.12 with growth_interval=3 grows on calls 4 and 8."""
    loss_scale, history = DynamicLossScale(8.0, period=3), []
    for _ in range(6):
        loss_scale = loss_scale.adjust(True)
        history.append(float(loss_scale.loss_scale))
    assert history == [8, 8, 16, 16, 16, 32]
