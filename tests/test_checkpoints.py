"""What goes to disk comes back: S and counter by name, configuration from the code."""

import dataclasses
import functools
import pickle
import re

import equinox as eqx
import flax.serialization
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from flax import nnx
from flax.training import train_state
from helpers import assert_bitwise_equal, by_name, count_traces, slow
from optimizers import half

import jmp_scale
from jmp_scale.checkpoints import restore, without_half_storage
from jmp_scale.linen import TrainState
from jmp_scale.nnx import Optimizer

ADAM = optax.adam(2.0**-10)  # steps that a bfloat16 near 1 cannot make
PARAMS = {"w": jnp.arange(1.0, 4.0), "b": jnp.float32(0.5)}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)


def make_state(loss_scale, guard=None):
    tx = jmp_scale.with_loss_scale(ADAM, loss_scale, guard=guard)
    return TrainState.create(apply_fn=None, params=PARAMS, tx=tx)


def with_orbax(state, path):
    ocp.save(path / "checkpoint", state)
    return lambda template: ocp.load(path / "checkpoint", template)


def with_flax(state, path):
    data = flax.serialization.to_bytes(state)
    return lambda template: flax.serialization.from_bytes(template, data)


def with_flax_dicts(state, path):
    """A loader without a template, which returns plain dicts."""
    data = flax.serialization.to_bytes(state)
    return lambda _: flax.serialization.msgpack_restore(data)


def with_pickle(state, path):
    data = pickle.dumps(jax.tree.leaves(state))
    structure = jax.tree.structure
    return lambda template: jax.tree.unflatten(structure(template), pickle.loads(data))


def with_equinox(state, path):
    eqx.tree_serialise_leaves(path / "checkpoint.eqx", state)
    return lambda like: eqx.tree_deserialise_leaves(path / "checkpoint.eqx", like)


GUARD = jmp_scale.SpikeGuard(warmup=7)
TARGET = jmp_scale.DynamicLossScale(8.0, counter=7)


@functools.cache
def state_after_a_skip():
    loss_scale = jmp_scale.DynamicLossScale(8.0, 7, period=50, hysteresis=2)
    step = jax.jit(lambda state, g: state.apply_gradients(grads=g, value=0.0))
    bad = jax.tree.map(lambda g: g * jnp.inf, GRADS)
    return step(step(make_state(loss_scale, guard=GUARD), bad), GRADS)


@pytest.mark.parametrize("loader", [with_orbax, with_flax, with_pickle])
def test_all_leaves_come_back_bit_for_bit_and_configuration_is_that_of_the_code(
    loader, tmp_path
):
    saved = state_after_a_skip()
    target = jmp_scale.DynamicLossScale(8.0, period=3, hysteresis=2)
    new = make_state(target, guard=jmp_scale.SpikeGuard(warmup=3))
    restored = loader(saved, tmp_path)(new)
    assert_bitwise_equal(*map(jax.tree.leaves, (restored, saved)))
    assert jax.tree.structure(restored) == jax.tree.structure(new)
    assert (restored.loss_scale.period, restored.opt_state.guard.warmup) == (3, 3)


@pytest.mark.parametrize(
    "state_dict",
    [
        {"scale": jnp.float32(8.0), "fin_steps": jnp.int32(0)},
        {"loss_scale": jnp.ones(2, jnp.float32), "counter": jnp.int32(0)},
        {"loss_scale": jnp.float32(8.0), "counter": jnp.float32(0)},
    ],
)
def test_a_foreign_or_truncated_state_dict_is_a_clear_error(state_dict):
    with pytest.raises(ValueError, match=r"DynamicLossScale at path .*expected"):
        flax.serialization.from_state_dict(jmp_scale.DynamicLossScale(), state_dict)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_s_and_a_guard_are_restored_from_any_floating_dtype_that_holds_them(dtype):
    # EasyLM's checkpointer writes all floating-point arrays in bfloat16.
    def restored(target, name, value):
        narrow = {name: np.asarray(value).astype(dtype)}
        saved = flax.serialization.to_state_dict(target) | narrow
        return flax.serialization.from_state_dict(target, saved)

    loss_scale = restored(TARGET, "loss_scale", 2.0**13)
    assert_bitwise_equal(loss_scale.loss_scale, jnp.float32(2.0**13))
    assert loss_scale.counter == 7
    guard = restored(GUARD, "loss_mean", -1.2345)
    expected = np.asarray(-1.2345).astype(dtype).astype(np.float32)
    assert_bitwise_equal((guard.loss_mean, guard.accepted), (expected, np.int32(0)))
    message = rf"at path .*got .*{dtype}.*in a dtype that rounds it \(save float32\)"
    for target, name, value in (
        (TARGET, "loss_scale", np.inf),
        (TARGET, "loss_scale", 4e4),
        (GUARD, "loss_mean", np.inf),
    ):
        with pytest.raises(ValueError, match=message):
            restored(target, name, value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_restore_casts_the_floats_of_s_and_of_a_guard(dtype):
    def wrote(x):
        return np.asarray(x).astype(dtype if x.dtype == jnp.float32 else x.dtype)

    guard = dataclasses.replace(GUARD, loss_mean=jnp.float32(1.2345))
    new = jmp_scale.with_loss_scale(ADAM, jmp_scale.DynamicLossScale(), guard=GUARD)
    new = new.init(PARAMS)
    saved = jax.tree.map(wrote, {"loss_scale": TARGET, "guard": guard})
    restored = restore(lambda _: new._replace(**saved), new)
    assert restored.loss_scale.loss_scale == 8
    expected = saved["guard"].loss_mean.astype(np.float32)
    assert_bitwise_equal(restored.guard.loss_mean, expected)


HALF_PARAMS = half(PARAMS)
KEY = jax.random.key(0)
for kind in (optax.EmptyState, optax.TraceState):
    jax.export.register_namedtuple_serialization(
        kind, serialized_name=f"test.{kind.__name__}"
    )


def test_an_exported_program_takes_and_returns_the_whole_state():
    tx = jmp_scale.with_half_storage(optax.sgd(0.1, 0.9))
    tx = jmp_scale.with_loss_scale(tx, TARGET, guard=GUARD)
    constant = jmp_scale.StaticLossScale(8.0), jmp_scale.NoOpLossScale()
    state = tx.init(HALF_PARAMS), constant
    same = jax.jit(lambda state: state)
    exported = jax.export.deserialize(jax.export.export(same)(state).serialize())
    assert_bitwise_equal(exported.call(state), state)


# A state may once have lacked these parts together, the newest form first.
FORMS = [
    "",
    "guard",
    "loss scale",
    "half storage",
    "half storage and guard",
    "half storage and loss scale",
]
OLDEST = FORMS[-1]


def optimizer_without(missing, loss_scale=8.0):
    tx, guard = ADAM, None if "guard" in missing else GUARD
    if "half storage" not in missing:
        tx = jmp_scale.with_half_storage(tx)
    if "loss scale" not in missing:
        loss_scale = jmp_scale.DynamicLossScale(loss_scale)
        tx = jmp_scale.with_loss_scale(tx, loss_scale, guard=guard)
    return tx


@functools.cache
def trained(missing):
    """(parameters, optimizer state) after a step, of a run without these parts."""
    params = PARAMS if "half storage" in missing else HALF_PARAMS
    tx = optimizer_without(missing)
    state = tx.init(params)
    if "loss scale" not in missing:
        state = state._replace(skipped=jnp.int32(3))
    updates, state = jax.jit(tx.update)(GRADS, state, params)
    return optax.apply_updates(params, updates), state


def new_state():
    """What a new run starts from; its S and its guard are recognized."""
    opt_state = optimizer_without("", loss_scale=2.0**10).init(HALF_PARAMS)
    guard = dataclasses.replace(opt_state.guard, accepted=jnp.int32(5))
    zeros = jax.tree.map(jnp.zeros_like, (HALF_PARAMS, opt_state.inner_state))
    return zeros[0], opt_state._replace(inner_state=zeros[1], guard=guard)


def expected_without(missing):
    """The new state, with everything that a run without these parts has."""
    params, opt_state = trained("")
    new = new_state()[1]
    if "loss scale" in missing:
        return params, new._replace(inner_state=opt_state.inner_state)
    if "guard" in missing:
        return params, opt_state._replace(guard=new.guard)
    return params, opt_state


def as_train_state(pair):
    params, opt_state = pair
    return train_state.TrainState(
        step=jnp.int32(7), apply_fn=None, params=params, tx=None, opt_state=opt_state
    )


EACH_BY_PICKLE = [(missing, tuple, with_pickle) for missing in FORMS]


# With a checkpoint of the oldest form a loader meets all others before.
@pytest.mark.parametrize(
    ("missing", "nest", "loader"),
    [
        (OLDEST, as_train_state, with_orbax),
        (OLDEST, as_train_state, with_flax_dicts),
        slow((OLDEST, tuple, with_flax)),
        slow((OLDEST, tuple, with_equinox)),
        *by_name([("guard", tuple, with_pickle)], EACH_BY_PICKLE),
    ],
)
def test_a_checkpoint_without_some_parts_is_restored(missing, nest, loader, tmp_path):
    load = loader(nest(trained(missing)), tmp_path)
    restored = restore(load, nest(new_state()))
    assert_bitwise_equal(restored, nest(expected_without(missing)))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))


def test_functions_and_numbers_among_the_leaves_stay_what_they_are():
    """A number as an array would be another type for `jit`."""
    new = {"activation": jax.nn.relu, "weight": jnp.zeros(2), "epoch": 0}
    new["state"] = jmp_scale.with_loss_scale(optax.sgd(0.1)).init(0.0)
    saved = {"weight": np.ones(2, np.float32), "epoch": 3, "state": ()}
    restored = restore(lambda _: saved, new)
    assert restored["activation"] is jax.nn.relu
    assert (type(restored["epoch"]), restored["epoch"]) == (int, 3)
    assert restored["weight"].tolist() == [1, 1]


def nnx_made(tx, dtype=jnp.float32, kind=nnx.Optimizer):
    """(model, optimizer) of NNX before the first step."""
    model = nnx.Linear(2, 3, param_dtype=dtype, rngs=nnx.Rngs(0))
    return model, kind(model, tx, wrt=nnx.Param)


def nnx_trained(missing):
    """(model, optimizer) of NNX after a step, of a run without these parts."""
    dtype = jnp.float32 if "half storage" in missing else jnp.bfloat16
    kind = nnx.Optimizer if "loss scale" in missing else Optimizer
    model, optimizer = nnx_made(optimizer_without(missing), dtype, kind)
    model.kernel[...] = jnp.arange(6.0, dtype=model.kernel.dtype).reshape(2, 3)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    nnx.jit(lambda model, optimizer: optimizer.update(model, grads))(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("missing", by_name(["guard"], FORMS))
def test_an_nnx_state_without_some_parts_is_restored(missing, tmp_path):
    saved = nnx.state(nnx_trained(missing))
    tx = optimizer_without("", loss_scale=2.0**10)
    model, optimizer = nnx_made(tx, jnp.bfloat16, Optimizer)
    state, pure = nnx.state((model, optimizer)), nnx.to_pure_dict(saved)
    restored = restore(with_orbax(pure, tmp_path), nnx.to_pure_dict(state))
    of_variables = restore(lambda _: pure, state)
    assert_bitwise_equal(nnx.to_pure_dict(of_variables), restored)
    nnx.update((model, optimizer), restored)
    expected_model, expected = nnx_trained("")
    assert_bitwise_equal(*map(nnx.state, (model, expected_model)))
    found, wanted = (x.opt_state.inner_state for x in (optimizer, expected))
    assert_bitwise_equal(*map(jax.tree.leaves, (found, wanted)))
    is_new = "loss scale" in missing
    assert float(optimizer.loss_scale) == (2.0**10 if is_new else 8.0)


def test_a_restored_state_trains_on_without_another_compilation():
    step, traces = count_traces(optimizer_without("").update)
    step = jax.jit(step)
    restored = restore(lambda _: trained(OLDEST), new_state())
    for params, state in (new_state(), restored):
        step(GRADS, state, params)
    assert len(traces) == 1


STORED = {"averages": ("mu", "nu"), "remainders": False, "key": KEY}


def test_float32_averages_are_rounded_and_come_back_as_they_are():
    plain = trained(OLDEST)
    tx = jmp_scale.with_half_storage(ADAM, **STORED)
    params, state = restore(lambda _: plain, (HALF_PARAMS, tx.init(HALF_PARAMS)))
    like = tx.init(HALF_PARAMS).inner_state
    nearest = half(plain[0]), optax.tree.cast_like(plain[1], like)
    assert_bitwise_equal((params, state.inner_state), nearest)
    back = without_half_storage(params, state)
    assert {x.dtype for x in jax.tree.leaves(back)} == {np.dtype("f4"), np.dtype("i4")}
    again = restore(lambda _: back, (params, tx.init(HALF_PARAMS)))
    assert_bitwise_equal(again, (params, state))
    updates = ADAM.update(GRADS, back[1], back[0])[0]
    assert jax.tree.structure(updates) == jax.tree.structure(GRADS)


def test_averages_of_float32_parameters_need_no_parameters_in_the_state():
    tx = jmp_scale.with_half_storage(ADAM, averages=("mu", "nu"), key=KEY)
    plain = ADAM.update(GRADS, ADAM.init(PARAMS), PARAMS)[1]
    state = restore(lambda _: plain, tx.init(PARAMS))
    like = tx.init(PARAMS).inner_state
    assert_bitwise_equal(state.inner_state, optax.tree.cast_like(plain, like))


def test_what_the_optimizer_itself_stores_in_bfloat16_stays_so_without_averages():
    inner = optax.adam(0.1, mu_dtype=jnp.bfloat16)
    state = jmp_scale.with_half_storage(inner).init(HALF_PARAMS)
    back = without_half_storage(HALF_PARAMS, state)[1]
    assert_bitwise_equal(back, inner.init(PARAMS))


@pytest.mark.parametrize(
    "inner", [optax.sgd(0.1), optax.chain(optax.clip(1.0), optax.scale(-0.1))]
)
def test_an_nnx_state_of_an_optimizer_without_arrays_is_restored(inner, tmp_path):
    saved, state = (
        nnx.to_pure_dict(nnx.state(nnx_made(tx)))
        for tx in (inner, jmp_scale.with_loss_scale(inner, TARGET))
    )
    zeros = jax.tree.map(jnp.zeros_like, state[0])
    restored = restore(with_orbax(saved, tmp_path), state | {0: zeros})
    assert_bitwise_equal(restored, state)


@pytest.mark.parametrize("missing", by_name([OLDEST], FORMS))
def test_abstract_leaves_are_filled_from_disk(missing, tmp_path):
    # Orbax's way for large models: no array is made before those on disk are read.
    device = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    params, opt_state = new_state()
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
        (params, opt_state),
    )
    given = abstract[1]
    if "loss scale" in missing:
        given = opt_state._replace(inner_state=given.inner_state)
    if "guard" in missing:
        given = given._replace(guard=opt_state.guard)
    load = with_orbax(trained(missing), tmp_path)
    restored = restore(load, (abstract[0], given))
    assert_bitwise_equal(restored, expected_without(missing))
    assert {x.sharding for x in jax.tree.leaves(restored[0])} == {device}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"b": PARAMS["b"]}, r"params/w is nothing, expected float32\[3\]"),
        (PARAMS | {"v": jnp.ones(3)}, r"params/v is float32\[3\], expected nothing"),
        (PARAMS | {"w": jnp.ones(4)}, r"params/w is float32\[4\], expected float32\["),
        (PARAMS | {"w": jnp.ones(3, jnp.float16)}, r"params/w is float16\[3\], exp"),
    ],
)
def test_a_checkpoint_with_other_leaves_is_refused(params, message):
    saved = make_state(TARGET).replace(params=params)
    message = f"(?s)as state is: .*without guard: {message}"
    with pytest.raises(ValueError, match=message):
        restore(lambda _: saved, make_state(TARGET, GUARD))


def test_if_no_form_fits_each_is_named_with_its_first_difference(tmp_path):
    params, opt_state = trained("")
    load = with_orbax({"weights": params}, tmp_path)
    with pytest.raises(ValueError, match="differs from each") as error:
        restore(load, (params, opt_state))
    lines = str(error.value).splitlines()[1:]
    names = [f"  without {x}" if x else "  as state is" for x in FORMS]
    assert [line.partition(":")[0] for line in lines] == names
    assert all(20 < len(line) < 260 for line in lines)


@pytest.mark.parametrize("names", [[], ["ema", "params"]], ids=str)
def test_parameters_that_are_not_in_the_state_once_are_told(names):
    params, opt_state = trained("")
    places = re.escape(str([f"{name}/" for name in names]))
    message = f"half storage: expected one tree .*, got those at {places}; pass .para"
    with pytest.raises(ValueError, match=message):
        restore(lambda _: None, dict.fromkeys(names, params) | {"state": opt_state})


def test_names_of_parameters_may_end_with_those_of_others():
    params = {"w": jnp.ones(2, jnp.bfloat16), "bw": jnp.zeros(2, jnp.bfloat16)}
    params |= {"inner": {"w": jnp.full(2, 2, jnp.bfloat16)}}
    tx = jmp_scale.with_half_storage(ADAM)
    for tree in (params, jnp.bfloat16(3)):
        state = tx.init(tree)
        updates, state = jax.jit(tx.update)(tree, state, tree)
        tree = optax.apply_updates(tree, updates)
        full = without_half_storage(tree, state)
        assert_bitwise_equal(restore(lambda _, x=full: x, (tree, state)), (tree, state))
