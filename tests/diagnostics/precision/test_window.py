"""The window of loss scales that work, on backward passes whose window is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import count_traces
from losses import forgetful

import jmp_scale
from jmp_scale.diagnostics import compare_gradients
from jmp_scale.diagnostics._precision.comparison import window_of

ONES = jnp.ones(3)


def test_the_window_is_that_of_the_backward_pass():
    scales = [2.0**k for k in range(42)]
    full = lambda w, x: 2.0**-30 * (w * x).sum()  # noqa: E731
    counted, traces = count_traces(forgetful)
    found = compare_gradients(counted, full, ONES, ONES, loss_scales=scales)
    # Zero up to 2^-25 = 2^(5-30); the cotangent S 2^-20 is infinite from 2^36 on.
    assert found.window == (2.0**6, 2.0**35, 2.0**24)
    assert found.loss_scales == tuple(scales)
    assert len(traces) <= 2  # of the program, and of its dtypes; none for another S
    text = "Loss scales from 2^6 to 2^35 work: start from 2^24."
    assert text in found.summary().splitlines()


def test_subnormal_gradients_at_one_are_a_reason_for_a_loss_scale():
    v = jnp.float32(np.random.RandomState(0).uniform(0.4e-7, 1.2e-7, 512))
    full = lambda w: jnp.sum(w * v)  # noqa: E731
    half = lambda w: jnp.sum(w.astype(jnp.float16).astype(jnp.float32) * v)  # noqa: E731
    found = compare_gradients(half, full, jnp.ones(512), loss_scale=1)
    grads = np.asarray(jax.grad(half)(jnp.ones(512)), np.float64)
    v = np.asarray(v, np.float64)
    error = np.linalg.norm(grads - v) / np.linalg.norm(v)
    assert error > 0.15
    assert found.error == pytest.approx(error, rel=1e-3)
    assert (found.leaves[0].lost, found.is_precise) == (0, False)
    assert found.window.lowest > 1
    assert "start from 2^" in found.summary()


def test_a_leaf_that_is_lost_is_named_and_not_precise_however_small_it_is():
    def loss(p, x, dtype=jnp.float32):
        h = jnp.tanh(x.astype(dtype) @ p["w"].astype(dtype)).astype(jnp.float32)
        temperature = (p["t"].astype(dtype) * dtype(3.0)).astype(jnp.float32)
        return jnp.mean((h - 1) ** 2) + 7e-9 * temperature

    half = lambda p, x: loss(p, x, jnp.float16)  # noqa: E731
    p, x = {"w": jnp.eye(8), "t": jnp.float32(0.5)}, jnp.ones((16, 8))
    found = compare_gradients(half, loss, p, x, loss_scale=1)
    assert found.error < 0.01
    assert not found.is_precise
    assert [leaf.path for leaf in found.leaves if leaf.is_lost] == ["['t']"]
    (finding,) = found.findings
    assert (finding.rule, finding.where) == ("gradient lost", "['t']")
    assert found.window.lowest > 1


def test_bfloat16_has_no_window_and_a_float16_program_without_one_says_so():
    def loss(w, dtype=jnp.float32):
        return (w.astype(dtype) * dtype(2)).astype(jnp.float32).sum()

    bfloat16 = lambda w: loss(w, jnp.bfloat16)  # noqa: E731
    assert compare_gradients(bfloat16, loss, ONES).window is None
    given = compare_gradients(bfloat16, loss, ONES, loss_scales=(1.0, 4.0))
    assert given.window == (1, 4, 1)
    wrong = lambda w: 2 * loss(w, jnp.float16)  # noqa: E731
    found = compare_gradients(wrong, loss, ONES)
    assert found.window is None
    assert "works] No loss scale from 2^-4 to 2^24 works." in found.summary()


EXACT = [0.0]  # the errors of one leaf
WINDOWS = {
    "the longest run": ([1, 1, 0, 1, 1, 1], [EXACT] * 6, (3, 5)),
    "the lower of two": ([1, 1, 0, 1, 1, 0], [EXACT] * 6, (0, 1)),
    "one is as exact as the best": ([1] * 6, [[0.01], [0.003], *[EXACT] * 4], (0, 5)),
    "one is not": ([1] * 6, [[0.01], [0.005], *[EXACT] * 4], (2, 5)),
    "one of two is not": ([1] * 6, [[0, 0], [0, 0.1], *[EXACT * 2] * 4], (2, 5)),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_the_window_is_a_run_of_loss_scales_that_work(case):
    works, errors, expected = WINDOWS[case]
    scales = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    found = window_of(scales, works, errors)
    assert found[:2] == tuple(scales[i] for i in expected)


@pytest.mark.parametrize(
    ("ends", "words", "start"),
    [
        ((2.0**6, 2.0**22), "from 2^6 to 2^22 work: start from 2^20.", 2.0**20),
        ((2.0**-10, 2.0), "including 1: loss scaling is not needed here.", 1.0),
    ],
)
def test_a_dynamic_loss_scale_takes_what_is_advised(ends, words, start):
    window = window_of(ends, [True] * 2, [EXACT] * 2)
    assert window.start == start
    assert words in str(window)
    jmp_scale.DynamicLossScale(window.start)
