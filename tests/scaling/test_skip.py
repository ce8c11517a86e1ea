import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bitwise_equal, by_name
from optimizers import BAD, OPTIMIZERS, PARAMS, optimizer, stepper

from jmp_scale import with_loss_scale
from jmp_scale._scaling.skip import select_step

POINT = jnp.linspace(0.5, 1.0, 8).reshape(2, 4)


def operations(tx, params):
    """How often the step has each operation on a CPU, by name and types."""
    step = jax.jit(lambda grads: tx.update(grads, tx.init(params), params))
    program = jax.export.export(step, platforms=["cpu"])(params).mlir_module()
    return collections.Counter(re.findall(r"stablehlo\.(\w+) .*: (.*) loc", program))


@pytest.mark.parametrize("name", by_name(["clip_adamw"], ["lamb"]))
def test_an_applied_step_computes_what_the_optimizer_does_operation_by_operation(name):
    params = {"large": jnp.ones((16, 1024)), "small": jnp.ones(3)}
    plain = optax.with_extra_args_support(OPTIMIZERS[name])
    own = operations(plain, params)
    assert own["divide", "tensor<16x1024xf32>"] > 1
    assert own <= operations(with_loss_scale(plain), params)


def loss_after_steps(tx):
    """The loss after two steps, of which one is skipped."""
    good = jnp.sin(POINT)

    def loss(p, rate, overflow_first):
        state, q = tx.init(p), p
        for is_bad in (overflow_first, ~overflow_first):
            grads = jnp.where(is_bad, jnp.inf, rate * good)
            updates, state = tx.update(grads, state, q)
            q = optax.apply_updates(q, updates)
        return jnp.sum(jnp.square(q))

    return loss


@pytest.mark.parametrize("name", by_name(["adamw"], ["adafactor", "lamb", "prodigy"]))
def test_derivatives_of_a_skipped_step_are_those_of_a_branch_also_in_a_map(name):
    ours = loss_after_steps(with_loss_scale(OPTIMIZERS[name]))
    branches = loss_after_steps(optax.apply_if_finite(OPTIMIZERS[name], 10))
    derivatives = [jax.jit(jax.grad(loss, (0, 1))) for loss in (ours, branches)]
    # Of two members each skips another step.
    flags = jnp.array([True, False])
    members = [(POINT, jnp.float32(1.5), flag) for flag in flags]
    alone, expected = ([fun(*args) for args in members] for fun in derivatives)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *members)
    in_a_map = jax.grad(lambda *args: jax.vmap(ours)(*args).sum(), (0, 1))
    mapped = jax.jit(in_a_map)(*stacked)
    for found in (alone, [*zip(*mapped, strict=True)]):
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert np.isfinite(a).all()
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_an_infinite_derivative_of_what_is_dropped_is_not_seen():
    def total(state, p, applied):
        def update(grads, state):  # closes over p, as over parameters
            return grads * (jnp.sqrt(state) + jnp.sqrt(p)), state + grads

        updates, new = select_step(applied, update, jnp.float32(1.0), state)
        return updates + new

    derivative = jax.jit(jax.grad(total, (0, 1)))
    assert derivative(*jnp.zeros(2), jnp.array(False)) == (1, 0)
    assert derivative(*jnp.full(2, 0.25), jnp.array(True)) == (2, 1)


@pytest.mark.parametrize("pure", [False, True])
def test_callbacks_see_a_state_of_one_piece_also_on_a_skipped_step(pure):
    seen = []

    def note(m, count):
        seen.append((float(m[0]), float(count)))
        return m

    def step(grads, state):
        m, count = state["m"] + grads["b"] * 0 + 1, state["count"] + 1
        if pure:
            grads["b"] += 0 * jax.pure_callback(note, m, m, count)
        else:
            jax.debug.callback(note, m, count)
        return grads, {"m": m, "count": count}

    start = {"m": jnp.ones(2), "count": jnp.float32(0)}
    tx = with_loss_scale(optimizer(start, step))
    jax.block_until_ready(jax.jit(stepper(tx))(PARAMS, tx.init(PARAMS), BAD))
    jax.effects_barrier()
    assert set(seen) == {(2.0, 1.0)}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_debug_nans_is_quiet_on_a_skipped_step(wrap):
    inverse = optimizer((), lambda g, s: (jax.tree.map(lambda x: 1 / x, g), s))
    tx = with_loss_scale(optax.chain(OPTIMIZERS["clip_adamw"], inverse))
    state = tx.init(PARAMS)
    with jax.debug_nans(True):
        updates, state = wrap(lambda g, s: tx.update(g, s, PARAMS))(BAD, state)
    assert_bitwise_equal(optax.apply_updates(PARAMS, updates), PARAMS)
    assert state.skipped == 1


def test_a_leaf_is_selected_before_the_updates_are_computed():
    def update(grads, state):
        new = 0.5 * state + grads
        return 2.0 / new, new

    step = jax.jit(lambda applied, *args: select_step(applied, update, *args))
    program = step.lower(jnp.array(True), jnp.ones(8), jnp.ones(8)).as_text()
    assert program.split("stablehlo.divide")[0].count("stablehlo.select") == 1


def test_two_leaves_of_one_new_value_keep_an_old_value_each():
    def run(applied, a, b):
        def update(_, state):
            new = 3 * state[0]
            return new, (new, new, state[2], state[0])

        return select_step(applied, update, (), (a, b, b, b))[1]

    a, b = jnp.arange(2.0), jnp.ones(2)
    assert_bitwise_equal(jax.jit(run)(jnp.array(False), a, b), (a, b, b, b))
    assert_bitwise_equal(jax.jit(run)(jnp.array(True), a, b), (3 * a, 3 * a, b, a))


@pytest.mark.parametrize("applied", [True, False])
def test_an_update_that_writes_into_a_mutable_array_is_kept_or_dropped(applied):
    def update(grads, state):
        ref = jax.new_ref(state)
        ref[...] += grads
        return -ref[...], ref[...]

    step = jax.jit(functools.partial(select_step, update=update))
    updates, new = step(jnp.array(applied), inputs=jnp.ones(2), old=jnp.full(2, 3.0))
    u, s = (-4.0, 4.0) if applied else (-0.0, 3.0)
    assert_bitwise_equal((updates, new), (jnp.full(2, u), jnp.full(2, s)))


def test_a_loop_that_waits_for_a_condition_ends_on_a_skipped_step():
    def update(grads, state):  # on a NaN, or on the old value of 0, it would never end
        new = state + 1.0 + grads
        grown = jax.lax.while_loop(lambda x: ~jnp.all(x >= 8), lambda x: x + x, new)
        return grown, new

    step = functools.partial(select_step, update=update)
    skipped = {"inputs": jnp.full(2, jnp.nan), "old": jnp.zeros(2)}
    for jitted in (step, jax.jit(step, static_argnames="update")):
        updates, new = jitted(jnp.array(False), **skipped)
        assert_bitwise_equal((updates, new), (jnp.full(2, -0.0), jnp.zeros(2)))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_updates_of_integers_are_zero_on_a_skipped_step(wrap):
    inner = optimizer((), lambda g, s: ({"n": jnp.int32(3), "g": g}, s))
    tx = with_loss_scale(inner)
    for g, expected in ((1.0, 3), (jnp.nan, 0)):
        updates, _ = wrap(tx.update)(jnp.float32(g), tx.init(jnp.float32(0.0)))
        assert updates["n"].dtype == jnp.int32
        assert updates["n"] == expected
