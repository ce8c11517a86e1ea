"""docs/precise-enough.md: each program needs its line, which is enough and is found."""

import importlib
import pathlib
import re

import jax
import pytest

from jmp_scale.diagnostics import sensitive_products

DOCS = pathlib.Path(__file__).parents[1] / "docs"
ROW = r"^\| \[([\w ]+)\]\(#[\w-]+\) \|.*\| `(\w+)` \|"
ROWS = re.findall(ROW, (DOCS / "precise-enough.md").read_text(), re.MULTILINE)


@pytest.fixture
def programs(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    with jax.numpy_rank_promotion("allow"):
        yield importlib.import_module("precise_enough")


def test_the_page_has_a_row_and_a_section_for_each_program():
    source = (DOCS / "precise_enough.py").read_text()
    assert re.findall(r'^    "([\w ]+)": \(.*"(\w+)"\),$', source, re.MULTILINE) == ROWS


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in ROWS])
def test_a_line_kept_in_float32_makes_the_gradient_precise_and_is_found(programs, name):
    # In bfloat16 the rest of a molecule's network has too few digits too.
    dtype = "float16" if "forces" in name else "bfloat16"
    before, after, share = programs.errors(name, dtype)
    assert before > 0.2
    assert after < 0.05
    assert share > 0.1
    loss, args, kept = programs.PROGRAMS[name]
    found = sensitive_products(loss, *args, dtype=dtype)
    assert found.keep == (kept,)
    assert f"keep_float32={found.keep}" in found.summary()
    assert found.error_before > 0.2
    assert found.error_after <= 0.05
    assert found.half_share > 0.1
