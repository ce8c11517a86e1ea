"""Training with parameters and averages in bfloat16, next to float32 references."""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import TWO_AXES, assert_bitwise_equal, by_name, sharded, slow
from jax import lax
from optimizers import BAD, GOOD, OPTIMIZERS, PARAMS, STEPS, half, optimizer, stepper

import jmp_scale.linen
import jmp_scale.nnx
from jmp_scale import full_parameters, with_half_storage, with_loss_scale

KEY = jax.random.key(0)
ADAMS = {"averages": ("mu", "nu"), "key": KEY}
TRACE = {"averages": ("trace",), "key": KEY}
STOCHASTIC = {"remainders": False, "key": KEY}
HALF = half(PARAMS)


# Parameters.


def rounded(x):
    """The nearest bfloat16, ties up, as an integer of 16 bits."""
    return ((np.asarray(x).view(np.uint32) + 2**15) >> 16).astype(np.uint16)


# By default those that differ most in what they do.
@pytest.mark.parametrize("name", by_name(["adamw", "masked", "sam"], OPTIMIZERS))
def test_the_float32_values_are_those_of_the_plain_optimizer_in_every_bit(name):
    inner, tx = OPTIMIZERS[name], with_half_storage(OPTIMIZERS[name])
    plain, params = PARAMS, HALF
    plain_state, state = inner.init(plain), tx.init(params)
    with jax.disable_jit():
        plain_step, step = stepper(inner), stepper(tx, full_parameters)
        for grads in STEPS:
            plain, plain_state = plain_step(plain, plain_state, grads)
            params, state = step(params, state, grads)
    assert_bitwise_equal(full_parameters(params, state), plain)
    for key in plain:
        actual = np.asarray(params[key]).view(np.uint16)
        np.testing.assert_array_equal(actual, rounded(plain[key]))


def every_size():
    """Parameters, and updates of each: some to its size, and some of any other."""
    largest, tiny = (float(getattr(jnp.finfo("bfloat16"), x)) for x in ("max", "tiny"))
    some = np.random.RandomState(0).randint(0, 2**16, 100).astype(np.uint16)
    named = [0, -0.0, 1, np.inf, np.nan, largest, -largest, tiny, -tiny, 2.0**-24]
    params = lax.bitcast_convert_type(jnp.array(some), jnp.bfloat16)
    params = jnp.append(params, jnp.array(named, jnp.bfloat16))
    moves = [0, -0.0, 1e-3, -2, 3e38, -3e38, 65504, -7e4, 1e-30, -(2.0**-25)]
    moves = jnp.float32([*moves, np.inf, np.nan])
    factors = jnp.float32([1e-3, -1, -1.9, 1e-6])
    relative = jnp.outer(factors, params.astype(jnp.float32))
    updates = jnp.outer(moves, jnp.ones(params.size)), relative
    return jnp.tile(params, (16, 1)), jnp.concatenate(updates)


@pytest.mark.parametrize("jit", [jax.jit, slow(lambda f: f)], ids=["jit", "eager"])
def test_values_of_every_size_are_kept_in_every_bit(jit):
    params, updates = every_size()
    tx = with_half_storage(optax.identity())
    state, plain = tx.init(params), params.astype(jnp.float32)
    step = jit(lambda p, s, u: tx.update(u, s, p))
    for factor in (1, 0.4):
        changes, state = step(params, state, factor * updates)
        old, params = params, optax.apply_updates(params, changes)
        plain = plain + factor * updates
        # From there a parameter can go no nearer to zero.
        near = jnp.abs(plain) >= 2.0**-15 * jnp.abs(old.astype(jnp.float32))
        near = np.asarray(near & (plain != 0))
        actual, expected = (
            np.asarray(x).view(np.uint32)
            for x in (full_parameters(params, state), plain)
        )
        assert near.sum() > 1000
        np.testing.assert_array_equal(actual[near], expected[near])
        nearest = rounded(np.asarray(plain)[near])
        got = np.asarray(params).view(np.uint16)[near]
        nonzero = (nearest & 0x7FFF) != 0
        np.testing.assert_array_equal(got[nonzero], nearest[nonzero])
        assert (jnp.isnan(params) == jnp.isnan(plain)).all()


def test_mixed_trees_keep_what_is_not_bfloat16_as_it_is():
    params = {"b": HALF["b"], "f": PARAMS["w"], "h": half(2.0), "n": None}
    params |= {"e": jnp.zeros((0, 3), jnp.bfloat16), "i": jnp.int32(3)}
    params |= {"q": jnp.ones(2, jnp.float8_e4m3fn), "m": optax.MaskedNode()}
    grads = jax.tree.map(jnp.ones_like, params) | {"i": None, "q": None, "b": None}
    tx = with_half_storage(optax.sgd(2.0**-12))
    state = tx.init(params)
    dtypes = {key: getattr(x, "dtype", None) for key, x in state.remainders.items()}
    assert dtypes == dict.fromkeys(params) | dict.fromkeys("beh", "int16")
    updates, state = jax.jit(tx.update)(grads, state, params)
    assert [updates[key] for key in ("i", "q", "b", "n")] == [None] * 4
    params["h"] = optax.apply_updates(params["h"], updates["h"])
    values = full_parameters(params, state)
    assert values["h"] == 2 - 2.0**-12
    assert values["b"].tolist() == PARAMS["b"].tolist()
    assert [values[key] is params[key] for key in "fiq"] == [True] * 3


@pytest.mark.parametrize("inner", [optax.sgd(0.5), optax.adam(0.5)])
def test_a_float8_parameter_is_updated_in_float32_and_stays_float8(inner):
    params = {"b": HALF["b"], "q": jnp.ones(2, jnp.float8_e5m2)}
    tx = with_half_storage(inner)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    got = optax.apply_updates(params, updates)["q"]
    assert (got.dtype, got.tolist()) == (jnp.float8_e5m2, [0.5, 0.5])


# Averages.

# Names of fields, by optimizer, whose arrays are averages; and those that are not.
FIELDS = {
    "adamw": ("mu nu", ""),
    "rmsprop_centered": ("trace", "mu nu"),
    "muon": ("mu nu", "ns_coeffs"),
    "multi_steps": ("mu nu", "acc_grads"),
    "partition": ("mu nu trace", ""),
    "masked": ("trace", ""),
    "inject_hyperparams": ("mu nu", ""),
    "amsgrad": ("mu nu", "nu_max"),
    "schedule_free_adamw": ("nu", "z"),
    "adan": ("m v n", "g"),
    "ademamix": ("m1 m2 nu", ""),
}


def fields_of(tree, dtype):
    """The fields in which arrays of a dtype lie, those with an axis."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    paths = [path for path, x in pairs if x.dtype == dtype and x.ndim]
    return {[k.name for k in path if hasattr(k, "name")][-1] for path in paths}


@pytest.mark.parametrize("name", [x for x in FIELDS if x in OPTIMIZERS])
def test_the_averages_are_bfloat16(name):  # older versions of Optax lack some
    averages, others = (set(text.split()) for text in FIELDS[name])
    tx = with_half_storage(OPTIMIZERS[name], averages=averages, key=KEY)
    start = jax.eval_shape(tx.init, PARAMS)
    for state in (start, jax.eval_shape(stepper(tx), PARAMS, start, GOOD)[1]):
        assert fields_of(state, jnp.bfloat16) == averages
        assert fields_of(state, jnp.float32) == others


# An optimizer that keeps the updates themselves.
Kept = collections.namedtuple("Kept", "mu nu")
KEEPING = optimizer(Kept(*jnp.zeros((2, 10_000))), lambda g, state: (g, Kept(g, g)))
TX = with_half_storage(KEEPING, **ADAMS)


def stored(x):
    """(mu, nu) of one step after which both are x, as float64 numbers."""
    return [np.float64(a) for a in TX.update(x, TX.init(x), x)[1].inner_state]


def moved(x):
    """Parameters that one step without remainders moves to x, as float64 numbers."""
    params = x.astype(jnp.bfloat16)
    tx = with_half_storage(optax.identity(), **STOCHASTIC)
    updates, _ = tx.update(x - params.astype(jnp.float32), tx.init(params), params)
    return np.float64(optax.apply_updates(params, updates))


@pytest.mark.parametrize("value", [1.2345, slow(2.0**-116 * 1.001), slow(-3e-5)])
def test_what_is_rounded_is_one_of_two_neighbors_and_right_in_the_mean(value):
    x, full = np.float64(np.float32(value)), jnp.full(10_000, value)
    for made in (moved(full), *stored(full)):
        low, high = np.unique(made)
        assert low < x < high
        assert abs(high - low) <= 2.0**-7 * abs(x)
        share = (x - low) / (high - low)
        deviation = np.sqrt(share * (1 - share) / made.size) * (high - low)
        assert abs(made.mean() - x) < 4 * deviation


def test_what_needs_no_rounding_stays_and_none_becomes_infinite():
    largest = float(jnp.finfo(jnp.bfloat16).max)
    stays = np.float32([0.0, -0.0, np.inf, -np.inf, 1.5, -(2.0**-126)])
    # Of JAX, of GPUs, and one whose upper half is infinite.
    nans = np.uint32([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
    above = np.finfo(np.float32).max * np.float32([1, -1, 0.999])
    x = np.tile([*stays, *nans.view(np.float32), *above], 1000)
    expected = np.where(np.isfinite(x), np.clip(x, -largest, largest), x)
    for made in stored(jnp.asarray(x)):
        np.testing.assert_array_equal(made, expected)
        assert (np.signbit(made) == np.signbit(x)).all()


@pytest.mark.parametrize(
    ("inner", "averages"),
    [
        (optax.rmsprop(0.1, centered=True, momentum=0.9), ("mu", "nu", "trace")),
        (optax.chain(optax.masked(optax.scale_by_stddev(), True)), ("mu",)),
        (optax.inject_hyperparams(optax.rmsprop)(0.1, centered=True), ("nu",)),
    ],
)
def test_averages_that_are_subtracted_from_each_other_are_refused(inner, averages):
    tx = with_half_storage(inner, averages=averages, key=KEY)
    with pytest.raises(ValueError, match=r"got mu and nu of a ScaleByR.*centered=F"):
        tx.init(PARAMS)


def test_noise_differs_by_average_parameter_and_step():
    x = jnp.full(10_000, 1 + 2.0**-8)  # half way between two neighbors
    ones = jnp.ones(10_000, jnp.bfloat16)
    tx = with_half_storage(KEEPING, remainders=False, **ADAMS)
    update = jax.jit(tx.update)
    start = tx.init(ones)
    first, one = update(x - 1, start, ones)
    second, two = update(x - 1, one, ones)
    # What is kept is the update, whose average is half way as well.
    drawn = [first, second, *TX.update(x, one, x)[1].inner_state]
    drawn += [*TX.update(x, two, x)[1].inner_state]
    for a, b in itertools.combinations(map(np.float64, drawn), 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    keys = [np.asarray(s.rounding_key).tolist() for s in (start, one, two)]
    assert len({*map(tuple, keys)}) == 3


def test_rounding_is_alike_under_every_layout():
    kinds = STOCHASTIC | TRACE | {"key": jax.random.key_data(KEY)}
    tx = with_half_storage(optax.sgd(0.1, momentum=0.9), **kinds)
    x = jax.random.normal(jax.random.key(1), (16, 24), jnp.bfloat16)

    @jax.jit
    def steps(x):
        params, state = x, tx.init(x)
        for factor in (1.0, 0.3):
            updates, state = tx.update(factor * x, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    assert_bitwise_equal(steps(sharded(x, TWO_AXES, jax.P("i", "j"))), steps(x))
    in_map = jax.shard_map(steps, mesh=TWO_AXES, in_specs=jax.P(), out_specs=jax.P())
    assert_bitwise_equal(jax.jit(in_map)(x), steps(x))


def test_the_members_of_an_ensemble_round_apart_with_keys_of_their_own():
    kinds = STOCHASTIC | TRACE
    tx = with_half_storage(optax.sgd(2.0**-9, momentum=0.9), **kinds)
    x = jnp.full((3, 100), 1.2345, jnp.bfloat16)
    grads = jnp.full((3, 100), 1.2345)
    keys = jax.vmap(jax.random.key_data)(jax.random.split(KEY, 3))
    states = jax.vmap(tx.init)(x)._replace(rounding_key=keys)
    made = jax.jit(jax.vmap(tx.update))(grads, states, x)
    for drawn in (made[0], made[1].inner_state[0].trace):
        assert len(np.unique(np.float32(drawn), axis=0)) == 3
    alone = jax.jit(tx.update)(*jax.tree.map(lambda a: a[1], (grads, states, x)))
    assert_bitwise_equal(jax.tree.map(lambda a: a[1], made), alone)


# Both.


@pytest.mark.parametrize("kinds", [TRACE, slow(STOCHASTIC | TRACE)])
def test_the_derivative_through_steps_is_that_of_float32_storage(kinds):
    params = {"w": jnp.ones((4, 2)), "z": jnp.zeros(3)}

    @functools.partial(jax.jit, static_argnums=1)
    @jax.grad
    def derivative(c, tx, params):
        state = tx.init(params)
        for _ in range(3):
            grads = jax.tree.map(lambda p: c * p.astype(jnp.float32) + 1, params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return sum(p.astype(jnp.float32).sum() for p in jax.tree.leaves(params))

    inner = optax.sgd(0.1, momentum=0.9)
    expected = derivative(1.1, inner, params)
    found = derivative(1.1, with_half_storage(inner, **kinds), half(params))
    # Cotangents of bfloat16 arrays are bfloat16. Without the momentum it is 40 % less.
    np.testing.assert_allclose(found, expected, rtol=0.01)


@pytest.mark.parametrize(
    ("name", "kinds", "dtype"),
    [
        ("multi_steps", ADAMS, jnp.float32),
        ("adamw", STOCHASTIC | ADAMS, jnp.bfloat16),
        slow(("adamw", {}, jnp.bfloat16)),
    ],
)
def test_a_skipped_step_changes_no_bit_and_init_does_not_warn(name, kinds, dtype):
    inner = with_half_storage(OPTIMIZERS[name], **kinds)
    tx = with_loss_scale(inner, jmp_scale.DynamicLossScale(8.0))
    params = half(PARAMS, dtype)
    state = tx.init(params)  # filters make a warning an error
    step = jax.jit(stepper(tx), donate_argnums=(0, 1))
    for grads in STEPS:
        params, state = step(params, state, grads)
    before = jax.tree.map(jnp.copy, (params, state.inner_state))
    params, state = step(params, state, BAD)
    assert_bitwise_equal((params, state.inner_state), before)
    assert (state.skipped, step._cache_size()) == (1, 1)


def test_averages_that_the_optimizer_itself_stores_in_half_precision_are_bfloat16():
    tx = with_half_storage(optax.adam(0.1, mu_dtype=jnp.float16), **ADAMS)
    state, step = tx.init(PARAMS), jax.jit(tx.update)
    for _ in range(2):
        _, state = step(PARAMS, state, PARAMS)
    dtypes = {x.dtype for x in jax.tree.leaves(state.inner_state) if x.ndim}
    assert dtypes == {jnp.dtype("bfloat16")}
    assert step._cache_size() == 1


def test_a_parameter_may_itself_be_called_mu():
    model = collections.namedtuple("Model", "mu z")(jnp.ones(3), {"nu": jnp.ones(2)})
    inner = optax.contrib.schedule_free_adamw(0.1)
    tx = with_half_storage(inner, averages=["nu"], key=KEY)
    state = tx.init(model).inner_state
    assert {x.dtype for x in jax.tree.leaves(state.z)} == {jnp.dtype("float32")}
    nu = state.base_optimizer_state[0].nu
    assert {x.dtype for x in jax.tree.leaves(nu)} == {jnp.dtype("bfloat16")}
    alone = with_half_storage(optax.adam(0.1), **ADAMS).init(jnp.ones(3))
    assert alone.inner_state[0].nu.dtype == jnp.bfloat16


def test_diagnostics_know_that_nothing_is_lost():
    tx = with_loss_scale(with_half_storage(optax.sgd(1e-5)))
    updates, state = jax.jit(tx.update)(GOOD, tx.init(HALF), HALF)
    known = {"params": HALF, "updates": updates}
    assert jmp_scale.diagnostics.metrics(state, **known)["lost_entries"] == 0
    assert jmp_scale.diagnostics.HealthLog()(state) == []


# Devices and Flax.

ADAM = with_half_storage(optax.adam(0.1), **ADAMS)


@functools.cache
def of_one_device():
    step, carry = jax.jit(stepper(ADAM)), (HALF, ADAM.init(HALF))
    for grads in STEPS:
        carry = step(*carry, grads)
    return carry


def in_linen():
    """Parameters and optimizer state of a model after some steps."""
    state = jmp_scale.linen.TrainState.create(apply_fn=None, params=HALF, tx=ADAM)
    step = jax.jit(lambda state, g: state.apply_gradients(grads=g))
    for grads in STEPS:
        state = step(state, grads)
    return state.params, state.opt_state


def in_nnx(make=jmp_scale.nnx.Optimizer):
    model = nnx.Dict(jax.tree.map(nnx.Param, HALF))
    made = make(model, ADAM, wrt=nnx.Param)
    update = nnx.jit(lambda model, made, grads: made.update(model, grads))
    for grads in STEPS:
        update(model, made, nnx.State(jax.tree.map(nnx.Param, grads)))
    return nnx.state(model, nnx.Param), nnx.state(made)


# The last has no loss scale.
@pytest.mark.parametrize("door", [in_linen, in_nnx, lambda: in_nnx(nnx.Optimizer)])
def test_flax_stores_what_optax_alone_does(door):
    params, state = door()
    expected, plain = of_one_device()
    full = full_parameters(params, state), full_parameters(expected, plain)
    assert_bitwise_equal(*map(jax.tree.leaves, full))
    found, wanted = (
        [x for x in jax.tree.leaves(tree) if x.dtype in (jnp.bfloat16, jnp.int16)]
        for tree in ((params, state), (expected, plain))
    )
    assert_bitwise_equal(found, wanted)


def test_storage_on_explicit_axes_is_that_of_one_device():
    mesh = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Explicit,))

    def placed(x):
        return sharded(x, mesh, jax.P("i") if x.ndim == 2 else jax.P())

    step = jax.jit(stepper(ADAM))
    with jax.set_mesh(mesh):
        carry = jax.tree.map(placed, (HALF, ADAM.init(HALF)))
        for grads in STEPS:
            carry = step(*carry, jax.tree.map(placed, grads))
    assert jax.typeof(carry[1].inner_state[0].nu["w"]).sharding.spec[0] == "i"
    assert_bitwise_equal(jax.device_get(carry), of_one_device())


def test_averages_of_float64_parameters_are_not_stored_in_bfloat16():
    with jax.enable_x64(True):
        tx = with_half_storage(optax.adam(0.1), **ADAMS)
        with pytest.raises(ValueError, match=r"got one with mu \(float64\), nu \(fl"):
            tx.init(jnp.ones(2, jnp.float64))


@pytest.mark.parametrize("name", ["remainders", "rounding_key", "inner_state"])
def test_parameters_may_have_the_names_of_its_state(name):
    params = {"layer": {name: jnp.ones(4, jnp.bfloat16)}}
    tx = with_loss_scale(
        with_half_storage(optax.adam(0.1)), jmp_scale.DynamicLossScale()
    )
    state = tx.init(params)
    updates, _ = tx.update(params, state, params)
    assert float(optax.apply_updates(params, updates)["layer"][name][0]) < 1
