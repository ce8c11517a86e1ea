"""Figures on the pages are those of benchmarks/results: `python docs/tables.py`."""

import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
NAMES = ("README", "index", "autocast", "memory", "remat", "compare", "devices")
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
def test_every_table_of_figures_is_one_that_the_results_fill(page, tables):
    for table in re.findall(r"^\|(?:.*\n\|)+.*$", page.read_text(), re.MULTILINE):
        cells = [cell.strip() for cell in table.split("|")]
        if any(re.fullmatch(r"\**\d\.\d\d\**", cell) for cell in cells):
            assert table.startswith(tuple(tables.TABLES)), table
