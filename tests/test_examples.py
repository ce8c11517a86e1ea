"""Every example runs, and shows what it says."""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(
    path.name for path in EXAMPLES.glob("*.py") if "def main" in path.read_text()
)


def run(script, *args, timeout=300):
    """What an example prints, run as a user runs it, but that it compiles quickly rather than well."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": str(EXAMPLES.parent),
    }
    command = [sys.executable, str(EXAMPLES / script), *map(str, args)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@functools.cache
def refusals_and_helps():
    """What every example prints for --help, and for a wrong --steps, from one process: each imports JAX."""
    code = (
        "import contextlib, io, json, runpy, sys\n"
        "texts = {}\n"
        "for path in sys.argv[1:]:\n"
        "    main = runpy.run_path(path)['main']\n"
        "    for arguments in ('--help', '--steps=0', '--steps=-3', '--steps=many'):\n"
        "        out = io.StringIO()\n"
        "        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):\n"
        "            try:\n"
        "                main([arguments])\n"
        "            except SystemExit:\n"
        "                texts[path.rsplit('/', 1)[1] + ' ' + arguments] = out.getvalue()\n"
        "print(json.dumps(texts))\n"
    )
    paths = [str(EXAMPLES / script) for script in SCRIPTS]
    environment = os.environ | {"PYTHONPATH": f"{EXAMPLES}:{EXAMPLES.parent}"}
    command = [sys.executable, "-c", code, *paths]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_the_example_shows(script):
    text = refusals_and_helps()[f"{script} --help"]
    assert "usage:" in text
    assert "--steps" in text


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("steps", ["0", "-3", "many"])
def test_a_wrong_number_of_steps_is_a_clear_error(script, steps):
    text = refusals_and_helps()[f"{script} --steps={steps}"]
    assert re.search(
        r"argument --steps: expected a whole number of at least 1, got '?" + steps, text
    ), text


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_autoencoder_learns_in_float16_only_with_a_loss_scale(seed, tmp_path):
    table = run("train_digits.py", "--steps", 800, "--seed", seed, "--out", tmp_path)
    rows = dict(
        re.findall(r"^(float\S+(?:, [a-z ]+?)?)\s{2,}(0\.\d+)", table, re.MULTILINE)
    )
    losses = {name: float(loss) for name, loss in rows.items()}
    assert losses["float32"] < 0.055
    assert losses["float16, no scaling"] > 0.070
    assert losses["float16, dynamic"] < 0.055
    assert (tmp_path / "train_digits.png").stat().st_size > 20_000


def test_the_textbook_gradient_is_zero_in_float16_and_right_with_a_loss_scale():
    rows = re.findall(
        r"^(float\S+(?:, S = 2\^\d+)?) +(\S+) +(\d\.\d+)$",
        run("linear_regression.py"),
        re.M,
    )
    table = {name: (float(gradient), float(w)) for name, gradient, w in rows}
    assert table["float32"] == (
        pytest.approx(-2.031e-5, rel=1e-3),
        pytest.approx(0.3, abs=2e-4),
    )
    assert table["float16"] == (0.0, 0.0)
    scaled = {
        "float16, S = 2^7": 0.2953,
        "float16, S = 2^10": 0.2995,
        "float16, S = 2^15": 0.2999,
    }
    for name, w in scaled.items():
        assert table[name] == (
            pytest.approx(-2.03e-5, rel=3e-3),
            pytest.approx(w, abs=1e-4),
        )


def test_one_nan_image_moves_s_only_where_the_cause_is_not_looked_at(tmp_path):
    table = run("nan_image.py", "--steps", 300, "--out", tmp_path)
    row = r"^(\w.*?) +2\^(\d+) +2\^(\d+) +(\d+) +(\d+) "
    rows = {
        name: list(map(int, numbers))
        for name, *numbers in re.findall(row, table, re.MULTILINE)
    }
    skipped = {name: numbers[2] for name, numbers in rows.items()}
    assert rows["gradients alone"][0] == 0
    assert rows["Megatron's rule"][0] < 15
    assert rows["cause-aware"][:2] == [16, 15]
    assert 0 < skipped["cause-aware"] == skipped["gradients alone"] < 30
    assert rows["cause-aware, NaN model"] == [15, 15, 300, 300]
    assert (tmp_path / "nan_image.png").stat().st_size > 20_000


def test_an_overflow_of_one_player_skips_and_backs_off_only_that_one(tmp_path):
    table = run("gan.py", "--steps", 60, "--overflow-at", 20, "--out", tmp_path)
    row = r"^(generator|discriminator) +(\d\.\d+) +2\^(\d+) +(\d+)  (.*)$"
    rows = {name: rest for name, *rest in re.findall(row, table, re.MULTILINE)}
    assert rows["discriminator"][1:] == ["14", "1", "20"]
    assert rows["generator"][1:] == ["15", "0", "-"]
    assert (tmp_path / "gan.png").stat().st_size > 10_000


def test_each_loss_finds_a_scale_of_its_own():
    table = run("several_losses.py", "--steps", 600)
    powers = {
        name: int(power)
        for name, power in re.findall(r"(\w+) S +2\^(\d+)$", table, re.MULTILINE)
    }
    assert powers["reconstruction"] == 24
    assert powers["label"] < 24
    assert abs(powers["shared"] - powers["label"]) <= 1


def test_each_run_that_goes_wrong_is_explained(tmp_path):
    text = run("diagnose.py", "--steps", 80, "--out", tmp_path)
    assert re.search(
        r"^verdict: Loss scales from 2\^1\d to 2\^2\d work", text, re.MULTILINE
    )
    assert "The loss scale is stuck at its floor of 2^0" in text
    assert re.search(
        r"^verdict: The loss itself is not finite",
        text,
        re.MULTILINE,
    )
    assert "most of them since the loss itself was not finite" in text
    assert re.search(r"^verdict: args\[1\] is not finite itself", text, re.MULTILINE)
    assert (tmp_path / "diagnose.png").stat().st_size > 20_000


def test_the_logged_metrics_are_one_row_a_step(tmp_path):
    run("log_metrics.py", "--steps", 120, "--out", tmp_path)
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert set(header.split(",")) >= {
        "step",
        "loss",
        "loss_scale",
        "skipped",
        "grad_norm",
    }
    assert [row.split(",")[0] for row in rows] == [str(step) for step in range(120)]


def test_a_skipped_step_leaves_the_statistics_of_a_resnet_finite(tmp_path):
    text = run("linen_resnet.py", "--steps", 4, "--out", tmp_path)
    skipped = [
        int(row)
        for row in re.findall(
            r"^ +\d+ +\d\.\d+ +\d\.\d+ +\d+ +(\d+)$", text, re.MULTILINE
        )
    ]
    assert skipped[-1] > 0
    assert "BatchNorm statistics finite: True" in text


def test_gradients_of_a_language_model_vanish_as_the_mean_grows(tmp_path):
    text = run("nnx_transformer.py", "--steps", 2, "--out", tmp_path)
    shares = [
        float(share)
        for share in re.findall(r"^ +[\d,]+ +(\d+\.\d)% +\d+\.\d%$", text, re.MULTILINE)
    ]
    assert shares == sorted(shares)
    assert shares[0] == 0 < 2 < shares[-1]


def test_a_resumed_run_is_bit_identical(tmp_path):
    text = run("resume.py", "--steps", 40, "--out", tmp_path)
    assert re.search(r"^0 of \d\d arrays differ in any bit", text, re.MULTILINE)


def test_four_ways_of_sharding_take_the_same_decisions():
    text = run("data_parallel.py", "--steps", 20)
    rows = re.findall(
        r"^(pmap|jit, .*?|shard_map) +\d+\.\d+ +(2\^\d+) +(\d+) +(\d+) ",
        text,
        re.MULTILINE,
    )
    assert [row[1:] for row in rows] == [("2^14", "1", "8")] * 4
