"""Every example runs, and shows what it says.

CPUs round float16 at different places, so a run leaves a plateau some steps earlier on
one than on another. What is asserted holds on all.
"""

import concurrent.futures
import contextlib
import functools
import io
import multiprocessing
import pathlib
import re
import runpy
import sys
import traceback

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
SHOWN = runpy.run_path(str(EXAMPLES.parent / "docs/outputs.py"))["shown"]()
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("[!_]*.py"))
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # Compiles quickly rather than well.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "PYTHONPATH": f"{EXAMPLES}:{EXAMPLES.parent}",
}


def main_of(script, *args):
    """What an example prints, in this process."""
    sys.argv = [script, *map(str, args)]
    sys.path[:0] = [str(EXAMPLES), str(EXAMPLES.parent)]
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        except SystemExit as end:
            return f"{out.getvalue()}{errors.getvalue()}{end.code}\n"
        except BaseException:
            raise AssertionError(traceback.format_exc()) from None
    assert "Warning" not in errors.getvalue(), errors.getvalue()
    shown = SHOWN.get(script.removesuffix(".py"))
    if shown and "--resume" not in args:
        assert words(out.getvalue()) == words(shown), out.getvalue()
    return out.getvalue()


def words(text):
    """What a page shows of a text: no numbers, paths and lines that name a file."""
    text = re.sub(r"^(figure|metrics|checkpoint): .*$", "", text, flags=re.M)
    return re.sub(r"\S*/|nan|inf|\d[\d.,]*(e[-+]\d+)?|[^\w\s]", " ", text).split()


@pytest.fixture(scope="module")
def run():
    """Calls `main_of` in another process, of which most examples share one."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)

        def process():
            context = multiprocessing.get_context("spawn")
            pool = concurrent.futures.ProcessPoolExecutor(1, context)
            return stack.enter_context(pool)

        shared = process()

        def run(script, *args):
            # Devices are chosen before JAX starts.
            alone = "import _devices" in (EXAMPLES / script).read_text()
            pool = process() if alone else shared
            return pool.submit(main_of, script, *args).result(timeout=900)

        yield run


# Nothing of the other tests is imported here: a fresh process must not start JAX.
@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_what_the_example_shows_and_steps_that_are_none_are_an_error(
    run, name
):
    text = run(name, "--help")
    assert "usage:" in text
    assert "--steps" in text
    expected = "--steps: expected a whole number of at least 1, got '0'"
    assert expected in run(name, "--steps=0")


def test_every_example_is_in_the_reading_order():
    table = (EXAMPLES / "README.md").read_text()
    assert sorted(re.findall(r"^\| \[(\w+\.py)\]\(\1\)", table, re.M)) == SCRIPTS


def columns(text, names):
    """The cells of the rows of a printed table whose first column is in `names`."""
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    return {name: cells for name, *cells in rows if name in names}


def exponent(power):
    return int(power.removeprefix("2^"))


def percent(share):
    return float(share.removesuffix("%"))


@pytest.mark.slow
def test_one_line_of_bfloat16_saves_half_of_what_is_kept_and_learns_the_same(run):
    text = run("bfloat16_equinox.py", "--steps", 60)
    rows = columns(text, ("float32", "bfloat16"))
    full, half = rows["float32"], rows["bfloat16"]
    assert (percent(full[0]), percent(half[0])) == (0, 100)
    saved = [float(cells[1].removesuffix(" MiB")) for cells in (full, half)]
    assert saved[1] < saved[0] / 2
    assert abs(percent(full[3]) - percent(half[3])) < 3


@pytest.mark.slow
def test_the_autoencoder_learns_in_float16_only_with_a_loss_scale(run, tmp_path):
    table = run("train_digits.py", "--steps", 600, "--out", tmp_path)
    names = ("float32", "float16, no scaling", "float16, dynamic")
    rows = columns(table, names)
    loss = {name: float(rows[name][0]) for name in names}
    zeros = {name: percent(rows[name][2]) for name in names}
    # 0.073 is the loss of the mean digit, which every network reaches within 30 steps.
    assert loss["float16, no scaling"] > 0.07
    assert loss["float32"] < 0.06
    assert loss["float16, dynamic"] < 0.06
    assert zeros["float16, no scaling"] > 40
    assert zeros["float32"] < zeros["float16, dynamic"] + 1 < 10
    assert exponent(rows["float16, dynamic"][3]) >= 16


@pytest.mark.slow
def test_the_textbook_gradient_is_zero_in_float16_and_right_with_a_loss_scale(run):
    names = ("float32", "float16", *(f"float16, S = 2^{n}" for n in (7, 10, 15)))
    table = columns(run("linear_regression.py"), names)
    gradient = {name: float(cells[0]) for name, cells in table.items()}
    w = {name: float(cells[1]) for name, cells in table.items()}
    assert (gradient["float16"], w["float16"]) == (0, 0)
    assert gradient["float32"] == pytest.approx(-2.031e-5, rel=1e-3)
    assert w["float32"] == pytest.approx(0.3, abs=2e-4)
    for name in names[2:]:
        assert gradient[name] == pytest.approx(-2.031e-5, rel=5e-3)
    # Descent ends where the scaled gradient vanishes in float16: the larger S, the
    # nearer to 0.3. Where exactly depends on how often w x - 0.3 x is rounded.
    assert 0.29 < w[names[2]] <= w[names[3]] <= w[names[4]] <= 0.3001
    assert w[names[4]] == pytest.approx(0.3, abs=5e-4)


@pytest.mark.slow
def test_one_nan_image_moves_s_only_where_the_cause_is_not_looked_at(run, tmp_path):
    table = run("nan_image.py", "--steps", 300, "--out", tmp_path)
    rows = columns(table, ("gradients alone", "Megatron's rule", "with the loss"))
    last = {name: exponent(cells[0]) for name, cells in rows.items()}
    assert last["gradients alone"] == 0
    assert last["Megatron's rule"] < 15
    assert last["with the loss"] == 16
    skipped = {name: int(cells[2]) for name, cells in rows.items()}
    assert 0 < skipped["with the loss"] == skipped["gradients alone"] < 30


# Arguments, and what the example prints then.
PRINTS = {
    "bfloat16_storage.py": ("--steps=30", r"8\.0 bytes a parameter\n.*; 0 arrays diff"),
    "data_parallel.py": ("--steps=20", r"(.* 2\^14 +1 +8\n){4}"),  # of all ways
    "diagnose.py": (
        "--steps=80",
        r"^verdict: Not precise enough: .* becomes zero[\s\S]*"
        r"^verdict: The loss itself is not finite[\s\S]*"
        r"^verdict: args\[1\] is not finite itself",
    ),
    "from_pytorch.py": ("--steps=100", "check_step: no problem found"),
    # An overflow of one player skips, and backs off, only that one.
    "gan.py": (
        "--steps=60 --overflow-at=20",
        r"^discriminator .* 2\^14 +1 +20\n *generator .* 2\^15 +0 +-$",
    ),
    "gaussian_process.py": ("--steps=2", r"^bfloat16, distances kept +[012](\.\d+)? %"),
    "linen_resnet.py": ("--steps=4", "BatchNorm statistics finite: True"),
    "log_metrics.py": ("--steps=100", r"metrics\.csv"),
    # The gradient is lost only without a loss scale.
    "quickstart.py": ("", r"(9\d|100)% of.* 0\n.* \d% of"),
    "resume.py": ("--steps=40", r"^0 of \d\d arrays differ in any bit"),
}


@pytest.mark.slow
@pytest.mark.parametrize("script", PRINTS)
def test_an_example_prints_what_it_shows(run, script, tmp_path):
    args, expected = PRINTS[script]
    writes = "out=True" in (EXAMPLES / script).read_text()
    out = ("--out", tmp_path) if writes else ()
    assert re.search(expected, run(script, *args.split(), *out), re.M)


@pytest.mark.slow
def test_each_loss_finds_a_scale_of_its_own_and_two_optimizers_one_that_suits_both(run):
    text = run("several_losses.py", "--steps", 600)
    rows = columns(text, ("reconstruction", "label"))
    assert exponent(rows["reconstruction"][1]) == 24
    assert exponent(rows["label"][1]) < 24
    text = run("shared_scale.py", "--steps", 600)
    shared = re.search(r"^S of both: (2\^\d+)$", text, re.M)[1]
    assert abs(exponent(shared) - exponent(rows["label"][1])) <= 2
    assert set(columns(text, ("encoder", "heads"))) == {"encoder", "heads"}


@pytest.mark.slow
def test_gradients_of_a_language_model_vanish_as_the_mean_grows(run, tmp_path):
    text = run("nnx_transformer.py", "--steps", 2, "--out", tmp_path)
    names = [f"{2**n:,}" for n in (10, 14, 17, 19, 21)]
    rows = columns(text, names)
    shares = [percent(rows[name][0]) for name in names]
    assert shares == sorted(shares)
    assert shares[0] < 0.1 < 2 < shares[-1]


@pytest.mark.slow
def test_a_run_that_diverges_goes_back_and_one_that_is_killed_takes_the_same_way(
    run, tmp_path
):
    rewind = ("rewind.py", "--steps", 400, "--out")
    text = run(*rewind, tmp_path / "straight")
    went_back = re.search(r"^the loss diverges: leaves out .*$", text, re.M)[0]
    (loss,) = columns(text, ["with rewind"])["with rewind"]
    assert float(loss) < 0.08
    assert float(columns(text, ["without"])["without"][0]) > 0.2
    killed = run(*rewind, tmp_path / "killed", "--kill-at", 300)
    resumed = run(*rewind, tmp_path / "killed", "--resume")
    assert "batch 300: resumed" in resumed
    assert went_back in killed + resumed
    assert columns(resumed, ["with rewind"])["with rewind"] == [loss]


@pytest.mark.slow
def test_a_phase_beyond_float16_is_trained_in_float32_and_left_again(run):
    text = run("precision_fallback.py", "--steps", 300)
    changes = re.findall(r"^step \d+: from (\w+) to (\w+)$", text, re.M)
    assert changes == [("float16", "float32"), ("float32", "float16")]
    rows = columns(text, ("float16 alone", "with float32"))
    right = {name: percent(cells[0]) for name, cells in rows.items()}
    assert right["float16 alone"] < 30  # 10 by chance
    assert right["with float32"] > 80


@pytest.mark.slow
def test_a_loss_without_logits_learns_the_same_in_less_memory(run):
    rows = columns(
        run("loss_without_logits.py", "--steps", 10),
        ("float32", "bfloat16", "bfloat16, in chunks", "float16, in chunks"),
    )
    losses = [float(cells[0]) for cells in rows.values()]
    assert max(losses) - min(losses) < 0.05
    memory = {name: float(cells[1].removesuffix(" MB")) for name, cells in rows.items()}
    for dtype in ("bfloat16", "float16"):
        assert memory[f"{dtype}, in chunks"] < memory["bfloat16"] / 2


# The tolerance is of the rounding of a product's result, and of that of the gradient.
@pytest.mark.parametrize(
    ("dtype", "tolerance", "options"),
    [
        ("float32", 2e-6, {"z_loss": 0.1}),
        ("bfloat16", 2e-2, {"soft_cap": 3.0}),
        pytest.param("float16", 2e-3, {}, marks=pytest.mark.slow),
    ],
)
def test_a_loss_without_logits_has_the_value_and_gradients_of_the_plain_one(
    dtype, tolerance, options, monkeypatch
):
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jmp_scale

    monkeypatch.syspath_prepend(EXAMPLES)
    from _loss_without_logits import losses_of_rows, summed_loss

    rng = np.random.RandomState(0)
    h, head = rng.normal(size=(32, 24)), rng.normal(size=(24, 400))
    labels = rng.randint(0, 400, 32)
    labels[[3, 17, 30]] = -1
    # So small that float16 has no gradient of the logits without a loss scale.
    weights = jnp.float32(rng.uniform(size=32) * 1e-9)

    def reference(h, head, weights):
        """In float64, of the formulas."""
        z_loss, soft_cap = options.get("z_loss", 0), options.get("soft_cap")
        logits = h @ head
        if soft_cap:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        log_sums = jnp.log(jnp.sum(jnp.exp(logits), axis=1))
        losses = log_sums - logits[np.arange(32), labels] + z_loss * log_sums**2
        return jnp.sum(losses * weights * (labels >= 0))

    losses_of = functools.partial(losses_of_rows, **options)

    def loss(h, head, weights):
        return summed_loss(h, head, jnp.asarray(labels), weights, losses_of)

    with jax.enable_x64(True):
        expected = jax.value_and_grad(reference, (0, 1, 2))(
            h, head, np.float64(weights)
        )
        expected = jax.tree.map(np.asarray, expected)
    half_loss = loss if dtype == "float32" else jmp_scale.autocast(loss, dtype)
    value_and_grad = jmp_scale.value_and_grad(
        half_loss, jmp_scale.StaticLossScale(2.0**15), argnums=(0, 1, 2)
    )
    value, grads = jax.jit(value_and_grad)(jnp.float32(h), jnp.float32(head), weights)
    assert {g.dtype for g in grads} == {np.dtype("float32")}
    for found, exact in zip((value, *grads), (expected[0], *expected[1]), strict=True):
        error = np.linalg.norm(np.float64(found) - exact) / np.linalg.norm(exact)
        assert error < tolerance


# Science: what they show, and the spread over seeds.
DTYPES = ("float32", "bfloat16", "float16", "float16, dynamic", "float16, cap of 2^40")


@pytest.mark.slow
def test_a_differential_equation_needs_loss_scaling_in_float16(run):
    rows = columns(run("pinn.py"), DTYPES)
    errors = {name: list(map(float, cells[:3])) for name, cells in rows.items()}
    assert all(least <= mid <= largest for mid, least, largest in errors.values())
    median = {name: values[0] for name, values in errors.items()}
    for name in ("float16, dynamic", "float16, cap of 2^40"):
        assert median[name] < 2 * median["float32"]
        assert median[name] < median["float16"] / 2
    assert [rows[name][3:] for name in DTYPES[:3]] == [["2^0", "0"]] * 3
    assert rows["float16, dynamic"][3:] == ["2^24", "0"]
    assert exponent(rows["float16, cap of 2^40"][3]) > 24


@pytest.mark.slow
def test_sampling_and_learning_differ_by_the_digits_of_the_dtype(run):
    rows = columns(run("policy_gradient.py", "--steps", 100, "--seeds", 2), DTYPES)
    mismatch = {name: float(cells[0]) for name, cells in rows.items()}
    assert mismatch["float32"] < 1e-5
    assert 1e-4 < mismatch["float16"] < 2e-3
    assert 3 < mismatch["bfloat16"] / mismatch["float16"] < 20  # three bits are 8
