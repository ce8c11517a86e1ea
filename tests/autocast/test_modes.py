"""Transformations of a cast function, three deep: forward over forward, and others."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from autocast_programs import N, arrays, layer, mean_square, product_with_a_rule
from helpers import by_name
from jax import lax

from jmp_scale import autocast

W, X, A, B = arrays((N, N), (4, N), (3, N, 2), (3, 2, N), scale=0.3)
ONE = jnp.float32(1.0)


def dense(s, w):
    return mean_square(layer(s * w, layer(s * w, X)))


def scan(s, w):
    return mean_square(lax.scan(lambda h, _: (layer(s * w, h), h), X, length=3)[0])


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


PROGRAMS = {
    "dense": (dense, W),
    "scan": (scan, W),
    "calls": (calls, W),
    "lora": (lora, W.astype("bfloat16")),
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
ROWS = [
    (*chain, *kind)
    for chain in itertools.product(MODES, repeat=3)
    for i, kind in enumerate(itertools.product(PROGRAMS, [True, False]))
    if (sum(map([*MODES].index, chain)) - i) % 5 == 0
]
QUICK = [("jvp", "jacfwd", "jacfwd", "lora", False)]


@functools.cache
def float32_derivative(name, order):
    """By forward mode alone, with which all must agree."""
    fun, w = PROGRAMS[name]
    derivative = lambda s: fun(s, w.astype("float32"))  # noqa: E731
    for _ in range(order):
        derivative = jax.jacfwd(derivative)
    return jax.jit(derivative)(ONE)


@pytest.mark.parametrize(
    ("first", "second", "third", "name", "recompute"), by_name(QUICK, ROWS)
)
def test_derivatives_are_those_of_float32(first, second, third, name, recompute):
    fun, w = PROGRAMS[name]
    half = autocast(fun, "bfloat16", recompute=recompute)
    derivative, chain = lambda s: half(s, w), (first, second, third)
    for mode in chain:
        derivative = MODES[mode](derivative)
    wanted = float32_derivative(name, 3 - chain.count("vmap of nothing"))
    assert jnp.abs(jax.jit(derivative)(ONE) - wanted) < 0.02 * jnp.abs(wanted)
