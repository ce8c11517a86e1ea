"""Every number of a report against casts by NumPy and ml_dtypes of the same values."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cast_reference import (
    ALL_F16,
    DTYPES,
    assert_same_in_vmap_and_scan,
    counts_of,
    everywhere,
    near_ties,
    reference_counts,
)

import jmp_scale
from jmp_scale import diagnostics

pytestmark = pytest.mark.strict_promotion

REPORTED = [name for name in DTYPES if name != "bfloat16"]

jitted_report = jax.jit(diagnostics.grad_report, static_argnames="dtype")


VALUES = {
    "all float16 bit patterns": (ALL_F16, [1.0, 2.0**15, 2.0**24]),
    "every size": (everywhere(), [2.0**-14, 2.0**10, 2.0**100, 0.7]),
    "near ties": (None, [1.0, 2.0**3, 2.0**15]),
}
CASES = [(name, s) for name, (_, scales) in VALUES.items() for s in scales]


@pytest.mark.parametrize("dtype", REPORTED)
@pytest.mark.parametrize(("values", "loss_scale"), CASES)
def test_counts_equal_those_of_casts(values, loss_scale, dtype):
    x = VALUES[values][0]
    x = near_ties(dtype, loss_scale) if x is None else x
    report = jitted_report({"w": x}, loss_scale, dtype=dtype)
    assert counts_of(report) == reference_counts(x, loss_scale, dtype)


@pytest.mark.parametrize("leaf_dtype", DTYPES)
def test_narrow_leaves_are_counted_by_their_values(leaf_dtype):
    bits = np.uint16 if ml_dtypes.finfo(DTYPES[leaf_dtype]).bits == 16 else np.uint8
    x = np.arange(np.iinfo(bits).max + 1).astype(bits).view(DTYPES[leaf_dtype])
    report = jitted_report(jnp.asarray(x), 2.0**5)
    expected = reference_counts(x.astype(np.float32), 2.0**5, "float16")
    assert counts_of(report) == expected


def test_the_gradients_are_read_once():
    leaves = [jnp.ones((300, 400)), jnp.ones(5000)]
    compiled = jitted_report.lower(leaves, jnp.float32(1)).compile()
    size = 4 * sum(x.size for x in leaves)
    assert compiled.cost_analysis()["bytes accessed"] < 1.1 * size


def test_a_complex_entry_counts_as_two_and_amax_is_that_of_the_finite_entries():
    x = np.array([1 + 1e-9j, 0 + np.inf * 1j], np.complex64)
    more = {"b": np.float32([1e-42, 2e-44]), "c": np.zeros(3, np.float32)}
    report = jitted_report({"a": x, **more}, 1.0)
    parts = np.ravel([x.real, x.imag])
    assert counts_of(report) == reference_counts(parts, 1.0, "float16")
    assert report.amax.tolist() == [1, float(np.float32(1e-42)), 0]


@pytest.mark.parametrize("dtype", REPORTED)
@pytest.mark.parametrize("amax", [1.0, 1.75, 1.9990234375, 1.99999, 3e-5, 7.3e4, 1e-30])
def test_the_recommended_scale_is_the_largest_with_two_bits_of_headroom(amax, dtype):
    report = jitted_report(jnp.float32([amax, amax / 2]), 1.0, dtype=dtype)
    limit = float(ml_dtypes.finfo(DTYPES[dtype]).max)
    amax = float(np.float32(amax))
    have_headroom = [k for k in range(25) if amax * 2.0**k * 4 <= limit]
    k = float(report.recommended_log2_scale)
    assert np.isnan(k) == (not have_headroom)
    headline = report.summary().splitlines()[0]
    if have_headroom:
        assert k == max(have_headroom)
        jmp_scale.DynamicLossScale(2.0**k)
        assert headline.endswith(f"recommended loss scale at most 2^{k:g}")
    else:
        assert headline.endswith("must be below 1: give it another min_loss_scale")


def test_any_loss_scale_number_or_array_is_taken():
    expected = reference_counts(ALL_F16, 8, "float16")
    scales = jmp_scale.StaticLossScale(8), jmp_scale.DynamicLossScale(8), 8
    for loss_scale in (*scales, jnp.float16(8)):
        report = jitted_report(ALL_F16, loss_scale)
        assert counts_of(report) == expected
        assert float(report.loss_scale) == 8
    assert float(jitted_report(ALL_F16, jmp_scale.NoOpLossScale()).loss_scale) == 1


REFUSED = {
    "dtype": ((ALL_F16, 1.0, "float32"), r"dtype to be .*float16, .* got float32"),
    "bfloat16": ((ALL_F16, 1.0, "bfloat16"), "bfloat16, .* use exponent_histogram"),
    "zero": ((ALL_F16, 0.0), r"loss_scale to be .* got 0.0"),
    "text": ((ALL_F16, "2**15"), "loss_scale"),
    "two": ((ALL_F16, jnp.ones(2)), r"a scalar loss_scale, got .* \(2,\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_by_name(case):
    args, words = REFUSED[case]
    error = TypeError if case == "text" else ValueError
    with pytest.raises(error, match=f"grad_report: .*{words}"):
        diagnostics.grad_report(*args)


def test_a_report_is_the_same_in_jit_vmap_and_scan():
    x = jnp.asarray(everywhere(n=64)).reshape(2, 35)
    report = lambda w, s: diagnostics.grad_report({"w": w}, s)  # noqa: E731
    assert_same_in_vmap_and_scan(report, x, jnp.float32([1.0, 2.0**10]))


def test_the_worst_leaves_come_first_and_the_summary_names_them():
    grads = {"good": jnp.ones(4), "lost": jnp.full(4, 1e-9)}
    grads["nan"] = jnp.array([1.0, jnp.nan])
    report = diagnostics.grad_report(grads, 1.0)
    assert report.paths == ("['good']", "['lost']", "['nan']")
    assert report.nonfinite.tolist() == [0, 0, 1]
    assert list(report.worst(2)) == ["['nan']", "['lost']"]
    assert report.to_dict()["leaves"]["['lost']"]["flushed"] == 4
    lines = report.summary().splitlines()
    assert "not finite from ['nan'] on" in lines[0]
    assert [line.split()[0] for line in lines[2:]] == list(report.paths)
    assert "100 %" in lines[3]
    assert len(report.summary(1).splitlines()) == 3


NOTHING_TO_RECOMMEND_BY = {
    "all finite; no loss scale to recommend": {"w": jnp.zeros(3), "e": jnp.zeros(0)},
    "no floating-point leaves": {"step": jnp.array(3), "none": None},
    "not finite from (the whole tree) on; no loss scale": jnp.float32([0.0, jnp.nan]),
}


@pytest.mark.parametrize("expected", NOTHING_TO_RECOMMEND_BY)
def test_nothing_is_recommended_without_a_finite_nonzero_entry(expected):
    report = jitted_report(NOTHING_TO_RECOMMEND_BY[expected], 2.0**15)
    assert np.isnan(report.recommended_log2_scale)
    summary = report.summary()
    assert expected in summary
    assert "nan" not in summary
    assert "inf" not in summary.replace("finite", "")


def test_the_summary_can_be_read_at_extreme_loss_scales():
    report = diagnostics.grad_report({"w": jnp.full(2, 1e38)}, jnp.float32(2.0**120))
    assert report.summary().endswith(" 1.00e+38")
    summary = diagnostics.grad_report(jnp.ones(2), jnp.float32(jnp.nan)).summary()
    assert summary.startswith("gradients at loss scale nan, cast to float16")


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_a_leaf_too_large_for_its_counters_is_refused(dtype):
    rows = 2**20 // np.dtype(dtype).itemsize  # two real numbers a complex entry
    most = jax.ShapeDtypeStruct((rows, 2**14 - 1), dtype)
    jax.eval_shape(lambda tree: diagnostics.grad_report(tree, 1.0), {"w": most})
    leaf = jax.ShapeDtypeStruct((rows, 2**14), dtype)
    with pytest.raises(
        ValueError, match=r"\['w'\] has 2\^32 entries or more; split it"
    ):
        jax.eval_shape(diagnostics.exponent_histogram, {"w": leaf})
