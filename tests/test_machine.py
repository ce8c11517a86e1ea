"""`python -m jmp_scale` says what a machine does with half precision, and measures."""

import functools
import json
import re
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from helpers import compilations

from jmp_scale import __main__ as command
from jmp_scale import _cpu as processor
from jmp_scale import _machine as machine
from jmp_scale.diagnostics import _timing as timing

pytestmark = pytest.mark.usefixtures("few_calls")

TINY = machine.Sizes(8, 1, 8, 2, 4, 2, 16)
RATIO = r"\d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\)"
PRODUCTS = ["float32", "bfloat16", "float16", 'float32, precision "highest"']
GRADIENTS = ["float32", "autocast, bfloat16", "autocast, float16"]
GRADIENTS += ["cast by hand, bfloat16", "cast by hand, float16"]
STEPS = ["float32", "cast by hand, bfloat16", "autocast, bfloat16"]
STEPS += ["autocast, bfloat16, skip", "autocast, float16, loss scale, skip"]


def test_the_report_names_versions_device_products_and_advice(capsys):
    command.main([], sizes=TINY)
    text = capsys.readouterr().out
    assert f"1 x {jax.devices()[0].device_kind} (cpu)" in text.replace("8 x", "1 x")
    assert f"jax {jax.__version__}" in text
    head = r"\| product of two 8 x 8 matrices +\| +ms \| +times as fast "
    assert re.search(head + r"\| MiB per device \| +TFLOP/s \|", text)
    assert re.search(rf"\| float16 +\| +\S+ \| +{RATIO} \| +0.0 \| +\S+ \|", text)
    assert re.search(r"Believe no gain below \d+\.\d\d: float32 beside itself", text)
    assert "This is a CPU, whose times say nothing about an accelerator" in text
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
def test_a_model_is_measured_in_every_precision_and_each_program_compiled_once(
    model, title, monkeypatch, capsys, caplog
):
    monkeypatch.setattr(machine, "gpt", model)
    compiled = compilations()
    with caplog.at_level("INFO", "jmp_scale"):
        command.main(["--measure", "--json"], sizes=TINY)
    found = json.loads(capsys.readouterr().out)
    assert {"python", "jmp_scale", "jax", "jaxlib", "optax"} <= found["versions"].keys()
    assert found["send"]
    kinds = ["product of two 8 x 8 matrices", f"gradient of {title}"]
    kinds += [f"step of AdamW for {title}"]
    programs = [PRODUCTS, GRADIENTS, STEPS]
    said = []
    for one, kind, expected in zip(found["comparisons"], kinds, programs, strict=True):
        assert one["title"].startswith(kind)
        said += [f"{one['title']}: compiling {name}" for name in expected]
        rows = one["rows"]
        assert [row["program"] for row in rows] == [*expected, "float32 beside itself"]
        assert not any(row["note"] for row in rows)
        assert all(row["milliseconds"] > 0 and row["mebibytes"] > 0 for row in rows)
        assert rows[1]["gain"].keys() == {"median", "low", "high"}
        assert one["believable"] >= 1
        has_errors = kind.startswith("gradient")
        for row in rows[1:-1]:
            assert (row["error"] is not None) == has_errors
            assert not has_errors or 0 < row["error"] < 0.1
    assert [r.message for r in caplog.records if ": compiling " in r.message] == said
    for name, count in (("matmul", 4), ("unscaled_value_and_grad", 5), ("step", 5)):
        assert compiled.count(f"jit({name})") == count, compiled


def test_a_step_trains_call_after_call():
    *_, compile_ = machine.steps(perceptron(TINY))[1].values()
    run = compile_().run
    losses = [float(run()[2]) for _ in range(9)]
    assert losses[-1] < losses[0]


def compared(seconds=1, **runs):
    """A comparison of programs that run these functions."""
    programs = jax.tree.map(lambda run: lambda: timing.Program(run, 1.0), runs)
    return timing.compare("task", programs, seconds)


def test_programs_are_run_in_turn_and_compared_with_the_first():
    calls = []
    found = compared(10, **{x: functools.partial(calls.append, x) for x in "abc"})
    assert "abcaacba" in "".join(calls)  # the order alternates
    a, b, _, control = found.rows
    assert a.gain is None
    assert b.gain.low <= b.gain.median <= b.gain.high
    assert (b.mebibytes, b.note) == (1, "")
    assert found.believable == max(control.gain.high, 1 / control.gain.low)


def test_a_program_that_takes_four_times_as_long_is_told_so(monkeypatch):
    now = [0.0]

    def work(seconds):
        now[0] += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    found = compared(a=lambda: work(0.001), b=lambda: work(0.004))
    assert found.rows[1].gain.median == pytest.approx(1 / 4)
    assert found.rows[1].milliseconds == pytest.approx(4)


def test_rows_hold_the_error_of_the_gradient_and_operations_a_second():
    def program(x):
        return lambda: timing.Program(lambda: jax.numpy.float32(x))

    programs = {"a": program(2.0), "b": program(2.5), "c": program(np.nan)}
    found = timing.compare("task", programs, 1, gradient_of=lambda x: [x], flops=1e9)
    assert [row.error for row in found.rows] == [None, 0.25, np.inf, None]
    for row in found.rows:
        assert row.teraflops == pytest.approx(1e-3 / (row.milliseconds / 1e3))


def test_a_program_that_the_device_refuses_is_said():
    def refused():
        raise NotImplementedError

    found = compared(a=list, b=refused)
    assert [row.note for row in found.rows] == ["", "refused: NotImplementedError", ""]
    assert re.search(r"\| refused: NotImplementedError \|", timing.markdown(found))
    # The base may be too large for the device, and others not.
    found = compared(a=refused, b=list)
    assert (found.rows[1].gain, found.believable) == (None, None)
    assert "Believe" not in timing.markdown(found)
    assert re.search(r"\| b +\| +\S+ \| +- \|", timing.markdown(found))


def halves(*gains, believable=1.05, prefix=""):
    """A comparison in which both halves gain so much, or were refused."""
    rows = [
        timing.Row(prefix + name, gain=timing.Ratio(x, x, x) if x else None)
        for name, x in zip(machine.HALVES, gains, strict=True)
    ]
    return timing.Comparison("product of two matrices", tuple(rows), believable)


ADVICE = [
    ((4.0, 4.0), 'Take "bfloat16", which'),
    ((4.0, None), 'Take "bfloat16", which'),
    ((1.0, 4.0), 'Take "float16" with'),
    ((None, 4.0), 'Take "float16" with'),
    ((1.2, 1.3), "bfloat16 and float16: no gain above 1.3 times in the product of two"),
    ((1.2, None), "bfloat16: no gain above 1.3 times"),
    ((None, None), "No advice"),
]


@pytest.mark.parametrize("kind", machine.SIZES)
@pytest.mark.parametrize("prefix", ["", "autocast, "])
@pytest.mark.parametrize(("gains", "expected"), ADVICE)
def test_advice_is_of_what_was_measured_and_of_gains_above_the_control(
    gains, expected, prefix, kind
):
    assert machine.advice(halves(*gains, prefix=prefix), kind).startswith(expected)
    noisy = halves(*gains, prefix=prefix, believable=4.5)
    assert "Take" not in machine.advice(noisy, kind)


UNITS, CPU = machine.CPU_WITH_UNITS, machine.CPU
ON_CPU = [
    (UNITS, (5.0, 0.9), "matrix units of this CPU (AMX) compute", "for tests here"),
    (CPU, (5.0, 0.9), 'Take "bfloat16"', "AMX"),
    (UNITS, (1.0, 2.0), 'Take "float16"', "AMX"),
    (UNITS, (1.0, 0.9), f"do not show with jax {jax.__version__}", "for tests here"),
    (CPU, (1.0, 0.9), "for tests here, not for speed: no matrix units", "jax 0.12"),
]


@pytest.mark.parametrize(("kind", "gains", "said", "not_said"), ON_CPU)
def test_a_cpu_gets_the_advice_that_its_matrix_units_give(kind, gains, said, not_said):
    text = machine.advice(halves(*gains), kind)
    assert said in text
    assert not_said not in text
    assert text.endswith("say nothing about an accelerator: run this there.")


@pytest.mark.parametrize("has_units", [True, False])
def test_the_units_of_a_cpu_count_where_it_is_the_device(has_units):
    assert machine.kind("gpu", has_units=has_units) == machine.ACCELERATOR
    assert machine.kind("cpu", has_units=has_units) == (UNITS if has_units else CPU)


INTEL = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8488C
flags\t\t: fpu avx512f amx_bf16 amx_tile
flags of something else\t: none

processor\t: 1
model name\t: Intel(R) Xeon(R) Platinum 8488C
flags\t\t: fpu avx512f amx_bf16 amx_tile
"""
DESCRIPTIONS = [
    (INTEL, True, "2 x Intel(R) Xeon(R) Platinum 8488C"),
    (INTEL.replace("amx_bf16", "avx512_bf16 amx_bf16x"), False, "2 x Intel(R) Xeon"),
    ("Features : fp asimd bf16\n", False, ""),
    (None, False, ""),
]


@pytest.mark.parametrize(("text", "expected", "name"), DESCRIPTIONS)
def test_matrix_units_are_those_that_linux_names(
    text, expected, name, monkeypatch, tmp_path
):
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(processor, "_DESCRIPTION", path)
    monkeypatch.setattr(processor, "_values", processor._values.__wrapped__)
    assert processor.has_bfloat16_units.__wrapped__() is expected
    assert processor.processor_name().startswith(name)


@pytest.mark.slow
def test_the_module_runs_as_a_command():
    options = {"capture_output": True, "text": True, "check": True, "timeout": 120}
    run = subprocess.run([sys.executable, "-m", "jmp_scale", "--help"], **options)
    assert "--measure" in run.stdout
