import functools

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from helpers import assert_bitwise_equal
from jax.sharding import NamedSharding, PartitionSpec

from jmp_scale import _skip, all_finite, select_tree
from jmp_scale._skip import update_or_keep

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 32).reshape(8, 4), "b": jnp.arange(8.0) / 8}
GOOD = jax.tree.map(lambda p: jnp.cos(p) / 3, PARAMS)
BAD = {"w": GOOD["w"].at[3, 1].set(jnp.nan), "b": GOOD["b"]}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "adam_bf16_momentum": optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "amsgrad": optax.amsgrad(0.1),
    "clip_adam": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(
        learning_rate=lambda n: 0.1 / (1 + n)
    ),
    "multi_steps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "add_noise": optax.chain(
        optax.add_noise(0.1, 0.55, jax.random.key(0)), optax.sgd(0.1)
    ),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "lamb": optax.lamb(0.1),
    "lion": optax.lion(0.1),
    "rmsprop": optax.rmsprop(0.1, momentum=0.9),
    "muon": optax.contrib.muon(0.1),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1),
    "lbfgs": optax.lbfgs(0.1, linesearch=None),
}


def late(finite, update, old):
    updates, new = update()
    return updates, select_tree(finite, new, old)


def stepper(tx, select):
    """One step with the state selected by `select`; the gradients of a skipped one are zeroed."""

    def value_fn(params):
        return sum(jnp.sum((p - 0.1) ** 2) for p in jax.tree.leaves(params))

    def step(params, state, grads):
        finite = all_finite(grads)
        safe = jax.tree.map(lambda g: jnp.where(finite, g, 0), grads)
        extra = {"value": value_fn(params), "grad": safe, "value_fn": value_fn}
        tx_update = optax.with_extra_args_support(tx).update
        updates, state = select(
            finite, lambda: tx_update(safe, state, params, **extra), state
        )
        updates = jax.tree.map(lambda u: jnp.where(finite, u, 0), updates)
        return optax.apply_updates(params, updates), state

    return step


# Without these, XLA fuses the two programs in different ways, and contracts a * b + c in some of them.
NO_REWRITES = {"xla_disable_hlo_passes": "fusion", "xla_backend_optimization_level": 0}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_early_and_late_selects_agree_bit_for_bit(name):
    tx = OPTIMIZERS[name]
    state = tx.init(PARAMS)
    early_step, late_step = (
        jax.jit(stepper(tx, select)).lower(PARAMS, state, GOOD).compile(NO_REWRITES)
        for select in (update_or_keep, late)
    )
    actual = expected = (PARAMS, state)
    for grads in (BAD, GOOD, GOOD, BAD, GOOD):
        actual, expected = early_step(*actual, grads), late_step(*expected, grads)
        assert_bitwise_equal(actual, expected)


def moving_average(grads, state):
    new = {"m": 0.5 * state["m"] + grads, "count": state["count"] + 1}
    return 2.0 * new["m"] / new["count"], new


def kept_or_new(select, finite, grads, state):
    return select(finite, lambda: moving_average(grads, state), state)


STATE = {"m": jnp.arange(8.0), "count": jnp.float32(3)}


def places_of_select(fun, *args):
    """Index of the first equation that selects, and the number of equations."""
    names = [str(equation) for equation in jax.make_jaxpr(fun)(*args).jaxpr.eqns]
    return next(
        i for i, name in enumerate(names) if "select_n" in name or "_where" in name
    ), len(names)


def test_a_leaf_is_selected_before_the_updates_are_computed():
    args = (jnp.array(True), jnp.ones(8), STATE)
    early, _ = places_of_select(functools.partial(kept_or_new, update_or_keep), *args)
    after, _ = places_of_select(functools.partial(kept_or_new, late), *args)
    assert early < after


@pytest.mark.parametrize("finite", [True, False])
def test_a_mapped_and_a_scanned_step_agree_with_the_late_select(finite):
    def run(select):
        def step(state, grads):
            updates, state = kept_or_new(
                select, jnp.all(grads < 9) & finite, grads, state
            )
            return state, updates

        grads = jnp.where(jnp.arange(3)[:, None] == 1, 9.0, jnp.ones((3, 8)))
        return jax.jit(lambda s: jax.lax.scan(step, s, grads))(STATE), jax.vmap(
            lambda g: step(STATE, g)
        )(grads)

    (actual_scan, _), (actual_map, _) = run(update_or_keep)
    (expected_scan, _), (expected_map, _) = run(late)
    assert_bitwise_equal((actual_scan, actual_map), (expected_scan, expected_map))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_of_a_state_agree_with_the_late_select(check_vma):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"m": PartitionSpec("x"), "count": PartitionSpec()}

    def run(select, finite):
        fun = functools.partial(kept_or_new, select)
        sharded = jax.shard_map(
            fun, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("x"), specs),
            out_specs=(PartitionSpec("x"), specs), check_vma=check_vma,
        )  # fmt: skip
        return jax.jit(sharded)(finite, jnp.ones(8), STATE)[1]

    for finite in (jnp.array(True), jnp.array(False)):
        assert_bitwise_equal(run(update_or_keep, finite), run(late, finite))


def test_a_sharded_state_keeps_its_sharding():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    state = STATE | {"m": jax.device_put(STATE["m"], sharding)}
    _, new = jax.jit(functools.partial(kept_or_new, update_or_keep))(
        jnp.array(False), jnp.ones(8), state
    )
    assert new["m"].sharding.is_equivalent_to(sharding, 1)
    assert_bitwise_equal(new, STATE)


@pytest.mark.parametrize("finite", [True, False])
def test_a_compiled_update_inside_is_selected_as_a_whole(finite):
    def run(select):
        inner = jax.jit(moving_average)
        fun = jax.jit(lambda f, g, s: select(f, lambda: inner(g, s), s))
        return fun(jnp.array(finite), jnp.ones(8), STATE)[1]

    assert_bitwise_equal(run(update_or_keep), run(late))


def test_a_loop_that_waits_for_a_condition_sees_only_new_values():
    def update(state):
        new = (
            state + 1.0
        )  # the loop doubles it up to 8; on the old value, 0, it would never end
        return jax.lax.while_loop(lambda x: jnp.all(x < 8), lambda x: x + x, new), new

    def step(finite, state):
        return update_or_keep(
            finite, lambda: jax.lax.cond(finite, update, update, state), state
        )

    def loop(finite, state):
        return update_or_keep(finite, lambda: update(state), state)

    for fun in (step, loop):
        updates, new = jax.jit(fun)(jnp.array(False), jnp.zeros(2))
        assert_bitwise_equal((updates, new), (jnp.full(2, 8.0), jnp.zeros(2)))


def test_two_leaves_of_one_new_value_keep_an_old_value_each():
    def run(finite, a, b):
        def update():
            new = 3 * a
            return new, (new, new, b, a)

        return update_or_keep(finite, update, (a, b, b, b))[1]

    a, b = jnp.arange(2.0), jnp.ones(2)
    assert_bitwise_equal(jax.jit(run)(jnp.array(False), a, b), (a, b, b, b))
    assert_bitwise_equal(jax.jit(run)(jnp.array(True), a, b), (3 * a, 3 * a, b, a))


@pytest.mark.parametrize(
    "new", [jnp.ones(3), jnp.ones((2, 1)), jnp.ones(2, jnp.int32), (jnp.ones(2),)]
)
def test_a_new_state_of_another_type_is_an_error(new):
    with pytest.raises(ValueError, match="select_tree"):
        jax.jit(
            lambda f, s: update_or_keep(
                f, lambda: (s, jax.tree.map(lambda x: x + x, new)), s
            )
        )(jnp.array(True), jnp.ones(2))


def test_without_jax_s_jaxpr_interface_the_select_is_late(monkeypatch):
    class NoInterface:
        pass

    monkeypatch.setattr(_skip, "core", NoInterface)
    fun = jax.jit(functools.partial(kept_or_new, update_or_keep))
    assert_bitwise_equal(fun(jnp.array(False), jnp.ones(8), STATE)[1], STATE)
