"""Every result of the diagnostics prints its summary."""

import jax.numpy as jnp

from jmp_scale import diagnostics

X = jnp.ones((4, 4))


def half_loss(w, x):
    return jnp.sum((x @ w).astype(jnp.float16))


def results():
    """A result of each tool, and a row of each that prints itself."""
    row = diagnostics.SensitiveProduct("loss.py", 3, "", "", 1.0, 0.1, 0.0)
    leaf = diagnostics.LeafComparison("", 8.0, 0.0, 0.0, True, 0.0)
    found = [
        diagnostics.Window(1.0, 4.0, 1.0),
        diagnostics.GradientComparison(4.0, 4.0, 0.0, 0.0, (leaf,), 0.0, 2.0**15),
        diagnostics.Diagnosis("overflow", "['w']", 3),
        diagnostics.precision_report(half_loss, X, X),
        diagnostics.SensitiveProducts((row,), (), 1.0, 0.1, 0.1, "No advice."),
        diagnostics.check_step(lambda x: x, {"w": X}),
    ]
    return [*found, found[3].findings[0], found[5].problems[0]]


def test_each_result_prints_its_summary():
    with_summary = {
        name
        for name, cls in vars(diagnostics).items()
        if hasattr(cls, "summary") and name != "SpeedComparison"
    }
    assert with_summary == {type(result).__name__ for result in results()}
    for result in results():
        assert str(result) == repr(result) == result.summary()
