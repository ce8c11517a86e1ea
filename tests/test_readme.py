"""What the README says works, and is where a newcomer looks for it."""

import code
import pathlib
import re
import tomllib

import jax
import jax.numpy as jnp
import pytest

from jmp_scale.diagnostics import precision_report

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = {
    name: (language, code)
    for name, language, code in re.findall(
        r"<!-- block: (\w+) -->\n```(\w+)\n(.*?)```", README, re.DOTALL
    )
}


def test_every_block_of_the_readme_has_a_name():
    languages = [language for language, _ in BLOCKS.values()]
    assert len(BLOCKS) == README.count("```") // 2
    assert set(languages) == {"bash", "python"}


def test_the_first_two_commands_are_two_command_lines():
    commands = [code for language, code in BLOCKS.values() if language == "bash"]
    assert [command.strip().count("\n") for command in commands] == [0, 0]
    assert "examples/train_digits.py" in commands[0]
    assert commands[1].strip().endswith("pytest")


def test_the_readme_is_one_screen_and_a_half():
    assert len(README.splitlines()) <= 125
    assert len(README.split()) <= 1100


def test_the_train_step_stands_within_forty_lines():
    assert "apply_updates" in "\n".join(README.splitlines()[:40])


def run(name):
    """The names that a block leaves, pasted into an empty program."""
    namespace = {"__name__": "__main__"}
    with jax.numpy_rank_promotion("allow"):  # as in a reader's program
        exec(BLOCKS[name][1], namespace)
    return namespace


def test_the_first_block_keeps_gradients_skips_an_overflow_and_breaks_no_rule(capsys):
    names = run("quickstart")
    without, with_ = re.findall(r"(\d+)% of", capsys.readouterr().out)
    # The CPU decides where float16 is rounded, and so the last percents.
    assert int(without) > 90
    assert int(with_) < 10
    assert names["train_step"]._cache_size() == 1
    params, opt_state, x = names["params"], names["opt_state"], names["x"]
    assert opt_state.skipped < 5
    kept, skipped, *_ = names["train_step"](params, opt_state, x * jnp.inf)
    assert skipped.skipped == opt_state.skipped + 1
    assert all((a == b).all() for a, b in zip(kept, params, strict=True))
    report = precision_report(names["half_loss"], params, x)
    assert {finding.severity for finding in report.findings} <= {"note"}


def test_the_linen_lines_of_the_readme_train_a_model():
    state = run("linen")["state"]
    assert state.step == 1
    assert (state.batch_stats["layers_1"]["mean"] != 0).all()


def test_the_nnx_lines_of_the_readme_train_a_model():
    assert run("nnx")["optimizer"].step[...] == 1


def test_summary_and_keywords_say_what_the_readme_says():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["description"] == README.splitlines()[2]
    keywords = f"\nkeywords: [{', '.join(project['keywords'])}]\n"
    assert keywords in (ROOT / "CITATION.cff").read_text()
    assert {"autocast", "amp", "bfloat16", "loss scaling"} <= {*project["keywords"]}


@pytest.mark.parametrize("name", ["quickstart", "linen", "nnx"])
def test_the_code_of_the_readme_can_be_pasted_into_the_prompt(name):
    prompt, errors = code.InteractiveConsole(), []
    prompt.runcode = lambda _: None  # parsed, as up to Python 3.12: a line at a time
    prompt.showsyntaxerror = lambda *_, **__: errors.append(prompt.buffer)
    waits = [prompt.push(line) for line in [*BLOCKS[name][1].splitlines(), ""]]
    assert not errors
    assert not waits[-1]


def test_links_of_the_readme_are_absolute_on_a_package_index():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    shown = README
    for rule in tools["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"][
        "substitutions"
    ]:
        shown = re.sub(rule["pattern"], rule["replacement"], shown)
    links = re.findall(r"\]\(([^)]+)\)", shown)
    assert len(links) > 10
    assert all(link.startswith("https://") for link in links)


@pytest.mark.parametrize("name", ["quickstart", "linen", "nnx"])
def test_the_code_of_the_readme_fits_a_line_of_88(name):
    assert max(map(len, BLOCKS[name][1].splitlines())) <= 88
