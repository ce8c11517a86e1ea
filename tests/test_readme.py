"""What the README says works, and is where a newcomer looks for it."""

import pathlib
import re
import tomllib

import jax
import jax.numpy as jnp
import optax
import pytest

import jmp_scale
from jmp_scale.diagnostics import check_step, precision_report

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = {
    name: (language, code)
    for name, language, code in re.findall(
        r"<!-- block: (\w+) -->\n```(\w+)\n(.*?)```", README, re.DOTALL
    )
}


def test_one_page_has_its_install_line_on_the_first_screen():
    assert len(README.splitlines()) <= 115
    assert len(BLOCKS) == README.count("```") // 2
    assert list(BLOCKS) == ["install", "bfloat16", "float16", "main", "tests"]
    lines = README.partition("<!-- block: install -->")[0].splitlines()
    assert len(lines) < 12
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    address = project["urls"]["Repository"]
    released = "/OWNER/" not in address  # .ci/release has run
    install = 'pip install "jmp_scale[flax]"' if released else f"git clone {address} "
    assert README.count(install) == BLOCKS["install"][1].count(install) == 1
    assert "python -m jmp_scale" in BLOCKS["install"][1]


def test_bfloat16_takes_one_line_and_float16_four():
    assert re.findall("^[+-]", BLOCKS["bfloat16"][1], re.MULTILINE) == ["-", "+"]
    told = re.findall("# (added|was|value=loss is added)", PROGRAM)
    assert told == ["added", "was", "was", "value=loss is added"]
    assert "takes one line" in README
    assert "takes four" in README


PROGRAM = BLOCKS["float16"][1]


def diff_of(name, without):
    """A diff as it stands afterwards (without="-"), or before (without="+")."""
    lines = BLOCKS[name][1].splitlines()
    return "\n".join(line[1:] for line in lines if not line.startswith(without))


def step_of(program):
    """The lines of the program that make a step, for a loss of the test's own."""
    return program[program.index("tx = ") :].partition("\nx = ")[0]


def loss_fn(params, x):
    """A reader's float32 program: ten sigmoid layers, whose gradients shrink."""
    h = x
    for w in params:
        h = jax.nn.sigmoid(h @ w)
    return jnp.mean((h - x) ** 2)


@pytest.fixture(scope="module")
def names():
    """The names that the blocks leave, one after the other, in a reader's program."""
    *keys, key = jax.random.split(jax.random.key(0), 11)
    params = [jax.random.normal(key, (32, 32)) / 6 for key in keys]
    batch = jax.random.uniform(key, (256, 32))
    names = {"loss_fn": loss_fn, "params": params, "batch": batch}
    names |= {"jax": jax, "jmp_scale": jmp_scale, "optax": optax}
    with jax.numpy_rank_promotion("allow"):  # as in a reader's program
        exec(diff_of("bfloat16", without="-"), names)
        names["bfloat16_grads"] = names["grads"]
        (half_loss,) = re.findall(r"^half_loss = .*$", PROGRAM, re.MULTILINE)
        exec(f"{half_loss}\n{step_of(PROGRAM)}", names)
    return names


def lost(grads):
    return float(jnp.mean(grads[0] == 0))


def test_the_line_of_bfloat16_gives_float32_gradients_and_loses_none(names):
    grads = names["bfloat16_grads"]
    assert {grad.dtype for grad in grads} == {jnp.dtype("float32")}
    assert lost(grads) < 0.1
    report = precision_report(
        jmp_scale.autocast(loss_fn, "bfloat16"), names["params"], names["batch"]
    )
    assert not report.findings


def test_the_step_of_float16_keeps_gradients_and_skips_an_overflow(names):
    params, batch, half_loss = names["params"], names["batch"], names["half_loss"]
    grads = jax.jit(lambda s, *args: jmp_scale.grad(half_loss, s)(*args))
    # The CPU decides where float16 is rounded, and so the last percents.
    assert lost(grads(jmp_scale.NoOpLossScale(), params, batch)) > 0.9
    opt_state = names["tx"].init(params)
    for _ in range(5):
        params, opt_state, loss = names["train_step"](params, opt_state, batch)
    assert lost(grads(opt_state.loss_scale, params, batch)) < 0.1
    assert opt_state.skipped < 5
    assert jnp.isfinite(loss)
    kept, skipped, _ = names["train_step"](params, opt_state, batch * jnp.inf)
    assert skipped.skipped == opt_state.skipped + 1
    assert all((a == b).all() for a, b in zip(kept, params, strict=True))
    assert names["train_step"]._cache_size() == 1
    found = check_step(names["train_step"], params, opt_state, batch)
    assert not found.findings, str(found)
    report = precision_report(half_loss, params, batch)
    assert report.ok, str(report)


def test_the_program_of_float16_learns(capsys):
    names = {}
    exec(PROGRAM, names)
    zeros = jax.tree.map(jnp.zeros_like, names["params"])
    assert names["loss"] < names["loss_fn"](zeros, names["x"]) / 2
    printed, scale = capsys.readouterr().out.split()
    shown, scale_shown = re.findall(r"^print\(.*  # (.*) (.*)$", PROGRAM, re.M)[0]
    assert scale == scale_shown
    assert float(printed) == pytest.approx(float(shown), rel=0.1)  # CPUs differ


def test_what_stood_there_before_is_a_loop_that_runs(names):
    before = {name: names[name] for name in ("loss_fn", "params", "batch")}
    before |= {"jax": jax, "optax": optax}
    exec(diff_of("bfloat16", without="+"), before)
    program = re.sub(r"= .*  # was (.*)$", r"= \1", PROGRAM, flags=re.MULTILINE)
    exec(step_of(program.replace(", value=loss)", ")")), before)
    opt_state = before["tx"].init(before["params"])
    step = before["train_step"]
    params, _, loss = step(before["params"], opt_state, before["batch"])
    assert loss == before["loss"]
    assert not (params[-1] == before["params"][-1]).all()


def test_summary_and_keywords_say_what_the_readme_says():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["description"] == README.splitlines()[2]
    keywords = f"\nkeywords: [{', '.join(project['keywords'])}]\n"
    assert keywords in (ROOT / "CITATION.cff").read_text()
    assert {"autocast", "amp", "bfloat16", "loss scaling"} <= {*project["keywords"]}


def test_links_of_the_readme_are_absolute_on_a_package_index():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    shown = README
    page = tools["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for rule in page["substitutions"]:
        shown = re.sub(rule["pattern"], rule["replacement"], shown)
    links = re.findall(r"\]\(([^)]+)\)", shown) + re.findall(r'src="(.*?)"', shown)
    assert len(links) > 10
    assert all(link.startswith("https://") for link in links)
