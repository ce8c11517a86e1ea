"""`python -m jmp_scale` says what a machine does with half precision, and measures."""

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import one_of

from jmp_scale import __main__ as command
from jmp_scale._machine import facts, gain, timing
from jmp_scale._machine.timing import CONTROL, Comparison, Program, Ratio, Row, compare

TINY = gain.Sizes((1, 8, 4), (1, 8, 2, 4, 2), (1, 4, 4, 2))
RATIO = r"\d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\)"
PRODUCTS = ["float32", "bfloat16", "float16", 'float32, precision "highest"']
GRADIENTS = [
    "float32",
    "autocast, bfloat16",
    "autocast, float16",
    "cast by hand, bfloat16",
    "cast by hand, float16",
    "float32 beside itself",
]
STEPS = [
    "float32",
    "autocast, bfloat16",
    "autocast, bfloat16, skip",
    "autocast, float16, loss scale, skip",
    "float32 beside itself",
]


@pytest.fixture(scope="module", autouse=True)
def few_calls():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_SAMPLE", 0.0)
        patch.setattr(timing, "_ROUNDS", range(2, 4))
        yield


def report(capsys, *arguments):
    command.main(arguments, side=8, sizes=TINY, seconds=(100, 100))
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def measured():
    """The comparisons of all models, in tiny sizes."""
    return [*gain.gains(TINY, 100)]


def test_the_report_names_versions_device_products_and_advice(capsys):
    text = report(capsys)
    assert f"1 x {jax.devices()[0].device_kind} (cpu)" in text.replace("8 x", "1 x")
    assert f"jax {jax.__version__}" in text
    assert re.search(
        r"\| product of two 8 x 8 matrices +\| +ms \| +times as fast", text
    )
    assert re.search(rf"\| float16 +\| +\S+ \| +{RATIO} \|", text)
    assert re.search(r"Believe no gain below \d+\.\d\d: float32 beside itself", text)
    assert "Take: half precision on a CPU is for tests" in text


def test_json_holds_what_the_text_says(capsys):
    found = json.loads(report(capsys, "--json"))
    assert found.keys() == {
        "date",
        "device",
        "versions",
        "settings",
        "keeps_roundings",
        "advice",
        "comparisons",
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert found["device"]["platform"] == "cpu"
    assert {"python", "jmp_scale", "jax", "jaxlib", "optax"} <= found["versions"].keys()
    (products,) = found["comparisons"]
    assert products["title"] == "product of two 8 x 8 matrices"
    names = [row["program"] for row in products["rows"]]
    assert names == [*PRODUCTS, "float32" + CONTROL]
    for row in products["rows"][1:]:
        assert row.keys() == {"program", "milliseconds", "gain", "mebibytes", "note"}
        assert row["milliseconds"] > 0
        assert row["gain"].keys() == {"median", "low", "high"}
    assert products["believable"] >= 1


@pytest.mark.slow
def test_measure_adds_the_models_to_both(capsys, measured, monkeypatch):
    monkeypatch.setattr(gain, "gains", lambda *_: measured)
    text = report(capsys, "--measure")
    for comparison in measured:
        assert comparison.title in text
    assert re.search(
        rf"\| autocast, bfloat16 +\| +\S+ \| +{RATIO} \| +\d+\.\d \|", text
    )
    found = json.loads(report(capsys, "--measure", "--json"))
    titles = [comparison["title"] for comparison in found["comparisons"][1:]]
    assert titles == [comparison.title for comparison in measured]
    assert found["peak_bytes"] is None  # of a CPU


@pytest.mark.slow
def test_every_model_is_measured_in_every_precision(measured):
    *gradients, steps = measured
    assert [row.program for row in steps.rows] == STEPS
    kinds = ["an MLP", "1 residual blocks", "GPT-2's blocks"]
    for kind, comparison in zip(kinds, gradients, strict=True):
        assert comparison.title.startswith(f"gradient of {kind}")
        assert [row.program for row in comparison.rows] == GRADIENTS
    for comparison in measured:
        assert not any(row.note for row in comparison.rows)
        assert all(row.mebibytes > 0 for row in comparison.rows)
        assert comparison.rows[-1].mebibytes == comparison.rows[0].mebibytes


@pytest.mark.parametrize("make", one_of(3, [gain._mlp, gain._stage, gain._blocks]))
def test_a_model_is_float32_and_its_casts_are_the_same_function(make):
    model = make(TINY)
    loss, grads = jax.value_and_grad(model.loss)(model.params, model.batch)
    assert {x.dtype for x in jax.tree.leaves((loss, grads))} == {np.dtype("float32")}
    assert float(loss) > 0
    assert all(bool(jnp.any(x != 0)) for x in jax.tree.leaves(grads))
    for compile_ in gain._gradients(model).values():
        value, half = compile_().run()
        np.testing.assert_allclose(float(value), float(loss), rtol=0.05)
        for x, y in zip(*map(jax.tree.leaves, (half, grads)), strict=True):
            assert np.linalg.norm(x - y) <= 0.1 * np.linalg.norm(y)


def test_a_step_trains_call_after_call():
    model = gain._mlp(TINY)
    for compile_ in gain._steps(model).values():
        run = compile_().run
        losses = [float(run()) for _ in range(20)]
        assert losses[-1] < losses[0]


def test_programs_are_run_in_turn_and_compared_with_the_first():
    calls = []

    def program(name):
        return lambda: Program(lambda: calls.append(name), memory=2**20)

    ticks = []
    found = compare(
        "task",
        {"a": program("a"), "b": program("b")},
        seconds=0,
        tick=lambda: ticks.append(1),
    )
    # The first is always compiled; a second is left out without time.
    assert [row.program for row in found.rows] == ["a", "b", "a" + CONTROL]
    assert found.rows[1].note == "not measured: out of time"
    assert len(ticks) == 1 + 2
    assert set(calls) == {"a"}
    found = compare("task", {"a": program("a"), "b": program("b")}, seconds=10)
    a, b, control = found.rows
    assert a.gain is None
    assert b.gain.low <= b.gain.median <= b.gain.high
    assert (b.mebibytes, b.note) == (1, "")
    assert found.believable == max(control.gain.high, 1 / control.gain.low)


@pytest.mark.parametrize("refused", ["a", "b"])
def test_a_program_that_the_device_refuses_is_said(refused):
    def program(name):
        def compile_():
            if name == refused:
                raise NotImplementedError
            return Program(lambda: None)

        return compile_

    rows = compare("task", {"a": program("a"), "b": program("b")}, seconds=1).rows
    by_name = {row.program: row for row in rows}
    assert by_name[refused].note == "refused: NotImplementedError"
    assert (by_name["b"].gain is None) == (refused in "ab")
    text = command._table(Comparison("task", rows, None))
    assert "refused: NotImplementedError |" in text


def gains(**medians):
    rows = [Row(name, 1.0, Ratio(x, x, x)) for name, x in medians.items()]
    return Comparison("product", (Row("float32", 1.0), *rows), 1.05)


ADVICE = [
    ({"bfloat16": 4.0, "float16": 4.0}, '"bfloat16", which needs no loss scale; "floa'),
    ({"bfloat16": 4.0, "float16": 1.0}, '"bfloat16", which needs no loss scale; float'),
    ({"bfloat16": 1.0, "float16": 4.0}, '"float16" with DynamicLossScale(); bfloat16'),
    ({"bfloat16": 1.2, "float16": 1.3}, "neither gains 1.3 times"),
    ({}, "neither gains"),
]


@pytest.mark.parametrize(("medians", "expected"), ADVICE)
def test_advice_follows_the_products(medians, expected):
    assert facts.advice(gains(**medians), "gpu").startswith(expected)


def test_advice_believes_no_gain_that_the_control_shows_too():
    products = gains(bfloat16=1.9, float16=1.9)
    noisy = Comparison(products.title, products.rows, believable=2.0)
    assert facts.advice(noisy, "gpu").startswith("neither gains 2.0 times")
    assert facts.advice(products, "cpu").startswith("half precision on a CPU")


def test_settings_are_those_that_are_not_defaults(monkeypatch):
    for name in facts._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    promotion = jax.config.jax_numpy_dtype_promotion
    with jax.numpy_dtype_promotion("standard"):
        before = facts.settings()
    assert "jax_enable_x64" not in before
    monkeypatch.setenv("XLA_FLAGS", "--xla_allow_excess_precision=false")
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        found = facts.settings()
    assert found["jax_enable_x64"].startswith("True (")
    assert found["jax_default_matmul_precision"].startswith("highest (")
    assert found["XLA_FLAGS"] == "--xla_allow_excess_precision=false"
    assert ("jax_numpy_dtype_promotion" in found) == (promotion != "standard")


ROUNDINGS = """
from jmp_scale._machine import facts
print(facts.keeps_roundings())
"""


@pytest.mark.slow
def test_roundings_are_kept_where_xla_may_not_leave_them_out():
    flags = "--xla_allow_excess_precision=false"
    run = subprocess.run(
        [sys.executable, "-c", ROUNDINGS],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert run.stdout.strip() == "{'bfloat16': True, 'float16': True}"


def test_the_module_runs_as_a_command():
    run = subprocess.run(
        [sys.executable, "-m", "jmp_scale", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "--measure" in run.stdout
    assert "--json" in run.stdout
