"""`python -m jmp_scale` says what a machine does with half precision, and measures."""

import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from jmp_scale import __main__ as command
from jmp_scale import _machine as machine
from jmp_scale.diagnostics import _timing as timing
from jmp_scale.diagnostics._timing import (
    CONTROL,
    Comparison,
    Program,
    Ratio,
    Row,
    compare,
)

TINY = machine.ModelSizes(1, 8, 2, 4, 2, 16)
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
    "cast by hand, bfloat16",
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
    head = r"\| product of two 8 x 8 matrices +\| +ms \| +times as fast "
    assert re.search(head + r"\| MiB per device \| +TFLOP/s \|", text)
    assert re.search(rf"\| float16 +\| +\S+ \| +{RATIO} \| +0.0 \| +\S+ \|", text)
    assert re.search(r"Believe no gain below \d+\.\d\d: float32 beside itself", text)
    assert "This is a CPU: half precision is for tests here" in text
    assert "JAX_PLATFORMS=cpu" in text


def perceptron(sizes):
    """A model that compiles faster than GPT-2."""

    def loss(w, x):
        return jax.numpy.mean((x @ w).astype("float32") ** 2)

    w, x = jax.random.normal(jax.random.key(0), (2, sizes.width, sizes.width))
    return machine.Model("MLP", loss, w, x)


@pytest.mark.parametrize(
    ("model", "title"),
    [(perceptron, "MLP"), pytest.param(machine.gpt, "GPT-2", marks=pytest.mark.slow)],
)
def test_json_holds_a_model_in_every_precision(model, title, monkeypatch, capsys):
    monkeypatch.setattr(machine, "gpt", model)
    found = json.loads(report(capsys, "--measure", "--json"))
    names = "date device versions environment advice comparisons "
    assert " ".join(found) == names + "peak_bytes_of_first_device send"
    assert {"python", "jmp_scale", "jax", "jaxlib", "optax"} <= found["versions"].keys()
    kinds = ["product of two 8 x 8 matrices", f"gradient of {title}"]
    kinds += [f"step of AdamW for {title}"]
    programs = [PRODUCTS, GRADIENTS, STEPS]
    for one, kind, expected in zip(found["comparisons"], kinds, programs, strict=True):
        assert one["title"].startswith(kind)
        rows = one["rows"]
        assert [row["program"] for row in rows] == [*expected, "float32" + CONTROL]
        assert not any(row["note"] for row in rows)
        assert all(row["milliseconds"] > 0 and row["mebibytes"] > 0 for row in rows)
        assert rows[1]["gain"].keys() == {"median", "low", "high"}
        assert one["believable"] >= 1
        has_errors = kind.startswith("gradient")
        for row in rows[1:-1]:
            assert (row["error"] is not None) == has_errors
            assert not has_errors or 0 < row["error"] < 0.1


def test_a_step_trains_call_after_call():
    for compile_ in machine.steps(perceptron(TINY))[1].values():
        run = compile_().run
        losses = [float(run()[2]) for _ in range(9)]
        assert losses[-1] < losses[0]


def test_programs_are_run_in_turn_and_compared_with_the_first():
    calls = []

    def program(name):
        return lambda: Program(lambda: calls.append(name), mebibytes=1.0)

    programs = {name: program(name) for name in "abc"}
    found = compare("task", programs, seconds=10)
    assert "abcaacba" in "".join(calls)  # the order alternates
    a, b, _, control = found.rows
    assert a.gain is None
    assert b.gain.low <= b.gain.median <= b.gain.high
    assert (b.mebibytes, b.note) == (1, "")
    assert found.believable == max(control.gain.high, 1 / control.gain.low)


def test_no_program_is_left_out_where_compilations_take_all_the_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def program(seconds):
        def run():
            now[0] += seconds

        def compile_():
            now[0] += 60.0
            return Program(run)

        return compile_

    programs = {"float32": program(8e-3), "bfloat16": program(8e-3)}
    programs |= {"float16": program(2e-3)}
    found = compare("task", programs, seconds=1)
    assert [row.note for row in found.rows] == [""] * 4
    assert found.rows[2].gain.median == pytest.approx(4)
    assert machine.advice(found, "gpu").startswith('Take "float16" with Dynamic')


def test_a_program_that_runs_out_of_memory_in_a_round_loses_its_row_alone():
    runs = []

    def fails_later():
        runs.append(0)
        if len(runs) > 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    programs = {"a": lambda: Program(lambda: 0), "b": lambda: Program(fails_later)}
    programs["c"] = programs["a"]
    found = compare("task", programs, seconds=1)
    assert [row.note for row in found.rows] == ["", "failed: JaxRuntimeError", "", ""]
    assert found.rows[2].gain is not None


def test_rows_hold_the_error_of_the_gradient_and_operations_a_second():
    def program(x):
        return lambda: Program(lambda: jax.numpy.float32(x))

    programs = {"a": program(2.0), "b": program(2.5), "c": program(np.nan)}
    found = compare("task", programs, 1, gradient_of=lambda x: [x], flops=1e9)
    assert [row.error for row in found.rows] == [None, 0.25, np.inf, None]
    for row in found.rows:
        assert row.teraflops == pytest.approx(1e-3 / (row.milliseconds / 1e3))


def test_a_program_that_the_device_refuses_is_said():
    def refused():
        raise NotImplementedError

    def runs():
        return Program(lambda: None)

    found = compare("task", {"a": runs, "b": refused}, seconds=1)
    assert [row.note for row in found.rows] == ["", "refused: NotImplementedError", ""]
    assert re.search(r"\| refused: NotImplementedError \|\n", timing.markdown(found))
    # The base may be too large for the device, and others not.
    found = compare("task", {"a": refused, "b": runs}, seconds=1)
    assert (found.rows[1].gain, found.believable) == (None, None)
    assert "Believe" not in timing.markdown(found)
    assert re.search(r"\| b +\| +\S+ \| +- \|", timing.markdown(found))


ADVICE = [
    ((4.0, 4.0), 'Take "bfloat16", which'),
    ((4.0, None), 'Take "bfloat16", which'),
    ((1.0, 4.0), 'Take "float16" with'),
    ((None, 4.0), 'Take "float16" with'),
    ((1.2, 1.3), "bfloat16 and float16: no gain above 1.3 times"),
    ((1.2, None), "bfloat16: no gain above 1.3 times"),
    ((None, None), "No advice"),
]


@pytest.mark.parametrize(("gains", "expected"), ADVICE)
def test_advice_is_of_measured_products_and_of_gains_above_the_control(gains, expected):
    rows = [
        Row(name, 1.0, Ratio(x, x, x)) if x else Row(name, note="refused: TypeError")
        for name, x in zip(machine.HALVES, gains, strict=True)
    ]
    text = machine.advice(Comparison("", tuple(rows), 1.05), "gpu")
    assert text.startswith(expected)
    assert "Take" not in machine.advice(Comparison("", tuple(rows), 4.5), "gpu")


@pytest.mark.slow
def test_the_module_runs_as_a_command():
    options = {"capture_output": True, "text": True, "check": True, "timeout": 120}
    run = subprocess.run([sys.executable, "-m", "jmp_scale", "--help"], **options)
    assert "--measure" in run.stdout
