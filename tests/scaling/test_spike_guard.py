import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import ONE_AXIS, assert_bitwise_equal
from optimizers import GOOD, PARAMS

from jmp_scale import DynamicLossScale, SpikeGuard, StaticLossScale, with_loss_scale


def reference(
    losses, norms, finite, threshold=6.0, decay=0.99, warmup=100, max_in_a_row=10
):
    """Spikes of a run, in Python numbers: the rule of the docstring, step by step."""

    class Series:
        mean, variance, steps, floor = 0.0, 0.0, 0, 0.25

        def limit(self, floor=0.0):
            spread = max(math.sqrt(self.variance), self.floor, floor)
            return self.mean + threshold * spread

        def warm(self):
            return accepted >= warmup and self.steps >= max(min(warmup, 20), 1)

        def learn(self, x):
            leaps_down = not self.warm() and x < 2 * self.mean - self.limit()
            if self.steps == 0 or leaps_down:
                self.mean, self.variance, self.steps = x, 0.0, 1
                return
            weight = (1 - decay) / (1 - decay ** (self.steps + 1))
            if not self.warm():
                x = min(x, self.limit())
            difference = x - self.mean
            self.mean += weight * difference
            self.variance = (1 - weight) * (self.variance + weight * difference**2)
            self.steps += 1

    loss, norm, in_a_row, accepted, spikes = Series(), Series(), 0, 0, []
    for x, g, is_finite in zip(losses, norms, finite, strict=True):
        deviation, bits = math.sqrt(norm.variance), math.log2(g) if g > 0 else None
        irregular = max(1, deviation / 0.25)
        loss.floor = irregular * max(math.sqrt(loss.variance), 0.02 * abs(loss.mean))
        # A norm beside an ordinary loss has to leap further.
        is_lone = loss.warm() and x <= (loss.mean + loss.limit()) / 2
        limit = norm.limit(min(8 / 3 * deviation, 2 / 3) if is_lone else 0.0)
        by_norm = is_finite and g > 0 and norm.warm() and bits > limit
        leaps = by_norm or (loss.warm() and x > loss.limit())
        spike = leaps and in_a_row < max_in_a_row
        spikes.append(spike)
        in_a_row += spike
        if spike or not is_finite:
            continue
        if leaps:
            loss, norm, accepted = Series(), Series(), 0
        in_a_row = 0
        if g > 0 or norm.steps == 0:
            loss.learn(x)
        if g > 0:
            norm.learn(bits)
        accepted += 1
    return spikes


def judged(guard, losses, norms, finite=None):
    """Spikes of a run, and the guard after it, in one compiled scan."""
    finite = np.ones(len(norms), bool) if finite is None else finite
    seen = jnp.float32(losses), jnp.float32(norms), jnp.asarray(finite)
    guard, spikes = scanned(guard, seen)
    return spikes.tolist(), guard


@jax.jit
def scanned(guard, seen):
    return jax.lax.scan(lambda guard, seen: guard.judge(*seen)[::-1], guard, seen)


def spikes_of(losses, norms):
    """Steps that a guard with the default arguments takes for spikes."""
    return np.flatnonzero(judged(SpikeGuard(), losses, norms)[0]).tolist()


def noisy_run(seed=0, steps=400, spikes=()):
    random = np.random.RandomState(seed)
    losses = 2 + np.exp(-np.arange(steps) / 50) + 0.1 * random.randn(steps)
    norms = np.exp2(0.3 * random.randn(steps))
    for step in spikes:
        losses[step] *= 100
        norms[step] *= 1000
    return losses, norms


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"threshold": 3.0, "decay": 0.9, "warmup": 20, "max_in_a_row": 2},
        {"threshold": 4.0, "decay": 0.999, "warmup": 0, "max_in_a_row": 1},
    ],
)
def test_spikes_are_those_of_the_rule_in_python_numbers(arguments):
    for seed in range(3):
        losses, norms = noisy_run(seed, spikes=(30, 150, 151, 152, 153, 300))
        finite = np.random.RandomState(seed).rand(400) > 0.05
        actual, _ = judged(SpikeGuard(**arguments), losses, norms, finite)
        assert actual == reference(losses, norms, finite, **arguments)


def test_a_loss_with_long_tails_is_not_a_spike():
    # As of a classifier late in training: losses and norms vary over decades together.
    random = np.random.RandomState(0)
    hardness = random.randn(5000)
    losses = 1e-3 * np.exp(hardness + 0.3 * random.randn(5000))
    norms = 1e-2 * np.exp(0.8 * hardness + 0.3 * random.randn(5000))
    losses[4000] *= 1e4
    norms[4000] *= 1e4
    assert spikes_of(losses, norms) == [4000]


@pytest.mark.parametrize("share", [0.3, 0.02, 0.0])
def test_a_loss_that_is_mostly_zero_without_gradients_is_not_a_spike(share):
    # As of a hinge loss: only examples within the margin have a loss and gradients.
    random = np.random.RandomState(0)
    losses = np.exp(0.3 * random.randn(5000))
    losses[:1000][random.rand(1000) > 0.5] = 0
    losses[1000:][random.rand(4000) > share] = 0
    assert spikes_of(losses, 2 * losses) == []


@pytest.mark.parametrize(
    ("factor", "loss", "spikes"),
    [(10, "ordinary", []), (20, "ordinary", [300]), (10, "raised", [300])],
)
def test_a_norm_beside_an_ordinary_loss_has_to_leap_further(factor, loss, spikes):
    # As of the digits autoencoder late in training: single norms of 14 deviations.
    losses, norms = noisy_run()
    norms = norms**0.8  # 0.24 bits
    norms[300] = factor
    losses[300] = 2.75 if loss == "raised" else 2  # the limit is 3.0, the mean 2.05
    assert spikes_of(losses, norms) == spikes
    losses[300:] = 2  # all of these are accepted, and enter the statistics whole
    norms[300:306] = *[10] * 5, 22  # beside one step of 10 it would be a spike
    assert spikes_of(losses, norms) == []


@pytest.mark.parametrize(("count", "spike"), [(19, False), (20, True)])
def test_a_loss_that_is_given_later_is_watched_after_twenty_steps(count, spike):
    guard = SpikeGuard(accepted=jnp.int32(100), norm_steps=jnp.int32(100))
    spikes, _ = judged(guard, [1.0] * count + [2.0], [1.0] * (count + 1))
    assert spikes == [False] * count + [spike]


@pytest.mark.parametrize("size", [1e3, 1e30])
def test_a_huge_step_within_the_warm_up_does_not_blind_the_guard(size):
    for step in (0, 1, 50, 99):
        losses, norms = noisy_run(steps=250)
        losses[step], norms[step] = size, size
        losses[200], norms[200] = 100.0, 1e3
        assert spikes_of(losses, norms) == [200]


def test_a_new_level_is_accepted_after_ten_spikes_and_guarded_in_its_turn():
    losses = np.concatenate([np.ones(150), np.full(250, 10.0)])
    losses[[200, 350]] = 100.0  # the first within the warm-up of the new level
    spikes, guard = judged(SpikeGuard(), losses, np.ones(400))
    assert np.flatnonzero(spikes).tolist() == [*range(150, 160), 350]
    assert float(guard.loss_mean) == pytest.approx(10, rel=1e-2)
    assert int(guard.loss_steps) == 239


def test_a_step_that_is_not_finite_changes_no_bit_of_the_guard():
    _, guard = judged(SpikeGuard(), *noisy_run())
    judge = jax.jit(SpikeGuard.judge)
    for seen in ((jnp.nan, 1.0), (jnp.inf, jnp.inf), (1.0, jnp.nan)):
        spike, after = judge(guard, *map(jnp.float32, seen), jnp.array(False))
        assert not spike
        assert_bitwise_equal(after, guard)


GUARD = SpikeGuard(warmup=10)
TX = with_loss_scale(optax.adam(0.1), DynamicLossScale(8.0), guard=GUARD)
compiled = functools.cache(lambda tx: jax.jit(tx.update))


def times(factor):
    return jax.tree.map(lambda g: g * factor, GOOD)


def steps_with(tx, state, grads, value, count):
    """State after each of several equal steps."""
    states = []
    for _ in range(count):
        _, state = compiled(tx)(grads, state, PARAMS, value=jnp.float32(value))
        states.append(state)
    return states


@functools.cache
def warm_state(tx):
    return steps_with(tx, tx.init(PARAMS), GOOD, 1.0, 15)[-1]


@pytest.mark.parametrize(("factor", "loss"), [(1, 1e3), (1e3, 1), (1e30, 1), (0, 1e6)])
def test_a_spike_is_skipped_as_a_whole_and_the_loss_scale_stays(factor, loss):
    state = warm_state(TX)
    updates, new = compiled(TX)(times(factor), state, PARAMS, value=jnp.float32(loss))
    assert_bitwise_equal(optax.apply_updates(PARAMS, updates), PARAMS)
    assert_bitwise_equal(new.inner_state, state.inner_state)
    assert_bitwise_equal(new.loss_scale, state.loss_scale)
    assert (new.applied, new.grads_finite) == (False, True)
    assert (new.skipped, new.skipped_in_a_row, new.spikes) == (1, 1, 1)
    assert new.nonfinite_losses == 0
    assert int(new.guard.in_a_row) == 1


def test_a_spike_that_overflows_keeps_s_until_the_new_level_is_let_through():
    tx = with_loss_scale(optax.adam(0.1), DynamicLossScale(2.0**15), guard=GUARD)
    start = warm_state(tx)
    states = steps_with(tx, start, times(jnp.inf), 1e6, 13)
    powers = [int(np.log2(s.loss_scale.loss_scale)) for s in states]
    assert powers == [*[15] * 10, 14, 13, 12]
    assert [int(s.spikes) for s in states] == [*range(1, 11), 10, 10, 10]
    assert not any(s.applied | s.grads_finite for s in states)
    last = states[-1]
    assert_bitwise_equal(last.inner_state, start.inner_state)
    assert last.guard.in_a_row == 10
    for name in ("loss_mean", "loss_deviation", "norm_mean", "accepted"):
        assert_bitwise_equal(getattr(last.guard, name), getattr(start.guard, name))
    after = steps_with(tx, last, GOOD, 1e6, 1)[0]  # the level is finite at this S
    assert (after.applied, after.guard.loss_mean) == (True, 1e6)


def test_the_derivatives_of_a_guarded_step_are_those_without_a_guard():
    params = jnp.ones(5)
    tx = with_loss_scale(optax.sgd(0.1), guard=GUARD)

    def step(grads, value):
        return tx.update(grads, tx.init(params), params, value=value)

    @jax.jit
    def derivatives(*at):
        # Cotangents of zero for the whole state, as an exported step has them.
        out, vjp = jax.vjp(step, *at)
        types = jax.tree.map(lambda x: jax.typeof(x).to_tangent_aval(), out)
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), types)
        tangents = jax.tree.leaves(jax.jvp(step, at, (params, jnp.float32(1.0)))[1])
        inexact = [x for x in tangents if x.dtype != jax.dtypes.float0]
        return vjp((jnp.ones(5), zeros[1])), inexact

    (by_grads, by_value), tangents = derivatives(0.1 * params, jnp.float32(1.0))
    np.testing.assert_allclose(by_grads, -0.1 * params)
    assert by_value == 0
    assert tangents
    assert all(np.isfinite(tangent).all() for tangent in tangents)


def test_skips_are_counted_by_cause():
    state = warm_state(TX)
    for factor, value, expected in (
        (jnp.inf, 1.0, (1, 0, 0)),
        (1e4, 1.0, (2, 1, 0)),
        (1.0, jnp.nan, (3, 1, 1)),
        (jnp.inf, jnp.nan, (4, 1, 2)),
        (jnp.inf, jnp.inf, (5, 1, 3)),
    ):
        state = steps_with(TX, state, times(factor), value, 1)[0]
        assert (state.skipped, state.spikes, state.nonfinite_losses) == expected
        assert state.grads_finite == (factor == 1e4)  # false for the loss, too
        assert state.loss_scale.loss_scale == 4


def test_the_guard_does_without_a_loss_and_with_a_constant_loss_scale():
    tx = with_loss_scale(optax.sgd(0.1), StaticLossScale(8.0), guard=GUARD)
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for _ in range(12):
        _, state = update(GOOD, state, PARAMS)
    assert (state.guard.norm_steps, state.guard.loss_steps) == (12, 0)
    assert update(times(1e3), state, PARAMS)[1].spikes == 1


def test_one_bad_shard_skips_the_step_on_every_device():
    state = warm_state(TX)

    def step(state, factor, value):
        stepped = TX.update(times(factor[0]), state, value=value[0])
        return jax.tree.map(lambda x: x[None], stepped)

    split = jax.P("i")
    specs = {"in_specs": (jax.P(), split, split), "out_specs": split}
    sharded = jax.jit(jax.shard_map(step, mesh=ONE_AXIS, **specs, check_vma=False))
    one, bad = jnp.ones(8), jnp.ones(8).at[3].set(1e4)
    for factor, value, spikes in ((bad, one, 1), (one, bad, 1), (one, one, 0)):
        updates, new = sharded(state, factor, value)
        assert new.spikes.tolist() == [spikes] * 8
        assert spikes == all((u == 0).all() for u in jax.tree.leaves(updates))
        assert all((x == x[0]).all() for x in jax.tree.leaves(new.guard))


def test_a_float64_loss_beyond_float32_is_a_spike_unless_it_is_negative():
    update = functools.partial(TX.update, GOOD, warm_state(TX), PARAMS)
    with jax.enable_x64(True):
        losses = jnp.array([1e39, -1e39])
        new = jax.jit(jax.vmap(lambda loss: update(value=loss)[1]))(losses)
    assert (new.spikes.tolist(), new.applied.tolist()) == ([1, 0], [False, True])
    assert new.nonfinite_losses.tolist() == [0, 0]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(new.guard))


def test_replicas_skip_together_for_one_loss_that_is_not_finite():
    tx = with_loss_scale(optax.adam(0.1), guard=GUARD, axis_name="i")

    def step(loss):  # the other replica's leaps
        return tx.update(GOOD, warm_state(TX), PARAMS, value=loss)[1]

    state = jax.jit(jax.vmap(step, axis_name="i"))(jnp.array([-jnp.inf, 1e6]))
    assert state.applied.tolist() == [False, False]
    assert state.nonfinite_losses.tolist() == [1, 1]
    assert state.spikes.tolist() == [0, 0]
