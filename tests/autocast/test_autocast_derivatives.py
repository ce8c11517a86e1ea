"""What derivatives save and compute, of each order, and rules of their own."""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_checks import (
    F16,
    assert_close,
    assert_close_gradients,
    assert_norm_close,
    jit_with_roundings,
    transposes_checkpoints,
    two_layers,
)
from autocast_programs import (
    N,
    W,
    X,
    arrays,
    layer,
    mean_square,
    product_with_a_rule,
    products,
)
from helpers import by_name, slow
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jmp_scale import autocast


@pytest.mark.parametrize("recompute", [True, slow(False)])
def test_only_gradients_of_weights_are_added_in_float32(recompute):
    """Also if the products are in different places of the program."""

    def loss(w, b, x):
        h = x @ W + b
        small = lax.stop_gradient(h.T @ h) * 0 + jnp.eye(N) / 512
        return jnp.sum(h @ w) + jnp.sum(h @ small) + jnp.sum(h @ (w / 512))

    grad = jax.grad(autocast(loss, "bfloat16", recompute=recompute), (0, 1))
    of_weight, of_activation = grad(jnp.eye(N), jnp.ones((8, N)), 0 * X)
    # Each entry is one of 1, 1/512 and 1/512. In bfloat16 the first one alone is left.
    assert {*np.unique(of_activation)} == {1.0}
    np.testing.assert_array_equal(of_weight, 8 * (1 + 1 / 512))


@transposes_checkpoints
def test_a_layer_keeps_its_stream_and_the_results_of_its_products():
    def loss(w, x):
        for _ in range(3):
            y = jax.nn.gelu(x @ w) @ w
            x = x + jax.nn.standardize(y, epsilon=1e-6)
        return mean_square(x)

    def kept(w, **options):
        backward = jax.vjp(autocast(loss, "float16", **options), w, X)[1]
        arrays = [x for x in jax.tree.leaves(backward) if x.shape == X.shape]
        return collections.Counter(x.dtype.name for x in arrays)

    # The argument and its copy; of six products the results; of two streams what a
    # product or the loss reads.
    assert kept(W) == kept(W.astype("float16")) == {"float16": 8, "float32": 2}
    assert kept(W, recompute=False)["float32"] > 10


def test_a_bfloat16_backward_pass_needs_no_loss_scale():
    def loss(w, x):
        return two_layers(w, x) * 1e-9

    half = autocast(loss, "float16", backward="bfloat16")
    both = products(jax.grad(half), W, X)
    assert both[:2] == [F16, F16]
    assert all("bfloat16" in pair for pair in both[2:])
    plain = autocast(loss, "float16")
    got, wanted, lost = (jax.jit(jax.grad(f))(W, X) for f in (half, loss, plain))
    assert_close(got * 1e9, wanted * 1e9, 0.03)
    assert not lost.any()  # all of it underflows


SECOND = {
    "reverse over reverse": lambda f: jax.grad(lambda w: jnp.vdot(jax.grad(f)(w), V)),
    "reverse over forward over reverse": lambda f: jax.grad(
        lambda w: jnp.vdot(jax.jvp(jax.grad(f), (w,), (V,))[1], V)
    ),
}
V = jnp.roll(W, 1, 0)


@pytest.mark.parametrize("derivative", by_name(["reverse over reverse"], SECOND))
def test_second_derivatives_have_the_range_of_the_backward_pass(derivative):
    def loss(w):  # so small that no cotangent is a float16 number but 0
        h = X + jnp.tanh(X @ w) @ w.T
        return 1e-9 * mean_square(jax.nn.softmax(h @ w) @ w + jnp.sin(h @ w))

    def computed(fun):
        return jit_with_roundings(SECOND[derivative](fun))(W)

    halved = functools.partial(autocast, loss, "float16", backward="bfloat16")
    got, plain = (computed(halved(recompute=r)) for r in (True, False))
    assert_norm_close(got, computed(loss), 0.03)
    assert_norm_close(got, plain, 0.01)


@jax.custom_jvp
def solved(w, x):
    """As of a solver: its solution, and numbers that have no derivative."""
    y = x @ w
    return jnp.max(y), jnp.tanh(y), jnp.argmax(y)


@functools.partial(solved.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    (w, x), (dw, dx) = primals, map(zero_if_symbolic, primals, tangents)
    largest, y, place = solved(w, x)
    zeros = [zero_from_primal(v, symbolic_zeros=True) for v in (largest, place)]
    return (largest, y, place), (zeros[0], (1 - y**2) * (dx @ w + x @ dw), zeros[1])


def zero_if_symbolic(primal, tangent):
    is_zero = isinstance(tangent, SymbolicZero)
    return zero_from_primal(primal) if is_zero else tangent


@pytest.mark.parametrize("recompute", [True, False])
def test_a_rule_may_say_that_a_result_has_no_tangent(recompute):
    """As those of Optimistix, Lineax and Diffrax do."""

    def loss(scale, w, x):
        def step(x, _):
            largest, y, _ = solved(scale * w, x)
            return y / largest, None

        return mean_square(lax.scan(step, x, length=2)[0])

    args = jnp.float32(1.0), W, X
    assert_close_gradients(loss, *args, recompute=recompute)
    grad = jax.grad(autocast(loss, "float16", recompute=recompute))
    assert {*products(grad, *args)} == {F16}


@pytest.mark.parametrize("recompute", [True, slow(False)])
def test_products_of_a_rule_have_the_range_of_the_backward_pass(recompute):
    def loss(s):
        return 1e-9 * mean_square(product_with_a_rule(s * W, jnp.sin(s * X @ W)))

    half = autocast(loss, "float16", backward="bfloat16", recompute=recompute)
    for derivative in (jax.grad, lambda f: jax.jacfwd(jax.grad(f))):
        got, wanted = (jax.jit(derivative(f))(jnp.float32(1)) for f in (half, loss))
        assert_norm_close(got, wanted, 0.02)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_rule_may_have_an_ordered_effect(recompute):
    seen = []
    fun = jax.custom_jvp(jnp.tanh)

    @fun.defjvp
    def _(primals, tangents):
        y = jnp.tanh(primals[0])
        jax.debug.callback(lambda _: seen.append(1), y[0, 0], ordered=True)
        return y, tangents[0] * (1 - y * y)

    def loss(w):
        return mean_square(fun(X @ w))

    assert_close_gradients(loss, W, recompute=recompute)
    jax.effects_barrier()
    assert len(seen) > 1  # in each of both programs


def foreign(name):
    """A function of another library's primitive, which has this name."""

    def fun(x, y):
        return x * jnp.sin(y) + y * y

    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x, y: x)
    mlir.register_lowering(primitive, mlir.lower_fun(fun, multiple_results=False))
    ad.defjvp(
        primitive,
        lambda t, x, y: t * jnp.sin(y),
        lambda t, x, y: t * (x * jnp.cos(y) + 2 * y),
    )
    return primitive.bind, fun


@pytest.mark.parametrize("name", ["stop_gradient", "dot_general", "name", "jit"])
def test_a_foreign_primitive_is_not_taken_for_one_of_its_name(name):
    def loss(fun, w):
        return mean_square(fun(jnp.tanh(X @ w), fun(X, jnp.exp(X)) @ w) @ w)

    opaque, plain = (functools.partial(loss, fun) for fun in foreign(name))
    found, wanted = (jax.jit(jax.grad(autocast(f, "f16")))(W) for f in (opaque, plain))
    assert_norm_close(found, wanted, 0.01)


A, B = arrays((3, N, 2), (3, 2, N), scale=0.3)
ONE = jnp.float32(1.0)


def calls(s, w):
    """A checkpoint, branches, and a function with a rule of its own."""

    @jax.checkpoint
    def block(w, x):
        return lax.cond(x[0, 0] > 9, layer, product_with_a_rule, w, x)

    return mean_square(block(s * w, block(s * w, X)))


def lora(s, w):
    """Adapters under `vmap`, of one weight stored in half precision."""

    def adapted(a, b):
        h = jnp.tanh(X @ w + (X @ (s * a)) @ (s * b))
        return mean_square(h @ w)

    return jnp.sum(jax.vmap(adapted)(A, B))


OF_A_SCALAR = {
    "dense": (lambda s, w: two_layers(s * w, X), 0.6 * W),
    "scan": (
        lambda s, w: mean_square(
            lax.scan(lambda h, _: (layer(s * w, h), h), X, length=3)[0]
        ),
        0.6 * W,
    ),
    "calls": (calls, 0.6 * W),
    "lora": (lora, 0.6 * W.astype("bfloat16")),
}
# Each returns a function of a scalar; all but the last are its derivative.
MODES = {
    "jvp": lambda f: lambda s: jax.jvp(f, (s,), (ONE,))[1],
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "linearize": lambda f: lambda s: jax.linearize(f, s)[1](ONE),
    "vmap of nothing": lambda f: (
        lambda s: jnp.mean(jax.vmap(lambda s, _: f(s), (None, 0))(s, jnp.arange(2.0)))
    ),
}
# Of each kind of program a fifth of all chains, in which each two modes meet.
CHAINS = [
    (*chain, *kind)
    for chain in itertools.product(MODES, repeat=3)
    for i, kind in enumerate(itertools.product(OF_A_SCALAR, [True, False]))
    if (sum(map([*MODES].index, chain)) - i) % 5 == 0
]


@functools.cache
def float32_derivative(name, order):
    """By forward mode alone, with which all must agree."""
    fun, w = OF_A_SCALAR[name]
    derivative = lambda s: fun(s, w.astype("float32"))  # noqa: E731
    for _ in range(order):
        derivative = jax.jacfwd(derivative)
    return jax.jit(derivative)(ONE)


@pytest.mark.parametrize(
    ("first", "second", "third", "name", "recompute"),
    by_name([("jvp", "jacfwd", "jacfwd", "lora", False)], CHAINS),
)
def test_derivatives_are_those_of_float32(first, second, third, name, recompute):
    fun, w = OF_A_SCALAR[name]
    half = autocast(fun, "bfloat16", recompute=recompute)
    derivative, chain = lambda s: half(s, w), (first, second, third)
    for mode in chain:
        derivative = MODES[mode](derivative)
    wanted = float32_derivative(name, 3 - chain.count("vmap of nothing"))
    assert jnp.abs(jax.jit(derivative)(ONE) - wanted) < 0.02 * jnp.abs(wanted)
