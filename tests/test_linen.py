"""Flax Linen's TrainState: what a skipped step keeps, and that it looks like Flax."""

import functools
import importlib
import sys
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import GOOD, GUARD, TX, assert_bitwise_equal, count_traces, data, each_skip
from optimizers import SGD

import jmp_scale
from jmp_scale.linen import TrainState

pytestmark = pytest.mark.strict_promotion
# Models whose layers have several dtypes.
MIXED = jax.numpy_dtype_promotion("standard")


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(8, dtype=jnp.float16)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(1, dtype=jnp.float16)(x).astype(jnp.float32)


class NetState(TrainState):
    batch_stats: Any
    ema: Any


def simple_state(params, tx=SGD, cls=TrainState, **kwargs):
    return cls.create(apply_fn=None, params={"w": params}, tx=tx, **kwargs)


def train_step(state, x, key, with_value=False):
    def loss_fn(params):
        collections = {"params": params, "batch_stats": state.batch_stats}
        rngs = {"dropout": jax.random.fold_in(key, state.step)}
        y, updates = state.apply_fn(collections, x, mutable=["batch_stats"], rngs=rngs)
        return jnp.mean((y - 1.0) ** 2) * jnp.mean(x**2), updates

    (loss, updates), grads = state.value_and_grad(loss_fn, has_aux=True)(state.params)
    ema = optax.incremental_update(state.params, state.ema, 0.1)
    value = loss if with_value else None
    return state.apply_gradients(grads=grads, value=value, ema=ema, **updates), loss


def kept(state):
    tree = state.params, state.opt_state.inner_state, state.batch_stats, state.ema
    return jax.tree.map(jnp.copy, tree)


@each_skip
@MIXED
def test_a_skipped_step_leaves_all_that_the_state_keeps_bit_identical(
    tx, bad, with_value
):
    step, traces = count_traces(functools.partial(train_step, with_value=with_value))
    step, net = jax.jit(step, donate_argnums=0), Net()
    keys = dict.fromkeys(("params", "dropout"), jax.random.key(0))
    fields = jax.jit(net.init)(keys, data(GOOD))
    fields["ema"] = fields["params"]
    state = NetState.create(apply_fn=net.apply, tx=tx, **fields)
    start, key = kept(state), jax.random.key(2)
    for _ in range(3):
        state, _ = step(state, data(GOOD), key)
    before, s = kept(state), float(state.loss_scale.loss_scale)
    for old, new in zip(start, before, strict=True):
        pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
        assert any((a != b).any() for a, b in pairs)
    state, _ = step(state, data(bad), key)
    assert_bitwise_equal(kept(state), before)
    assert (int(state.opt_state.skipped), int(state.step)) == (1, 4)
    assert float(state.loss_scale.loss_scale) == (s if with_value else s / 2)
    state, loss = step(state, data(GOOD), key)
    assert np.isfinite(float(loss))
    assert len(traces) == 1


def test_a_second_loss_scale_is_refused():
    twice = r"TrainState.create: .* in one place, got loss_scale=.*already wrapped in"
    with pytest.raises(ValueError, match=twice):
        simple_state(jnp.ones(2), TX, loss_scale=jmp_scale.DynamicLossScale())


class State(TrainState):
    stats: Any
    epoch: int = flax.struct.field(pytree_node=False, default=0)
    name: Any = flax.struct.field(pytree_node=False, default=None)


STATE = simple_state(jnp.ones(2), cls=State, stats=jnp.zeros(2))


def test_a_change_that_is_not_like_its_field_is_refused():
    with pytest.raises(ValueError, match=r"'stats'.*float16"):
        STATE.apply_gradients(grads=STATE.params, stats=jnp.zeros(2, jnp.float16))


def test_static_fields_are_replaced_as_they_are_also_on_a_skipped_step():
    @jax.jit
    def step(state, g):
        changes = {"epoch": state.epoch + 1, "name": "run", "stats": state.stats + 1}
        return state.apply_gradients(grads={"w": jnp.full(2, g)}, **changes)

    state = STATE
    for epoch, g in ((1, 1.0), (2, jnp.nan)):
        state = step(state, g)
        found = state.epoch, state.name, state.stats.tolist()
        assert found == (epoch, "run", [1, 1])


@functools.cache
def float8_state():
    model = nn.Dense(4, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    params = model.init(jax.random.key(0), jnp.ones((8, 16)))
    params |= {"constants": {"c": jnp.ones(2)}}
    loss_scale = jmp_scale.DynamicLossScale(2.0**10)
    tx = jmp_scale.with_loss_scale(optax.sgd(1e-3), loss_scale, guard=GUARD)
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@jax.jit
def float8_step(state, x):
    def loss_fn(params, x):
        return (state.apply_fn(params, x) ** 2).mean()

    loss, grads = state.value_and_grad(loss_fn, allow_int=True)(state.params, x)
    return state.apply_gradients(grads=grads, value=loss)


def with_leaf(tree, name, fun):
    """`tree` with `fun` of its leaf `name`."""
    leaves = flax.traverse_util.flatten_dict(tree)
    path = next(path for path in leaves if path[-1] == name)
    leaves[path] = fun(leaves[path])
    return flax.traverse_util.unflatten_dict(leaves)


def test_a_non_finite_gradient_float8_scale_or_maximum_skips_the_step():
    state = float8_state()
    apply = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    ones = jax.tree.map(jnp.ones_like, state.params)
    bad = {"bias": jnp.inf, "input_amax_history": jnp.inf}
    bad |= {"kernel_scale": jnp.nan, "output_grad_amax_history": jnp.nan}
    for name, value in bad.items():
        grads = with_leaf(ones, name, lambda x, value=value: jnp.full_like(x, value))
        after = apply(state, grads)
        assert_bitwise_equal(after.params, state.params)
        assert float(after.loss_scale.loss_scale) == 2.0**9
    # Others are not steps: they replace what there was, and a FrozenDict stays one.
    frozen, grads = map(flax.core.freeze, (state.params, ones))
    replaced = apply(state.replace(params=frozen), grads).params
    assert isinstance(replaced, flax.core.FrozenDict)
    assert len(jax.tree.leaves(replaced["_overwrite_with_gradient"])) == 6
    assert_bitwise_equal(*(x["_overwrite_with_gradient"] for x in (replaced, grads)))


def test_an_infinite_maximum_in_a_history_that_flax_saved_skips_nothing():
    state, name = float8_state(), "input_amax_history"
    params = with_leaf(state.params, name, lambda x: x.at[5].set(jnp.inf))
    x = jax.random.normal(jax.random.key(3), (8, 16))
    state = float8_step(state.replace(params=params), x)
    assert int(state.opt_state.skipped) == 0
    state = float8_step(state, x.at[0, 0].set(jnp.nan))
    assert int(state.opt_state.skipped) == 1


def test_an_object_from_before_flax_was_imported_is_saved(monkeypatch):
    loss_scale, registry = jmp_scale.DynamicLossScale(8.0), "_STATE_DICT_REGISTRY"
    known = getattr(flax.serialization, registry)
    monkeypatch.delitem(known, jmp_scale.DynamicLossScale)
    importlib.reload(sys.modules["jmp_scale._flax"])
    data = flax.serialization.to_bytes(loss_scale)
    restored = flax.serialization.from_bytes(jmp_scale.DynamicLossScale(), data)
    assert float(restored) == 8


def test_a_missing_flax_is_named(monkeypatch):
    for name in ("_flax", "linen", "nnx"):
        monkeypatch.delitem(sys.modules, f"jmp_scale.{name}", raising=False)
        monkeypatch.delattr(jmp_scale, name, raising=False)
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(ImportError, match="pip install 'flax"):
        importlib.import_module("jmp_scale.nnx")
