import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import assert_bitwise_equal, sharded
from optimizers import BAD, GOOD, PARAMS, SPECIAL, half, optimizer, stepper, value_fn

import jmp_scale
from jmp_scale import DynamicLossScale, NoOpLossScale, SpikeGuard, with_loss_scale

ADAM, SAM = optax.adam(0.1), SPECIAL["sam"]  # which takes no loss


def extra_args_optimizer(update):
    return optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)


def test_an_optimizer_with_callbacks_sees_zeros_in_place_of_a_skipped_step():
    seen = []

    def look(updates, state, params, *, value, grad):
        leaves = jax.tree.leaves((updates, value, grad))
        jax.debug.callback(lambda *x: seen.extend(x), *leaves)
        return updates, state

    tx = with_loss_scale(extra_args_optimizer(look), DynamicLossScale())
    for value in (1.0, jnp.nan):
        value = jnp.float32(value)
        tx.update(BAD, tx.init(PARAMS), PARAMS, value=value, grad=BAD)
    jax.effects_barrier()
    assert len(seen) == 10
    assert not any(np.any(x) for x in seen)


def test_extra_arguments_reach_the_inner_optimizer_gradients_in_float32():
    def scaled_by(updates, state, params=None, *, value, gain, grad):
        assert (updates.dtype, grad.dtype) == (jnp.float32, jnp.float32)
        return updates * gain * value + grad, state

    tx = with_loss_scale(extra_args_optimizer(scaled_by))
    one, state = jnp.float16(1.0), tx.init(jnp.float32(0.0))
    updates, _ = tx.update(one, state, value=2.0, gain=3.0, grad=one)
    assert updates == 7


def test_updates_have_the_dtype_of_the_parameters():
    tx = with_loss_scale(optax.sgd(0.1))
    params = jnp.ones(2, jnp.float16), jnp.ones(2, jnp.bfloat16)
    ones = jnp.ones(2), jnp.ones(2)
    updates = jax.eval_shape(lambda: tx.update(ones, tx.init(params), params)[0])
    assert [u.dtype for u in updates] == [jnp.float16, jnp.bfloat16]


def test_optax_finds_the_loss_scale_at_any_depth():
    tx = with_loss_scale(optax.adam(1e-3), DynamicLossScale(8.0))
    state = optax.chain(optax.chain(tx), optax.identity()).init(PARAMS)
    found = optax.tree.get(state, "loss_scale")
    assert isinstance(found, DynamicLossScale)
    assert found.loss_scale == 8
    for name in ("grads_finite", "skipped", "skipped_in_a_row", "count"):
        assert optax.tree.get(state, name).shape == ()


def test_before_the_first_step_all_is_finite_applied_and_nothing_counted():
    state = with_loss_scale(optax.sgd(0.1)).init(PARAMS)
    assert state.loss_scale == NoOpLossScale()  # the default
    own = state._replace(loss_scale=DynamicLossScale(), inner_state=())
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(own)) == 26
    flags = state.grads_finite, state.applied
    counts = state.skipped, state.skipped_in_a_row, state.nonfinite_losses, state.spikes
    assert_bitwise_equal(flags, (jnp.bool_(True),) * 2)
    assert_bitwise_equal(counts, (jnp.int32(0),) * 4)


def test_every_init_builds_its_own_buffers_also_of_a_state_that_is_the_parameters():
    average = optax.GradientTransformation(lambda p: p, lambda g, s, p=None: (g, s))
    inner = optax.chain(average, optax.adam(1e-3))
    tx = with_loss_scale(inner, DynamicLossScale(), guard=SpikeGuard())
    states = tx.init(PARAMS), tx.init(PARAMS)
    assert_bitwise_equal(states[0].inner_state[0], PARAMS)
    leaves = jax.tree.leaves((PARAMS, states))
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


def test_a_step_compiled_ahead_of_time_has_no_branch_and_moves_nothing_to_the_host():
    tx = with_loss_scale(optax.adamw(0.1), DynamicLossScale(8.0))
    state, params = tx.init(PARAMS), PARAMS
    step = jax.jit(stepper(tx)).lower(params, state, GOOD).compile()
    words = (" conditional(", "custom-call", "outfeed", "infeed", " while(")
    assert not any(word in step.as_text() for word in words)
    with jax.transfer_guard("disallow"):
        for grads in (GOOD, BAD, GOOD):
            params, state = step(params, state, grads)


def test_an_overflow_in_a_gradient_function_of_the_optimizer_is_skipped():
    def ascend(updates, state, params, *, grad_fn):  # as SAM does
        return grad_fn(params + updates, 0), state + 1

    inner = optax.GradientTransformationExtraArgs(lambda p: jnp.int32(0), ascend)
    tx = with_loss_scale(inner, DynamicLossScale(1.0, min_loss_scale=2.0**-10))
    overflow, good = (
        jax.jit(functools.partial(tx.update, grad_fn=lambda p, _, s=size: p * s))
        for size in (jnp.inf, -1.0)
    )
    one = jnp.ones(1)
    updates, new = overflow(one, tx.init(one), one)
    assert_bitwise_equal(optax.apply_updates(one, updates), one)
    assert (new.skipped, new.grads_finite, new.applied) == (1, False, False)
    assert (new.skipped_in_a_row, new.loss_scale.loss_scale) == (1, 0.5)
    _, bad = good(one * jnp.nan, new, one)
    assert (bad.skipped, bad.applied) == (2, False)
    updates, new = good(one, bad, one)
    assert (new.skipped_in_a_row, new.applied, new.inner_state) == (0, True, 1)
    assert updates == -2


def test_a_value_does_not_break_an_optimizer_that_does_not_know_it():
    tx = with_loss_scale(SAM, DynamicLossScale())
    state = tx.init(PARAMS)
    update = jax.jit(tx.update)
    updates, _ = update(GOOD, state, PARAMS, value=jnp.float32(1))
    assert_bitwise_equal(updates, update(GOOD, state, PARAMS)[0])


@pytest.mark.parametrize("other", [optax.clip(1.0), ADAM])
def test_a_part_of_a_chain_that_refuses_the_loss_is_told_to_be_outermost(other):
    tx = with_loss_scale(optax.chain(other, SAM))
    message = "unexpected keyword argument 'value'"
    with pytest.raises(TypeError, match=message) as raised:
        tx.update(GOOD, tx.init(PARAMS), PARAMS, value=jnp.float32(1))
    (note,) = raised.value.__notes__
    assert "outermost in inner, as optax.contrib.sam(optax.chain(...)" in note
    assert "or leave value= out" in note
    tx.update(GOOD, tx.init(PARAMS), PARAMS)


def by_loss(updates, state, params=None, *, loss, **extra):
    return jax.tree.map(lambda u: u * loss, updates), state


TAKES_LOSS = {
    "plain": extra_args_optimizer(by_loss),
    "strict": extra_args_optimizer(lambda u, s, p=None, *, loss: (u * loss, s)),
    "chain": optax.chain(extra_args_optimizer(by_loss), optax.scale(1.0)),
}


@pytest.mark.parametrize("name", TAKES_LOSS)
def test_a_loss_reaches_an_optimizer_that_takes_it_by_that_name(name):
    tx, params = with_loss_scale(TAKES_LOSS[name]), jnp.ones(2)
    # One that names the loss needs no value.
    for value in [{"value": 3.0}] if name == "chain" else [{"value": 3.0}, {}]:
        updates, _ = tx.update(params, tx.init(params), params, loss=3.0, **value)
        assert updates.tolist() == [3, 3]


@pytest.mark.parametrize("nothing", [None, optax.MaskedNode()])
def test_parts_without_a_gradient_or_a_parameter_may_be_left_out(nothing):
    tx = with_loss_scale(ADAM)
    params = {"trained": PARAMS["w"], "frozen": PARAMS, "other": nothing}
    grads = {"trained": GOOD["w"], "frozen": nothing, "other": GOOD["w"]}
    updates, _ = tx.update(grads, tx.init(grads), params)
    expected = -0.1 * np.sign(GOOD["w"])  # Adam's first step
    np.testing.assert_allclose(updates["trained"], expected, rtol=1e-4)
    assert updates["frozen"] == nothing


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_parameters_are_warned_of_once_with_the_cure(dtype):
    message = rf"got \['b'\] of {jnp.dtype(dtype)}, .*cast_to_param"
    with pytest.warns(UserWarning, match=message) as seen:
        with_loss_scale(ADAM).init(half(PARAMS, dtype))
    assert [warning.filename for warning in seen] == [__file__]


@pytest.mark.parametrize(
    "nest",
    [
        lambda tx: optax.chain(optax.clip(1.0), tx),
        lambda tx: optax.partition({"a": tx, "b": ADAM}, {"w": "a", "b": "b"}),
    ],
)
def test_a_loss_scale_within_another_is_refused_at_any_depth(nest):
    within = nest(with_loss_scale(ADAM, DynamicLossScale()))
    tx = with_loss_scale(within, DynamicLossScale())
    with pytest.raises(ValueError, match=r"contains with_loss_scale.*wrap once"):
        tx.init(PARAMS)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (
            {"n": jnp.float32(0)},
            r"types of its state, got inner_state\['n'\] as float32",
        ),
        ({"n": jnp.zeros(2, jnp.int32)}, r"types of its state, got .* as int32\[2\]"),
        ({"m": jnp.int32(0)}, "structure of its state"),
    ],
)
def test_a_state_whose_types_or_structure_the_optimizer_changes_is_an_error(
    new, message
):
    start = {"kept": jnp.int32(0), "n": jnp.int32(0)}
    tx = with_loss_scale(optimizer(start, lambda g, s: (g, s | new)))
    with pytest.raises(ValueError, match=f"expected inner to keep the {message}"):
        tx.update(GOOD, tx.init(PARAMS), PARAMS)


def test_numbers_in_the_state_of_an_optimizer_become_strongly_typed_arrays():
    start = {"rate": 0.5, "n": 1, "weak": jnp.asarray(2.0)}
    state = with_loss_scale(optimizer(start)).init(PARAMS).inner_state
    assert state == start
    assert not any(leaf.weak_type for leaf in state.values())


@pytest.mark.parametrize("rate", [jnp.float32(0.5), np.float64(0.5)])
def test_a_learning_rate_set_in_the_inner_state_is_used_and_kept(rate):
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    tx = with_loss_scale(inner)
    state = tx.init(PARAMS)
    state.inner_state.hyperparams["learning_rate"] = rate
    updates, state = tx.update(GOOD, state, PARAMS)
    np.testing.assert_array_equal(updates["b"], -0.5 * GOOD["b"])
    assert state.inner_state.hyperparams["learning_rate"] == 0.5


def test_an_optimizer_may_start_with_numpy_arrays_of_64_bits():
    start = {"n": np.int64(0), "m": np.ones(3)}
    inner = optimizer(start, lambda g, s: (g, {"n": s["n"] + 1, "m": s["m"] * 0.5}))
    tx = with_loss_scale(inner)
    state = tx.init(PARAMS)
    for grads in (GOOD, BAD, GOOD):
        _, state = tx.update(grads, state, PARAMS)
    assert state.inner_state["n"] == 2
    np.testing.assert_array_equal(state.inner_state["m"], np.full(3, 0.25))


def test_no_tracer_leaks_from_a_step_or_its_derivative():
    guard = SpikeGuard()
    tx = with_loss_scale(optax.sgd(0.1), DynamicLossScale(), guard=guard)

    def loss_after(params, state):
        fun = jmp_scale.value_and_grad(value_fn, state.loss_scale)
        loss, grads = fun(params)
        updates, state = tx.update(grads, state, params, value=loss)
        return value_fn(optax.apply_updates(params, updates)), state

    with jax.checking_leaks():
        state = tx.init(PARAMS)
        jax.eval_shape(jax.grad(loss_after, has_aux=True), PARAMS, state)


def test_a_state_keeps_its_sharding_on_explicit_and_auto_axes():
    types = (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=types)
    tx = with_loss_scale(SPECIAL["adafactor_factored"], DynamicLossScale())
    with jax.set_mesh(mesh):
        params = sharded(jnp.ones((8, 4)), mesh, jax.P("x"))
        state, update = tx.init(params), jax.jit(tx.update)
        types = jax.tree.map(jax.typeof, state)
        for factor in (0.1, jnp.inf):
            _, state = update(params * factor, state, params)
            assert jax.tree.map(jax.typeof, state) == types
        assert state.skipped == 1
