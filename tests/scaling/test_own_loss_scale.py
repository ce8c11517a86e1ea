"""A loss scale of a user's own works wherever one of the library does."""

import dataclasses
import functools
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from flax import nnx
from helpers import assert_bitwise_equal

import jmp_scale
import jmp_scale.linen
import jmp_scale.nnx
from jmp_scale import diagnostics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Additive(jmp_scale.LossScale):
    """Halves S at every skip, and adds a constant otherwise."""

    loss_scale: jax.Array | float = 32.0
    step: float = dataclasses.field(default=8.0, metadata={"static": True})

    def adjust(self, grads_finite, *, loss_finite=True):
        s = self.loss_scale
        new = jnp.where(grads_finite, s + self.step, s / 2)
        return dataclasses.replace(self, loss_scale=jnp.where(loss_finite, new, s))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InParts(jmp_scale.LossScale):
    """Its S is a property, and its leaves lie in a dictionary: the same S as above."""

    parts: dict[str, jax.Array]

    @property
    def loss_scale(self):
        return self.parts["whole"] + self.parts["rest"]

    def adjust(self, grads_finite, *, loss_finite=True):
        s = Additive(self.loss_scale).adjust(grads_finite, loss_finite=loss_finite)
        whole = jnp.floor(s.loss_scale)
        return InParts({"whole": whole, "rest": s.loss_scale - whole})


PARTS = {"whole": jnp.float32(32.0), "rest": jnp.float32(0.0)}
KINDS = {"a field": Additive(), "a property": InParts(PARTS)}
PARAMS = {"w": jnp.float32([1.0, -2.0])}
X = jnp.float32([[1.0, 2.0], [3.0, 4.0]])
# S after a step with these inputs, by hand: + 8, / 2, stays, + 8.
INPUTS = (X, X.at[0, 0].set(3e38), X, X)
VALUES = (1.0, 1.0, jnp.nan, 1.0)
EXPECTED = [40.0, 20.0, 20.0, 28.0]


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def wrapped(kind):
    return jmp_scale.with_loss_scale(optax.adam(0.1), KINDS[kind])


def update(tx, params, state, x, value=None):
    _, grads = jmp_scale.value_and_grad(loss_fn, state.loss_scale)(params, x)
    updates, state = tx.update(grads, state, params, value=value)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("kind", KINDS)
def test_s_follows_its_own_rule_and_gradients_are_true(kind):
    tx = wrapped(kind)

    def step(carry, given):
        params, state = update(tx, *carry, *given)
        return (params, state), state.loss_scale.loss_scale

    start, given = (PARAMS, tx.init(PARAMS)), (jnp.stack(INPUTS), jnp.array(VALUES))
    (_, state), seen = jax.lax.scan(step, start, given)
    assert seen.tolist() == EXPECTED
    assert (state.skipped, state.nonfinite_losses) == (2, 1)
    s = state.loss_scale
    _, grads = jmp_scale.value_and_grad(loss_fn, s)(PARAMS, X)
    expected = jax.grad(loss_fn)(PARAMS, X)["w"]
    assert jnp.allclose(grads["w"], expected, rtol=1e-6)
    assert s.scale(jnp.float16(3.0)) == 84
    assert jmp_scale.get_loss_scale(s) is s


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_keep_its_leaves(kind, tmp_path):
    tx = wrapped(kind)
    _, state = update(tx, PARAMS, tx.init(PARAMS), X)
    data, new = flax.serialization.to_bytes(state), tx.init(PARAMS)
    assert_bitwise_equal(flax.serialization.from_bytes(new, data), state)
    assert_bitwise_equal(pickle.loads(pickle.dumps(state)), state)
    ocp.save(tmp_path / "state", state)
    assert_bitwise_equal(ocp.load(tmp_path / "state", new), state)


def test_linen_and_nnx_train_with_it():
    state = jmp_scale.linen.TrainState.create(
        apply_fn=None, params=PARAMS, tx=optax.sgd(0.1), loss_scale=Additive()
    )
    model = nnx.Dict(w=nnx.Param(PARAMS["w"]))
    optimizer = jmp_scale.nnx.Optimizer(model, optax.sgd(0.1), loss_scale=Additive())
    for x, s in zip(INPUTS[:2], EXPECTED[:2], strict=True):
        _, grads = state.value_and_grad(loss_fn)(state.params, x)
        state = state.apply_gradients(grads=grads)
        _, grads = optimizer.value_and_grad(lambda m, x: loss_fn({"w": m.w[...]}, x))(
            model, x
        )
        optimizer.update(model, grads)
        assert float(state.loss_scale) == float(optimizer.loss_scale) == s
    assert_bitwise_equal(state.params["w"], model.w[...])


def test_check_step_and_the_health_log_read_it():
    tx = wrapped("a field")
    train_step = jax.jit(functools.partial(update, tx))
    check = diagnostics.check_step(train_step, PARAMS, tx.init(PARAMS), X)
    assert check.ok, check.summary()
    state, log = tx.init(PARAMS), diagnostics.HealthLog()
    assert log(state) == []
    for _ in range(10):
        _, state = train_step(PARAMS, state, INPUTS[1])
    assert any("last 10 steps were all skipped" in str(each) for each in log(state))
    assert diagnostics.metrics(state)["loss_scale"] == 2.0**-5


def test_without_a_rule_it_cannot_be_made():
    class NoRule(jmp_scale.LossScale):
        loss_scale = 1.0

    with pytest.raises(TypeError, match="abstract method"):
        NoRule()
