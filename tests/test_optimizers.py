"""What Optax promises of its optimizers holds through the wrapper.

The behaviours are those that Optax's own tests of aliases, accumulation, masking,
freezing and conditional updates hold; the tests here are written anew.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bitwise_equal
from optimizers import every_optimizer, stepper

import jmp_scale

PARAMS = {"w": jnp.float32([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.float32([0.25, 4.0])}
GOOD = jax.tree.map(lambda p: p / 4 + 0.75, PARAMS)
BAD = GOOD | {"b": jnp.float32([jnp.nan, 1.0])}
OPTIMIZERS = every_optimizer()
DTYPES = ("float32", "float16", "bfloat16")


def wrap(inner, **kwargs):
    return jmp_scale.with_loss_scale(inner, jmp_scale.DynamicLossScale(8.0, **kwargs))


def types(tree):
    return jax.tree.map(jax.typeof, jax.eval_shape(lambda: tree))


def run(tx, grads, params=PARAMS):
    """(parameters, state) before, and after each of several gradients."""
    update, state = jax.jit(tx.update), tx.init(params)
    history = [(params, state)]
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
        history.append((params, state))
    return history


def close(actual, expected, rtol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol), actual, expected)


FLOAT32_ONLY = {"lbfgs", "lbfgs_without_search"}  # in Optax itself


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in OPTIMIZERS
        for dtype in DTYPES
        if dtype == "float32" or name not in FLOAT32_ONLY
    ],
)
def test_a_step_keeps_shapes_and_dtypes_of_parameters_and_state(name, dtype):
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    tx = wrap(OPTIMIZERS[name])
    state = jax.eval_shape(tx.init, params)
    new_params, new_state = jax.eval_shape(stepper(tx), params, state, params)
    assert jax.tree.map(jax.typeof, (new_params, new_state)) == jax.tree.map(
        jax.typeof, (jax.eval_shape(lambda: params), state)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_is_initialized_as_without_the_wrapper(name, dtype):
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    wrapped = jax.eval_shape(wrap(OPTIMIZERS[name]).init, params).inner_state
    plain = jax.eval_shape(OPTIMIZERS[name].init, params)
    assert jax.tree.structure(wrapped) == jax.tree.structure(plain)
    for a, b in zip(jax.tree.leaves(wrapped), jax.tree.leaves(plain), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [optax.adam, optax.adamw, optax.lion, optax.nadam])
def test_an_explicit_dtype_of_the_moments_is_kept(make, dtype):
    tx = wrap(make(0.1, mu_dtype=dtype))
    _, state = run(tx, [GOOD])[-1]
    mu = optax.tree.get(state, "mu")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(mu)} == {dtype}


@pytest.mark.parametrize("name", ["adam", "adamw", "lion", "rmsprop", "sgd", "yogi"])
def test_accumulated_halves_take_the_step_of_their_mean(name):
    halves = [jax.tree.map(lambda g, s=s: s * g, GOOD) for s in (0.5, 1.5)]
    accumulate = optax.MultiSteps(OPTIMIZERS[name], 2).gradient_transformation()
    params, state = run(wrap(accumulate), [*halves, *halves])[-1]
    expected, _ = run(wrap(OPTIMIZERS[name]), [GOOD, GOOD])[-1]
    close(params, expected)
    assert int(state.inner_state.gradient_step) == 2


def test_an_accumulation_schedule_counts_the_steps_that_were_taken():
    schedule = optax.MultiSteps(optax.sgd(1.0), lambda step: 1 + step)
    tx = wrap(schedule.gradient_transformation())
    history = run(tx, [GOOD, BAD, GOOD, GOOD, BAD, GOOD, GOOD, GOOD])
    moved = [
        bool((a["w"] != b["w"]).any()) for (a, _), (b, _) in itertools.pairwise(history)
    ]
    assert moved == [True, False, False, True, False, False, False, True]


def test_a_window_of_accumulation_is_a_scan_with_constant_types():
    tx = wrap(optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation())

    def step(carry, bad):
        grads = jax.tree.map(lambda g, b: jnp.where(bad, b, g), GOOD, BAD)
        updates, state = tx.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), state.applied

    start, bad = (PARAMS, tx.init(PARAMS)), jnp.array([False, True, False, False])
    (params, state), applied = jax.jit(lambda c: jax.lax.scan(step, c, bad))(start)
    assert applied.tolist() == [True, False, True, True]
    assert int(state.inner_state.gradient_step) == 1
    close(params, run(wrap(optax.adam(0.1)), [GOOD])[-1][0], rtol=1e-5)


def test_multi_steps_with_its_own_skip_has_nothing_left_to_skip():
    inner = optax.MultiSteps(
        optax.sgd(1.0), 2, should_skip_update_fn=optax.skip_not_finite
    )
    _, state = run(wrap(inner.gradient_transformation()), [GOOD, BAD, GOOD])[-1]
    assert int(state.skipped) == 1
    assert int(state.inner_state.gradient_step) == 1
    assert not bool(state.inner_state.skip_state["should_skip"])


def test_float16_micro_batches_are_accumulated_in_float32():
    inner = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    tx = wrap(inner)
    grads = jax.tree.map(lambda p: jnp.full_like(p, 40000, jnp.float16), PARAMS)
    params, state = run(tx, [grads, grads])[-1]  # the sum, 80000, is not a float16
    assert int(state.skipped) == 0
    close(params, jax.tree.map(lambda p: p - 40000, PARAMS))


def test_an_average_of_updates_is_debiased_by_applied_steps():
    tx = wrap(optax.ema(0.9, debias=True))
    history = run(tx, [GOOD, BAD, GOOD])
    updates, _ = tx.update(GOOD, history[-1][1], PARAMS)
    close(updates, GOOD)  # an average of equal updates
    assert int(history[-1][1].inner_state.count) == 2


MASKS = {
    "a tree": {"w": True, "b": False},
    "a function": lambda tree: jax.tree.map(lambda x: x.ndim == 2, tree),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_mask_leaves_the_other_leaves_alone_and_their_state_empty(mask):
    tx = wrap(optax.masked(optax.adam(0.1), mask))
    _, state = run(tx, [GOOD, BAD])[-1]
    adam = state.inner_state.inner_state[0]
    assert isinstance(adam.mu["b"], optax.MaskedNode)
    assert int(adam.count) == 1
    updates, _ = tx.update(GOOD, state, PARAMS)
    assert_bitwise_equal(updates["b"], GOOD["b"])


def test_masks_within_masks_skip_as_a_whole():
    inner = optax.masked(optax.trace(0.9), {"w": True, "b": False})
    outer = optax.chain(optax.masked(inner, {"w": True, "b": True}), optax.scale(-0.1))
    history = run(wrap(outer), [GOOD, BAD, GOOD])
    assert_bitwise_equal(history[2][0], history[1][0])
    assert_bitwise_equal(history[2][1].inner_state, history[1][1].inner_state)


FROZEN = {
    "set_to_zero": lambda: optax.partition(
        {"train": optax.adam(0.1), "freeze": optax.set_to_zero()},
        {"w": "train", "b": "freeze"},
    ),
    "freeze": lambda: optax.chain(
        optax.adam(0.1), optax.transforms.freeze({"w": False, "b": True})
    ),
    "selective_transform": lambda: optax.transforms.selective_transform(
        optax.adam(0.1), freeze_mask={"w": False, "b": True}
    ),
}


@pytest.mark.parametrize("make", FROZEN.values(), ids=FROZEN)
def test_frozen_parameters_keep_their_bits(make):
    frozen = {"w": PARAMS["w"], "b": jnp.float32([-0.0, 4.0])}
    history = run(wrap(make()), [GOOD, BAD, GOOD], frozen)
    for params, _ in history:
        close(params["b"], frozen["b"], rtol=0)
    assert_bitwise_equal(history[2][0], history[1][0])
    assert (history[3][0]["w"] != history[2][0]["w"]).all()


@pytest.mark.parametrize("make", FROZEN.values(), ids=FROZEN)
def test_a_nan_in_the_gradient_of_a_frozen_parameter_skips_the_step_all_the_same(make):
    # What may be ignored only the loss knows: `jax.lax.stop_gradient` makes it zero.
    (_, _), (_, state) = run(wrap(make()), [BAD])
    assert int(state.skipped) == 1


def test_parameters_that_are_left_out_of_the_gradients_need_no_check():
    trained = {"w": PARAMS["w"], "b": None}
    history = run(wrap(optax.adam(0.1)), [GOOD | {"b": None}], trained)
    assert history[-1][0]["b"] is None
    assert (history[-1][0]["w"] != PARAMS["w"]).all()


def test_injected_hyperparameters_are_read_and_set_in_the_inner_state():
    tx = wrap(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    state = tx.init(PARAMS)
    state.inner_state.hyperparams["learning_rate"] = jnp.float32(2.0)
    updates, state = tx.update(GOOD, state, PARAMS)
    assert_bitwise_equal(updates, jax.tree.map(lambda g: -2 * g, GOOD))
    assert float(state.inner_state.hyperparams["learning_rate"]) == 2.0


def test_an_injected_schedule_stands_still_on_a_skipped_step():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    tx = wrap(optax.inject_hyperparams(optax.sgd)(learning_rate=schedule))
    rates = [
        float(state.inner_state.hyperparams["learning_rate"])
        for _, state in run(tx, [GOOD, BAD, BAD, GOOD, GOOD])
    ]
    assert rates == [1.0, 1.0, 1.0, 1.0, 0.75, 0.5]


SIMPLE = [
    name
    for name in ("adabelief", "adagrad", "adam", "lion", "nadamw", "radam", "rmsprop")
    if name in OPTIMIZERS
]


@pytest.mark.parametrize("name", SIMPLE)
def test_every_hyperparameter_of_an_optimizer_can_be_injected(name):
    tx = wrap(optax.inject_hyperparams(getattr(optax, name))(learning_rate=0.1))
    params, state = run(tx, [GOOD, BAD, GOOD])[-1]
    expected, _ = run(wrap(OPTIMIZERS[name]), [GOOD, BAD, GOOD])[-1]
    # Arrays in place of constants: another program for the powers of the decay rates.
    close(params, expected, rtol=1e-4)
    assert int(state.inner_state.count) == 2


@pytest.mark.parametrize("flags", ["++-+", "-+--+", "---++"])
def test_it_counts_as_apply_if_finite_does_below_its_limit(flags):
    grads = [GOOD if flag == "+" else BAD for flag in flags]
    ours = run(wrap(optax.adam(0.1)), grads)
    optaxs = run(optax.apply_if_finite(optax.adam(0.1), 10), grads)
    for (params, state), (expected, counters) in zip(ours[1:], optaxs[1:], strict=True):
        close(params, expected)
        close(state.inner_state, counters.inner_state)
        assert int(state.skipped) == int(counters.total_notfinite)
        assert int(state.skipped_in_a_row) == int(counters.notfinite_count)
        assert bool(state.applied) == bool(counters.last_finite)


def test_a_transformation_under_a_condition_counts_applied_steps():
    def every_second(step):
        return step % 2 == 1

    tx = wrap(optax.conditionally_transform(optax.scale(0.0), every_second))
    factors = []
    state = tx.init(PARAMS)
    for grads in (GOOD, GOOD, BAD, GOOD, GOOD):
        updates, state = tx.update(grads, state, PARAMS)
        factors.append(float(updates["w"][0, 0] / GOOD["w"][0, 0]))
    assert factors == [1, 0, 0, 1, 0]


def test_optax_maps_over_the_parameters_within_the_state():
    tx = wrap(optax.adam(0.1))
    state = run(tx, [GOOD])[-1][1]
    doubled = optax.tree.map_params(tx, lambda x: 2 * x, state)
    close(
        doubled.inner_state[0].mu, jax.tree.map(jnp.add, *[state.inner_state[0].mu] * 2)
    )
    assert_bitwise_equal(doubled.loss_scale, state.loss_scale)


def test_a_second_step_compiles_nothing_again():
    tx = wrap(optax.adamw(0.1))
    update = jax.jit(tx.update)
    state = tx.init(PARAMS)
    for grads in (GOOD, BAD, GOOD):
        _, state = update(grads, state, PARAMS)
    assert update._cache_size() == 1
