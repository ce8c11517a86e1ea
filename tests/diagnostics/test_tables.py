"""Every result of the diagnostics prints itself: str is its summary, repr one line."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

import jmp_scale
from jmp_scale import diagnostics

X = jnp.ones((4, 4))
HALF = jmp_scale.autocast(lambda w, x: jnp.mean((x @ w) ** 2), "float16")


def half_loss(w, x):
    return jnp.sum((x @ w).astype(jnp.float16))


@functools.cache
def results():
    """A result of each tool, and a row of each that has rows."""
    row = diagnostics.SensitiveProduct("loss.py", 3, "", "", 1.0, 0.1, 0.0)
    leaf = diagnostics.LeafComparison("", 8.0, 0.0, 0.0, True, 0.0)
    found = [
        diagnostics.calibrate_loss_scale(HALF, X, X, log2_scales=(0, 2)),
        diagnostics.GradientComparison(4.0, 4.0, 0.0, 0.0, (leaf,), 0.0, 2.0**15),
        diagnostics.Diagnosis("overflow", "['w']", 3, ("['w']",)),
        diagnostics.exponent_histogram({"w": 1e-8 * X, "zero": 0 * X}),
        diagnostics.grad_report({"w": 1e-8 * X, "v": X}, 1.0),
        diagnostics.lost_updates(X, 1e-9 * X),
        diagnostics.precision_report(half_loss, X, X),
        diagnostics.SensitiveProducts((row,), (), 1.0, 0.1, 0.1, "No advice."),
        diagnostics.LossScaleHistory.create(),
        diagnostics.check_step(lambda x: x, {"w": X}),
    ]
    by_type = {type(result).__name__: result for result in found}
    rows = [
        leaf,
        row,
        by_type["PrecisionReport"].findings[0],
        by_type["PrecisionReport"].operations[0],
        by_type["StepCheck"].problems[0],
    ]
    return by_type | {type(row).__name__: row for row in rows}


def test_str_is_the_summary_and_repr_one_short_line_of_every_result():
    classes = {
        name: cls
        for name, cls in vars(diagnostics).items()
        if inspect.isclass(cls) and name != "HealthLog"
    }
    assert classes.keys() == results().keys()
    for name, result in results().items():
        text = repr(result)
        assert text.startswith(f"{name}(")
        assert text.endswith(")")
        assert "\n" not in text
        assert len(text) <= 200
        assert str(result) == (result.summary() if hasattr(result, "summary") else text)


def test_repr_shows_numbers_dtypes_and_counts():
    row = results()["LeafComparison"]
    assert repr(row).startswith("LeafComparison(path='', norm=8, error=0, lost=0")
    report = repr(results()["PrecisionReport"])
    assert "findings=(1 of Finding), operations=(" in report
    assert "log2_scales=int32[2], zero_fraction=float32[2,1]" in repr(
        results()["Calibration"]
    )


def test_summaries_of_one_line():
    assert str(results()["LostUpdates"]) == (
        "100 % of the updates, 100 % of their size, lost in rounding."
    )
    finding = results()["Finding"]
    where = f"{__file__}:{inspect.getsourcelines(half_loss)[1] + 1}: warning: "
    assert str(finding).startswith(where)
    assert str(finding) in str(results()["PrecisionReport"]).splitlines()


def test_the_histogram_prints_ranges_and_the_share_that_becomes_zero():
    lines = str(results()["ExponentHistogram"]).splitlines()[2:]
    assert lines[0].split() == ["['w']", "16", "2^-27", "2^-27", "100", "%"]
    assert lines[1].split() == ["['zero']", "0", "-", "-", "0", "%"]


def test_a_result_without_known_numbers_prints_its_repr():
    texts = []

    @jax.jit
    def report(x):
        result = diagnostics.grad_report(x, 1.0)
        texts.append((str(result), repr(result)))
        return result

    result = report(X)
    batched = jax.vmap(report)(jnp.stack([X, X]))
    texts.append((str(batched), repr(batched)))
    result.amax.delete()
    texts.append((str(result), repr(result)))
    for text, short in texts:
        assert text == short
        assert short.startswith("GradReport(amax=float32[")
        assert len(short) <= 200


@pytest.mark.parametrize("host", [False, True])
def test_scalars_are_shown_as_numbers_on_the_device_and_on_the_host(host):
    result = diagnostics.lost_updates(X, 1e-9 * X)
    result = jax.device_get(result) if host else result
    assert repr(result) == "LostUpdates(entries=1, magnitude=1)"
