"""What goes to disk comes back: S and counter by name, configuration from the code."""

import functools
import pickle

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
from helpers import assert_bitwise_equal, count_traces

import jmp_scale
from jmp_scale.checkpoints import (
    restore_older,
    restore_without_half_parameters,
    restore_without_loss_scale,
    without_half_parameters,
)
from jmp_scale.linen import TrainState
from jmp_scale.nnx import Optimizer

PARAMS = {"w": jnp.arange(1.0, 4.0), "b": jnp.float32(0.5)}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)


def make_state(loss_scale=None, **kwargs):
    kwargs["loss_scale"] = loss_scale or jmp_scale.DynamicLossScale(2.0**10)
    return TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(0.1), **kwargs)


@functools.cache
def old_state():
    """A state without a loss scale, as Flax's own class makes it, after one step."""
    tx = optax.adam(0.1)
    state = train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    return state.apply_gradients(grads=GRADS)


def nnx_optimizer(tx, loss_scale=None, **kwargs):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    return model, Optimizer(model, tx, loss_scale=loss_scale, **kwargs)


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


GUARD = jmp_scale.SpikeGuard(warmup=7)


@pytest.fixture(params=[with_orbax, with_flax, with_pickle])
def round_trip(request, tmp_path):
    return lambda state, target: request.param(state, tmp_path)(target)


@pytest.fixture(params=[with_orbax, with_flax_dicts])
def loader(request, tmp_path):
    return lambda state: request.param(state, tmp_path)


def test_all_leaves_come_back_bit_for_bit_and_configuration_is_that_of_the_code(
    round_trip,
):
    loss_scale = jmp_scale.DynamicLossScale(8.0, 7, period=50, hysteresis=2)
    saved = make_state(loss_scale, guard=GUARD)
    grads = jax.tree.map(lambda g: g * jnp.inf, GRADS)
    saved = saved.apply_gradients(grads=grads, value=jnp.float32(0.0))
    saved = saved.apply_gradients(grads=GRADS, value=jnp.float32(0.0))
    target = jmp_scale.DynamicLossScale(8.0, period=3, hysteresis=2)
    new = make_state(target, guard=jmp_scale.SpikeGuard(warmup=3))
    restored = round_trip(saved, new)
    for field in ("step", "params", "opt_state"):
        leaves = (jax.tree.leaves(getattr(x, field)) for x in (restored, saved))
        assert_bitwise_equal(*leaves)
    assert jax.tree.structure(restored) == jax.tree.structure(new)
    assert (restored.loss_scale.period, restored.opt_state.guard.warmup) == (3, 3)


def test_an_nnx_optimizer_comes_back(round_trip):
    saved = jmp_scale.DynamicLossScale(2.0**10, counter=1999)
    saved = nnx_optimizer(optax.adam(0.1), saved)
    model, optimizer = nnx_optimizer(optax.adam(0.1), jmp_scale.DynamicLossScale())
    pure = (nnx.to_pure_dict(nnx.state(x)) for x in (saved, (model, optimizer)))
    nnx.update((model, optimizer), jax.tree.map(jnp.asarray, round_trip(*pure)))
    assert_bitwise_equal(optimizer.loss_scale.counter, jnp.int32(1999))
    assert optimizer.loss_scale.adjust(jnp.array(True)).loss_scale == 2.0**11


def test_orbax_names_the_leaves_on_disk(tmp_path):
    ocp.save(tmp_path / "checkpoint", make_state())
    on_disk = ocp.metadata(tmp_path / "checkpoint").metadata["opt_state"]["loss_scale"]
    names = {name for name, leaf in on_disk.items() if leaf is not None}
    assert names == {"loss_scale", "counter"}


@pytest.mark.parametrize(
    "state_dict",
    [
        {"scale": jnp.float32(8.0), "fin_steps": jnp.int32(0)},
        jnp.float32(8.0),
        {"loss_scale": jnp.ones(2, jnp.float32), "counter": jnp.int32(0)},
        {"loss_scale": jnp.float16(jnp.inf), "counter": jnp.int32(0)},
        {"loss_scale": jnp.float32(8.0), "counter": jnp.float32(0)},
    ],
)
def test_a_foreign_or_truncated_state_dict_is_a_clear_error(state_dict):
    with pytest.raises(ValueError, match=r"DynamicLossScale at path .*expected"):
        flax.serialization.from_state_dict(jmp_scale.DynamicLossScale(), state_dict)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2"])
def test_s_is_restored_from_any_floating_dtype_that_holds_it(dtype):
    # EasyLM's checkpointer writes all floating-point arrays in bfloat16.
    def saved(s):
        return {"loss_scale": np.asarray(s).astype(dtype), "counter": np.int32(7)}

    target = jmp_scale.DynamicLossScale()
    restored = flax.serialization.from_state_dict(target, saved(2.0**13))
    assert_bitwise_equal(restored.loss_scale, jnp.float32(2.0**13))
    assert restored.counter == 7
    message = rf"got .*{dtype}.*in a dtype that rounds it \(save float32\)"
    for s in (1.5 * 2.0**13, np.inf):
        with pytest.raises(ValueError, match=message):
            flax.serialization.from_state_dict(target, saved(s))


HALF_PARAMS = {name: x.astype(jnp.bfloat16) for name, x in PARAMS.items()}
KEY = jax.random.key(0)
for kind in (optax.EmptyState, optax.TraceState):
    jax.export.register_namedtuple_serialization(
        kind, serialized_name=f"test.{kind.__name__}"
    )


@pytest.mark.parametrize(
    ("tx", "params"),
    [
        (
            jmp_scale.with_loss_scale(
                jmp_scale.with_half_parameters(optax.sgd(0.1)),
                jmp_scale.DynamicLossScale(period=2, max_loss_scale=2.0**20),
            ),
            HALF_PARAMS,
        ),
        (jmp_scale.with_half_state(optax.sgd(0.1, 0.9), key=KEY), PARAMS),
    ],
)
def test_an_exported_update_survives_serialization(tx, params):
    update = jax.jit(lambda state: tx.update(GRADS, state, params)[1])
    state = tx.init(params)
    exported = jax.export.deserialize(jax.export.export(update)(state).serialize())
    assert_bitwise_equal(exported.call(exported.call(state)), update(update(state)))


def check_restored(state, saved):
    assert_bitwise_equal(state.params, saved.params)
    assert_bitwise_equal(state.opt_state.inner_state, saved.opt_state)
    assert int(state.step) == int(saved.step)
    assert float(state.loss_scale.loss_scale) == 2.0**10
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state.opt_state))


def test_a_python_number_stays_one():
    """As an array it would be another type for `jit`."""
    new = {"epoch": 0, "states": [jmp_scale.with_loss_scale(optax.sgd(0.1)).init(0.0)]}
    restored = restore_without_loss_scale(lambda _: {"epoch": 3, "states": [()]}, new)
    assert type(restored["epoch"]) is int
    assert restored["epoch"] == 3


@pytest.mark.parametrize("guard", [GUARD, None], ids=["guard", "none"])
def test_a_checkpoint_without_a_loss_scale_is_restored_and_trains_on(loader, guard):
    saved, new = old_state(), make_state(guard=guard)
    restored = restore_without_loss_scale(loader(saved), new)
    check_restored(restored, saved)
    assert_bitwise_equal(restored.opt_state.guard, guard)
    step, traces = count_traces(lambda state: state.apply_gradients(grads=GRADS))
    step = jax.jit(step)
    step(new)
    assert int(step(restored).step) == 2
    assert len(traces) == 1


def with_nnx(on_disk, saved, optimizer, tmp_path):
    """A loader and a new state of an NNX optimizer: dicts for Orbax, or variables."""
    saved, state = nnx.state(saved), nnx.state(optimizer)
    if not on_disk:
        return lambda _: saved, state
    return with_orbax(nnx.to_pure_dict(saved), tmp_path), nnx.to_pure_dict(state)


ON_DISK = [(optax.adam(0.1), True), (optax.sgd(0.1), True), (optax.sgd(0.1), False)]


@pytest.mark.parametrize(("tx", "on_disk"), ON_DISK)
def test_an_nnx_state_without_a_loss_scale_is_restored(tx, on_disk, tmp_path):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    saved = nnx.Optimizer(model, tx, wrt=nnx.Param)
    saved.step[...] += 5
    _, optimizer = nnx_optimizer(tx, jmp_scale.DynamicLossScale(2.0**10), guard=GUARD)
    given = with_nnx(on_disk, saved, optimizer, tmp_path)
    nnx.update(optimizer, restore_without_loss_scale(*given))
    assert int(optimizer.step[...]) == 5
    assert float(optimizer.loss_scale.loss_scale) == 2.0**10


def test_abstract_leaves_are_filled_from_disk(tmp_path):
    saved, state = old_state(), make_state()
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    inner_state = abstract.opt_state.inner_state
    opt_state = state.opt_state._replace(inner_state=inner_state)
    abstract = abstract.replace(opt_state=opt_state)
    load = with_orbax(saved, tmp_path)
    check_restored(restore_without_loss_scale(load, abstract), saved)


@pytest.mark.parametrize(
    ("saved", "state", "message"),
    [
        (
            old_state,
            lambda: jax.eval_shape(make_state),
            r"ShapeDtypeStructs at .*ale/counter",
        ),
        (make_state, make_state, "restored into the state as it is"),
        (old_state, old_state, "state has no loss scale"),
    ],
    ids=["abstract", "has one already", "state without"],
)
def test_a_loss_scale_is_expected_in_the_state_alone(saved, state, message):
    with pytest.raises(ValueError, match=message):
        restore_without_loss_scale(lambda _: saved(), state())


@pytest.mark.parametrize("restore", [restore_without_loss_scale, restore_older])
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"b": PARAMS["b"]}, r"in state: +params/w \(nothing for float32\[3\]\)\n"),
        (PARAMS | {"v": jnp.ones(3)}, r"only in the checkpoint: +params/v\n"),
        (PARAMS | {"w": jnp.ones(4)}, r"params/w \(float32\[4\] for float32\[3\]\)"),
        (PARAMS | {"w": jnp.ones(3, jnp.float16)}, r"params/w \(float16\[3\] for fl"),
        (PARAMS | {"w": "text"}, r"params/w \(str\[\] for float32"),
        (jax.eval_shape(lambda: PARAMS), r"state: +params/b \(nothing for .*params/w"),
    ],
)
def test_a_checkpoint_with_other_leaves_is_refused(restore, params, message):
    is_older = restore is restore_without_loss_scale
    saved = (old_state() if is_older else make_state()).replace(params=params)
    with pytest.raises(ValueError, match=f"(?s){restore.__name__}.*{message}"):
        restore(lambda _: saved, make_state(guard=GUARD))


def test_states_without_arrays_may_stand_in_mappings_at_any_depth_and_alone():
    state = jmp_scale.with_loss_scale(optax.sgd(0.1)).init(PARAMS)._asdict()
    del state["inner_state"], state["guard"]  # as NNX leaves them out
    new = {"tx": state, "disc": {"step": jnp.int32(0), "tx": state}, "list": [state]}
    saved = {"disc": {"step": jnp.int32(3)}, "list": []}
    templates = []
    restored = restore_without_loss_scale(lambda x: templates.append(x) or saved, new)
    assert restored["disc"] == new["disc"] | {"step": 3}
    assert templates == [{"disc": {"step": 0}, "list": [None]}]


@pytest.mark.parametrize(("tx", "on_disk"), ON_DISK)
def test_an_nnx_state_without_a_guard_is_restored(tx, on_disk, tmp_path):
    loss_scale = jmp_scale.DynamicLossScale(8.0) if on_disk else None
    _, saved = nnx_optimizer(tx, loss_scale)
    saved.opt_state.skipped[...] += 1
    _, optimizer = nnx_optimizer(tx, loss_scale, guard=GUARD)
    load, state = with_nnx(on_disk, saved, optimizer, tmp_path)
    nnx.update(optimizer, restore_older(load, state))
    assert int(optimizer.opt_state.skipped[...]) == 1
    assert_bitwise_equal(optimizer.loss_scale, saved.loss_scale)
    assert optimizer.opt_state.guard.warmup == 7


@pytest.mark.parametrize("guards", [(None, None), (None, GUARD), (GUARD, GUARD)])
def test_a_checkpoint_is_restored_with_or_without_its_guard(loader, guards):
    saved = make_state(jmp_scale.DynamicLossScale(8.0, 7), guard=guards[0])
    opt_state = saved.opt_state._replace(skipped=jnp.int32(3))
    restored = restore_older(
        loader(saved.replace(opt_state=opt_state)), make_state(guard=guards[1])
    )
    assert_bitwise_equal(restored.opt_state._replace(guard=guards[0]), opt_state)
    assert_bitwise_equal(restored.opt_state.guard, guards[1])
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(restored.opt_state))


@functools.cache
def half_and_full():
    """(half parameters, their state, plain float32 parameters, theirs) after a step."""
    inner, found = optax.adam(2.0**-10), []
    halves = jmp_scale.with_half_parameters(inner), HALF_PARAMS
    for tx, params in (halves, (inner, PARAMS)):
        tx = jmp_scale.with_loss_scale(tx, jmp_scale.DynamicLossScale(8.0))
        updates, state = jax.jit(tx.update)(GRADS, tx.init(params), params)
        found += [optax.apply_updates(params, updates), state]
    return found


def test_a_float32_checkpoint_goes_into_half_precision_and_back(loader):
    params, state, plain, plain_state = half_and_full()
    new = jax.tree.map(jnp.zeros_like, (params, state))
    restored = restore_without_half_parameters(loader((plain, plain_state)), *new)
    assert_bitwise_equal(restored, (params, state))
    assert_bitwise_equal(without_half_parameters(*restored), (plain, plain_state))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_float32_checkpoint_goes_into_abstract_half_precision_parameters(
    dtype, tmp_path
):
    # Orbax's way for large models: no array is made before those on disk are read.
    tx = jmp_scale.with_half_parameters(optax.adam(1e-3))
    plain = {"w": jnp.linspace(-2.0, 2.0, 12).reshape(4, 3), "n": jnp.ones(3)}
    saved = plain, optax.adam(1e-3).init(plain)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    params = plain | {"w": plain["w"].astype(dtype)}
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        (params, jax.eval_shape(tx.init, params)),
    )
    load = with_orbax(saved, tmp_path)
    concrete = jax.device_put(params, sharding)
    for target in (abstract, (concrete, abstract[1])):
        restored = restore_without_half_parameters(load, *target)
        assert_bitwise_equal(without_half_parameters(*restored), saved)
    types = jax.tree.map(lambda x: x.dtype, (restored, abstract))
    assert types[0] == types[1]
    assert {x.sharding for x in jax.tree.leaves(restored)} == {sharding}
    stochastic = jmp_scale.with_half_parameters(optax.adam(1e-3), key=jax.random.key(0))
    state = jax.eval_shape(stochastic.init, params)
    with pytest.raises(ValueError, match="ShapeDtypeStructs at 1/rounding_key; pass"):
        restore_without_half_parameters(lambda _: saved, params, state)


def test_remainders_of_bfloat16_in_a_float16_model_are_told(tmp_path):
    def start(dtype):
        params = {"w": jnp.linspace(-2.0, 2.0, 8).astype(dtype)}
        tx = jmp_scale.with_half_parameters(optax.adam(1e-3))
        tx = jmp_scale.with_loss_scale(tx)
        return tx, params, tx.init(params)

    tx, params, state = start(jnp.bfloat16)
    updates, state = tx.update(params, state, params)
    params = optax.apply_updates(params, updates)
    load = with_orbax((params, state), tmp_path)
    template = start(jnp.float16)[1:]
    message = "expected a remainder of parameter w of at most half a digit"
    with pytest.raises(ValueError, match=f"full_parameters: {message}"):
        jmp_scale.full_parameters(*load(template))
    with pytest.raises(ValueError, match=f"restore_older: {message}"):
        restore_older(load, template)
    full = jmp_scale.full_parameters(params, state)
    template = start(jnp.float16)[1:]
    params, state = restore_without_half_parameters(
        lambda _: (full, without_half_parameters(params, state)[1]), *template
    )
    assert_bitwise_equal(jmp_scale.full_parameters(params, state), full)


@pytest.mark.parametrize(
    ("tx", "wrap", "on_disk"),
    [
        (optax.adam(2.0**-9), jmp_scale.with_loss_scale, True),
        (optax.sgd(2.0**-9), lambda tx: tx, True),
        (optax.sgd(2.0**-9), jmp_scale.with_loss_scale, False),
    ],
)
def test_a_float32_nnx_checkpoint_goes_into_a_bfloat16_model_and_back(
    tx, wrap, on_disk, tmp_path
):
    def trained(dtype, tx, steps=1):
        model = nnx.Linear(2, 3, param_dtype=dtype, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, wrap(tx), wrt=nnx.Param)
        for _ in range(steps):
            grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
            optimizer.update(model, grads)
        return model, optimizer

    def states(model, optimizer):
        pair = nnx.state(model, nnx.Param), nnx.state(optimizer)
        return tuple(map(nnx.to_pure_dict, pair)) if on_disk else pair

    full = states(*trained(jnp.float32, tx))
    model, optimizer = trained(jnp.bfloat16, jmp_scale.with_half_parameters(tx), 0)
    load = with_orbax(full, tmp_path) if on_disk else lambda _: full
    half = restore_without_half_parameters(load, *states(model, optimizer))
    nnx.update(model, half[0])
    nnx.update(optimizer, half[1])
    assert model.kernel.dtype == jnp.bfloat16
    back = without_half_parameters(*states(model, optimizer))
    assert_bitwise_equal(*map(jax.tree.leaves, (back, full)))
    assert jax.tree.structure(back) == jax.tree.structure(full)


def test_a_checkpoint_of_half_precision_parameters_is_not_taken_for_a_float32_one():
    params, state, _, _ = half_and_full()
    with pytest.raises(ValueError, match="expected a checkpoint of the older state"):
        restore_without_half_parameters(lambda _: (params, state), params, state)
