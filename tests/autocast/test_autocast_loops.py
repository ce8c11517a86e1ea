"""Loops, checkpoints and layers that are alike, as `autocast` runs them."""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_checks import assert_close_gradients, two_layers
from autocast_programs import PROGRAMS, N, W, X, layer, mean_square
from helpers import ONE_AXIS, by_name
from jax import export, lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec as P

from jmp_scale import _jaxpr, autocast


@functools.partial(
    jax.shard_map, mesh=ONE_AXIS, in_specs=(P("i"), P("i")), out_specs=P("i")
)
def gathered(shard, x):
    return x @ lax.all_gather(shard, "i", tiled=True)


@pytest.mark.parametrize("around", ["scan", "cond", "all_gather", "experts"])
def test_gradients_of_weights_are_float32_whatever_is_done_to_them(around):
    big = jnp.full((512, N), 300.0)  # whose sums of 512 float16 cannot hold

    def total(w):
        return 400 * jnp.sum(big @ w)

    def loss(w):
        w = w.reshape(2, N // 2, N).transpose(1, 0, 2).reshape(N, N)
        w = functools.reduce(lambda w, _: 1.01 * w, range(40), w)
        if around == "scan":
            return lax.scan(lambda c, w: (c + total(w), None), 0.0, w[None])[0]
        if around == "cond":
            return lax.cond(big[0, 0] > 0, total, lambda w: jnp.sum(w @ w), w)
        if around == "all_gather":
            return 400 * jnp.sum(gathered(w, big))
        chosen = w[None][jnp.zeros(2, int)]
        return 400 * jnp.sum(big.reshape(2, 256, N) @ chosen)

    got, wanted = (jax.jit(jax.grad(f))(W) for f in (autocast(loss, "float16"), loss))
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.parametrize("backward", ["float16", "bfloat16"])
def test_a_loop_rounds_what_each_step_reads_and_sums_gradients_in_float32(backward):
    xs = jnp.full((3000, 8, N), 1 + 2.0**-10)  # float16 holds it, bfloat16 does not

    def loss(w):
        return lax.scan(lambda c, x: (c + jnp.sum(x @ w), None), 0.0, xs)[0]

    got = jax.grad(autocast(loss, "float16", backward=backward))(W)
    np.testing.assert_array_equal(got, 24000 * float(xs[0, 0, 0].astype(backward)))


def deep(factors):
    softmax = jax.jit(jax.nn.softmax)  # a call within each layer

    def loss(w, x):
        for i, factor in enumerate(factors):
            with jax.named_scope(f"layer_{i}"):
                x = softmax(x @ w) * factor
        return mean_square(x)

    return loss


def test_equal_layers_are_traced_once():
    def runs(layers):
        """How often a layer's cheap operations are evaluated."""
        spy = mock.Mock(wraps=_jaxpr.evaluate_all)
        with mock.patch.object(_jaxpr, "evaluate_all", spy):
            half = autocast(deep([2.0] * layers), "float16")
            jax.make_jaxpr(jax.grad(half))(W, X)
        return spy.call_count

    runs(1)  # JAX traces the product's gradients once in a process
    # The first run of an island is its own, the repeated ones those of all equal ones.
    # Under JAX_CUSTOM_JVP3 a function with a rule is traced when it is called, too.
    assert runs(9) - runs(3) in (6, 12)


LIKE = {  # what is done to the result of a layer, from one source line
    "power": (lax.integer_pow, [2, 3, 2]),
    "factor": (lambda y, factor: y * factor, [1.0, 2.0, np.float32(1), -1]),
    "constant": (lambda y, k: y * np.full((N, N), k, np.float32), [1, 2, 1]),
    "function": (lambda y, f: f(y), [jax.nn.relu, jnp.tanh, jax.nn.relu6]),
    "outputs": (lambda y, n: y + y[:n].sum(), [1, 2, 1]),
}


@pytest.mark.parametrize("what", by_name(["power", "constant"], LIKE))
def test_steps_that_differ_in_one_thing_are_not_one(what):
    change, values = LIKE[what]

    def loss(w, x):
        total = 0.0
        for i, value in enumerate(values * 2):
            x = change(jnp.tanh(x @ w), value)
            total += x.sum() if i % 2 else 0.0
        return mean_square(x @ w) + total

    assert_close_gradients(loss, W, W.T)


def test_a_product_behind_an_island_keeps_its_own_context():
    def loss(w, x):
        y = x @ w
        with set_xla_metadata(part="island"):
            y = jnp.tanh(y)
        return mean_square(y @ w)

    jaxpr = jax.make_jaxpr(jax.grad(autocast(loss, "float16")))(W, X)
    marked = [e.primitive.name for e in _jaxpr.equations(jaxpr) if e.ctx.xla_metadata]
    assert "tanh" in marked
    assert "dot_general" not in marked


def test_equal_layers_differ_in_what_they_read_twice():
    """The first one reads one array as input and operand, the others read two."""

    def f(w, x):
        first = h = x @ w
        for _ in range(3):
            h = jnp.tanh(h) @ first
        return jnp.sum(jnp.sin(h))

    square = W[:8, :8]
    got, wanted = (
        jax.jit(jax.grad(autocast(f, "float16", recompute=recompute)))(square, square.T)
        for recompute in (True, False)
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_each_layer_keeps_its_scopes_in_both_passes():
    def loss(w, x):
        with jax.named_scope("model"):
            return autocast(deep([2.0] * 4), "float16")(w, x)

    grad = jax.jit(jax.value_and_grad(loss))
    names = re.findall(r'op_name="([^"]*)"', grad.lower(W, X).compile().as_text())
    for i in range(4):
        own = [name for name in names if f"layer_{i}" in name]
        assert all(set(re.findall(r"layer_\d", name)) == {f"layer_{i}"} for name in own)
        exponentials = {name for name in own if name.endswith("/exp")}
        assert exponentials
        assert all("model" in name for name in exponentials)
        for operation in ("dot_general", "mul"):
            passes = ["transpose" in name for name in own if operation in name]
            assert {*passes} == {True, False}


@pytest.mark.parametrize("name", ["scan_reversed_and_unrolled", "remat"])
def test_loops_and_checkpoints_keep_their_options(name):
    fun, args, *_ = PROGRAMS[name]
    keys = ("reverse", "unroll", "prevent_cse")

    def options(fun):
        found = _jaxpr.equations(jax.make_jaxpr(fun)(*args))
        params = map(_jaxpr.params_of, found)
        return {tuple(each.get(key) for key in keys) for each in params}

    assert len(options(fun)) == 2  # and that of all other equations
    assert options(autocast(fun, "float16")) == options(fun)


@pytest.mark.parametrize(
    ("platform", "barriers"), [("cuda", True), ("tpu", False), ("cpu", False)]
)
def test_the_barrier_is_chosen_when_the_program_is_lowered(platform, barriers):
    grad = jax.jit(jax.grad(autocast(two_layers, "float16")))
    text = export.export(grad, platforms=[platform])(W, X).mlir_module()
    assert ("optimization_barrier" in text) == barriers


@pytest.mark.parametrize(
    "inside",
    [
        lambda f: lambda y: lax.cond(y[0, 0] > 9, jnp.sin, f, y),
        functools.partial(jax.checkpoint, prevent_cse=False),
    ],
)
def test_there_is_no_barrier_in_a_loop(inside):
    def loss(w, x):
        step = inside(lambda y: layer(w, jax.nn.gelu(y @ w)))
        return jnp.sum(lax.scan(lambda y, _: (step(y), None), x, None, length=2)[0])

    grad = jax.jit(jax.grad(autocast(loss, "float16")))
    text = export.export(grad, platforms=["cuda"])(W, X).mlir_module()
    assert "optimization_barrier" not in text
