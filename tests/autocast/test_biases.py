"""Gradients of biases: which are rounded with those of their weights, and how well."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow
from jax import lax

from jmp_scale import autocast
from jmp_scale._autocast import biases

N, ROWS = 16, 64
W, V = (np.float32(np.linspace(-1, 1, N * N).reshape(N, N) ** p) for p in (1, 3))
B = np.float32(np.linspace(-1, 1, N) ** 2)
X = np.float32(np.sin(np.arange(ROWS * N)).reshape(ROWS, N))
GELU, TANH, SILU = jax.nn.gelu, jnp.tanh, jax.nn.silu


def dense(function=GELU):
    return lambda w, b, x: function(x @ w + b[None]) @ V


def gated(function):
    return lambda w, b, x: (function(x @ w + b[None]) * (x @ w.T + b[None])) @ V


def in_scan(w, b, x):
    return lax.scan(lambda h, _: (dense()(w, b, h), None), x, None, length=2)[0]


def behind_convolution(w, b, x):
    y = lax.conv(x.reshape(1, N, 8, 8), w.reshape(N, N, 1, 1), (1, 1), "SAME")
    return GELU(y + b[None, :, None, None])


def with_dropout(w, b, x):
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, (ROWS, N))
    return jnp.where(keep, GELU(x @ w + b[None]), 0) @ V


ROUNDED = {  # how many sums are rounded
    "gelu": (dense(), 1),
    "exact gelu": (dense(lambda x: jax.nn.gelu(x, approximate=False)), 1),
    "silu": (dense(SILU), 1),
    "tanh": (dense(TANH), 1),
    "softmax": (dense(jax.nn.softmax), 1),
    "jit": (jax.jit(dense()), 1),
    "checkpoint": (jax.checkpoint(dense()), 1),
    "scan": (in_scan, 1),
    "a bias of one row": (lambda w, b, x: GELU(x @ w + b.reshape(1, N)) @ V, 1),
    "a convolution": (behind_convolution, 1),
    "dropout": (with_dropout, 1),
    "both factors of a gate": (gated(GELU), 2),
    "relu": (dense(jax.nn.relu), 0),
    "nothing": (lambda w, b, x: x @ w + b[None], 0),
    "a sum of another size": (
        lambda w, b, x: GELU(x @ w) @ V[:, :8] + b[None, :8],
        0,
    ),
    "a gate without functions": (gated(jax.nn.relu), 0),
    "a norm": (lambda w, b, x: jax.nn.standardize(x @ w + b[None]) @ V, 0),
    "a residual stream": (lambda w, b, x: TANH(x + (x @ w + b[None])) @ V, 1),
    "a product that stays": (
        lambda w, b, x: GELU(jnp.matmul(x, w, precision="highest") + b[None]) @ V,
        0,
    ),
}


def loss_of(fun):
    return lambda w, b, x: jnp.mean(fun(w, b, x) ** 2)


def arguments():
    return [jnp.asarray(each, jnp.float32) for each in (W, B, X)]


@pytest.mark.parametrize("name", ROUNDED)
def test_a_sum_is_rounded_where_an_expensive_function_has_its_size(monkeypatch, name):
    (fun, count), rounded = ROUNDED[name], []
    plain = biases.with_rounded_gradient
    monkeypatch.setattr(
        biases, "with_rounded_gradient", lambda *of: rounded.append(of) or plain(*of)
    )
    jax.make_jaxpr(autocast(fun, "bfloat16", recompute=False))(*arguments())
    # JAX may trace the body of a loop more than once.
    assert len(rounded) == count or (name == "scan" and rounded)


def test_sizes_may_be_symbolic():
    rows = jax.export.symbolic_shape("rows")[0]
    types = [jax.ShapeDtypeStruct(x.shape, "float32") for x in arguments()]
    types[2] = jax.ShapeDtypeStruct((rows, N), "float32")
    gradient = jax.grad(autocast(loss_of(dense()), "bfloat16"), (0, 1))
    program = jax.export.export(jax.jit(gradient), platforms=["cuda"])(*types)
    assert program.mlir_module().count("optimization_barrier") >= 1


@pytest.mark.parametrize("recompute", [True, slow(False)])
@pytest.mark.parametrize("dtypes", [("bfloat16",), ("float16", "bfloat16")])
@pytest.mark.parametrize("name", ["gelu", "both factors of a gate", "scan"])
def test_it_is_as_exact_as_the_gradient_of_its_weight(
    monkeypatch, name, dtypes, recompute
):
    # On this machine too, as on a GPU.
    monkeypatch.setattr(biases, "on_gpu", lambda fun, x: fun(x))
    loss = loss_of(ROUNDED[name][0])
    exact = jax.grad(loss, (0, 1))(*arguments())
    dtype, *backward = dtypes
    more = {"backward": backward[0]} if backward else {}
    half = autocast(loss, dtype, recompute=recompute, **more)
    found = jax.jit(jax.grad(half, (0, 1)))(*arguments())
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
