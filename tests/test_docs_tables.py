"""Figures on the pages are those of benchmarks/results: `python docs/tables.py`."""

import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "benchmarks/README.md"]
PAGES += sorted(ROOT.glob("docs/*.md"))
NAMES = ("README", "index", "autocast", "memory", "compare", "devices")
HELD = [page for page in PAGES if page.stem in NAMES]
HELD.remove(ROOT / "benchmarks/README.md")


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


def test_the_gain_stands_in_the_readme_and_on_the_first_page():
    for page in (ROOT / "README.md", ROOT / "docs/index.md"):
        assert "| float32 = 1 | H100" in page.read_text()


def test_a_row_without_figures_is_an_error(tables):
    columns = "| H100: memory | bytes | v5e: memory | cycles |\n|---|---|---|---|---|\n"
    with pytest.raises(ValueError, match="'GPT-7' has no figures"):
        tables.written(f"| by hand = 1 {columns}| GPT-7 |\n")


def ratios(tables, machine, column):
    """Of the models on the pages: what `autocast` takes, where a cast by hand is 1."""
    return {
        row["model"]: float(row[column])
        for row in tables.rows_of("autocast", f"^{machine}, bf16$")
        if row["program"] == "autocast" and row["model"] in tables.MODELS.values()
    }


def test_the_pages_name_the_models_that_take_more_than_a_cast_by_hand(tables):
    compare, memory = (
        (ROOT / f"docs/{page}.md").read_text() for page in ("compare", "memory")
    )
    told = (
        "on a v5e it needs more memory for an\n"
        "  MLP with relu, an MLP-Mixer and Equinox"
    )
    assert f"{told}; on an H100 it usually moves more bytes" in compare
    v5e = ratios(tables, "tpu-v5e", tables.MEMORY)
    assert {model for model, over in v5e.items() if over > 1.02} == {
        "mlp-relu",
        "mixer8",
        "equinox4",
    }
    h100 = ratios(tables, "h100", tables.BYTES)
    assert sum(over > 1 for over in h100.values()) > len(h100) / 2
    assert "in one case (MLP-Mixer, H100) several times as long" in memory
    slow = {
        (machine, model)
        for machine in ("h100", "tpu-v5e")
        for model, over in ratios(tables, machine, "compile time, s").items()
        if over > 2
    }
    assert slow == {("h100", "mixer8")}
    assert "on a v6e.** Flax's `DynamicScale` takes fewer cycles" in compare
    row = tables._cells(compare.partition("| TPU v6e |")[2].splitlines()[1])
    assert row[1:3] == ["train step", "cycles"]
    assert float(row[5]) < float(row[3])


def test_every_figure_is_lower_than_in_float32(tables):
    page = (ROOT / "docs/memory.md").read_text()
    assert "needs less memory and moves fewer bytes in every model tried" in page
    gain = page.partition("| float32 = 1 |")[2].partition("\n\n")[0]
    rows = [re.findall(r"\| (\d\.\d\d) ", row) for row in gain.splitlines()[2:]]
    compile_times = [float(row.pop(2)) for row in rows]
    assert len(rows) > 8
    assert all(float(figure) < 1 for row in rows for figure in row)
    assert "on an H100 (the first table)" in page
    assert min(compile_times) > 1
