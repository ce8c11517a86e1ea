"""With XLA's default flags the backward pass reads logits as the forward pass did."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_programs import arrays, convolve
from helpers import slow
from jax import export

from jmp_scale import autocast

# More entries than a row whose sum is recomputed has.
SIZE = 20_000
H, W, V = arrays((8, 16), (16, SIZE), (SIZE, 4), scale=3)
IMAGES, KERNEL = arrays((2, 130, 130, 3), (3, 3, 3, 2), scale=2)
# As of a trained model.
LABELS = jax.jit(lambda h, w: jax.random.categorical(jax.random.key(0), h @ w))(H, W)
ALL_ROUNDINGS = {"xla_allow_excess_precision": False}


def log_softmax(w, h, labels):
    logs = jax.nn.log_softmax(h @ w)
    return -jnp.mean(jnp.take_along_axis(logs, labels[:, None], 1))


def logsumexp(w, h, v):
    return jnp.mean(jax.nn.logsumexp(h @ w, -1) - (h @ w)[:, 0])


def attention(w, h, v):
    return jnp.mean((jax.nn.softmax(h @ w / 4) @ v - 1) ** 2)


def convolution(w, h, v):
    y = convolve(v, w, (1, 1), "VALID").reshape(2, -1)
    return jnp.mean(jax.nn.logsumexp(y, -1) - y[:, 0])


def gradient(fun, args, options=None):
    compiled = jax.jit(jax.grad(fun)).lower(*args).compile(compiler_options=options)
    return np.asarray(compiled(*args), np.float64)


FORMS = {
    log_softmax: (W, H, LABELS),
    logsumexp: (W, H, V),
    attention: (W, H, V),
    convolution: (KERNEL, H, IMAGES),
}


@pytest.mark.parametrize("recompute", [True, slow(False)])
@pytest.mark.parametrize("fun", FORMS)
def test_the_error_is_that_with_all_roundings(fun, recompute):
    half, args = autocast(fun, "bfloat16", recompute=recompute), FORMS[fun]
    exact = gradient(fun, args)
    found, rounded = (
        np.linalg.norm(gradient(half, args, options) - exact)
        for options in ({}, ALL_ROUNDINGS)
    )
    assert found <= 1.1 * rounded


@pytest.mark.parametrize(("platform", "count"), [("cpu", 1), ("cuda", 0), ("tpu", 0)])
def test_only_a_cpu_is_told_to_round(platform, count):
    half = jax.jit(autocast(log_softmax, "bfloat16"))
    text = export.export(half, platforms=[platform])(W, H, LABELS).mlir_module()
    assert text.count("stablehlo.reduce_precision") == count
