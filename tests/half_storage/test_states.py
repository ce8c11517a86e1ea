"""Moving averages in bfloat16, rounded stochastically, beside float32 references."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from flax import nnx
from helpers import TWO_AXES, assert_bitwise_equal, one_of, sharded
from optimizers import (
    BAD,
    GOOD,
    OPTIMIZERS,
    PARAMS,
    STEPS,
    by_name,
    linen,
    of_nnx,
    optimizer,
    stepper,
)

from jmp_scale import (
    DynamicLossScale,
    diagnostics,
    full_parameters,
    with_half_parameters,
    with_half_state,
    with_loss_scale,
)

contrib: Any = optax.contrib
KEY = jax.random.key(0)
# Names of fields, by optimizer, whose arrays are averages; and those that are not.
FIELDS = {
    "adamw": ("mu nu", ""),
    "lion": ("mu", ""),
    "momentum": ("trace", ""),
    "rmsprop_centered": ("mu nu trace", ""),
    "muon": ("mu nu", "ns_coeffs"),
    "multi_steps": ("mu nu", "acc_grads"),
    "partition": ("mu nu trace", ""),
    "masked": ("trace", ""),
    "inject_hyperparams": ("mu nu", ""),
    "amsgrad": ("mu nu", "nu_max"),
    "schedule_free_adamw": ("nu", "z"),
    "sm3": ("nu", "mu"),
    "novograd": ("mu", ""),
    "lamb": ("mu nu", ""),
    "adan": ("m v n", "g"),
    "ademamix": ("m1 m2 nu", ""),
    "simplified_ademamix": ("m n", ""),
    "adadelta": ("e_g e_x", ""),
    "signum": ("ema", ""),
    "prodigy": ("exp_avg exp_avg_sq", "grad_sum params0"),
}


def named(name):
    """(an optimizer, the names to pass) of the table."""
    fields = FIELDS[name][0].split()
    usual = {"mu", "nu", "trace"}
    return OPTIMIZERS[name], {} if usual.issuperset(fields) else {"names": fields}


def fields_of(tree, dtype):
    """The fields in which arrays of a dtype lie, those with an axis."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    paths = [path for path, x in pairs if x.dtype == dtype and x.ndim]
    return {[k.name for k in path if hasattr(k, "name")][-1] for path in paths}


@pytest.mark.parametrize("name", [x for x in FIELDS if x in OPTIMIZERS])
def test_the_averages_are_bfloat16(name):  # older versions of Optax lack some
    inner, names = named(name)
    state = jax.eval_shape(with_half_state(inner, key=KEY, **names).init, PARAMS)
    found = fields_of(state, jnp.bfloat16), fields_of(state, jnp.float32)
    assert found == tuple(set(text.split()) for text in FIELDS[name])


@by_name({"adamw", "multi_steps", "schedule_free_adamw"}, FIELDS)
def test_the_first_step_is_that_of_the_optimizer_and_its_state_is_rounded(name):
    inner, names = named(name)
    tx = with_half_state(inner, key=KEY, **names)
    state = tx.init(PARAMS)
    with jax.disable_jit():
        params, new = stepper(tx)(PARAMS, state, GOOD)
        expected, plain = stepper(inner)(PARAMS, inner.init(PARAMS), GOOD)
    assert_bitwise_equal(params, expected)
    assert jax.tree.structure(new.inner_state) == jax.tree.structure(plain)
    for x, like in zip(*map(jax.tree.leaves, (new.inner_state, plain)), strict=True):
        near = 2.0**-7 * np.abs(np.asarray(like, np.float64)) * (x.dtype != like.dtype)
        assert (np.abs(np.float64(x) - np.float64(like)) <= near).all()
        assert x.dtype == like.dtype or x.ndim > 0
    kinds = [[x.dtype for x in jax.tree.leaves(tree)] for tree in (state, new)]
    assert kinds[0] == kinds[1]


class Kept(NamedTuple):
    """A state of an optimizer that keeps the updates themselves."""

    mu: Any
    nu: Any


KEEPING = optimizer(
    Kept(jnp.zeros(10_000), jnp.zeros(10_000)), lambda g, state: (g, Kept(g, g))
)


TX = with_half_state(KEEPING, key=KEY)
keep = jax.jit(lambda x: TX.update(x, TX.init(x), x)[1].inner_state)


def stored(x):
    """(mu, nu) of one step after which both are x, as float64 numbers."""
    x = jnp.broadcast_to(jnp.float32(x), 10_000)
    return [np.float64(leaf) for leaf in keep(x)]


@pytest.mark.parametrize("value", [1.2345, -3e-5, 2.0**-126 * 1.001, 3.3e38])
def test_an_average_becomes_one_of_two_neighbors_and_is_right_in_the_mean(value):
    x = np.float64(np.float32(value))
    for made in stored(value):
        low, high = np.unique(made)
        assert low < x < high
        assert abs(high - low) <= 2.0**-7 * abs(x)
        share = (x - low) / (high - low)
        deviation = np.sqrt(share * (1 - share) / made.size) * (high - low)
        assert abs(made.mean() - x) < 4 * deviation


LARGEST = float(np.finfo(np.float32).max)
STAY = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.5, -(2.0**-126), LARGEST, -LARGEST]


@pytest.mark.parametrize("value", STAY)
def test_what_needs_no_rounding_stays_and_none_becomes_infinite(value):
    largest = float(jnp.finfo(jnp.bfloat16).max)
    stays = np.clip(value, -largest, largest) if np.isfinite(value) else value
    for made in stored(value):
        np.testing.assert_array_equal(made, np.full(10_000, stays))
        assert (np.signbit(made) == np.signbit(value)).all()


def test_an_average_of_squares_decays_where_rounded_to_nearest_it_stands_still():
    tx = with_half_state(optax.scale_by_adam(b2=0.9999), key=KEY)
    params, steps = jnp.ones(1024), 2000
    start = tx.init(params)
    nu = jnp.full_like(params, 1.2345, jnp.bfloat16)
    start = start._replace(inner_state=start.inner_state._replace(nu=nu))

    def step(state, _):
        return tx.update(jnp.zeros_like(params), state, params)[1], None

    end = np.float64(jax.lax.scan(step, start, length=steps)[0].inner_state.nu)
    expected = np.float64(nu)[0] * 0.9999**steps
    assert (end >= 0).all()
    # Their noise is 5 % each at most.
    assert abs(end.mean() / expected - 1) < 4 * 0.05 / np.sqrt(params.size)
    nearest = (nu.astype(jnp.float32) * 0.9999).astype(jnp.bfloat16)
    assert (nearest == nu).all()


def correlation(x, y):
    x, y = (np.asarray(a, np.float64) for a in (x, y))
    return abs(np.corrcoef(x, y)[0, 1])


def test_noise_differs_by_average_step_and_wrapper():
    x = jnp.full(10_000, 1 + 2.0**-8)  # half way between two neighbors
    update = jax.jit(TX.update)
    one = update(x, TX.init(x))[1]
    two = update(x, one)[1]
    other = with_half_parameters(optax.sgd(1.0), key=KEY)
    params = jnp.ones(10_000, jnp.bfloat16)
    updates, _ = jax.jit(other.update)(-(x - 1), other.init(params), params)
    drawn = [*one.inner_state, *two.inner_state, updates]
    for a, b in itertools.combinations(drawn, 2):
        assert correlation(a, b) < 0.05
    keys = [np.asarray(s.rounding_key).tolist() for s in (TX.init(x), one, two)]
    assert len({*map(tuple, keys)}) == 3


BOTH = pytest.mark.parametrize(
    ("wrap", "dtype"),
    [(with_half_state, jnp.float32), (with_half_parameters, jnp.bfloat16)],
)


@BOTH
def test_rounding_is_alike_under_every_layout(wrap, dtype):
    tx = wrap(optax.sgd(0.1, momentum=0.9), key=jax.random.key_data(KEY))
    x = jax.random.normal(jax.random.key(1), (16, 24)).astype(dtype)

    @jax.jit
    def steps(x):
        params, state = x, tx.init(x)
        for factor in (1.0, 0.3):
            updates, state = tx.update(factor * x, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    for spec in (jax.P("i", "j"), jax.P(None, "i")):
        assert_bitwise_equal(steps(sharded(x, TWO_AXES, spec)), steps(x))
    in_map = jax.shard_map(steps, mesh=TWO_AXES, in_specs=jax.P(), out_specs=jax.P())
    assert_bitwise_equal(jax.jit(in_map)(x), steps(x))


@BOTH
def test_the_members_of_an_ensemble_round_apart_with_keys_of_their_own(wrap, dtype):
    tx = wrap(optax.sgd(2.0**-9, momentum=0.9), key=KEY)
    x = jnp.full((3, 100), 1.2345, dtype)
    keys = jax.vmap(jax.random.key_data)(jax.random.split(KEY, 3))
    states = jax.vmap(tx.init)(x)._replace(rounding_key=keys)
    made = jax.jit(jax.vmap(tx.update))(x, states, x)
    drawn = made[0] if dtype == jnp.bfloat16 else made[1].inner_state[0].trace
    assert len(np.unique(np.float32(drawn), axis=0)) == 3
    alone = jax.jit(tx.update)(*jax.tree.map(lambda a: a[1], (x, states, x)))
    assert_bitwise_equal(jax.tree.map(lambda a: a[1], made), alone)


# Wrapped, and in wrappers.


SKIPPED = [
    (with_half_state(OPTIMIZERS["multi_steps"], key=KEY), jnp.float32),
    (with_half_parameters(optax.adamw(1e-3)), jnp.bfloat16),
    (with_half_parameters(optax.adamw(1e-3), key=KEY), jnp.float16),
    (with_half_state(OPTIMIZERS["muon"], key=KEY), jnp.float32),
    (with_half_parameters(optax.adamw(1e-3)), jnp.float16),
]


@pytest.mark.parametrize(("inner", "dtype"), one_of(2, SKIPPED))
def test_a_skipped_step_changes_no_bit_and_init_does_not_warn(inner, dtype):
    tx = with_loss_scale(inner, DynamicLossScale(8.0))
    params = jax.tree.map(lambda p: jnp.array(p, dtype), PARAMS)
    state = tx.init(params)  # filters make a warning an error
    step = jax.jit(stepper(tx), donate_argnums=(0, 1))
    for grads in STEPS:
        params, state = step(params, state, grads)
    before = jax.tree.map(jnp.copy, (params, state.inner_state))
    params, state = step(params, state, BAD)
    assert_bitwise_equal((params, state.inner_state), before)
    assert (state.skipped, step._cache_size()) == (1, 1)


half_state = functools.partial(with_half_state, key=KEY)
LABELS = {"w": "a", "b": "b"}
WRAPPERS = {
    "MultiSteps": lambda t: optax.MultiSteps(t, 2).gradient_transformation(),
    "partition": lambda t: optax.partition({"a": t, "b": t}, LABELS),
    "masked": lambda t: optax.masked(t, {"w": True, "b": False}),
    "chain": lambda t: optax.chain(optax.clip(1.0), t),
    "lookahead": lambda t: optax.lookahead(t, 2, 0.5),
    "apply_if_finite": lambda t: optax.apply_if_finite(t, 1),
    "half parameters": with_half_parameters,
    "half parameters, a key": functools.partial(with_half_parameters, key=KEY),
}


@pytest.mark.parametrize(
    ("name", "order"),
    one_of(4, itertools.product(WRAPPERS, ["around", "within"])),
)
def test_it_trains_around_and_within_other_wrappers(name, order):
    wrap, inner = WRAPPERS[name], optax.adam(2.0**-7)
    tx = wrap(half_state(inner)) if order == "within" else half_state(wrap(inner))
    found = []
    for each in (tx, wrap(inner)):
        params = PARAMS
        if name.startswith("half"):
            params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        if name == "lookahead":
            params = optax.LookaheadParams.init_synced(params)
        state, step = each.init(params), jax.jit(each.update)
        for grads in STEPS:
            updates, state = step(grads, state, params)
            params = optax.apply_updates(params, updates)
        assert step._cache_size() == 1
        if name == "lookahead":
            params = params.fast
        found.append(full_parameters(params, state))
        is_ours = each is tx
        assert ("nu" in fields_of(state, jnp.bfloat16)) == is_ours
    # Two percent of four steps; a step of a bfloat16 below 4 if they too are random.
    atol = 2.0**-6 if "key" in name else 0.02 * 4 * 2.0**-7
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=atol), *found)


@pytest.mark.parametrize("dtype", one_of(2, ["bfloat16", "float16"]))
def test_averages_that_the_optimizer_keeps_in_half_precision_are_bfloat16(dtype):
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    for inner in (optax.adam(0.1), optax.adam(0.1, mu_dtype=dtype)):
        tx = half_state(inner)
        state, step = tx.init(params), jax.jit(tx.update)
        for _ in range(2):
            _, state = step(params, state, params)
        assert {x.dtype for x in jax.tree.leaves(state.inner_state) if x.ndim} == {
            jnp.dtype("bfloat16")
        }
        assert step._cache_size() == 1


# Doors and disks.


ADAM = half_state(optax.adam(0.1))


@functools.cache
def of_one_device():
    step, carry = jax.jit(stepper(ADAM)), (PARAMS, ADAM.init(PARAMS))
    for grads in STEPS:
        carry = step(*carry, grads)
    return carry


@pytest.mark.parametrize(
    "door",
    [
        functools.partial(of_nnx, make=nnx.Optimizer),
        *(linen, of_nnx),  # those that have a loss scale
    ],
)
def test_flax_stores_what_optax_alone_does(door):
    _, found = door(PARAMS, ADAM)
    averages = [x for x in jax.tree.leaves(found) if x.dtype == jnp.bfloat16]
    expected = jax.tree.leaves(of_one_device())
    assert_bitwise_equal(averages, [x for x in expected if x.dtype == jnp.bfloat16])
    if door in (linen, of_nnx):
        assert diagnostics.HealthLog()(found) == []


def test_replicas_of_pmap_are_those_of_one_device():
    step = jax.pmap(stepper(ADAM))
    replicas = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * 2), tree)  # noqa: E731
    carry = replicas((PARAMS, ADAM.init(PARAMS)))
    for grads in STEPS:
        carry = step(*carry, replicas(grads))
    for i in range(2):
        own = jax.tree.map(lambda x, i=i: x[i], carry)
        assert_bitwise_equal(own, of_one_device())


def test_averages_on_explicit_axes_are_those_of_one_device():
    mesh = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Explicit,))

    def placed(x):
        return sharded(x, mesh, jax.P("i") if x.ndim == 2 else jax.P())

    step = jax.jit(stepper(ADAM))
    with jax.set_mesh(mesh):
        carry = jax.tree.map(placed, (PARAMS, ADAM.init(PARAMS)))
        for grads in STEPS:
            carry = step(*carry, jax.tree.map(placed, grads))
    assert jax.typeof(carry[1].inner_state[0].nu["w"]).sharding.spec[0] == "i"
    assert_bitwise_equal(jax.device_get(carry), of_one_device())


def test_full_parameters_are_found_below_half_states_in_nnx():
    for key in (None, KEY):
        tx = half_state(with_half_parameters(optax.sgd(2.0**-9, momentum=0.5), key=key))
        model = nnx.Linear(2, 3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        made = nnx.Optimizer(model, tx, wrt=nnx.Param)
        made.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
        params = nnx.state(model, nnx.Param)
        values = full_parameters(params, nnx.state(made))
        expected = full_parameters(params, made.opt_state)
        assert_bitwise_equal(jax.tree.leaves(values), jax.tree.leaves(expected))
        cast = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        same = jax.tree.map(lambda a, b: bool((a == b).all()), values, cast)
        assert all(jax.tree.leaves(same)) == (key is not None)


def test_a_parameter_may_itself_be_called_mu():
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        mu: jax.Array
        z: dict

    model = Model(jnp.ones(3), {"nu": jnp.ones(2)})
    state = half_state(contrib.schedule_free_adamw(0.1)).init(model).inner_state
    assert {x.dtype for x in jax.tree.leaves(state.z)} == {jnp.dtype("float32")}
    nu = state.base_optimizer_state[0].nu
    assert {x.dtype for x in jax.tree.leaves(nu)} == {jnp.dtype("bfloat16")}
    assert half_state(optax.adam(0.1)).init(jnp.ones(3)).inner_state[0].nu.dtype == (
        jnp.bfloat16
    )


def test_checkpoints_come_back_and_go_from_float32_to_half_and_back(tmp_path):
    inner, tx = optax.adamw(0.1), half_state(optax.adamw(0.1))
    plain = inner.update(GOOD, inner.init(PARAMS), PARAMS)[1]
    ocp.save(tmp_path / "plain", plain)
    like = tx.init(PARAMS)
    saved = ocp.load(tmp_path / "plain", inner.init(PARAMS))
    state = like._replace(inner_state=optax.tree.cast_like(saved, like.inner_state))
    assert jax.tree.structure(state) == jax.tree.structure(like)
    for _ in range(2):
        _, state = tx.update(GOOD, state, PARAMS)
    ocp.save(tmp_path / "half", state)
    restored = ocp.load(tmp_path / "half", jax.tree.map(jnp.zeros_like, state))
    assert_bitwise_equal(restored, state)
    back = optax.tree.cast_like(state.inner_state, jax.eval_shape(inner.init, PARAMS))
    assert_bitwise_equal(optax.tree.cast_like(back, like.inner_state), state[0])
    assert jax.tree.structure(back) == jax.tree.structure(plain)
    inner.update(GOOD, back, PARAMS)


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        (lambda: half_state("adam"), TypeError, "expected inner .*optimizer first"),
        (
            lambda: half_state(optax.adam(0.1), names="mu"),
            TypeError,
            r'names of fields, got \'mu\'; write names=\("mu", "nu"\)',
        ),
        (
            lambda: half_state(OPTIMIZERS["adan"]).init(PARAMS),
            ValueError,
            r"\['mu', 'nu', 'trace'\], .* got one with g, m, n, v; pass its averages",
        ),
        (
            lambda: half_state(optax.sgd(0.1)).init(PARAMS),
            ValueError,
            "got one with no fields; .*leave this optimizer",
        ),
        (
            lambda: half_state(with_loss_scale(optax.adam(0.1))).init(PARAMS),
            ValueError,
            r"write with_loss_scale\(with_half_state\(optimizer\)\)",
        ),
        (
            lambda: half_state(optax.chain(half_state(optax.adam(0.1)))).init(PARAMS),
            ValueError,
            "without half states within",
        ),
        (
            lambda: half_state(optax.adam(0.1)).update(
                GOOD, optax.adam(0.1).init(PARAMS), PARAMS
            ),
            TypeError,
            "expected the HalfStateState that init returns, got a tuple .*cast_like",
        ),
    ],
)
def test_mistakes_are_named_with_their_cure(mistake, error, message):
    with pytest.raises(error, match=f"with_half_state: .*{message}"):
        mistake()
