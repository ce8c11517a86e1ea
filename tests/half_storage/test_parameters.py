"""Half-precision parameters whose float32 values are those of plain Optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_bitwise_equal, one_of
from jax import lax
from optimizers import (
    GOOD,
    OPTIMIZERS,
    PARAMS,
    STEPS,
    by_name,
    linen,
    stepper,
)

import jmp_scale.nnx
from jmp_scale import (
    checkpoints,
    full_parameters,
    with_half_parameters,
    with_loss_scale,
)

# Those that differ most in what they do; all others are slow tests.
TYPICAL = {"adamw", "masked", "multi_steps", "muon", "sam", "set_to_zero"}
HALF = (jnp.bfloat16, jnp.float16)


def half(tree, dtype=jnp.bfloat16):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def rounded(x, dtype):
    """The nearest number of the dtype, ties up for bfloat16; an integer of 16 bits."""
    if dtype == jnp.float16:
        finite = np.clip(x, -65504, 65504)
        return np.where(np.isinf(x), x, finite).astype(np.float16).view(np.uint16)
    return ((np.asarray(x).view(np.uint32) + 2**15) >> 16).astype(np.uint16)


@functools.cache
def run(name, dtype):
    """(plain float32 parameters, half ones, float32 values) after some steps."""
    inner = OPTIMIZERS[name]
    tx = with_half_parameters(inner)
    plain, params = PARAMS, half(PARAMS, dtype)
    plain_state, state = inner.init(plain), tx.init(params)
    with jax.disable_jit():
        plain_step, step = stepper(inner), stepper(tx, full_parameters)
        for grads in STEPS:
            plain, plain_state = plain_step(plain, plain_state, grads)
            params, state = step(params, state, grads)
    return plain, params, full_parameters(params, state)


@pytest.mark.parametrize("dtype", one_of(2, HALF))
@by_name(TYPICAL, OPTIMIZERS)
def test_the_float32_values_are_those_of_the_plain_optimizer_in_every_bit(name, dtype):
    plain, params, values = run(name, dtype)
    assert_bitwise_equal(values, plain)
    for key in plain:
        actual = np.asarray(params[key]).view(np.uint16)
        np.testing.assert_array_equal(actual, rounded(np.asarray(plain[key]), dtype))


def every_size(dtype):
    """Parameters, and updates of each: some to its size, and some of any other."""
    largest, tiny = float(jnp.finfo(dtype).max), float(jnp.finfo(dtype).tiny)
    some = np.random.RandomState(0).randint(0, 2**16, 100).astype(np.uint16)
    named = [0, -0.0, 1, 2, np.inf, np.nan, largest, -largest, tiny, -tiny, 2.0**-24]
    params = lax.bitcast_convert_type(jnp.array(some), dtype)
    params = jnp.append(params, jnp.array(named, dtype))
    moves = [0, -0.0, 1e-3, -2, 3e38, -3e38, 65504, -7e4, 1e-30, -(2.0**-25)]
    moves = jnp.float32([*moves, np.inf, np.nan])
    factors = jnp.float32([1e-3, -1, -1.9, 1e-6])
    relative = jnp.outer(factors, params.astype(jnp.float32))
    updates = jnp.outer(moves, jnp.ones(params.size)), relative
    return jnp.tile(params, (16, 1)), jnp.concatenate(updates)


@pytest.mark.parametrize("jit", one_of(2, [jax.jit, lambda f: f]), ids=["jit", "eager"])
@pytest.mark.parametrize("dtype", HALF)
def test_values_of_every_size_are_kept_in_every_bit(dtype, jit):
    params, updates = every_size(dtype)
    tx = with_half_parameters(optax.identity())
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
        nearest = rounded(np.asarray(plain)[near], dtype)
        got = np.asarray(params).view(np.uint16)[near]
        nonzero = (nearest & 0x7FFF) != 0
        np.testing.assert_array_equal(got[nonzero], nearest[nonzero])
        assert (jnp.isnan(params) == jnp.isnan(plain)).all()
    if dtype == jnp.float16:
        with pytest.raises(ValueError, match="of at most half a digit of a float16"):
            full_parameters(params / 2, state)


def test_mixed_trees_keep_what_is_not_half_precision_as_it_is():
    params = {"b": half(PARAMS["b"]), "f": PARAMS["w"], "h": half(2.0, jnp.float16)}
    params |= {"n": None, "e": jnp.zeros((0, 3), jnp.bfloat16), "i": jnp.int32(3)}
    params |= {"q": jnp.ones(2, jnp.float8_e4m3fn), "m": optax.MaskedNode()}
    grads = jax.tree.map(jnp.ones_like, params) | {"i": None, "q": None, "b": None}
    tx = with_half_parameters(optax.sgd(2.0**-12))
    state = tx.init(params)
    dtypes = {key: getattr(x, "dtype", None) for key, x in state.remainder.items()}
    wanted = dict.fromkeys(params) | {"b": "int16", "e": "int16", "h": "float32"}
    assert dtypes == wanted | {"m": None}
    updates, state = tx.update(grads, state, params)
    assert [updates[key] for key in ("i", "q", "b", "n")] == [None] * 4
    params["h"] = optax.apply_updates(params["h"], updates["h"])
    values = full_parameters(params, state)
    assert values["h"] == 2 - 2.0**-12
    assert values["b"].tolist() == PARAMS["b"].tolist()
    assert [values[key] is params[key] for key in "fiq"] == [True] * 3


@pytest.mark.parametrize(
    "nest",
    [
        lambda tx: tx,
        lambda tx: optax.partition({"a": tx, "b": tx}, {"w": "a", "b": "b"}),
        lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
    ],
)
def test_nothing_is_lost_at_any_depth_of_a_loss_scale(nest):
    # Steps as large as the parameters: updates of 8 bits would miss the rounding.
    inner = nest(optax.sgd(0.37))
    tx = with_loss_scale(nest(with_half_parameters(optax.sgd(0.37))))
    params, plain = half(PARAMS), PARAMS
    state, plain_state = tx.init(params), inner.init(plain)
    for grads in STEPS:
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        updates, plain_state = inner.update(grads, plain_state, plain)
        plain = optax.apply_updates(plain, updates)
    assert_bitwise_equal(full_parameters(params, state), plain)


@pytest.mark.parametrize("within", [with_loss_scale, with_half_parameters])
def test_a_wrong_order_is_an_error_with_the_cure(within):
    tx = with_half_parameters(optax.chain(within(optax.adam(0.1)), optax.identity()))
    with pytest.raises(ValueError, match=r"write with_loss_scale\(with_half_par"):
        tx.init(half(PARAMS))


def test_calls_without_or_with_other_parameters_are_errors():
    tx = with_half_parameters(optax.adam(0.1))
    params = half(PARAMS)
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"expected the parameters, got None; write"):
        tx.update(GOOD, state)
    for other in (PARAMS, {"w": params["w"]}, {**params, "b": params["b"][:1]}):
        with pytest.raises(ValueError, match=r"parameter b to be bfloat16\[2\]"):
            tx.update(GOOD, state, other | {"w": params["w"]})
        with pytest.raises(ValueError, match="full_parameters: expected parameter b"):
            full_parameters(other | {"w": params["w"]}, state)


KEY = jax.random.key(0)


def updated(state_of, key=None):
    """An update of bfloat16 parameters with the state of something else."""
    params = half(PARAMS)
    state = state_of(optax.adam(0.1), params)
    with_half_parameters(optax.adam(0.1), key=key).update(GOOD, state, params)


def of_plain(tx, params):
    return tx.init(params)


def of_no_key(tx, params):
    return with_half_parameters(tx).init(params)


def of_key(tx, params):
    return with_half_parameters(tx, key=KEY).init(params)


def of_float32(tx, params):
    return with_half_parameters(tx).init(PARAMS)


MISTAKES = [
    (lambda: with_half_parameters("adam"), TypeError, "expected inner"),
    (
        lambda: updated(of_plain),
        TypeError,
        "State .*got a tuple of length 2; .*restore",
    ),
    (
        lambda: updated(of_no_key, key=KEY),
        ValueError,
        r"of one with key=, got that of one without key=; write tx.init\(params\)",
    ),
    (lambda: updated(of_key), ValueError, "one without key=, got that of one with"),
    (
        lambda: updated(of_float32),
        ValueError,
        r"parameter b to be float32, by the remainders in .*got bfloat16.*as init got",
    ),
    (
        lambda: with_half_parameters(optax.adam(0.1), key=0),
        TypeError,
        r"to be a PRNG key, got 0; write key=jax.random.key\(0\)",
    ),
    (
        lambda: with_half_parameters(optax.adam(0.1), key=jax.random.split(KEY)),
        ValueError,
        r"one PRNG key, got an array of shape \(2,\); .*_replace\(rounding_key=",
    ),
    (
        lambda: with_half_parameters(optax.adam(0.1)).init({"f": jax.nn.relu}),
        TypeError,
        r"got a .* at params\['f'\]; .*equinox.filter\(",
    ),
    (
        lambda: with_loss_scale(optax.adam(0.1)).init({"f": jax.nn.relu}),
        TypeError,
        r"got a .* at params\['f'\]; .*equinox.filter\(",
    ),
]


@pytest.mark.parametrize(("mistake", "error", "message"), MISTAKES)
def test_mistakes_are_named_with_their_cure(mistake, error, message):
    with pytest.raises(error, match=f"with_(half_parameters|loss_scale): .*{message}"):
        mistake()


def of_two(params, state):
    """States of two optimizers whose parameters have the same names, as a GAN's."""
    return params, {"generator": state, "discriminator": state}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (of_two, r"expected one remainder of parameter b, .*that updates these"),
        (lambda p, s: (s, p), r"got the state first; write full_parameters\(params"),
        (lambda p, s: ({"params": p}, s), r"params has params/b, params/w; pass all"),
        (lambda p, s: (p["w"], s), r"parameter b to be bfloat16\[2\].*; pass all"),
        (
            lambda p, s: (half(p, jnp.float32), s),
            "apply updates by optax.apply_updates",
        ),
    ],
)
def test_parameters_and_a_state_that_do_not_belong_together(given, message):
    params = half(PARAMS)
    state = with_half_parameters(optax.adam(0.1)).init(params)
    with pytest.raises(ValueError, match=f"full_parameters: .*{message}"):
        full_parameters(*given(params, state))
    if given is of_two:
        with pytest.raises(ValueError, match=message):
            checkpoints.without_half_parameters(*given(params, state))


def test_states_without_remainders_are_none_of_half_parameters():
    """Of `with_half_state` as NNX and state dicts lay them out, and of nothing."""
    params = half(PARAMS)
    others = {"inner_state": {}, "rounding_key": jnp.zeros(2, jnp.uint32)}, {}
    plain = half(params, jnp.float32), others
    assert_bitwise_equal(checkpoints.without_half_parameters(params, others), plain)


# Stochastic rounding.


def stochastic_step(x, dtype, key=None):
    """Parameters after one step, from the nearest of the dtype towards `x`."""
    params = x.astype(dtype)
    tx = with_half_parameters(
        optax.identity(), key=jax.random.key(0) if key is None else key
    )
    updates, state = tx.update(x - params.astype(jnp.float32), tx.init(params), params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("value", one_of(4, [1.2345, -3e-5, 1e-8, 65501.0]))
def test_stochastic_rounding_is_unbiased_between_the_two_neighbors(value, dtype):
    x = jnp.full(100_000, value, jnp.float32)
    made = np.float64(stochastic_step(x, dtype)[0])
    low, high = made.min(), made.max()
    assert len(np.unique(made)) == 2
    assert low < value < high
    spread = (high - low) / 2 / np.sqrt(x.size)  # of the mean, at most
    assert abs(made.mean() - np.float64(x[0])) < 4 * spread


@pytest.mark.parametrize("dtype", HALF)
def test_values_that_need_no_rounding_stay_under_a_key(dtype):
    params, _ = every_size(dtype)
    tx = with_half_parameters(optax.identity(), key=jax.random.key(0))
    zeros = jnp.zeros(params.shape)
    updates, state = tx.update(zeros, tx.init(params), params)
    made = optax.apply_updates(params, updates)
    assert_bitwise_equal(
        made[~jnp.isnan(made)], (params + zeros.astype(dtype))[~jnp.isnan(params)]
    )
    assert jax.tree.leaves(state.remainder) == []


# Doors.


def squares(params):
    return sum(jnp.sum(p.astype(jnp.float32) ** 2) for p in jax.tree.leaves(params))


def test_linen_trains_half_precision_models_as_float32_ones():
    inner = optax.sgd(2.0**-9, momentum=0.5)
    params, state = linen(half(PARAMS), with_half_parameters(inner))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert_bitwise_equal(full_parameters(params, state), linen(PARAMS, inner)[0])


class Mixed(nnx.Module):
    """Half-precision weights between float32 norms."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.LayerNorm(2, rngs=rngs)
        self.linear = nnx.Linear(2, 3, param_dtype=jnp.bfloat16, rngs=rngs)


@pytest.mark.parametrize("make", one_of(2, [jmp_scale.nnx.Optimizer, nnx.Optimizer]))
def test_full_parameters_of_a_mixed_nnx_model_are_those_of_a_float32_one(make):
    def trained(model, tx):
        optimizer = make(model, tx, wrt=nnx.Param)
        grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
        optimizer.update(model, grads)
        return nnx.state(model, nnx.Param), nnx.state(optimizer)

    wide, inner = Mixed(), optax.sgd(2.0**-9, momentum=0.5)
    nnx.update(wide, half(nnx.state(wide), jnp.float32))
    expected = trained(wide, inner)
    params, state = trained(Mixed(), with_half_parameters(inner))
    assert_bitwise_equal(full_parameters(params, state), expected[0])
    plain = checkpoints.without_half_parameters(params, state)
    assert_bitwise_equal(*map(jax.tree.leaves, (plain, expected)))
    restored = checkpoints.restore_without_half_parameters(
        lambda _: plain, params, state
    )
    assert_bitwise_equal(restored, (params, state))


def test_equinox_models_keep_their_functions():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(2, 2, 4, 0, dtype=jnp.bfloat16, key=jax.random.key(0))
    tx = with_half_parameters(optax.sgd(2.0**-12))
    old, static = eqx.partition(model, eqx.is_array)
    updates, state = tx.update(old, tx.init(old), old)
    new = optax.apply_updates(old, updates)
    values = full_parameters(eqx.combine(new, static), state)
    expected = jax.tree.map(lambda p: p.astype(jnp.float32) * (1 - 2.0**-12), old)
    assert_bitwise_equal(eqx.filter(values, eqx.is_array), expected)
    assert values.activation is model.activation
    with pytest.raises(ValueError, match=r"equinox\.apply_updates does not"):
        tx.update(old, state, eqx.apply_updates(old, updates))


def test_diagnostics_know_that_nothing_is_lost():
    params = half(PARAMS, jnp.float16)
    tx = with_loss_scale(with_half_parameters(optax.sgd(1e-5)))
    state = tx.init(params)
    updates, state = jax.jit(tx.update)(GOOD, state, params)
    known = {"params": params, "updates": updates}
    assert jmp_scale.diagnostics.metrics(state, **known)["lost_entries"] == 0
    assert jmp_scale.diagnostics.HealthLog()((params, state)) == []
    report = functools.partial(jmp_scale.diagnostics.precision_report, squares, params)
    assert [f.rule for f in report(opt_state=state).findings] == []
    assert [f.rule for f in report().findings] == ["half-parameters"]
