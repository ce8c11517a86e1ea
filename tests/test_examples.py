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

# Neither `helpers` nor another test file: a fresh process must not start JAX.
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_scale

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
def run(tmp_path_factory):
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
            source = (EXAMPLES / script).read_text()
            if "out=True" in source and "--out" not in args:
                args += ("--out", tmp_path_factory.mktemp("out"))
            # Devices are chosen before JAX starts.
            pool = process() if "import _devices" in source else shared
            return pool.submit(main_of, script, *args).result(timeout=900)

        yield run


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


def test_every_example_is_in_the_reading_order_and_on_the_page_of_examples():
    table = (EXAMPLES / "README.md").read_text()
    assert sorted(re.findall(r"^\| \[(\w+\.py)\]\(\1\)", table, re.M)) == SCRIPTS
    page = (EXAMPLES.parent / "docs/examples.md").read_text()
    assert {*re.findall(r"`(\w+\.py)`", page)} == {*SCRIPTS}
    assert {*re.findall(r"^\[The program\]\(.*/(.*)\)$", page, re.M)} == {*SCRIPTS}


def number(cell):
    """Of a cell: `2^14` is 14, and units do not count."""
    return float(re.search(r"(?:2\^)?(-?[\d.]+(?:e-?\d+)?)", cell)[1])


def columns(text, names):
    """The numbers in the rows of a table, those whose first column is in `names`."""
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    return {
        name: [number(cell) for cell in cells if re.search(r"\d", cell)]
        for name, *cells in rows
        if name in names
    }


# Arguments; and rows, with the least and largest number in a column. These hold
# whatever a CPU rounds: a loss of 0.073 is that of the mean digit, and 0.3 the true w.
# For a policy's gradient three bits are a factor of 8.
TABLES = """
bfloat16_equinox.py --steps=60
    float32 | 0: 0 to 0
    bfloat16 | 0: 100 to 100 | 1: 0 to 10
linear_regression.py
    float32 | 0: -2.032e-05 to -2.03e-05 | 1: 0.2998 to 0.3002
    float16 | 0: 0 to 0 | 1: 0 to 0
    float16, S = 2^7 | 0: -2.05e-05 to -2.02e-05 | 1: 0.29 to 0.2999
    float16, S = 2^10 | 0: -2.05e-05 to -2.02e-05
    float16, S = 2^15 | 0: -2.05e-05 to -2.02e-05 | 1: 0.2995 to 0.3001
loss_without_logits.py --steps=10
    bfloat16 | 1: 20 to 99
    bfloat16, in chunks | 1: 0 to 10
    float16, in chunks | 1: 0 to 10
nan_image.py --steps=300
    gradients alone | 0: 0 to 0
    Megatron's rule | 0: 0 to 14
    with the loss | 0: 16 to 16 | 2: 1 to 29
nnx_transformer.py --steps=2
    1,024 | 0: 0 to 0.1
    2,097,152 | 0: 2 to 100
pinn.py
    float32 | 0: 0 to 0.01
    float16 | 0: 0.01 to 0.1
    float16, dynamic | 0: 0 to 0.01 | 3: 24 to 24
    float16, cap of 2^40 | 3: 25 to 40
policy_gradient.py --steps=100 --seeds=2
    float32 | 0: 0 to 1e-05
    float16 | 0: 0.0001 to 0.002
    bfloat16 | 0: 0.001 to 0.02
precision_fallback.py --steps=300
    float16 alone | 0: 0 to 30
    with float32 | 0: 80 to 100
several_losses.py --steps=600
    reconstruction | 1: 24 to 24
    label | 1: 0 to 23
train_digits.py --steps=600
    float32 | 0: 0 to 0.06
    float16, no scaling | 0: 0.07 to 0.08 | 2: 40 to 100
    float16, dynamic | 0: 0 to 0.06 | 2: 0 to 10 | 3: 16 to 24
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "args", "bounds"),
    re.findall(r"^(\w.*py) ?(.*)\n((?: .*\n)+)", TABLES, re.M),
)
def test_a_table_shows_what_the_example_is_for(run, script, args, bounds):
    bounds = [line.strip().split(" | ") for line in bounds.splitlines()]
    text = run(script, *args.split())
    rows = columns(text, {name for name, *_ in bounds})
    for name, *ranges in bounds:
        for column, least, largest in (re.split(": | to ", each) for each in ranges):
            shown = rows[name][int(column)]
            assert float(least) <= shown <= float(largest), f"{name}: {text}"


# Arguments, and what the example prints then, beside the words that its page shows.
PRINTS = {
    "bfloat16_storage.py": ("--steps=30", r"8\.0 bytes a parameter\n.*; 0 arrays diff"),
    "data_parallel.py": ("--steps=20", r"(.* 2\^14 +1 +8\n){4}"),  # of all ways
    "diagnose.py": ("--steps=80", r"^error \[argument not finite\] args\[1\]"),
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
    "shared_scale.py": ("--steps=600", r"^S of both: 2\^(1[5-9]|2\d)$"),
    "resume.py": ("--steps=40", r"^0 of \d\d arrays differ in any bit"),
}


@pytest.mark.slow
@pytest.mark.parametrize("script", PRINTS)
def test_an_example_prints_what_it_shows(run, script):
    args, expected = PRINTS[script]
    assert re.search(expected, run(script, *args.split()), re.M)


@pytest.mark.slow
def test_a_run_that_diverges_goes_back_and_one_that_is_killed_takes_the_same_way(
    run, tmp_path
):
    rewind = ("rewind.py", "--steps", 400, "--out")
    text = run(*rewind, tmp_path / "straight")
    went_back = re.search(r"^the loss diverges: leaves out .*$", text, re.M)[0]
    rows = columns(text, ["with rewind", "without"])
    assert rows["with rewind"][0] < 0.08 < 0.2 < rows["without"][0]
    killed = run(*rewind, tmp_path / "killed", "--kill-at", 300)
    resumed = run(*rewind, tmp_path / "killed", "--resume")
    assert "batch 300: resumed" in resumed
    assert went_back in killed + resumed
    assert columns(resumed, ["with rewind"])["with rewind"] == rows["with rewind"]


# The tolerance is of the rounding of a product's result, and of that of the gradient.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance", "options"),
    [
        ("float32", 2e-6, {"z_loss": 0.1}),
        ("bfloat16", 2e-2, {"soft_cap": 3.0}),
        ("float16", 2e-3, {}),
    ],
)
def test_a_loss_without_logits_has_the_value_and_gradients_of_the_plain_one(
    dtype, tolerance, options, monkeypatch
):
    monkeypatch.syspath_prepend(EXAMPLES)
    from _loss_without_logits import losses_of_rows, summed_loss

    rng = np.random.RandomState(0)
    h, head = rng.normal(size=(32, 24)), rng.normal(size=(24, 400))
    labels = rng.randint(0, 400, 32)
    labels[[3, 17, 30]] = -1
    # So small that float16 has no gradient of the logits without a loss scale.
    weights = jnp.float32(rng.uniform(size=32) * 1e-9)

    def reference(h, head, weights, z_loss=0.0, soft_cap=None):
        """In float64, of the formulas."""
        logits = h @ head
        if soft_cap:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        log_sums = jnp.log(jnp.sum(jnp.exp(logits), axis=1))
        losses = log_sums - logits[np.arange(32), labels] + z_loss * log_sums**2
        return jnp.sum(losses * weights * (labels >= 0))

    def loss(h, head, weights):
        losses_of = functools.partial(losses_of_rows, **options)
        return summed_loss(h, head, jnp.asarray(labels), weights, losses_of)

    with jax.enable_x64(True):
        exact = jax.value_and_grad(functools.partial(reference, **options), (0, 1, 2))
        value, grads = exact(h, head, np.float64(weights))
        expected = [np.asarray(x) for x in (value, *grads)]
    half_loss = loss if dtype == "float32" else jmp_scale.autocast(loss, dtype)
    value_and_grad = jmp_scale.value_and_grad(
        half_loss, jmp_scale.StaticLossScale(2.0**15), argnums=(0, 1, 2)
    )
    value, grads = jax.jit(value_and_grad)(jnp.float32(h), jnp.float32(head), weights)
    assert {g.dtype for g in grads} == {np.dtype("float32")}
    for found, right in zip((value, *grads), expected, strict=True):
        error = np.linalg.norm(np.float64(found) - right)
        assert error < tolerance * np.linalg.norm(right)
