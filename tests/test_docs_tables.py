"""Figures on the pages are those of benchmarks/results: `python docs/tables.py`."""

import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
NAMES = ("README", "index", "autocast", "memory", "compare", "devices")
HELD = [page for page in PAGES if page.stem in (*NAMES, "half-parameters")]

RESULTS = """# autocast

#### h100, bf16

| model | program | temporaries, MB | bytes, GB | kernels | compile time, s |
| --- | --- | --- | --- | --- | --- |
| mlp-gelu | by hand | 1376 | 8.699 | 65 | 0.5 |
| mlp-gelu | float32 | 1.560 | 1.506 | 0.754 | 0.6 |
| mlp-gelu | autocast | 0.391 | 1.232 | 1.000 | 0.9 |
| mlp-gelu | autocast, checkpoint | 0.878 | 1.950 | 1.508 | 0.8 |

#### tpu-v5e, bf16

| model | program | temporaries, MB | bytes, GB | M cycles |
| --- | --- | --- | --- | --- |
| mlp-gelu | by hand | 135 | 5.034 | 60.97 |
| mlp-gelu | float32 | inf | - | - |
| mlp-gelu | autocast | 0.975 | 1.040 | 0.958 |
| mlp-gelu | autocast, checkpoint | 1.500 | 1.560 | 1.496 |
"""

COSTS = """## jmp_scale

#### AdamW alone, f32 / f16 gradients, 2 parameters in 100 leaves

| step | bytes | kernels | time ratio |
| --- | --- | --- | --- |
| with_loss_scale | 1.100 / 1.056 | 518 (1.70) / 519 (1.71) | 1.20 (1.1 to 1.3) / 1.1 |

#### Clipping by the global norm and AdamW alone, f32 / f16 gradients, in 100 leaves

| step | bytes |
| --- | --- |
| with_loss_scale | 9.000 |

## The other libraries

#### AdamW alone, f32 and f16 gradients, 2 parameters in 100 leaves

| step | bytes (f32) | bytes (f16) | kernels | time ratio (f32) |
| --- | --- | --- | --- | --- |
| jmp | 1.650 | 1.611 | 829 (2.73) | 6.13 (5.9 to 6.2) |
| flax DynamicScale | 1.850 | 2.000 | 928 (3.05) | 8.02 (7.8 to 8.2) |
| mpx | 1.650 | 1.611 | 829 (2.73) | 5.74 (5.6 to 5.9) |
| optax.apply_if_finite | 1.650 | 1.722 | 400 (1.32) | 4.21 (4.1 to 4.3) |
"""


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


def test_a_row_has_the_ratios_of_its_model(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "autocast.md").write_text(RESULTS)
    name = "MLP, gelu"
    columns = "| H100: memory | bytes | v5e: memory | cycles |\n|---|---|---|---|---|\n"
    page = f"| float32 = 1 {columns}| {name} | |\n"
    row = f"| {name} | 0.25 | 0.82 | 1.50 | float32 does not fit | - |\n"
    assert tables.written(page).endswith(row)
    page = f"| by hand = 1 {columns}| {name} | 0.5 |\n\nText.\n| other | table |\n"
    row = f"| {name} | 0.39 | 1.23 | 0.98 | 0.96 |\n\nText.\n| other | table |\n"
    assert tables.written(page).endswith(row)
    columns = "| H100, without | with | v5e, without | with |\n|---|---|---|---|---|\n"
    page = f"| by hand = 1 {columns}| {name} |\n"
    row = f"| {name} | 0.39 | 0.88 | 0.98 | 1.50 |\n"
    assert tables.written(page).endswith(row)
    with pytest.raises(ValueError, match="'GPT-7' has no figures"):
        tables.written(page.replace(name, "GPT-7"))


def test_a_row_has_the_cost_of_each_library(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "cpu.md").write_text(COSTS)
    page = """| machine | step | measure |
|---|---|---|
| a CPU | AdamW | time |
| | AdamW | bytes |
| | AdamW | kernels |
"""
    assert tables.written(page).splitlines()[2:] == [
        "| a CPU | AdamW | time | 1.20 | 6.13 | 8.02 | 5.74 | 4.21 |",
        "| | AdamW | bytes | 1.10 | 1.65 | 1.85 | 1.65 | 1.65 |",
        "| | AdamW | kernels | 1.70 | 2.73 | 3.05 | 2.73 | 1.32 |",
    ]


def test_a_row_has_the_ratios_of_its_layout(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    results = """### h100 x 8, gradient, bf16, auto
| layout | model | program | temporaries, MB | bytes, GB | M cycles | wire, MB |
| --- | --- | --- | --- | --- | --- | --- |
| TP | u2 | by hand | 604.2 | 4.293 | - | 281.9 |
| TP | u2 | autocast | 0.953 | 1.276 | - | 1.285 |
| TP | u2 | autocast, half parameters | 0.932 | 1.209 | - | 1.090 |
| TP | u9 | autocast | 9.000 | 9.000 | - | 9.000 |

### tpu-v5e x 8, gradient, bf16, auto
| layout | model | program | temporaries, MB | bytes, GB | M cycles | wire, MB |
| --- | --- | --- | --- | --- | --- | --- |
| TP | u2 | autocast | 1.054 | 0.932 | 0.973 | 1.196 |
| TP | u2 | autocast, half parameters | 0.839 | 0.754 | 1.004 | 1.000 |
"""
    (tmp_path / "sharded.md").write_text(results)
    name = "tensor parallel, 2 x 4"
    header = "| by hand = 1 | H100: wire | memory |\n|---|---|---|\n"
    page = f"{header}| {name} |\n| {name}, half parameters |\n"
    assert tables.written(page).splitlines()[2:] == [
        f"| {name} | 1.29 | 0.95 | 1.28 | 1.20 | 1.05 | 0.97 |",
        f"| {name}, half parameters | 1.09 | 0.93 | 1.21 | 1.00 | 0.84 | 1.00 |",
    ]


def test_a_row_has_the_time_of_its_trace(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    results = """## As traced

| model | program | trace time, s, median of five |
| --- | --- | --- |
| linen12 | by hand | 1.070 |
| linen12 | float32 | 0.936 |
| linen12 | autocast | 1.803 |
| linen12 | autocast, checkpoint | 1.835 |
"""
    (tmp_path / "autocast.md").write_text(results)
    header = "| tracing, float32 = 1 | by hand |\n|---|---|\n"
    row = "| in Linen | 1.07 | 1.80 | 1.84 |\n"
    assert tables.written(header + "| in Linen |\n") == header + row


def test_a_row_has_the_losses_of_its_form(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    results = "".join(
        f"""### {task}, learning rate {rate}

| form | median | least | largest | verdict |
| --- | --- | --- | --- | --- |
| float32 parameters | 1.5 | 1.4 | 1.6 | as float32 |
| naive | 2.5 | 2.4 | 2.6 | not as float32 |
| remainder | 1.5 | 1.4 | 1.6 | as float32 |
"""
        for task in tables.TASKS
        for rate in tables.RATES
    )
    (tmp_path / "half_parameters.md").write_text(results)
    header = "| last loss | digits, 1e-3 | 1e-4 |\n|---|---|---|\n"
    names = ("float32 parameters", "naive", "remainder")
    page = header + "".join(f"| {name} |\n" for name in names)
    assert tables.written(page).splitlines()[2:] == [
        f"| float32 parameters |{' 1.5 (1.4 to 1.6) |' * 6}",
        f"| naive |{' **2.5** |' * 6}",
        f"| remainder |{' 1.5 |' * 6}",
    ]


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
