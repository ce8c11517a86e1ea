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


def test_units_that_stay_as_traced_say_what_they_make():
    def f(w, x):
        return jnp.sort(jnp.argsort(x) @ w)

    lines = plan_text(f, jnp.ones((4, 4)), jnp.ones(4)).splitlines()
    assert lines[0] == "0 arguments: a[4, 4], b[4]"
    kinds = [line for line in lines if line[0].isdigit()][1:]
    assert {kind.split()[1] for kind in kinds} == {"other:"}
    assert lines[-1] == f"results: {lines[-2].split()[0].partition('[')[0]}"
    assert lines[-2].startswith("    ")
