"""What derivatives save and compute, of each order, and rules of their own."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_checks import (
    F16,
    assert_close,
    assert_norm_close,
    jit_with_roundings,
    transposes_checkpoints,
    two_layers,
)
from autocast_programs import (
    N,
    W,
    X,
    mean_square,
    product_with_a_rule,
    products,
)
from helpers import by_name, slow
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jmp_scale import _jaxpr, autocast


def kept(fun, *args):
    """Types of the arrays that the backward pass keeps, except arguments and casts."""

    def backward(*args):
        return jax.tree.leaves(jax.vjp(fun, *args)[1])

    jaxpr = jax.make_jaxpr(backward)(*args).jaxpr
    given, casts = {*jaxpr.invars}, ("convert_element_type", "stop_gradient")
    for eqn in jaxpr.eqns:
        name, own = eqn.primitive.name, given.issuperset(_jaxpr.variables(eqn.invars))
        # A function of one array that returns it: its value, and its gradient.
        returns = name == "custom_jvp_call" and not eqn.params["call_jaxpr"].eqns
        if own and (name in casts or returns):
            given.update(eqn.outvars)
    results = [v for v in jaxpr.outvars if not _jaxpr.is_literal(v)]
    return [v.aval for v in dict.fromkeys(results) if v not in given]


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


def sizes_of(fun, *args):
    """How many arrays of the size of `X` are kept, by dtype."""
    avals = [a for a in kept(fun, *args) if a.size >= X.size]
    assert all(a.size == X.size for a in avals)
    return collections.Counter(a.dtype.name for a in avals)


@transposes_checkpoints
def test_a_layer_keeps_its_stream_and_the_results_of_its_products():
    def loss(w, x):
        for _ in range(3):
            y = jax.nn.gelu(x @ w) @ w
            x = x + jax.nn.standardize(y, epsilon=1e-6)
        return mean_square(x)

    # Of six products the results, of two streams what a product or the loss reads.
    assert sizes_of(autocast(loss, "float16"), W, X) == {"float16": 7, "float32": 1}
    # Also with a weight that is stored in half precision.
    assert sizes_of(autocast(loss, "float16"), W.astype("float16"), X).total() == 8
    plain = sizes_of(autocast(loss, "float16", recompute=False), W, X)
    assert plain["float32"] > 9


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


@transposes_checkpoints
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

    half = autocast(loss, "float16", recompute=recompute)
    one = jnp.float32(1.0)
    got, wanted = (jax.jit(jax.grad(f))(one, W, X) for f in (half, loss))
    assert_close(got, wanted, 0.02)
    assert {*products(jax.grad(half), one, W, X)} == {F16}


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

    got = jax.jit(jax.grad(autocast(loss, "bfloat16", recompute=recompute)))(W)
    jax.effects_barrier()
    assert seen
    assert_close(got, jax.grad(loss)(W), 0.02)


def foreign(name):
    """A function of another library's primitive, which has this name."""

    def fun(x, y):
        return x * jnp.sin(y) + y * y

    def rule(primals, tangents, **_):
        pairs = zip(primals, tangents, strict=True)
        tangents = (
            jnp.zeros_like(x) if isinstance(t, ad.Zero) else t for x, t in pairs
        )
        return primitive.bind(*primals), jax.jvp(fun, tuple(primals), tuple(tangents))[
            1
        ]

    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x, y: x)
    mlir.register_lowering(primitive, mlir.lower_fun(fun, multiple_results=False))
    ad.primitive_jvps[primitive] = rule
    return primitive.bind, fun


@pytest.mark.parametrize("name", ["stop_gradient", "dot_general", "name", "jit"])
def test_a_foreign_primitive_is_not_taken_for_one_of_its_name(name):
    def loss(fun, w):
        return mean_square(fun(jnp.tanh(X @ w), fun(X, jnp.exp(X)) @ w) @ w)

    opaque, plain = (functools.partial(loss, fun) for fun in foreign(name))
    found, wanted = (jax.jit(jax.grad(autocast(f, "f16")))(W) for f in (opaque, plain))
    assert_norm_close(found, wanted, 0.01)
