"""The plan of a program, as a script of the page on how it works prints it."""

import inspect
import pathlib
import re
import runpy

import jax.numpy as jnp
import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "print_plan.py"))
plan_text = SCRIPT["plan_text"]


@pytest.mark.usefixtures("ranks_promote")
def test_the_page_shows_the_program_and_what_is_printed(capsys):
    section = (DOCS / "how-it-works.md").read_text().partition("## A plan, printed")[2]
    code, wanted = re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)[:2]
    SCRIPT["main"]()
    assert capsys.readouterr().out == wanted
    assert inspect.getsource(SCRIPT["attention"]) == code


def test_results_of_products_are_kept_and_cheap_values_made_again():
    def f(w, x):
        return jnp.sum(jnp.tanh(x @ w) @ w)

    assert plan_text(f, jnp.ones((4, 4)), jnp.ones((8, 4))).splitlines() == [
        "0 arguments: a[4, 4], b[8, 4]",
        "1 half:",
        "    c[8, 4] = dot_general of b, a",
        "2 half: tanh",
        "    e[8, 4] = dot_general of d, a",
        "    keeps in half: c[8, 4]",
        "    makes again: d[8, 4]",
        "3 half: reduce_sum",
        "    keeps: f[]",
        "results: f",
    ]


def test_units_that_stay_as_traced_say_what_they_make():
    def f(w, x):
        return jnp.sort(jnp.argsort(x) @ w)

    lines = plan_text(f, jnp.ones((4, 4)), jnp.ones(4)).splitlines()
    assert lines[0] == "0 arguments: a[4, 4], b[4]"
    kinds = [line for line in lines if line[0].isdigit()][1:]
    assert {kind.split()[1] for kind in kinds} == {"other:"}
    assert lines[-1] == f"results: {lines[-2].split()[0].partition('[')[0]}"
    assert lines[-2].startswith("    ")


def test_variables_beyond_the_alphabet_have_two_letters():
    text = plan_text(lambda *xs: sum(xs), *[jnp.ones(2)] * 28)
    assert text.splitlines()[0].endswith("z[2], aa[2], ab[2]")
