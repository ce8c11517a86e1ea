"""Large arrays, whose sums and clipped gradients a CPU computes in another form."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bitwise_equal
from jax import lax
from jax.sharding import PartitionSpec

import jmp_scale
from jmp_scale import _skip_on_cpu
from jmp_scale._skip import update_or_keep

# A row, with a rest, a prime number of rows, and more than two dimensions.
SHAPES = [(4096,), (4099,), (127, 64), (3, 7, 512)]
CLIP = optax.clip_by_global_norm(1.0)


def gradients(shape, norm):
    """Random gradients, of which the second leaf is small."""
    rng = np.random.default_rng(0)
    grads = {"large": rng.normal(size=shape), "small": rng.normal(size=3)}
    size = np.sqrt(sum((g**2).sum() for g in grads.values()))
    return jax.tree.map(lambda g: jnp.float32(g * (norm / size)), grads)


def update(tx, grads):
    """Compiled updates and state."""
    return jax.jit(tx.update)(grads, tx.init(grads), grads)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_large_gradients_are_clipped_to_the_norm(shape):
    grads = gradients(shape, norm=7.0)
    updates, _ = update(jmp_scale.with_loss_scale(CLIP), grads)
    # The norm, its reciprocal and the product each round once.
    expected = jax.tree.map(lambda g: np.float64(g) / 7.0, grads)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=5e-7),
                 updates, expected)  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_large_gradients_below_the_norm_keep_every_bit(shape):
    grads = gradients(shape, norm=0.5)
    assert_bitwise_equal(update(jmp_scale.with_loss_scale(CLIP), grads)[0], grads)


def test_large_arrays_stay_float32_where_there_is_float64():
    tx = jmp_scale.with_loss_scale(CLIP)
    with jax.enable_x64(True):
        grads = gradients((4096,), norm=7.0)
        updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
    assert {u.dtype for u in jax.tree.leaves(updates)} == {np.dtype(np.float32)}


@pytest.mark.parametrize("size", [1e25, 1e30])
def test_a_large_gradient_whose_square_overflows_is_clipped_as_in_optax(size):
    grads = gradients((4096,), norm=size)
    updates, state = update(jmp_scale.with_loss_scale(CLIP), grads)
    assert bool(state.applied)
    assert_bitwise_equal(updates, update(CLIP, grads)[0])


@pytest.mark.parametrize("fast_math", [False, True])
def test_a_large_array_keeps_every_bit_on_a_skipped_step(fast_math):
    options = {"xla_cpu_enable_fast_math": fast_math}
    tx = jmp_scale.with_loss_scale(optax.chain(CLIP, optax.adamw(0.1)))
    params = gradients((4099,), norm=3.0)
    step = jax.jit(tx.update, compiler_options=options)
    _, state = step(params, tx.init(params), params)
    bad = params | {"large": params["large"].at[4098].set(jnp.nan)}
    updates, after = step(bad, state, params)
    assert not bool(after.applied)
    assert_bitwise_equal(after.inner_state, state.inner_state)
    assert_bitwise_equal(optax.apply_updates(params, updates), params)


def test_mapped_steps_clip_each_by_its_own_norm():
    norms = jnp.array([0.5, 7.0])
    grads = jax.tree.map(
        lambda g: jnp.stack([g / 2, 7 * g]), gradients((4099,), norm=1.0)
    )
    tx = jmp_scale.with_loss_scale(CLIP)
    state = tx.init(jax.tree.map(lambda g: g[0], grads))
    mapped = jax.vmap(tx.update, in_axes=(0, None))
    updates, _ = jax.jit(mapped)(grads, state)
    expected = jax.tree.map(
        lambda g: g / jnp.maximum(norms, 1).reshape(-1, *[1] * (g.ndim - 1)), grads
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6),
                 updates, expected)  # fmt: skip


def test_a_step_of_large_arrays_has_the_derivatives_of_the_optimizer():
    grads = gradients((4099,), norm=7.0)

    def loss(tx, factor):
        scaled = jax.tree.map(lambda g: g + factor * g**2, grads)
        updates, _ = tx.update(scaled, tx.init(grads), grads)
        return optax.tree.sum(updates)

    derivatives = [
        jax.jit(jax.grad(functools.partial(loss, tx)))(2.0)
        for tx in (jmp_scale.with_loss_scale(CLIP), CLIP)
    ]
    np.testing.assert_allclose(*derivatives, rtol=1e-4)


def test_shards_of_large_arrays_are_clipped_inside_shard_map():
    tx = jmp_scale.with_loss_scale(CLIP)
    grads = gradients((8 * 4099,), norm=1.0)["large"]
    mesh = jax.make_mesh((8,), ("i",), (jax.sharding.AxisType.Auto,))

    def shard_step(grads):
        return tx.update(7 * grads / jnp.linalg.norm(grads), tx.init(grads))[0]

    spec = PartitionSpec("i")
    mapped = jax.shard_map(shard_step, mesh=mesh, in_specs=spec, out_specs=spec)
    shards = jax.jit(mapped)(grads).reshape(8, -1)
    norms = np.linalg.norm(np.asarray(shards, np.float64), axis=1)
    np.testing.assert_allclose(norms, np.ones(8), rtol=1e-6)


def test_a_step_of_large_arrays_is_exported_for_several_platforms():
    grads = gradients((4099,), norm=7.0)
    tx = jmp_scale.with_loss_scale(CLIP)
    step = jax.jit(lambda grads: tx.update(grads, tx.init(grads))[0])
    exported = jax.export.export(step, platforms=("cpu", "tpu", "cuda"))(grads)
    assert_bitwise_equal(exported.call(grads), step(grads))


SUMS = {
    "of squares": lambda x: (x * x).sum(),
    "of a matrix": lambda x: jnp.abs(x.reshape(64, -1)).sum(),
    "of products": lambda x: jnp.vdot(x, x),
}


@pytest.mark.parametrize("name", SUMS)
def test_unscaled_gradients_are_not_written_for_a_sum_of_them(name):
    def step(grads, s, momentum):
        unscaled = grads * (1 / s)  # as unscale does
        keep = functools.partial(
            update_or_keep,
            jnp.isfinite(s),
            lambda g, m: (g / SUMS[name](g), 0.9 * m + g),
        )
        return keep(unscaled, momentum)

    x = jnp.linspace(1.0, 2.0, 2**16)
    compiled = jax.jit(step).lower(x, 2.0, x).compile()
    # The gradients three times, momentum, and both results.
    assert compiled.cost_analysis()["bytes accessed"] < 6.1 * x.nbytes
    updates, momentum = compiled(x, 2.0, jnp.zeros_like(x))[1:]
    np.testing.assert_allclose(updates, x / 2 / SUMS[name](x / 2), rtol=1e-6)
    np.testing.assert_allclose(momentum, x / 2)


X = jnp.linspace(1.0, 2.0, 4096)
NOT_CLIPPED = {
    "a sum over one axis": lambda x: x.reshape(64, 64).sum(0).max() * x,
    "a product of matrices": lambda x: jnp.vdot(x.reshape(8, -1), x.reshape(8, -1)) * x,
    "pairs of axes": lambda x: (
        jnp.einsum("ij,ji->", x.reshape(8, 512), x.reshape(512, 8)) * x
    ),
    "float16": lambda x: (x.astype(jnp.float16) / 8).sum().astype(x.dtype) * x,
    "kept where it is larger": lambda x: lax.select(x.sum() > 1, x / 3, x),
    "entry by entry": lambda x: jnp.where(x > 1.5, x, x / 3),
    "divided by an array": lambda x: lax.select(x.sum() < 1, x, x / (x * x)),
    "divides a scalar": lambda x: lax.select(x.sum() < 1, x, 3 / x),
    "another array": lambda x: lax.select(x.sum() < 1, x, (x + 1) / 3),
    "of three cases": lambda x: lax.select_n(jnp.argmin(x), x / 3, x, -x),
    "several factors": lambda x: lax.select(x.sum() < 1, x, x / 3 * 5 / 7),
    "a kept product": lambda x: (lambda y: lax.select(x.sum() < 1, y, y * 5))(x / 3),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_CLIPPED)
def test_updates_that_look_alike_are_computed_as_written(name):
    def both(x, state):
        return NOT_CLIPPED[name](x), state

    keep = functools.partial(update_or_keep, jnp.array(True), both)
    _, updates, _ = jax.jit(keep)(X, X)
    np.testing.assert_allclose(updates, NOT_CLIPPED[name](X), rtol=1e-6)


def test_a_sum_of_many_equal_entries_is_right():
    """One after the other, ones in float32 add up to 2**24 at most."""
    ones = jnp.ones(2**25 + 1)
    keep = functools.partial(
        update_or_keep, jnp.array(True), lambda x, s: (x[:1] * x.sum(), s)
    )
    _, updates, _ = jax.jit(keep)(ones, jnp.zeros(1))
    np.testing.assert_allclose(updates, [2.0**25 + 1], rtol=1e-6)


def test_small_arrays_are_computed_as_written():
    grads = gradients((4095,), norm=7.0)
    closed = jax.make_jaxpr(CLIP.update)(grads, CLIP.init(grads))
    made_by = {v: e for e in closed.jaxpr.eqns for v in e.outvars}
    for equation in closed.jaxpr.eqns:
        assert not _skip_on_cpu._is_large_sum(equation)
        assert not _skip_on_cpu._factors_unless(equation, made_by)
