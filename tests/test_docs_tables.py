"""Figures on the pages are those of benchmarks/results: `python docs/tables.py`."""

import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
NAMES = ("README", "index", "autocast", "memory", "remat", "compare", "devices")
TABLE = r"^\|(?:.*\n\|)+.*$"
HELD = [page for page in PAGES if page.stem in NAMES]


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("tables")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_figures_of_a_page_are_those_of_the_results(page, tables):
    text = page.read_text()
    assert text == tables.written(text), "run `python docs/tables.py`"


@pytest.mark.parametrize("page", HELD, ids=lambda page: page.stem)
def test_figures_are_of_results_whose_commits_their_section_names(page, tables):
    for section in re.split("^## ", page.read_text(), flags=re.MULTILINE):
        for table in re.findall(TABLE, section, re.MULTILINE):
            cells = [cell.strip() for cell in table.split("|")]
            if table.startswith(tuple(tables.TABLES)):
                tables.measured.clear()
                tables.written(table)
                assert tables.measured
                assert not {one for one in tables.measured if one not in section}, table
            elif any(re.fullmatch(r"\**\d\.\d\d\**", cell) for cell in cells):
                pytest.fail(f"filled from no results: {table}")


@pytest.mark.parametrize("machine", ["h100", "tpu-v5e"])
def test_memory_and_bytes_are_lower_than_in_float32_in_every_model_tried(
    machine, tables
):
    page = (ROOT / "docs/memory.md").read_text()
    assert "Every model tried needs less memory and moves fewer bytes" in page
    programs = {}
    for row in tables.rows_of("autocast", f"^{machine}, bf16$"):
        programs.setdefault(row["program"], {})[row["model"]] = row
    assert len(programs["float32"]) == 10
    for model, full in programs["float32"].items():
        half = programs["autocast"][model]
        for column in (tables.MEMORY, tables.BYTES):
            if full[column] != "-":  # does not fit
                assert float(half[column]) < float(full[column])
