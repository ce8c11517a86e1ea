import contextlib
import io
import pathlib
import re

import jax
import jax.numpy as jnp

from jmp_scale._autocast_text import plan_text

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "how-it-works.md"


def test_the_page_shows_what_its_program_prints():
    section = PAGE.read_text().partition("## A plan, printed")[2]
    code, wanted = re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)[:2]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), jax.numpy_rank_promotion("allow"):
        exec(code, {"jax": jax, "jnp": jnp})
    assert printed.getvalue() == wanted


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
