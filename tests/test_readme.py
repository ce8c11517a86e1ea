"""What the README says works, and is where a newcomer looks for it."""

import pathlib
import re
import tomllib

import jax
import jax.numpy as jnp
import optax

import jmp_scale

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BLOCKS = {
    name: (language, code)
    for name, language, code in re.findall(
        r"<!-- block: (\w+) -->\n```(\w+)\n(.*?)```", README, re.DOTALL
    )
}
PROGRAM = BLOCKS["float16"][1]


def test_one_page_has_its_install_line_on_the_first_screen():
    assert len(README.splitlines()) <= 115
    assert len(BLOCKS) == README.count("```") // 2
    assert list(BLOCKS) == ["install", "bfloat16", "float16", "main", "tests"]
    lines = README.partition("<!-- block: install -->")[0].splitlines()
    assert len(lines) < 12
    address = PROJECT["project"]["urls"]["Repository"]
    released = "/OWNER/" not in address  # .ci/release has run
    install = 'pip install "jmp_scale[flax]"' if released else f"git clone {address} "
    assert README.count(install) == BLOCKS["install"][1].count(install) == 1
    assert "python -m jmp_scale" in BLOCKS["install"][1]


def test_bfloat16_takes_one_line_and_float16_four():
    assert re.findall("^[+-]", BLOCKS["bfloat16"][1], re.MULTILINE) == ["-", "+"]
    told = re.findall("# (added|was|value=loss is added)", PROGRAM)
    assert told == ["added", "was", "was", "value=loss is added"]


def diff_of(name, without):
    """A diff as it stands afterwards (without="-"), or before (without="+")."""
    lines = BLOCKS[name][1].splitlines()
    return "\n".join(line[1:] for line in lines if not line.startswith(without))


def step_of(program):
    """The lines that make a step, for a loss of the test's own."""
    return program[program.index("tx = ") :].partition("\nx = ")[0]


def loss_fn(params, x):
    """A reader's float32 program: ten sigmoid layers, whose gradients shrink."""
    h = x
    for w in params:
        h = jax.nn.sigmoid(h @ w)
    return jnp.mean((h - x) ** 2)


def reader():
    """The names of a reader's program."""
    *keys, key = jax.random.split(jax.random.key(0), 11)
    params = [jax.random.normal(key, (32, 32)) / 6 for key in keys]
    names = {"jax": jax, "jmp_scale": jmp_scale, "optax": optax, "loss_fn": loss_fn}
    return names | {"params": params, "batch": jax.random.uniform(key, (256, 32))}


def lost(grads):
    return float(jnp.mean(grads[0] == 0))


def test_the_line_of_bfloat16_gives_float32_gradients_and_loses_none(ranks_promote):
    names = reader()
    exec(diff_of("bfloat16", without="-"), names)
    assert {grad.dtype for grad in names["grads"]} == {jnp.dtype("float32")}
    assert lost(names["grads"]) < 0.1


def test_the_step_of_float16_keeps_gradients_and_skips_an_overflow(ranks_promote):
    names = reader()
    params, batch = names["params"], names["batch"]
    (half_loss,) = re.findall(r"^half_loss = .*$", PROGRAM, re.MULTILINE)
    exec(f"{half_loss}\n{step_of(PROGRAM)}", names)
    grads = jax.jit(lambda s: jmp_scale.grad(names["half_loss"], s)(params, batch))
    opt_state = names["tx"].init(params)
    # The CPU decides where float16 is rounded, and so the last percents.
    assert lost(grads(jmp_scale.NoOpLossScale())) > 0.9
    assert lost(grads(opt_state.loss_scale)) < 0.1
    kept, opt_state, _ = names["train_step"](params, opt_state, batch * jnp.inf)
    assert opt_state.skipped == 1
    assert all((a == b).all() for a, b in zip(kept, params, strict=True))


def test_what_stood_there_before_is_a_loop_that_runs(ranks_promote):
    before = reader()
    del before["jmp_scale"]
    exec(diff_of("bfloat16", without="+"), before)
    program = re.sub(r"= .*  # was (.*)$", r"= \1", PROGRAM, flags=re.MULTILINE)
    exec(step_of(program.replace(", value=loss)", ")")), before)
    params, batch = before["params"], before["batch"]
    opt_state = before["tx"].init(params)
    updated, _, loss = before["train_step"](params, opt_state, batch)
    assert loss == before["loss"]
    assert not (updated[-1] == params[-1]).all()


def test_summary_and_keywords_say_what_the_readme_says():
    project = PROJECT["project"]
    assert project["description"] == README.splitlines()[2]
    keywords = f"\nkeywords: [{', '.join(project['keywords'])}]\n"
    assert keywords in (ROOT / "CITATION.cff").read_text()
    assert {"autocast", "amp", "bfloat16", "loss scaling"} <= {*project["keywords"]}


def test_links_of_the_readme_are_absolute_on_a_package_index():
    shown, hooks = README, PROJECT["tool"]["hatch"]["metadata"]["hooks"]
    for rule in hooks["fancy-pypi-readme"]["substitutions"]:
        shown = re.sub(rule["pattern"], rule["replacement"], shown)
    links = re.findall(r"\]\(([^)]+)\)", shown) + re.findall(r'src="(.*?)"', shown)
    assert len(links) > 10
    assert all(link.startswith("https://") for link in links)
