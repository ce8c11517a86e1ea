"""Flax NNX's Optimizer: what a skipped step keeps, and that it looks like NNX from outside."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_bitwise_equal, count_traces

import jmp_scale
from jmp_scale.nnx import Optimizer

GOOD, OVERFLOWS = 1.0, 3e5  # the second is infinite in float16


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 8, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 1, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(self.hidden(x)))).astype(jnp.float32)


def data(size):
    return jax.random.normal(jax.random.key(1), (16, 4)) * size


def loss_fn(model, x):
    return jnp.mean((model(x) - 1.0) ** 2)


TX = jmp_scale.with_loss_scale(
    optax.adam(1e-2), jmp_scale.DynamicLossScale(2.0**10, period=2)
)


def make(optimizer_class=Optimizer, tx=TX, **kwargs):
    model = Net(nnx.Rngs(0))
    return model, optimizer_class(model, tx, **kwargs)


def train_step(model, optimizer, x):
    loss, grads = optimizer.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    return loss


def train_step_with_value(model, optimizer, x):
    loss, grads = optimizer.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads, value=loss)
    return loss


def plain_train_step(model, optimizer, x):
    loss_scale = optimizer.opt_state.loss_scale
    loss, grads = jmp_scale.value_and_grad(
        loss_fn, loss_scale, transform=nnx.value_and_grad
    )(model, x)
    optimizer.update(model, grads)
    return loss


JITTED = {
    step: nnx.jit(step)
    for step in (train_step, train_step_with_value, plain_train_step)
}


def run(sizes, model, optimizer, step=train_step):
    step = JITTED[step]
    for size in sizes:
        step(model, optimizer, data(size))


def snapshot(model, optimizer):
    """All that training keeps but the loss scale's own state, as host arrays."""
    state = nnx.to_pure_dict(nnx.state((model, optimizer)))
    optimizer_state = state.pop(1)
    inner_state = optimizer_state["opt_state"].get("inner_state")
    return jax.tree.map(host, (state[0], inner_state, optimizer_state["step"]))


def host(x):
    return np.asarray(
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    )


def test_an_applied_step_changes_parameters_statistics_and_step():
    model, optimizer = make()
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.BatchStat, nnx.Param))
    run([GOOD], model, optimizer)
    for old, new in zip(
        before, nnx.state(model, nnx.BatchStat, nnx.Param), strict=True
    ):
        pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
        assert any((a != b).any() for a, b in pairs)
    assert int(optimizer.step[...]) == 1


@pytest.mark.parametrize("step", [train_step, train_step_with_value])
def test_a_skipped_step_leaves_all_that_training_keeps_bit_identical(step):
    model, optimizer = make()
    run([GOOD, GOOD, GOOD], model, optimizer)
    before = snapshot(model, optimizer)
    run([OVERFLOWS], model, optimizer, step)
    assert_bitwise_equal(snapshot(model, optimizer), before)
    assert int(optimizer.opt_state.skipped[...]) == 1


def test_an_eager_step_skips_as_well():
    model, optimizer = make(
        tx=optax.sgd(0.1), loss_scale=jmp_scale.DynamicLossScale(2.0**10)
    )
    before = snapshot(model, optimizer)
    train_step(model, optimizer, data(OVERFLOWS))
    assert_bitwise_equal(snapshot(model, optimizer), before)
    assert float(optimizer.loss_scale.loss_scale) == 2.0**9


def test_jax_jit_with_split_and_merge_skips_too():
    model, optimizer = make()
    graphdef, state = nnx.split((model, optimizer))

    @jax.jit
    def step(state, x):
        model, optimizer = nnx.merge(graphdef, state, copy=True)
        train_step(model, optimizer, x)
        return nnx.state((model, optimizer))

    before = snapshot(model, optimizer)
    nnx.update((model, optimizer), step(state, data(OVERFLOWS)))
    assert_bitwise_equal(snapshot(model, optimizer), before)
    assert int(optimizer.opt_state.skipped[...]) == 1


def test_the_plain_nnx_optimizer_keeps_parameters_but_also_the_non_finite_statistics():
    model, optimizer = make(nnx.Optimizer, wrt=nnx.Param)
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    run([OVERFLOWS], model, optimizer, plain_train_step)
    assert_bitwise_equal(jax.tree.map(np.asarray, nnx.state(model, nnx.Param)), before)
    assert not jmp_scale.all_finite(nnx.state(model, nnx.BatchStat))
    assert int(optimizer.step[...]) == 1


def test_training_goes_on_after_a_skipped_step():
    model, optimizer = make()
    run([GOOD, OVERFLOWS, GOOD], model, optimizer)
    assert jmp_scale.all_finite(nnx.state(model))
    assert int(optimizer.step[...]) == 2


def test_a_non_finite_loss_given_as_value_leaves_the_loss_scale_alone():
    model, optimizer = make()
    run([OVERFLOWS], model, optimizer, train_step_with_value)
    assert float(optimizer.loss_scale.loss_scale) == 2.0**10


def test_the_loss_scale_follows_the_rule():
    model, optimizer = make()
    history = []
    for size in [GOOD, GOOD, OVERFLOWS, GOOD]:
        run([size], model, optimizer)
        history.append(
            (float(optimizer.loss_scale.loss_scale), int(optimizer.loss_scale.counter))
        )
    assert history == [(2.0**10, 1), (2.0**11, 0), (2.0**10, 0), (2.0**10, 1)]


def test_four_steps_are_one_compilation_also_across_a_skip_and_a_growth():
    step, traces = count_traces(train_step)
    model, optimizer = make()
    step = nnx.jit(step)
    for size in [GOOD, OVERFLOWS, GOOD, GOOD]:
        step(model, optimizer, data(size))
    assert len(traces) == 1


def test_model_and_optimizer_can_be_donated():
    model, optimizer = make()
    step = nnx.jit(train_step, donate_argnums=(0, 1))
    for size in [GOOD, OVERFLOWS, GOOD]:
        loss = step(model, optimizer, data(size))
    assert int(optimizer.step[...]) == 2
    assert np.isfinite(float(loss))


def test_dropout_keys_advance_on_applied_steps_only():
    model, optimizer = make()
    run([GOOD, OVERFLOWS, GOOD], model, optimizer)
    assert int(model.dropout.rngs.count[...]) == 2


def test_an_aux_is_returned_and_the_model_may_stand_second():
    model, optimizer = make()

    def second(x, model):
        loss = loss_fn(model, x)
        return loss, x.shape

    (_, aux), grads = optimizer.value_and_grad(second, argnums=1, has_aux=True)(
        data(OVERFLOWS), model
    )
    optimizer.update(model, grads)
    assert aux == (16, 4)
    assert jmp_scale.all_finite(nnx.state(model, nnx.BatchStat))


def test_only_the_variables_of_wrt_are_trained():
    model, optimizer = make(wrt=nnx.PathContains("out"))
    hidden = np.asarray(model.hidden.kernel[...])
    out = np.asarray(model.out.kernel[...])
    run([GOOD], model, optimizer)
    assert_bitwise_equal(np.asarray(model.hidden.kernel[...]), hidden)
    assert (np.asarray(model.out.kernel[...]) != out).any()


def test_without_a_loss_scale_it_trains_as_nnx_does():
    ours, reference = (
        nnx.Linear(4, 1, rngs=nnx.Rngs(0)),
        nnx.Linear(4, 1, rngs=nnx.Rngs(0)),
    )
    optimizer = Optimizer(ours, optax.adam(1e-2))
    reference_optimizer = nnx.Optimizer(reference, optax.adam(1e-2), wrt=nnx.Param)
    for _ in range(2):
        train_step(ours, optimizer, data(GOOD))
        _, grads = nnx.value_and_grad(loss_fn)(reference, data(GOOD))
        reference_optimizer.update(reference, grads)
    ours, reference = (
        nnx.to_pure_dict(nnx.state(model)) for model in (ours, reference)
    )
    assert_bitwise_equal(ours, reference)


def test_the_optimizer_is_wrapped_with_the_given_loss_scale():
    loss_scale = jmp_scale.DynamicLossScale(8.0, period=7)
    _, optimizer = make(tx=optax.sgd(0.1), loss_scale=loss_scale)
    assert_bitwise_equal(optimizer.loss_scale, loss_scale)


def test_the_verbs_of_a_loss_scale_work_on_nnx_variables_as_leaves():
    _, optimizer = make()
    loss_scale = optimizer.opt_state.loss_scale
    assert isinstance(loss_scale.loss_scale, nnx.Variable)
    assert float(loss_scale.scale(jnp.float32(3.0))) == 3.0 * 2.0**10
    assert float(loss_scale.unscale(jnp.float16(4.0))) == 2.0**-8
    adjusted = loss_scale.adjust(jnp.array(False), loss_finite=jnp.array(True))
    assert float(adjusted.loss_scale) == 2.0**9


def test_two_loss_scales_are_refused():
    with pytest.raises(ValueError, match="already wrapped in with_loss_scale"):
        make(loss_scale=jmp_scale.DynamicLossScale())
