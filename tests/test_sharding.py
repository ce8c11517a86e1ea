"""The whole step on eight devices: one bad device skips it on all, and S agrees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    EXPLICIT,
    ONE_AXIS,
    TWO_AXES,
    assert_bitwise_equal,
    by_name,
    compilations,
    on_each_device,
    sharded,
    varying,
)
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

import jmp_scale

LOSS_SCALE = jmp_scale.DynamicLossScale(2.0**10)
COMPILATIONS = compilations()


def example(bad_device=None):
    """Images f32[16, 8], two a device, and weights: one too large for float16."""
    images = np.random.RandomState(0).uniform(size=(16, 8)).astype(np.float32)
    weights = np.ones(16, np.float32)
    if bad_device is not None:
        weights[2 * bad_device] = 2.0**40
    return images, weights


def initial_params():
    a, b = jax.random.normal(jax.random.key(0), (2, 8, 8)) / 3
    return {"a": a, "b": b}


def loss_fn(params, images, weights):
    a, b = (params[name].astype(jnp.float16) for name in "ab")
    outputs = jnp.tanh(images.astype(jnp.float16) @ a) @ b
    return jnp.mean(weights[:, None] * (outputs.astype(jnp.float32) - images) ** 2)


def gathered_loss_fn(params, images, weights):
    return loss_fn(reshard(params, P()), images, weights)


def optimizer(axes=(), axis_name=None):
    """Adam that averages over `axes`, after the wrapper has checked local gradients."""
    mean = lambda u, _: lax.pmean(u, axes) if axes else u  # noqa: E731
    inner = optax.chain(optax.stateless(mean), optax.adam(0.1))
    return jmp_scale.with_loss_scale(inner, LOSS_SCALE, axis_name=axis_name)


def step(tx, state, images, weights, loss_fn=loss_fn, varying_over=()):
    params, opt_state = state
    at = varying(params, varying_over) if varying_over else params
    fun = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)
    loss, grads = fun(at, images, weights)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state


def replicated(tx, mapped):
    copies = jax.tree.map(lambda x: jnp.stack([x] * 8), initial_params())
    # With the axis name of the step, or the second step would compile again.
    state = mapped(lambda params: (params, tx.init(params)))(copies)
    train_step = mapped(functools.partial(step, tx))
    rows = lambda x: x.reshape(8, 2, *x.shape[1:])  # noqa: E731
    return state, lambda state, *batch: train_step(state, *map(rows, batch))


def shard_mapped(mesh, axes, check_vma=True, scanned=False, **kwargs):
    tx = optimizer(axes)
    one_step = functools.partial(step, tx, varying_over=axes if check_vma else ())

    def scan_step(state, *batch):
        batches = jax.tree.map(lambda x: x[None], batch)
        return lax.scan(lambda s, b: (one_step(s, *b), None), state, batches)[0]

    specs = {"in_specs": (P(), P(axes), P(axes)), "out_specs": P()}
    options = {"mesh": mesh, "check_vma": check_vma, **specs, **kwargs}
    mapped = jax.shard_map(scan_step if scanned else one_step, **options)
    return on_mesh(mesh, P(), tx, jax.jit(mapped))


def jitted(mesh, spec, loss_fn=loss_fn):
    tx = optimizer()
    train_step = jax.jit(functools.partial(step, tx, loss_fn=loss_fn))
    return on_mesh(mesh, spec, tx, train_step)


def on_mesh(mesh, spec, tx, train_step):
    """State as the step returns it: `init` under `jax.set_mesh`, parameters on it."""

    def step_on_mesh(state, *batch):
        with jax.set_mesh(mesh):
            return train_step(state, *sharded(batch, mesh, P(mesh.axis_names)))

    params = sharded(initial_params(), mesh, spec)
    with jax.set_mesh(mesh):
        return (params, tx.init(params)), step_on_mesh


PMAP = functools.partial(jax.pmap, axis_name="i")
VMAP = lambda fun: jax.jit(jax.vmap(fun, axis_name="i"))  # noqa: E731
MODES = {
    "pmap with axis name": lambda: replicated(optimizer(("i",)), PMAP),
    # There is nothing to average over: each replica has its own images.
    "pmap without axis name": lambda: replicated(optimizer(), jax.pmap),
    "vmap with axis name": lambda: replicated(optimizer(("i",), "i"), VMAP),
    "shard_map unchecked": lambda: shard_mapped(ONE_AXIS, ("i",), check_vma=False),
    "shard_map": lambda: shard_mapped(ONE_AXIS, ("i",)),
    "shard_map 2-D": lambda: shard_mapped(TWO_AXES, ("i", "j")),
    "partial shard_map": lambda: shard_mapped(TWO_AXES, ("i",), axis_names={"i"}),
    "scan in shard_map": lambda: shard_mapped(ONE_AXIS, ("i",), scanned=True),
    "jit data-parallel": lambda: jitted(ONE_AXIS, P()),
    "jit FSDP": lambda: jitted(ONE_AXIS, P("i")),
    "jit FSDP, Explicit": lambda: jitted(EXPLICIT, P("i"), gathered_loss_fn),
    "jit data-parallel, Explicit": lambda: jitted(EXPLICIT, P()),
}


QUICK = "pmap with axis name", "shard_map unchecked", "jit FSDP, Explicit"
each_mode = pytest.mark.parametrize("mode", by_name(QUICK, MODES))


@functools.cache
def first_step(mode):
    """The state before and after one step, the step, and whether that compiled it."""
    state, train_step = MODES[mode]()
    COMPILATIONS.clear()
    return state, train_step(state, *example()), train_step, len(COMPILATIONS) > 0


@each_mode
def test_one_bad_device_skips_the_step_on_all_devices_and_compiles_nothing_again(mode):
    start, state, train_step, is_compiled = first_step(mode)
    start, applied = jax.device_get((start, state))
    assert all(np.any(applied[0][name] != start[0][name]) for name in "ab")
    assert set(on_each_device(state[1].skipped)) == {0}

    assert is_compiled
    COMPILATIONS.clear()
    state = train_step(state, *example(bad_device=5))
    skipped = jax.device_get(state)
    assert_bitwise_equal(skipped[0], applied[0])
    assert_bitwise_equal(skipped[1].inner_state, applied[1].inner_state)
    assert on_each_device(state[1].loss_scale.loss_scale) == [2.0**9] * 8
    assert on_each_device(state[1].skipped) == [1] * 8
    assert on_each_device(state[1].grads_finite) == [False] * 8

    state = train_step(state, *example())
    # jax 0.8 invents an axis name for each pmap without one, so init and step differ in
    # placement.
    invented = mode == "pmap without axis name" and jax.__version_info__ < (0, 9)
    assert len(COMPILATIONS) == invented
    again = jax.device_get(state)
    assert all(np.any(again[0][name] != skipped[0][name]) for name in "ab")
    assert on_each_device(state[1].grads_finite) == [True] * 8


@functools.cache
def params_of_a_single_device():
    tx, params = optimizer(), initial_params()
    return jax.jit(functools.partial(step, tx))((params, tx.init(params)), *example())[
        0
    ]


@each_mode
def test_every_mode_takes_the_step_of_a_single_device(mode):
    if mode == "pmap without axis name":  # each replica steps by its own images
        return
    _, (params, _), *_ = first_step(mode)
    expected = params_of_a_single_device()
    # Adam's first step is about 0.1 times the sign; f16 sums differ in their order.
    for name in "ab":
        of_one = np.asarray(params[name]).reshape(-1, 8, 8)[0]
        np.testing.assert_allclose(of_one, expected[name], rtol=0, atol=2e-4)
