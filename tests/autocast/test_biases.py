"""Gradients of biases: which are rounded with those of their weights, and how well."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_programs import arrays, mean_square
from helpers import by_name
from jax import lax

from jmp_scale import autocast
from jmp_scale._autocast import biases

N, ROWS = 16, 64
W, V, B, X = arrays((N, N), (N, N), (N,), (ROWS, N))
GELU, TANH = jax.nn.gelu, jnp.tanh


def dense(function=GELU):
    return lambda w, b, x: function(x @ w + b[None]) @ V


def gated(function):
    return lambda w, b, x: (function(x @ w + b[None]) * (x @ w.T + b[None])) @ V


def in_scan(w, b, x):
    return lax.scan(lambda h, _: (dense()(w, b, h), None), x, None, length=2)[0]


def behind_convolution(w, b, x):
    y = lax.conv(x.reshape(1, N, 8, 8), w.reshape(N, N, 1, 1), (1, 1), "SAME")
    return GELU(y + b[None, :, None, None])


ROUNDED = {  # how many sums are rounded
    "gelu": (dense(), 1),
    "checkpoint": (jax.checkpoint(dense()), 1),
    "scan": (in_scan, 1),
    "a bias of one row": (lambda w, b, x: GELU(x @ w + b.reshape(1, N)) @ V, 1),
    "a convolution": (behind_convolution, 1),
    "both factors of a gate": (gated(GELU), 2),
    "relu": (dense(jax.nn.relu), 0),
    "nothing": (lambda w, b, x: x @ w + b[None], 0),
    "a sum of another size": (
        lambda w, b, x: GELU(x @ w) @ V[:, :8] + b[None, :8],
        0,
    ),
    "a norm": (lambda w, b, x: jax.nn.standardize(x @ w + b[None]) @ V, 0),
    "a residual stream": (lambda w, b, x: TANH(x + (x @ w + b[None])) @ V, 1),
    "a stream with one more axis": (
        lambda w, b, x: GELU(x[None] + (x @ w)[None])[0] @ V,
        0,
    ),
    "a product that is repeated itself": (
        lambda w, b, x: GELU(x[:1] @ w + x) @ V + GELU(x[:1] @ w + x[:, :1]),
        0,
    ),
    "a product that stays": (
        lambda w, b, x: GELU(jnp.matmul(x, w, precision="highest") + b[None]) @ V,
        0,
    ),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_a_sum_is_rounded_where_an_expensive_function_has_its_size(monkeypatch, name):
    (fun, count), rounded = ROUNDED[name], []
    plain = biases.with_rounded_gradient
    monkeypatch.setattr(
        biases, "with_rounded_gradient", lambda *of: rounded.append(of) or plain(*of)
    )
    half = autocast(fun, "float16", backward="bfloat16", recompute=False)
    jax.make_jaxpr(half)(W, B, X)
    assert all(dtype == jnp.bfloat16 for dtype, _ in rounded)
    # JAX may trace the body of a loop more than once.
    assert len(rounded) == count or (name == "scan" and rounded)


GATE = "both factors of a gate"


@pytest.mark.parametrize(
    ("name", "recompute"),
    by_name([("gelu", True)], itertools.product(["gelu", GATE, "scan"], [True, False])),
)
def test_it_is_as_exact_as_the_gradient_of_its_weight(monkeypatch, name, recompute):
    # On this machine too, as on a GPU.
    monkeypatch.setattr(biases, "on_gpu", lambda fun, x: fun(x))
    fun, _ = ROUNDED[name]
    loss = lambda *args: mean_square(fun(*args))  # noqa: E731
    exact = jax.grad(loss, (0, 1))(W, B, X)
    half = autocast(loss, "float16", backward="bfloat16", recompute=recompute)
    found = jax.jit(jax.grad(half, (0, 1)))(W, B, X)
    of_weight, of_bias = (
        np.linalg.norm(np.asarray(x, float) - y) / np.linalg.norm(y)
        for x, y in zip(found, exact, strict=True)
    )
    assert found[1].dtype == jnp.float32
    assert of_bias <= 1.5 * of_weight + 2.0**-8


def test_the_gradient_is_the_rounded_one_and_second_derivatives_follow(monkeypatch):
    monkeypatch.setattr(biases, "on_gpu", lambda fun, x: fun(x))
    rounded = lambda x: biases.with_rounded_gradient(jnp.dtype("bfloat16"), x)  # noqa: E731
    x = jnp.linspace(0.1, 1, 8)
    found = jax.grad(lambda x: jnp.sum(jnp.sin(rounded(x))))(x)
    np.testing.assert_array_equal(found, jnp.cos(x).astype("bfloat16"))
    second = jax.grad(lambda x: jax.grad(lambda x: jnp.sin(rounded(x)))(x))(0.5)
    np.testing.assert_allclose(second, -np.sin(0.5), rtol=1e-2)
