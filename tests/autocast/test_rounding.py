"""With XLA's default flags the backward pass reads logits as the forward pass did."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_checks import jit_with_roundings
from autocast_programs import arrays
from helpers import slow
from jax import export

from jmp_scale import autocast

# More entries than a row whose sum is recomputed has.
SIZE = 20_000
H, W, V = arrays((8, 16), (16, SIZE), (SIZE, 4), scale=3)
# As of a trained model.
LABELS = jax.jit(lambda h, w: jax.random.categorical(jax.random.key(0), h @ w))(H, W)


def log_softmax(w, h, labels):
    logs = jax.nn.log_softmax(h @ w)
    return -jnp.mean(jnp.take_along_axis(logs, labels[:, None], 1))


def attention(w, h, v):
    return jnp.mean((jax.nn.softmax(h @ w / 4) @ v - 1) ** 2)


def gradient(fun, args, jit=jax.jit):
    return np.asarray(jit(jax.grad(fun))(*args), np.float64)


FORMS = {log_softmax: (W, H, LABELS), attention: (W, H, V)}


@pytest.mark.parametrize("recompute", [True, slow(False)])
@pytest.mark.parametrize("fun", FORMS)
def test_the_error_is_that_with_all_roundings(fun, recompute):
    half, args = autocast(fun, "bfloat16", recompute=recompute), FORMS[fun]
    exact = gradient(fun, args)
    found, rounded = (
        np.linalg.norm(gradient(half, args, jit) - exact)
        for jit in (jax.jit, jit_with_roundings)
    )
    assert found <= 1.1 * rounded


@pytest.mark.parametrize(("platform", "count"), [("cpu", 1), ("cuda", 0), ("tpu", 0)])
def test_only_a_cpu_is_told_to_round(platform, count):
    half = jax.jit(autocast(log_softmax, "bfloat16"))
    text = export.export(half, platforms=[platform])(W, H, LABELS).mlir_module()
    assert text.count("stablehlo.reduce_precision") == count
