"""`python -m jmp_scale` says what a machine does with half precision, and measures."""

import json
import os
import re
import subprocess
import sys

import jax
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
]
STEPS = [
    "float32",
    "autocast, bfloat16",
    "autocast, bfloat16, skip",
    "autocast, float16, loss scale, skip",
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


def test_the_report_names_versions_device_products_and_advice(capsys):
    text = report(capsys)
    assert f"1 x {jax.devices()[0].device_kind} (cpu)" in text.replace("8 x", "1 x")
    assert f"jax {jax.__version__}" in text
    head = r"\| product of two 8 x 8 matrices +\| +ms \| +times as fast \| +MiB \|"
    assert re.search(head, text)
    assert re.search(rf"\| float16 +\| +\S+ \| +{RATIO} \| +0.0 \|", text)
    assert re.search(r"Believe no gain below \d+\.\d\d: float32 beside itself", text)
    assert "Take: half precision on a CPU is for tests" in text
    assert re.search("rounded: bfloat16 (yes|no), float16 (yes|no)", text)


@pytest.mark.slow
def test_json_holds_the_models_too_in_every_precision(capsys):
    found = json.loads(report(capsys, "--measure", "--json"))
    names = "date device versions settings keeps_roundings advice comparisons peak_"
    assert " ".join(found).startswith(names)
    assert {"python", "jmp_scale", "jax", "jaxlib", "optax"} <= found["versions"].keys()
    kinds = ["product of two 8 x 8 matrices", "gradient of an MLP"]
    kinds += ["gradient of 1 residual blocks", "gradient of GPT-2's blocks"]
    kinds += ["step of AdamW for GPT-2's blocks"]
    programs = [PRODUCTS, GRADIENTS, GRADIENTS, GRADIENTS, STEPS]
    for one, kind, expected in zip(found["comparisons"], kinds, programs, strict=True):
        assert one["title"].startswith(kind)
        rows = one["rows"]
        assert [row["program"] for row in rows] == [*expected, "float32" + CONTROL]
        assert not any(row["note"] for row in rows)
        assert all(row["milliseconds"] > 0 and row["mebibytes"] > 0 for row in rows)
        assert rows[1]["gain"].keys() == {"median", "low", "high"}
        assert one["believable"] >= 1


@pytest.mark.parametrize("make", one_of(3, [gain.mlp, gain.stage, gain.blocks]))
def test_a_model_is_float32_and_its_casts_are_the_same_function(make):
    model = make(TINY)
    loss, grads = jax.value_and_grad(model.loss)(model.params, model.batch)
    assert {x.dtype for x in jax.tree.leaves((loss, grads))} == {np.dtype("float32")}
    assert float(loss) > 0
    for compile_ in gain.gradients(model)[1].values():
        value, half = compile_().run()
        np.testing.assert_allclose(float(value), float(loss), rtol=0.05)
        for x, y in zip(*map(jax.tree.leaves, (half, grads)), strict=True):
            assert np.linalg.norm(y) > 0
            assert np.linalg.norm(x - y) <= 0.1 * np.linalg.norm(y)


def test_programs_are_run_in_turn_and_compared_with_the_first():
    calls = []

    def program(name):
        return lambda: Program(lambda: calls.append(name), mebibytes=1.0)

    programs = {name: program(name) for name in "abc"}
    found = compare("task", programs, seconds=0)
    # The first is always compiled; a second is left out without time.
    assert [row.program for row in found.rows] == ["a", "b", "c", "a" + CONTROL]
    assert found.rows[1].note == "not measured: out of time"
    assert set(calls) == {"a"}
    found = compare("task", programs, seconds=10)
    assert "abcaacba" in "".join(calls)  # the order alternates
    a, b, _, control = found.rows
    assert a.gain is None
    assert b.gain.low <= b.gain.median <= b.gain.high
    assert (b.mebibytes, b.note) == (1, "")
    assert found.believable == max(control.gain.high, 1 / control.gain.low)


def test_a_program_that_the_device_refuses_is_said():
    def refused():
        raise NotImplementedError

    programs = {"a": lambda: Program(lambda: None), "b": refused}
    found = compare("task", programs, seconds=1)
    assert [row.note for row in found.rows] == ["", "refused: NotImplementedError", ""]
    assert re.search(r"\| refused: NotImplementedError \| +\|", command._table(found))


ADVICE = [
    ({"bfloat16": 4.0, "float16": 4.0}, '"bfloat16", which needs no loss scale; "floa'),
    ({"bfloat16": 4.0, "float16": 1.0}, '"bfloat16", which needs no loss scale; float'),
    ({"bfloat16": 1.0, "float16": 4.0}, '"float16" with DynamicLossScale(); bfloat16'),
    ({"bfloat16": 1.2, "float16": 1.3}, "neither gains 1.3 times"),
    ({}, "neither gains"),
]


@pytest.mark.parametrize(("medians", "expected"), ADVICE)
def test_advice_follows_the_products_and_no_gain_that_the_control_shows_too(
    medians, expected
):
    rows = tuple(Row(name, 1.0, Ratio(x, x, x)) for name, x in medians.items())
    assert facts.advice(Comparison("", rows, 1.05), "gpu").startswith(expected)
    noisy = facts.advice(Comparison("", rows, 4.5), "gpu")
    assert noisy.startswith("neither gains 4.5 times")


def test_settings_are_those_that_are_not_defaults(monkeypatch):
    for name in facts._VARIABLES.split():
        monkeypatch.delenv(name, raising=False)
    assert "jax_enable_x64" not in facts.settings()
    monkeypatch.setenv("XLA_FLAGS", "--xla_allow_excess_precision=false")
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        found = facts.settings()
    assert found["jax_enable_x64"].startswith("True (")
    assert found["jax_default_matmul_precision"].startswith("highest (")
    assert found["XLA_FLAGS"] == "--xla_allow_excess_precision=false"


@pytest.mark.slow
def test_the_module_runs_as_a_command_and_roundings_can_be_kept():
    code = "from jmp_scale import __main__\n__main__.main(['--json'], side=8)"
    found = json.loads(
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "XLA_FLAGS": "--xla_allow_excess_precision=false"},
            capture_output=True,
            check=True,
            timeout=120,
        ).stdout
    )
    assert found["keeps_roundings"] == {"bfloat16": True, "float16": True}
    options = {"capture_output": True, "text": True, "check": True, "timeout": 120}
    run = subprocess.run([sys.executable, "-m", "jmp_scale", "--help"], **options)
    assert "--measure" in run.stdout
