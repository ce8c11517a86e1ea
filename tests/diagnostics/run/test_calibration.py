"""The window of loss scales that work, on backward passes whose window is known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise_equal, count_traces, one_of
from losses import forgetful

import jmp_scale
from jmp_scale import diagnostics

pytestmark = pytest.mark.strict_promotion


def calibrated(scales):
    w = x = jnp.ones(3)
    return diagnostics.calibrate_loss_scale(forgetful, w, x, log2_scales=scales)


def test_calibration_finds_the_window_that_the_backward_pass_has():
    scales = range(0, 42, 1)
    found = calibrated(scales)
    # Zero up to 2^-25 = 2^(5-30); the cotangent S 2^-20 is infinite from 2^36 on.
    assert [float(x) for x in (found.log2_low, found.log2_high)] == [6, 35]
    assert float(found.recommended_log2_scale) == 24  # not 33: see below
    assert found.log2_scales.tolist() == list(scales)
    assert found.finite.tolist() == [k < 36 for k in scales]
    assert found.zero_fraction[:36].tolist() == [[float(k < 6)] for k in scales][:36]


TIES = (-100, -30, -14, -12, -1, 0, 1, 7, 25, 26, 29, 30, 31, 32, 33, 64, 100)


def test_the_loss_scales_tried_are_exact():
    """The float16 gradient of leaf k is S 2^-(25 + k): zero up to S = 2^k, not above.

    In leaf k of `above` it is one float32 step larger: not zero from S = 2^k on.
    """
    at_tie = {k: np.ldexp(np.float32(1), -25 - k) for k in TIES}
    above = {k: np.nextafter(x, np.float32(np.inf)) for k, x in at_tie.items()}
    factors = {"at tie": at_tie, "above": above}

    def loss(params):
        half = jax.tree.map(lambda w: w.astype(jnp.float16).astype(jnp.float32), params)
        return sum(jax.tree.leaves(jax.tree.map(jnp.multiply, half, factors)))

    params = jax.tree.map(lambda _: jnp.float32(0), factors)
    found = diagnostics.calibrate_loss_scale(loss, params, log2_scales=TIES)
    zero = dict(zip(found.paths, np.asarray(found.zero_fraction).T, strict=True))
    for k in TIES:
        assert zero[f"['at tie'][{k}]"].tolist() == [float(s <= k) for s in TIES]
        assert zero[f"['above'][{k}]"].tolist() == [float(s < k) for s in TIES]


@jax.custom_vjp
def finite_at(x, loss_scales):
    """x, with a gradient that is finite only if S is one of `loss_scales`."""
    return x


def _backward(loss_scales, cotangent):
    works = jnp.any(cotangent.ravel()[0] == loss_scales)
    return jnp.where(works, cotangent, jnp.inf), jnp.zeros_like(loss_scales)


finite_at.defvjp(lambda x, loss_scales: (x, loss_scales), _backward)


@pytest.mark.parametrize(
    ("works", "window"),
    one_of(2, [([0, 1, 4, 5, 6, 9], (4, 6)), ([3], (3, 3)), ([0, 1, 4, 5], (0, 1))]),
)
def test_all_loss_scales_of_the_window_work(works, window):
    loss_scales = jnp.float32([2.0**k for k in works])
    found = diagnostics.calibrate_loss_scale(
        lambda w: finite_at(w, loss_scales).sum(), jnp.ones(2), log2_scales=range(10)
    )
    assert (float(found.log2_low), float(found.log2_high)) == window


def test_masked_entries_that_are_always_zero_or_nan_do_not_count_as_lost():
    def loss(w):  # its gradient is S or S times 0, which is NaN from 2^16 on
        return (w.astype(jnp.float16) * jnp.float16([1, 0, 0])).astype("float32").sum()

    found = diagnostics.calibrate_loss_scale(loss, jnp.ones(3))
    assert (float(found.log2_low), float(found.log2_high)) == (-4, 14)
    np.testing.assert_allclose(found.zero_fraction[0], 2 / 3)


def test_calibration_says_so_where_no_scale_works():
    found = diagnostics.calibrate_loss_scale(lambda w: jnp.log(w).sum(), -jnp.ones(3))
    for value in (found.log2_low, found.log2_high, found.recommended_log2_scale):
        assert np.isnan(value)
    words = "No loss scale of the sweep gives finite gradients: run diagnose_nonfinite."
    assert found.summary() == words


def test_calibration_is_the_same_in_jit_and_vmap_and_compiles_the_loss_once():
    counted, traces = count_traces(forgetful)
    xs = jnp.float32([[1, 1, 1], [2.0**-10, 1, 0]])
    calibrate, w = diagnostics.calibrate_loss_scale, jnp.ones(3)
    one_by_one = [calibrate(forgetful, w, x) for x in xs]
    expected = jax.tree.map(lambda *rows: jnp.stack(rows), *one_by_one)
    batch = jax.jit(jax.vmap(functools.partial(calibrate, counted, w)))(xs)
    assert_bitwise_equal(batch, expected)
    assert len(traces) == 1


def test_calibration_refuses_scales_that_do_not_increase():
    words = "calibrate_loss_scale: expected log2_scales"
    for scales in ([], [0, 0], [3, 1], [0.5], [0, 127], [-127, 0], [[1]]):
        with pytest.raises(ValueError, match=words):
            calibrated(scales)


@pytest.mark.parametrize(
    ("shift", "scales", "recommended", "said"),
    one_of(
        4,
        [
            (0, range(20, 36), 24, "start from 2^24"),
            (0, range(26, 36), None, "only with another max_loss_scale"),
            (-35, range(-10, 2), 0, "including 1: loss scaling is not needed"),
            (-50, range(-20, 2), None, "only with another min_loss_scale"),
            (0, [35], None, "2^35 works, which a DynamicLossScale takes only"),
        ],
    ),
)
def test_a_dynamic_loss_scale_takes_what_is_advised(shift, scales, recommended, said):
    def loss(w):  # the window is 2^(6 + shift) to 2^(35 + shift)
        return forgetful(w, jnp.ones(3)) * 2.0**-shift

    found = diagnostics.calibrate_loss_scale(loss, jnp.ones(3), log2_scales=scales)
    assert said in found.summary()
    best = float(found.recommended_log2_scale)
    assert np.isnan(best) == (recommended is None)
    if recommended is not None:
        assert best == recommended
        jmp_scale.DynamicLossScale(2.0**best)


def test_a_loss_without_half_precision_is_told_so():
    """A float16 batch that is cast at once is not half precision either."""

    def loss(dtype, w, x):
        layer = lambda h, w: (jax.nn.sigmoid(h @ w.astype(dtype)), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layer, x.astype(dtype), w)[0].astype(jnp.float32))

    w, x = jnp.ones((2, 4, 4)), jnp.ones((3, 4), jnp.float16)
    for dtype in ("float32", "bfloat16"):
        fun = functools.partial(loss, dtype)
        found = diagnostics.calibrate_loss_scale(fun, w, x)
        assert found.has_half_precision == (dtype != "float32")
        nothing = "Nothing in this loss is half precision: cast inside it first."
        assert (found.summary() == nothing) == (dtype == "float32")
