"""Transformations around `autocast`, shardings within it, and sizes without numbers."""

import jax
import jax.numpy as jnp
import pytest
from autocast_checks import F16, assert_close, assert_close_gradients
from autocast_programs import N, W, X, layer, mean_square, products
from helpers import EXPLICIT, ONE_AXIS, by_name, sharded
from jax import export, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jmp_scale import autocast


def several(x, count):
    return jnp.stack([x * i for i in range(1, count + 1)])


def on_devices(f):
    """The mean over eight devices, each with an x of its own."""

    def mean(w, x):
        return jax.tree.map(lambda y: lax.pmean(y, "i"), f(w, x[0]))

    run = jax.shard_map(mean, mesh=ONE_AXIS, in_specs=(P(), P("i")), out_specs=P())
    return lambda w, x: run(w, several(x, 8))


AROUND = {
    "checkpoint": lambda f, w, x: jax.value_and_grad(jax.checkpoint(f))(w, x),
    "vmap": lambda f, w, x: jax.vmap(jax.value_and_grad(f), (None, 0))(
        w, several(x, 2)
    ),
    "scan": lambda f, w, x: lax.scan(
        lambda c, y: (c + f(c, y), jax.grad(f)(c, y)), w, several(x, 2)
    ),
    "linearize": lambda f, w, x: jax.linearize(f, w, x)[1](w, x),
    "hessian": lambda f, w, x: jax.hessian(lambda v: f(v[:, None] * w, x))(w[0]),
    "pmap": lambda f, w, x: jax.pmap(jax.grad(f), in_axes=(None, 0))(w, several(x, 8)),
    "shard_map": lambda f, w, x: jax.value_and_grad(on_devices(f))(w, x),
    "in shard_map": lambda f, w, x: on_devices(jax.grad(f))(w, x),
    "gradient": lambda f, w, x: autocast(jax.grad(f), "float16")(w, x),
}


@pytest.mark.parametrize(
    "around", by_name(["checkpoint", "linearize", "shard_map"], AROUND)
)
def test_it_composes_with_what_is_around_it(around):
    def loss(w, x):
        y = jax.nn.gelu(layer(w, x)) + x
        return mean_square(layer(w, y) + y)

    run = AROUND[around]
    run = run if around == "pmap" else jax.jit(run, static_argnums=0)
    assert_close(run(autocast(loss, "float16"), W, X), run(loss, W, X), 0.02)


SPLIT, WHOLE = (NamedSharding(ONE_AXIS, P(*names)) for names in (["i"], []))
split_layer = jax.jit(layer, in_shardings=(WHOLE, SPLIT), out_shardings=SPLIT)
SHARDED = {
    "layer": lambda w, x: split_layer(w, split_layer(w, x)),
    "result": jax.jit(lambda w, x: layer(w, x), out_shardings=SPLIT),
    "scan": lambda w, x: lax.scan(lambda c, _: (split_layer(w, c), 0), x, length=2)[0],
    "vmap": lambda w, x: jax.vmap(split_layer, (0, None))(jnp.stack([w, w]), x)[0],
}


@pytest.mark.parametrize("name", by_name(["layer", "result"], SHARDED))
def test_the_shardings_of_an_inner_jit_are_kept(name):
    """Else each device computes all of it."""
    program = SHARDED[name]
    args = sharded(jnp.ones((64, 64)), ONE_AXIS, P()), jnp.ones((256, 64))

    def compiled(fun):
        return jax.jit(fun).lower(*args).compile()

    def flops(fun):
        cost = compiled(jax.grad(lambda w, x: mean_square(fun(w, x)))).cost_analysis()
        return cost["flops"]

    half = autocast(program, "bfloat16")
    got, wanted = (compiled(f).output_shardings for f in (half, program))
    assert got.is_equivalent_to(wanted, 2)
    assert flops(half) < 1.2 * flops(program)


def test_a_product_over_a_sharded_axis_keeps_the_sharding_of_its_result():
    def loss(w, x):
        y = jnp.einsum("bi,ij->bj", x, w, out_sharding=P("i"))
        return mean_square(jnp.tanh(y))

    with jax.set_mesh(EXPLICIT):
        args = sharded(W, EXPLICIT, P("i")), sharded(X, EXPLICIT, P(None, "i"))
        assert_close_gradients(loss, *args)


def test_auto_axes_among_explicit_ones():
    def loss(w, x):
        y = jax.nn.gelu(layer(w, x))
        inner = jax.sharding.auto_axes(
            lambda w, y: layer(w, layer(w, y)) + y, axes="i", out_sharding=P("i")
        )
        return mean_square(layer(w, inner(w, y) + y))

    with jax.set_mesh(EXPLICIT):
        args = sharded(W, EXPLICIT, P()), sharded(X, EXPLICIT, P("i"))
        assert {*products(autocast(loss, "float16"), *args)} == {F16}
        assert_close_gradients(loss, *args)


SYMBOLIC = {
    "attention": lambda w, x: jax.nn.softmax((x @ w) @ (x @ w.T).T) @ (2 * x @ w),
    "lookup": lambda w, x: w[jnp.argmax(x, 1)] @ w,
    "norm of a batch": lambda w, x: (x @ w / jnp.std(x @ w, 0, keepdims=True)) @ w,
    "scan": lambda w, x: lax.scan(lambda c, _: (layer(w, c), None), x, length=2)[0],
    "rows": lambda w, x: lax.scan(lambda c, r: (jnp.tanh(c @ w) + r, c), x[0], x)[1],
    "a bias": lambda w, x: jax.nn.gelu(x @ w + w[:1]) @ w,
    "labels": lambda w, x: jnp.take_along_axis(x @ w, jnp.argmax(x, 1)[:, None], 1),
}


@pytest.mark.parametrize("name", by_name(["attention", "a bias", "labels"], SYMBOLIC))
def test_a_program_of_symbolic_sizes_is_that_of_each_size(name):
    """As `jax.export` traces it."""

    def loss(w, x):
        return mean_square(SYMBOLIC[name](w, x))

    step = jax.jit(jax.value_and_grad(autocast(loss, "float16")))
    (b,) = export.symbolic_shape("b")
    types = W, jax.ShapeDtypeStruct((b, N), jnp.float32)
    assert products(step, *types) == products(step, W, X)
    assert_close(export.export(step)(*types).call(W, X), step(W, X), 1e-3)
