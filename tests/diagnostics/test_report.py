"""Every number of a report against casts by NumPy and ml_dtypes of the same values."""

import functools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import sklearn.datasets
from helpers import assert_bitwise_equal, count_traces

import jmp_scale
from jmp_scale import diagnostics
from jmp_scale.diagnostics import _report

pytestmark = pytest.mark.strict_promotion

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
COUNTS = ("size", "zero", "flushed", "subnormal", "overflow", "nonfinite")
ALL_F16 = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)


def everywhere(seed=0, n=20_000):
    """Random float32 bit patterns: every exponent, subnormals, infinities, NaNs, and both zeros."""
    bits = (
        np.random.RandomState(seed)
        .randint(0, 2**32, n, dtype=np.uint64)
        .astype(np.uint32)
    )
    return np.concatenate(
        [bits.view(np.float32), np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45])]
    )


def near_ties(dtype, loss_scale):
    """The three numbers around each threshold of a cast, divided by a power-of-two loss scale."""
    thresholds = {
        "float16": [2.0**-25, 2.0**-14, 65504, 65520],
        "bfloat16": [2.0**-134, 2.0**-126, 3.3895314e38, 3.3961775e38],
        "float8_e5m2": [2.0**-17, 2.0**-14, 57344, 61440],
        "float8_e4m3fn": [2.0**-10, 2.0**-6, 448, 464],
    }[dtype]
    at = np.float32(thresholds) / np.float32(loss_scale)
    around = [np.nextafter(at, np.float32(0)), at, np.nextafter(at, np.float32(np.inf))]
    return np.concatenate([*around, *(-x for x in around)])


@np.errstate(all="ignore")
def reference_counts(x, loss_scale, dtype):
    """The counts of `grad_report`, from a cast."""
    cast = (x * np.float32(loss_scale)).astype(DTYPES[dtype]).astype(np.float32)
    finite, tiny = np.isfinite(x), float(ml_dtypes.finfo(DTYPES[dtype]).tiny)
    below_normal = np.abs(np.float64(x) * np.float64(np.float32(loss_scale))) < tiny
    masks = {
        "size": np.ones_like(finite),
        "zero": x == 0,
        "flushed": (x != 0) & (cast == 0),
        "subnormal": below_normal & (cast != 0),
        "overflow": finite & ~np.isfinite(cast),
        "nonfinite": ~finite,
    }
    return {name: int(mask.sum()) for name, mask in masks.items()}


def counts_of(report, i=0):
    return {name: int(getattr(report, name)[i]) for name in COUNTS}


jitted_report = jax.jit(diagnostics.grad_report, static_argnames="dtype")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_scale", [1.0, 2.0**7, 2.0**15, 2.0**24])
def test_counts_equal_those_of_casts_over_all_float16_bit_patterns(loss_scale, dtype):
    report = jitted_report({"w": ALL_F16}, loss_scale, dtype=dtype)
    assert counts_of(report) == reference_counts(ALL_F16, loss_scale, dtype)


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**15, 2.0**24])
def test_subnormals_are_those_of_the_cast_itself_over_all_float16_bit_patterns(
    loss_scale,
):
    with np.errstate(all="ignore"):
        cast = np.abs((ALL_F16 * np.float32(loss_scale)).astype(np.float16))
    report = jitted_report(ALL_F16, loss_scale)
    assert (
        int(report.subnormal[0])
        == ((cast > 0) & (cast < np.finfo(np.float16).tiny)).sum()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_scale", [2.0**-14, 1.0, 2.0**10, 2.0**40, 1000.0, 0.7])
def test_counts_equal_those_of_casts_over_float32_numbers_of_every_size(
    loss_scale, dtype
):
    if dtype == "bfloat16" and loss_scale not in (1.0, 2.0**10, 2.0**40):
        loss_scale = (
            2.0**20
        )  # NumPy's own product rounds in float32's subnormal range below S = 1
    x = everywhere()
    assert counts_of(jitted_report(x, loss_scale, dtype=dtype)) == reference_counts(
        x, loss_scale, dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_scale", [1.0, 2.0**3, 2.0**15])
def test_counts_are_right_one_step_below_at_and_above_each_threshold(loss_scale, dtype):
    x = near_ties(dtype, loss_scale)
    assert counts_of(jitted_report(x, loss_scale, dtype=dtype)) == reference_counts(
        x, loss_scale, dtype
    )


@pytest.mark.parametrize(
    "leaf_dtype", ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"]
)
def test_narrow_leaves_are_counted_by_their_values(leaf_dtype):
    bits = np.uint16 if ml_dtypes.finfo(DTYPES[leaf_dtype]).bits == 16 else np.uint8
    x = np.arange(np.iinfo(bits).max + 1).astype(bits).view(DTYPES[leaf_dtype])
    report = jitted_report(jnp.asarray(x), 2.0**5)
    assert counts_of(report) == reference_counts(
        x.astype(np.float32), 2.0**5, "float16"
    )


def test_a_complex_entry_counts_as_two():
    x = np.array([1 + 1e-9j, 0 + np.inf * 1j], np.complex64)
    report = diagnostics.grad_report(jnp.asarray(x), 1.0)
    assert counts_of(report) == reference_counts(
        np.ravel([x.real, x.imag]), 1.0, "float16"
    )


def test_float64_entries_beyond_float32_are_neither_zero_nor_infinite():
    with jax.enable_x64(True):
        report = diagnostics.grad_report(jnp.array([1e300, 1e-300, 0.0, np.inf]), 1.0)
        assert [counts_of(report)[name] for name in COUNTS] == [4, 1, 1, 0, 1, 1]


def test_amax_headroom_and_range_are_those_of_the_finite_entries():
    x = {
        "a": np.float32([0, -3e-5, 0.7, np.nan, np.inf]),
        "b": np.float32([1e-42, 2e-44]),
        "c": np.zeros(3),
    }
    report = jitted_report(jax.tree.map(jnp.float32, x), 2.0**12)
    a, b = np.float32([0.7, 3e-5]), np.float64([np.float32(1e-42), np.float32(2e-44)])
    assert report.amax.tolist() == [float(a[0]), float(b[0]), 0.0]
    expected = [
        np.log2(65504) - np.log2(a[0]) - 12,
        np.log2(65504) - np.log2(b[0]) - 12,
        np.inf,
    ]
    np.testing.assert_allclose(
        report.headroom_bits, expected, atol=1e-5
    )  # one float32 log2
    np.testing.assert_allclose(
        report.dynamic_range_bits,
        [np.log2(a[0] / a[1]), np.log2(b[0] / b[1]), 0],
        atol=1e-4,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("amax", [1.0, 1.75, 1.9990234375, 1.99999, 3e-5, 7.3e4, 1e-40])
def test_the_recommended_scale_is_the_largest_with_two_bits_of_headroom(amax, dtype):
    k = float(
        jitted_report(
            jnp.float32([amax, amax / 2]), 1.0, dtype=dtype
        ).recommended_log2_scale
    )
    limit = float(ml_dtypes.finfo(DTYPES[dtype]).max)
    amax = float(np.float32(amax))
    assert amax * 2.0**k * 4 <= limit < amax * 2.0 ** (k + 1) * 4


def test_nothing_is_recommended_for_gradients_without_a_finite_entry_that_is_not_zero():
    assert np.isnan(
        diagnostics.grad_report(jnp.array([0.0, jnp.nan]), 1.0).recommended_log2_scale
    )


def test_leaves_are_named_and_the_first_non_finite_one_is_found():
    grads = {
        "a": [jnp.ones(2), jnp.array(3)],
        "b": jnp.array([1.0, jnp.nan]),
        "c": jnp.array(jnp.inf),
    }
    report = jitted_report(grads, jmp_scale.DynamicLossScale())
    assert report.paths == ("['a'][0]", "['b']", "['c']")
    assert (bool(report.all_finite), int(report.first_nonfinite)) == (False, 1)
    assert report.nonfinite.tolist() == [0, 1, 1]
    finite = jitted_report(grads["a"], jmp_scale.DynamicLossScale())
    assert (bool(finite.all_finite), int(finite.first_nonfinite)) == (True, -1)


@pytest.mark.parametrize(
    "tree", [{}, {"step": jnp.array(3), "none": None}, {"w": jnp.zeros((0, 4))}]
)
def test_trees_without_entries_are_reported_as_finite(tree):
    report = jitted_report(tree, 1.0)
    assert bool(report.all_finite)
    assert int(report.first_nonfinite) == -1
    assert np.isnan(report.recommended_log2_scale)


@pytest.mark.parametrize(
    "loss_scale",
    [
        jmp_scale.NoOpLossScale(),
        jmp_scale.StaticLossScale(8),
        jmp_scale.DynamicLossScale(8),
        8,
        jnp.float16(8),
    ],
)
def test_any_loss_scale_number_or_array_is_taken(loss_scale):
    s = float(getattr(loss_scale, "loss_scale", loss_scale))
    report = diagnostics.grad_report(ALL_F16, loss_scale)
    assert counts_of(report) == reference_counts(ALL_F16, s, "float16")
    assert float(report.loss_scale) == s


def test_bad_input_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"dtype must be one of float16, .* got float32"
    ):
        diagnostics.grad_report(ALL_F16, 1.0, "float32")
    with pytest.raises(ValueError, match=r"loss_scale must be .* got 0.0"):
        diagnostics.grad_report(ALL_F16, 0.0)
    with pytest.raises(TypeError, match="loss_scale"):
        diagnostics.grad_report(ALL_F16, "2**15")
    with pytest.raises(
        ValueError, match=r"grad_report: expected a scalar loss_scale, got .* \(2,\)"
    ):
        diagnostics.grad_report(ALL_F16, jnp.ones(2))
    with pytest.raises(
        ValueError, match=r"to_dict: expected one report, got a batch \(3,\)"
    ):
        jax.vmap(functools.partial(diagnostics.grad_report, ALL_F16))(
            jnp.ones(3)
        ).to_dict()


def test_a_report_is_the_same_in_jit_vmap_and_scan():
    x = jnp.asarray(everywhere(n=64)).reshape(2, 35)
    scales = jnp.float32([1.0, 2.0**10])
    one_by_one = [
        diagnostics.grad_report({"w": w}, s) for w, s in zip(x, scales, strict=True)
    ]
    expected = jax.tree.map(lambda *rows: jnp.stack(rows), *one_by_one)
    report = lambda w, s: diagnostics.grad_report({"w": w}, s)  # noqa: E731
    assert_bitwise_equal(jax.jit(jax.vmap(report))(x, scales), expected)
    assert_bitwise_equal(
        jax.lax.scan(lambda _, ws: (None, report(*ws)), None, (x, scales))[1], expected
    )


def test_the_report_is_one_compilation_over_changing_loss_scales():
    fun, traces = count_traces(diagnostics.grad_report)
    for exponent in range(4):
        jax.jit(fun)(jnp.ones(3), jmp_scale.DynamicLossScale(2.0**exponent))
    assert len(traces) == 1


def test_the_gradients_are_read_once():
    leaves = [jnp.ones((300, 400)), jnp.ones(5000)]
    compiled = jax.jit(diagnostics.grad_report).lower(leaves, jnp.float32(1)).compile()
    size = 4 * sum(x.size for x in leaves)
    assert compiled.cost_analysis()["bytes accessed"] < 1.1 * size


def test_counts_are_right_above_two_to_the_31_entries():
    def report():  # never in memory: XLA fuses the constant into the reduction
        return diagnostics.grad_report(jnp.full((2**20, 2**11 + 1), 2.0**-30), 1.0)

    shapes = jax.eval_shape(report)
    assert shapes.zero.dtype == jnp.uint32
    counts = counts_of(jax.jit(report)())
    assert counts["size"] == counts["flushed"] == 2**31 + 2**20


def test_a_leaf_too_large_for_its_counters_is_counted_in_pieces(monkeypatch):
    monkeypatch.setattr(_report, "_LARGEST_COUNT", 30_000)
    report = jax.jit(diagnostics.grad_report)(
        [ALL_F16.reshape(16, 4096), ALL_F16[1:51]], 2.0**15
    )
    assert report.zero.dtype == jnp.float32
    assert counts_of(report, 0) == reference_counts(ALL_F16, 2.0**15, "float16")
    assert counts_of(report, 1) == reference_counts(ALL_F16[1:51], 2.0**15, "float16")
    assert report.amax[0] == 65504
    assert report.dynamic_range_bits[0] == np.float32(np.log2(65504) + 24)


def test_the_worst_leaves_come_first_and_the_summary_names_them():
    grads = {
        "good": jnp.ones(4),
        "lost": jnp.full(4, 1e-9),
        "nan": jnp.array([1.0, jnp.nan]),
    }
    report = diagnostics.grad_report(grads, 1.0)
    assert list(report.worst(2)) == ["['nan']", "['lost']"]
    assert report.to_dict()["leaves"]["['lost']"]["flushed"] == 4
    assert report.to_dict()["all_finite"] is False
    assert report.flushed_share.tolist() == [0.0, 1.0, 0.0]
    lines = report.summary().splitlines()
    assert "not finite from ['nan'] on" in lines[0]
    assert [line.split()[0] for line in lines[2:]] == [
        "['good']",
        "['lost']",
        "['nan']",
    ]
    assert "100.0 %" in lines[3]
    assert len(report.summary(1).splitlines()) == 3


# The histogram


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", ["all float16 bit patterns", "every size", "ties"])
def test_one_histogram_has_the_flushed_share_of_every_scale_and_dtype(values, dtype):
    x = {
        "all float16 bit patterns": ALL_F16,
        "every size": everywhere(),
        "ties": near_ties(dtype, 2.0**3),
    }[values]
    log2_scales = np.array([0, 2, 3, 4, 15, 24])
    expected = [reference_counts(x, 2.0**k, dtype) for k in log2_scales]
    nonzero = (np.isfinite(x) & (x != 0)).sum()

    @jax.jit
    def shares(x):
        histogram = diagnostics.exponent_histogram({"w": x})
        return histogram.flushed_share(log2_scales, dtype), histogram.subnormal_share(
            log2_scales, dtype
        )

    for name, share in zip(("flushed", "subnormal"), shares(x), strict=True):
        counted = np.rint(np.float64(share[:, 0]) * nonzero)
        assert counted.tolist() == [row[name] for row in expected]


def test_entries_are_counted_at_their_exponent():
    x = everywhere()
    histogram = diagnostics.exponent_histogram([x, x[:0]])
    finite = np.float64(np.abs(x[np.isfinite(x) & (x != 0)]))
    expected = np.bincount(np.frexp(finite)[1] - 1 + 149, minlength=277)
    assert histogram.counts[0].tolist() == expected.tolist()
    assert histogram.exponents[[0, -1]].tolist() == [-149, 127]
    assert int(histogram.zero[0]) == (x == 0).sum()
    assert int(histogram.nonfinite[0]) == (~np.isfinite(x)).sum()
    assert not histogram.counts[1].any()


def test_a_histogram_is_the_same_in_vmap_and_scan_and_of_an_empty_tree():
    x = jnp.asarray(everywhere(n=64)).reshape(2, 35)
    expected = jax.tree.map(
        lambda *rows: jnp.stack(rows), *map(diagnostics.exponent_histogram, x)
    )
    assert_bitwise_equal(jax.vmap(diagnostics.exponent_histogram)(x), expected)
    scanned = jax.lax.scan(
        lambda _, w: (None, diagnostics.exponent_histogram(w)), None, x
    )[1]
    assert_bitwise_equal(scanned, expected)
    assert diagnostics.exponent_histogram({}).flushed_share(3).shape == (0,)


@pytest.mark.parametrize(
    "mode", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_reports_of_sharded_leaves_are_those_of_whole_ones(mode, wrap):
    mesh = jax.make_mesh((4, 2), ("i", "j"), axis_types=(mode, mode))
    spec = jax.sharding.PartitionSpec("i", "j")
    whole = {"w": everywhere()[:20_000].reshape(40, 500), "b": np.ones(3, np.float32)}
    sharded = whole | {
        "w": jax.device_put(whole["w"], jax.sharding.NamedSharding(mesh, spec))
    }
    for report in (
        diagnostics.exponent_histogram,
        lambda x: diagnostics.grad_report(x, 2.0**4),
    ):
        chex.assert_trees_all_equal(wrap(report)(sharded), wrap(report)(whole))


def test_a_histogram_refuses_scales_that_are_no_whole_powers_of_two():
    with pytest.raises(
        TypeError,
        match="flushed_share: expected log2_scale of whole numbers, got float32",
    ):
        diagnostics.exponent_histogram(jnp.ones(2)).flushed_share(1.5)
    with pytest.raises(ValueError, match="dtype must be one of"):
        diagnostics.exponent_histogram(jnp.ones(2)).flushed_share(1, "int8")


# The real backward pass


def forgetful(w, x):
    """A loss whose float16 backward pass makes 2^-30 per entry of x = 1 at S = 1: zero below S = 2^6."""
    half = w.astype(jnp.float16) * x.astype(jnp.float16)
    return (half * jnp.float16(2.0**-10)).astype(jnp.float32).sum() * 2.0**-20


def test_calibration_finds_the_window_that_the_backward_pass_has():
    scales = range(0, 42, 1)
    found = diagnostics.calibrate_loss_scale(
        forgetful, jnp.ones(3), jnp.ones(3), log2_scales=scales
    )
    # Zero up to 2^-25 = 2^(5-30); the cotangent S 2^-20 is infinite in float16 from 2^36 on.
    assert [float(x) for x in (found.log2_low, found.log2_high)] == [6, 35]
    assert float(found.recommended_log2_scale) == 33
    assert bool(found.needs_scaling)
    assert found.log2_scales.tolist() == list(scales)
    assert found.finite.tolist() == [k < 36 for k in scales]
    assert found.zero_fraction[:36].tolist() == [[float(k < 6)] for k in scales][:36]


def test_calibration_needs_no_scaling_where_nothing_is_lost_at_one():
    found = diagnostics.calibrate_loss_scale(
        lambda w: (w["a"] ** 2).sum(), {"a": jnp.ones(3)}
    )
    assert not bool(found.needs_scaling)
    assert found.paths == ("['a']",)
    assert "not needed" in found.summary()


def sigmoid_loss(params, images):
    """The autoencoder of the examples, in float16."""
    x = images.astype(jnp.float16)
    for w in params:
        x = jax.nn.sigmoid(x @ w.astype(jnp.float16))
    return jnp.mean((x.astype(jnp.float32) - images) ** 2)


def relu_loss(params, images, labels):
    *hidden, last = (w.astype(jnp.float16) for w in params)
    x = images.astype(jnp.float16)
    for w in hidden:
        x = jax.nn.relu(x @ w)
    logits = (x @ last).astype(jnp.float32)
    return -jnp.mean(
        jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
    )


def test_the_digits_autoencoder_needs_scaling_and_a_relu_classifier_does_not():
    def glorot(*widths):
        keys = jax.random.split(jax.random.key(0), len(widths) - 1)
        init = jax.nn.initializers.glorot_normal()
        return [
            init(k, shape)
            for k, *shape in zip(keys, widths[:-1], widths[1:], strict=True)
        ]

    digits = sklearn.datasets.load_digits()
    chosen = np.random.RandomState(0).randint(1437, size=256)
    images, labels = (
        np.float32(digits.data[chosen] / 16),
        digits.target[chosen].astype(np.int32),
    )
    deep = glorot(64, 128, 64, 32, 16, 32, 64, 128, 64)
    autoencoder = diagnostics.calibrate_loss_scale(sigmoid_loss, deep, images)
    assert bool(autoencoder.needs_scaling)
    assert 14 <= float(autoencoder.log2_low) <= 18
    assert 20 <= float(autoencoder.log2_high) <= 24
    classifier = diagnostics.calibrate_loss_scale(
        relu_loss, glorot(64, 64, 64, 10), images, labels
    )
    assert not bool(classifier.needs_scaling)


def test_entries_that_are_always_zero_do_not_count_as_lost():
    found = diagnostics.calibrate_loss_scale(
        forgetful, jnp.ones(3), jnp.float32([1, 0, 0])
    )
    assert float(found.log2_low) == 6
    np.testing.assert_allclose(found.zero_fraction[-1], 2 / 3)


def test_calibration_says_so_where_no_scale_works():
    found = diagnostics.calibrate_loss_scale(lambda w: jnp.log(w).sum(), -jnp.ones(3))
    for value in (found.log2_low, found.log2_high, found.recommended_log2_scale):
        assert np.isnan(value)
    assert bool(found.needs_scaling)
    assert "diagnose_nonfinite" in found.summary()


def test_calibration_takes_what_jax_grad_takes():
    def loss(x, w, power, name):
        assert isinstance(power, int)
        assert name == "static"
        return (x * w["w"] ** power).sum(), {"aux": x}

    args = jnp.ones(3), {"w": jnp.ones(3), "key": jnp.array(1)}, 2, "static"
    found = diagnostics.calibrate_loss_scale(
        loss, *args[:1], {"w": args[1]["w"]}, *args[2:], argnums=1, has_aux=True
    )
    assert found.paths == ("['w']",)
    assert bool(found.finite.all())


def test_calibration_is_the_same_in_jit_and_vmap_and_compiles_the_loss_once():
    counted, traces = count_traces(forgetful)
    xs = jnp.float32([[1, 1, 1], [2.0**-10, 1, 0]])
    one_by_one = [
        diagnostics.calibrate_loss_scale(forgetful, jnp.ones(3), x) for x in xs
    ]
    expected = jax.tree.map(lambda *rows: jnp.stack(rows), *one_by_one)
    calibrate = functools.partial(
        diagnostics.calibrate_loss_scale, counted, jnp.ones(3)
    )
    assert_bitwise_equal(jax.jit(jax.vmap(calibrate))(xs), expected)
    assert len(traces) == 1


@pytest.mark.parametrize(
    "scales", [[], [0, 0], [3, 1], [0.5], [0, 127], [-127, 0], [[1]]]
)
def test_calibration_refuses_scales_that_do_not_increase(scales):
    with pytest.raises(ValueError, match="calibrate_loss_scale: log2_scales must be"):
        diagnostics.calibrate_loss_scale(
            forgetful, jnp.ones(3), jnp.ones(3), log2_scales=scales
        )


def test_a_finite_step_is_diagnosed_as_such():
    diagnosis = diagnostics.diagnose_nonfinite(
        forgetful, 2.0**15, jnp.ones(3), jnp.ones(3)
    )
    assert diagnosis == diagnostics.Diagnosis("none")


@pytest.mark.parametrize("start", [2.0**36, 2.0**40, 1e12])
def test_an_overflow_is_finite_from_the_largest_smaller_scale_on(start):
    diagnosis = diagnostics.diagnose_nonfinite(
        forgetful, start, jnp.ones(3), jnp.ones(3)
    )
    assert (diagnosis.cause, diagnosis.finite_at_log2) == ("overflow", 35)
    assert "2^35" in diagnosis.summary()


def out_of_range(w):
    """At S = 1 the gradient is 240000, beyond float16: finite from S = 2^-2 on."""
    return (w.astype(jnp.float16) * jnp.float16(60000)).astype(jnp.float32) * 4


def test_an_overflow_that_persists_at_one_is_searched_further_down():
    assert (
        diagnostics.diagnose_nonfinite(out_of_range, 8, jnp.float32(1)).finite_at_log2
        == -2
    )
    assert (
        "below 1"
        in diagnostics.diagnose_nonfinite(out_of_range, 8, jnp.float32(1)).summary()
    )
    assert (
        diagnostics.diagnose_nonfinite(
            out_of_range, 8, jnp.float32(1), log2_min=-1
        ).cause
        == "nan"
    )
    assert (
        diagnostics.diagnose_nonfinite(
            out_of_range, 8, jnp.float32(1), log2_min=-2
        ).cause
        == "overflow"
    )


def test_the_leaf_that_overflows_first_as_the_scale_grows_is_named():
    def loss(params):
        return forgetful(params["a"], jnp.ones(3)) + 2.0**4 * forgetful(
            params["b"], jnp.ones(3)
        )

    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    diagnosis = diagnostics.diagnose_nonfinite(loss, 2.0**60, params)
    assert (diagnosis.path, diagnosis.finite_at_log2) == ("['b']", 31)
    assert diagnosis.nonfinite_paths == ("['b']",)


def test_a_loss_that_is_not_finite_is_a_matter_of_the_forward_pass():
    def loss(params, batch):
        return (params["w"] * batch["x"]).sum(), None

    batch = {"y": jnp.ones(2), "x": jnp.array([1.0, jnp.nan])}
    diagnosis = diagnostics.diagnose_nonfinite(
        loss, 2.0**15, {"w": jnp.ones(2)}, batch, has_aux=True
    )
    assert (diagnosis.cause, diagnosis.path) == ("forward", "['w']")
    assert diagnosis.nonfinite_argument == "args[1]['x']"
    assert "args[1]['x']" in diagnosis.summary()
    exploded = diagnostics.diagnose_nonfinite(
        lambda w: jnp.exp(w).sum(), 2.0**15, jnp.full(2, 1e3)
    )
    assert (exploded.cause, exploded.nonfinite_argument) == ("forward", None)


def test_a_nan_that_no_scale_cures_is_found():
    params = {"a": jnp.ones(2), "b": jnp.zeros(2)}
    diagnosis = diagnostics.diagnose_nonfinite(
        lambda p: (p["a"] + jnp.where(p["b"] > 0, jnp.sqrt(p["b"]), 0)).sum(),
        jmp_scale.DynamicLossScale(),
        params,
    )
    assert (diagnosis.cause, diagnosis.path, diagnosis.finite_at_log2) == (
        "nan",
        "['b']",
        None,
    )
    assert "debug_nans" in diagnosis.summary()


def test_a_diagnosis_compiles_the_loss_once_however_many_scales_it_tries():
    counted, traces = count_traces(out_of_range)
    diagnostics.diagnose_nonfinite(counted, 2.0**15, jnp.float32(1))
    assert len(traces) == 1


def test_a_diagnosis_refuses_a_bad_search_range():
    with pytest.raises(ValueError, match="diagnose_nonfinite: log2_min must be in"):
        diagnostics.diagnose_nonfinite(out_of_range, 8, jnp.float32(1), log2_min=-127)


def test_debug_nans_finds_a_planted_nan_at_a_loss_scale_of_one():
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jmp_scale.grad(lambda w: jnp.log(w).sum(), jmp_scale.NoOpLossScale())(
            -jnp.ones(2)
        )


# History


def recorded(flags, capacity=100, loss_finite=None, loss_scale=None):
    """A history of steps with these flags, in which S follows its rule."""
    loss_scale = loss_scale or jmp_scale.DynamicLossScale(2.0**15, period=3)
    loss_finite = [True] * len(flags) if loss_finite is None else loss_finite

    def step(carry, flag):
        history, loss_scale = carry
        finite, loss_is_finite = flag
        history = history.push(loss_scale, finite, loss_finite=loss_is_finite, amax=2.0)
        return (history, loss_scale.adjust(finite, loss_finite=loss_is_finite)), None

    flags = jnp.array(flags, bool), jnp.array(loss_finite, bool)
    history = diagnostics.LossScaleHistory.create(capacity)
    return jax.lax.scan(step, (history, loss_scale), flags)[0]


def test_a_history_counts_skips_growths_and_backoffs():
    history, _ = recorded([0, 0, 1, 1, 1, 1, 0, 1])
    assert history.to_dict()["log2_scale"].tolist() == [15, 14, 13, 13, 13, 14, 14, 13]
    summary = history.summary()
    assert (summary.steps, summary.skip_rate, summary.longest_run) == (8, 3 / 8, 2)
    assert (summary.growths, summary.backoffs, summary.loss_nonfinite) == (1, 3, 0)
    assert (
        summary.log2_scale_min,
        summary.log2_scale_median,
        summary.log2_scale_last,
    ) == (13, 13.5, 13)


@pytest.mark.parametrize("steps", [3, 4, 5, 11])
def test_a_full_history_keeps_the_last_steps_in_order(steps):
    flags = [i % 3 > 0 for i in range(steps)]
    history = recorded(flags, capacity=4)[0].to_dict()
    assert history["step"].tolist() == list(range(steps))[-4:]
    assert history["grads_finite"].tolist() == flags[-4:]
    assert (
        history["log2_scale"].tolist()
        == recorded(flags)[0].to_dict()["log2_scale"].tolist()[-4:]
    )


def test_an_empty_history_has_a_summary():
    summary = diagnostics.LossScaleHistory.create(3).summary()
    assert (summary.steps, summary.skip_rate, summary.longest_run) == (0, 0.0, 0)
    assert np.isnan(summary.log2_scale_last)


def test_a_history_refuses_a_bad_capacity_and_batches():
    for capacity in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="capacity must be an integer >= 1"):
            diagnostics.LossScaleHistory.create(capacity)
    with pytest.raises(
        ValueError, match=r"push: grads_finite must be a scalar, got \(2,\)"
    ):
        diagnostics.LossScaleHistory.create(3).push(1.0, jnp.ones(2, bool))


# Health and metrics, of states without Optax


def state(loss_scale=None, skipped=0, in_a_row=0, inner=None):
    loss_scale = jmp_scale.DynamicLossScale() if loss_scale is None else loss_scale
    counts = jnp.array(skipped, jnp.int32), jnp.array(in_a_row, jnp.int32)
    return jmp_scale.LossScaleState(
        loss_scale, inner, jnp.array(in_a_row == 0), *counts
    )


def test_nothing_is_said_when_all_is_well():
    assert diagnostics.health(state()) == []
    assert diagnostics.health(state(skipped=7)) == []
    assert diagnostics.health(state(jmp_scale.NoOpLossScale())) == []
    assert diagnostics.health(state(), recorded([1] * 50)[0]) == []
    assert (
        diagnostics.health(state(skipped=2), recorded([0, 0, *[1] * 50])[0]) == []
    )  # the warm-up is over


FINDINGS = {
    "warm-up": (
        state(jmp_scale.DynamicLossScale(2.0**12), 3, 3),
        None,
        "At most 12 more skips",
    ),
    "warm-up, recorded": (
        state(jmp_scale.DynamicLossScale(2.0**12), 3, 3),
        [0, 0, 0],
        "warm-up",
    ),
    "occasional": (state(skipped=5, in_a_row=1), None, "normal if rare"),
    "occasional, recorded": (state(skipped=1), [*[1] * 30, 0, 1], "(3.1%): normal"),
    "frequent": (state(skipped=3), [*[1] * 5, 0, 1, 0, 1], "22.2%"),
    "broken batches": (
        state(skipped=2),
        [*[1] * 5, -1, 1, -1, 1],
        "loss itself was not finite",
    ),
    "floor": (
        state(jmp_scale.DynamicLossScale(1.0), 40, 30),
        None,
        "stuck at its floor of 2^0",
    ),
    "loss": (
        state(skipped=8, in_a_row=2),
        [1, 1, -1, -1],
        "the loss itself is not finite",
    ),
    "loss, not recorded": (
        state(skipped=60, in_a_row=60),
        None,
        "the loss itself is not finite",
    ),
    "every step": (
        state(jmp_scale.DynamicLossScale(8.0), 14, 12),
        None,
        "something broke",
    ),
    "every step, static": (
        state(jmp_scale.StaticLossScale(8), 12, 12),
        None,
        "does not adapt: take",
    ),
    "one step, static": (
        state(jmp_scale.StaticLossScale(8), 1, 1),
        None,
        "normal if it stays the only one",
    ),
    "below 1": (
        state(jmp_scale.DynamicLossScale(0.25, min_loss_scale=0)),
        None,
        "2^-2, below 1",
    ),
    "float16": (
        state(inner={"mu": jnp.ones(2, jnp.float16)}),
        None,
        ".inner_state['mu'] is float16",
    ),
}


@pytest.mark.parametrize("case", FINDINGS)
def test_each_finding_is_one_sentence(case):
    opt_state, flags, expected = FINDINGS[case]
    history = None
    if flags is not None:  # -1: the loss itself is not finite
        history, _ = recorded(
            [flag > 0 for flag in flags], loss_finite=[flag >= 0 for flag in flags]
        )
    sentences = diagnostics.health(opt_state, history)
    assert len(sentences) == 1
    assert expected in sentences[0]


@pytest.mark.parametrize("in_a_row", [9, 10])
def test_a_run_is_long_from_ten_steps_on(in_a_row):
    sentence = diagnostics.health(state(jmp_scale.DynamicLossScale(8.0), 50, in_a_row))[
        0
    ]
    assert ("something broke" in sentence) == (in_a_row == 10)


def test_a_finding_is_told_when_it_begins_and_when_it_is_over():
    log = diagnostics.HealthLog()
    floor = jmp_scale.DynamicLossScale(1.0)
    assert log(state()) == []
    assert "stuck" in log(state(floor, 9, 9))[0]
    assert log(state(floor, 10, 10)) == []
    assert log(state(floor, 10, 0)) == ["Over: stuck at the floor."]
    assert log(state(floor, 10, 0)) == []


def test_states_are_found_at_any_depth_and_told_apart():
    nested = {
        "gen": ((state(skipped=1),), jnp.ones(2)),
        "dis": [None, state(jmp_scale.StaticLossScale(0.5))],
    }
    assert diagnostics.health(nested) == [
        sentence
        for sentence in diagnostics.health(nested)
        if sentence.startswith("['dis'][1]: The loss scale is 2^-1")
    ]
    assert len(diagnostics.health(nested)) == 1
    scalars = diagnostics.metrics(nested)
    assert int(scalars["['gen'][0][0].skipped"]) == 1
    assert float(scalars["['dis'][1].loss_scale"]) == 0.5


@pytest.mark.parametrize("function", [diagnostics.health, diagnostics.metrics])
def test_a_tree_without_a_state_is_refused(function):
    with pytest.raises(
        ValueError, match=f"{function.__name__}: found no state of with_loss_scale"
    ):
        function({"mu": jnp.ones(2)})


def test_health_refuses_several_replicas_of_a_state():
    replicas = jax.tree.map(lambda x: jnp.stack([x, x]), state())
    with pytest.raises(
        ValueError, match=r"health: expected one state, got \(2,\) of them"
    ):
        diagnostics.health(replicas)


def test_metrics_are_scalars_that_stay_on_the_device():
    grads = {
        "w": jnp.array([3.0, 4.0]),
        "h": jnp.full(1, 300, jnp.float16),
        "step": jnp.array(7),
    }

    @jax.jit
    def step(opt_state, grads):
        return diagnostics.metrics(opt_state, grads)

    with jax.transfer_guard_device_to_host("disallow"):
        scalars = step({"opt": state(skipped=5, in_a_row=2)}, grads)
    assert all(isinstance(x, jax.Array) and x.shape == () for x in scalars.values())
    assert {name: x.item() for name, x in scalars.items()} == {
        "loss_scale": 2.0**15,
        "skipped": 5,
        "skipped_in_a_row": 2,
        "grads_finite": False,
        "grad_norm": float(np.float32(np.sqrt(90025))),
    }


def test_metrics_without_gradients_have_no_norm_and_know_every_loss_scale():
    for loss_scale in (jmp_scale.NoOpLossScale(), jmp_scale.StaticLossScale(1)):
        scalars = diagnostics.metrics(state(loss_scale))
        assert (scalars["loss_scale"].dtype, float(scalars["loss_scale"])) == (
            jnp.float32,
            1.0,
        )
        assert "grad_norm" not in scalars


def test_a_calibration_without_parameters_is_a_clear_error():
    with pytest.raises(
        ValueError,
        match="calibrate_loss_scale: the gradients have no floating-point leaf",
    ):
        diagnostics.calibrate_loss_scale(lambda params: jnp.float32(1.0), {})
