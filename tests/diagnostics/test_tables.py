"""Every result of the diagnostics prints itself: str is its summary, repr one line."""

import functools
import inspect

import jax
import jax.numpy as jnp

import jmp_scale
from jmp_scale import diagnostics

X = jnp.ones((4, 4))
UNLIKE = "HealthLog", "SpeedComparison"  # no result; made by a measurement alone
HALF = jmp_scale.autocast(lambda w, x: jnp.mean((x @ w) ** 2), "float16")


def half_loss(w, x):
    return jnp.sum((x @ w).astype(jnp.float16))


@functools.cache
def results():
    """A result of each tool, and a row of each that has rows."""
    row = diagnostics.SensitiveProduct("loss.py", 3, "", "", 1.0, 0.1, 0.0)
    leaf = diagnostics.LeafComparison("", 8.0, 0.0, 0.0, True, 0.0)
    found = [
        diagnostics.Window(1.0, 4.0, 1.0),
        diagnostics.GradientComparison(4.0, 4.0, 0.0, 0.0, (leaf,), 0.0, 2.0**15),
        diagnostics.Diagnosis("overflow", "['w']", 3, ("['w']",)),
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
        if inspect.isclass(cls) and name not in UNLIKE
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
    assert repr(results()["Window"]) == "Window(lowest=1, highest=4, start=1)"


def test_a_finding_is_one_line_of_its_report():
    finding = results()["Finding"]
    where = f"{__file__}:{inspect.getsourcelines(half_loss)[1]}: warning: "
    assert str(finding).startswith(where)
    assert str(finding) in str(results()["PrecisionReport"]).splitlines()


def test_a_result_without_known_numbers_prints_its_repr():
    texts = []

    @jax.jit
    def create():
        result = diagnostics.LossScaleHistory.create(1)
        texts.append((str(result), repr(result)))
        return result

    result = create()
    batched = jax.tree.map(lambda x: jnp.stack([x, x]), result)
    texts.append((str(batched), repr(batched)))
    for leaf in jax.tree.leaves(result):
        leaf.delete()
    texts.append((str(result), repr(result)))
    for text, short in texts:
        assert text == short
        assert short.startswith("LossScaleHistory(log2_scale=float32[")
        assert len(short) <= 200


def test_scalars_are_shown_as_numbers_on_the_device_and_on_the_host():
    result = diagnostics.LossScaleHistory.create(1)
    for history in (result, jax.device_get(result)):
        assert repr(history).startswith(
            "LossScaleHistory(log2_scale=nan, grads_finite=True, "
        )
