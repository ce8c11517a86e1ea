"""Every optimizer of Optax keeps its properties, and those of Optax, when wrapped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bitwise_equal, by_name, count_traces, slow
from optimizers import BAD, GOOD, OPTIMIZERS, PARAMS, stepper

import jmp_scale
from jmp_scale import DynamicLossScale, with_loss_scale
from jmp_scale._scaling import skip as _skip

STEPS = (BAD, GOOD, BAD, GOOD, BAD, BAD, GOOD)

# Those that differ most in what they compute; all others are slow tests.
TYPICAL = "adafactor_factored", "multi_steps", "sam"
FLOAT32_ONLY = {"lbfgs", "lbfgs_without_search"}  # in Optax itself
# Their branches keep the dtype of the parameters, which gradients here do not have.
FLOAT32_ONLY |= {"galore", "novograd"}

# Otherwise XLA fuses two programs in different ways, and contracts a * b + c.
NO_REWRITES = {"xla_disable_hlo_passes": "fusion", "xla_backend_optimization_level": 0}


def each_optimizer(quick=TYPICAL):
    return pytest.mark.parametrize("name", by_name(quick, OPTIMIZERS))


def history_of(step, params, state, gradients):
    """Parameters and state before and after each step."""
    history = [(params, state)]
    for grads in gradients:
        params, state = step(*jax.tree.map(jnp.copy, (params, state)), grads)
        history.append((params, state))
    return history


@functools.cache
def runs(name):
    """(history of the wrapped optimizer, of the plain one by good steps, traces)."""
    inner = OPTIMIZERS[name]
    tx = with_loss_scale(inner, DynamicLossScale(2.0**10, period=2))
    counted, traces = count_traces(stepper(tx))
    good = [grads for grads in STEPS if grads is GOOD]
    return (
        history_of(compiled(counted), PARAMS, tx.init(PARAMS), STEPS),
        history_of(compiled(stepper(inner)), PARAMS, inner.init(PARAMS), good),
        traces,
    )


def compiled(step):
    return jax.jit(step, donate_argnums=(0, 1), compiler_options=NO_REWRITES)


def test_the_enumeration_finds_the_optimizers_of_optax():
    known = {"adamw", "muon", "lamb", "prodigy", "lbfgs", "schedule_free_sgd"}
    assert len(OPTIMIZERS) > 60
    assert known <= OPTIMIZERS.keys()


@each_optimizer()
def test_a_skipped_step_changes_no_bit_of_parameters_and_inner_state(name):
    history, _, _ = runs(name)
    for grads, before, after in zip(STEPS, history, history[1:], strict=False):
        if grads is not GOOD:
            assert_bitwise_equal(after[0], before[0])
            assert_bitwise_equal(after[1].inner_state, before[1].inner_state)


@each_optimizer()
def test_applied_steps_are_those_of_the_plain_optimizer(name):
    history, plain, _ = runs(name)
    kept = [history[0]]
    kept += [x for x, g in zip(history[1:], STEPS, strict=True) if g is GOOD]
    for (params, state), expected in zip(kept, plain, strict=True):
        actual = params, state.inner_state
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
            if not jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
                np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@each_optimizer()
def test_one_compilation_with_donated_state_counts_and_adjusts_s(name):
    history, _, traces = runs(name)
    states = [state for _, state in history]
    assert len(traces) == 1
    assert [int(s.skipped) for s in states] == [0, 1, 1, 2, 2, 3, 4, 4]
    assert [int(s.skipped_in_a_row) for s in states] == [0, 1, 0, 1, 0, 1, 2, 0]
    powers = [int(np.log2(s.loss_scale.loss_scale)) for s in states]
    assert powers == [10, 9, 9, 8, 8, 7, 6, 6]
    types = jax.tree.map(jax.typeof, states[0])
    assert all(jax.tree.map(jax.typeof, state) == types for state in states)


@each_optimizer(quick=("adafactor_factored", "sam"))
def test_selecting_early_and_late_give_the_same_bits(name, monkeypatch):
    tx = with_loss_scale(OPTIMIZERS[name], DynamicLossScale(2.0**10, period=2))
    monkeypatch.setattr(_skip, "WAITS_OR_SHOWS", [""])  # which is in every name
    step, start = compiled(stepper(tx)), tx.init(PARAMS)
    assert_bitwise_equal(history_of(step, PARAMS, start, STEPS), runs(name)[0])


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
@each_optimizer()
def test_a_state_starts_as_without_the_wrapper_and_keeps_its_types(name, dtype):
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    tx = with_loss_scale(OPTIMIZERS[name], DynamicLossScale(8.0))
    state = jax.eval_shape(tx.init, params)
    plain = jax.eval_shape(OPTIMIZERS[name].init, params)
    assert jax.tree.structure(state.inner_state) == jax.tree.structure(plain)
    for a, b in zip(*map(jax.tree.leaves, (state.inner_state, plain)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    if dtype == "float32" or name not in FLOAT32_ONLY:
        after = jax.eval_shape(stepper(tx), params, state, params)
        start = jax.eval_shape(lambda: params), state
        assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, start)


def test_accumulation_inside_goes_by_windows_of_finite_micro_batches():
    """Outside, MultiSteps keeps the NaN in its accumulator.

    Averages by `applied` move at each micro-batch, by `has_updated` at dropped ones.
    """
    large = functools.partial(optax.skip_large_updates, max_squared_norm=1e4)
    steps = optax.MultiSteps(optax.sgd(lambda count: 1.0 + count), 2, True, large)
    rule = DynamicLossScale(2.0**10, period=3)
    tx = with_loss_scale(steps.gradient_transformation(), rule)
    start = jnp.float32([1.0, -2.0])
    sizes = (1.0, jnp.inf, 3.0, 1e3, jnp.inf, 1.0, 1e3, 1.0)
    gradients = [jnp.full(2, size) for size in sizes]
    history = history_of(jax.jit(stepper(tx)), start, tx.init(start), gradients)
    before, average, scales = history[0][1], start, []
    for params, state in history[1:]:
        ended = state.inner_state.gradient_step > before.inner_state.gradient_step
        moved = optax.incremental_update(params, average, 0.5)
        average, before = jmp_scale.select_tree(ended, moved, average), state
        scales.append(int(np.log2(state.loss_scale.loss_scale)))
    first, second = start - 2, start - 2 - 2 * 1
    assert average.tolist() == (start / 4 + first / 4 + second / 2).tolist()
    assert scales == [10, 9, 9, 9, 8, 8, 8, 9]


def test_optax_maps_over_the_parameters_within_the_state():
    tx = with_loss_scale(optax.adam(0.1), DynamicLossScale())
    _, state = tx.update(GOOD, tx.init(PARAMS), PARAMS)
    doubled = optax.tree.map_params(tx, lambda x: 2 * x, state)
    mu = state.inner_state[0].mu
    assert_bitwise_equal(doubled.inner_state[0].mu, jax.tree.map(jnp.add, mu, mu))
    assert_bitwise_equal(doubled.loss_scale, state.loss_scale)
