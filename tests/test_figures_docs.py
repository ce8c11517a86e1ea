"""Figures of docs/memory.md and docs/compare.md: those of the benchmarks' tables."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = (ROOT / "benchmarks/results/autocast.md").read_text()
BENCHMARKS = (ROOT / "benchmarks/README.md").read_text()
MODELS = {
    "GPT-2, 4 layers": "gpt4",
    "the same, vocabulary 50,257": "gpt4-V50257",
    "the same, attention in a checkpoint": "gpt4-no-scores",
    "the same in Equinox": "equinox4",
    "GPT-2, 12 layers in a `scan`": "gpt12-scan",
    "MLP, gelu": "mlp-gelu",
    "MLP, relu": "mlp-relu",
    "MLP-Mixer": "mixer8",
    "ResNet-50": "resnet50-stage3",
}


def tables(text):
    """The tables of a page, each a list of rows of cells, without their heads."""
    found = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    return [[cells(line) for line in table.splitlines()[2:]] for table in found]


def cells(line):
    return [cell.strip() for cell in line.strip("| ").split(" |")]


def compiled(machine):
    """(model, program) -> (memory, bytes, kernels or cycles), a cast by hand = 1."""
    part = RESULTS.partition(f"#### {machine}, bf16\n")[2].partition("\n#")[0]
    return {(row[0], row[1]): row[2:5] for row in tables(part)[0]}


def ratio(of, over):
    return None if "inf" in over or "-" in (of, over) else float(of) / float(over)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_figure_of_the_page_on_memory_is_that_of_the_benchmark(index):
    gpu, tpu = compiled("h100"), compiled("tpu-v5e")
    page = tables((ROOT / "docs/memory.md").read_text())[index]
    assert len(page) > 5
    for name, *shown in page:
        model = MODELS[name]
        cast = [gpu[model, "autocast"], tpu[model, "autocast"]]
        base = [["1"] * 3] * 2
        if index == 0:
            base = [gpu[model, "float32"], tpu[model, "float32"]]
        right = [
            ratio(cast[0][0], base[0][0]),
            ratio(cast[0][1], base[0][1]),
            ratio(cast[1][0], base[1][0]),
            ratio(cast[1][2], base[1][2]),
        ]
        if index == 2:
            kept = [
                gpu[model, "autocast, checkpoint"],
                tpu[model, "autocast, checkpoint"],
            ]
            pairs = zip(cast, kept, strict=True)
            right = [float(row[0]) for pair in pairs for row in pair]
        for told, true in zip(shown, right, strict=True):
            if true is None:
                assert told in ("-", "float32 does not fit")
            else:
                # Measured anew, a row moves by some percent without another meaning.
                assert float(told) == pytest.approx(true, abs=0.005, rel=0.05), name


@pytest.mark.parametrize(
    ("machine", "adamw", "train"),
    [("A CPU", 1, 4), ("One TPU v5e", 1, 5), ("One TPU v6e", 1, 5), ("One H100", 0, 4)],
)
def test_the_costs_of_the_comparison_are_those_of_the_benchmark(machine, adamw, train):
    part = BENCHMARKS.partition(f"### {machine}")[2].partition("\n### ")[0]
    rows = {row[0]: row[1:] for row in tables(part)[0]}
    names = [
        "with_loss_scale",
        "jmp",
        "flax DynamicScale",
        "mpx",
        "optax.apply_if_finite",
    ]
    short = machine.removeprefix("One ").removeprefix("A ")
    page = (ROOT / "docs/compare.md").read_text()
    costs = page.partition("## What it costs")[2].partition(f"| {short} |")[2]
    shown = [cells(line) for line in costs.splitlines()[:2]]
    # AdamW of float32 gradients, the first of two; float16 compute, the last.
    first = [float(rows[name][adamw].split(" / ")[0]) for name in names]
    last = [float(rows[name][train].split(" / ")[-1]) for name in names]
    assert [float(cell) for cell in shown[0][-5:]] == first
    assert [float(cell) for cell in shown[1][-5:]] == last


def test_the_mistakes_of_the_comparison_are_counted_from_the_benchmark():
    part = BENCHMARKS.partition("[start:correctness]")[2].partition("[end:")[0]
    columns = list(zip(*tables(part)[0], strict=True))[1:]
    counted = [
        (
            sum(cell != "-" for cell in cells),
            sum(cell not in ("-", "right") for cell in cells),
        )
        for cells in columns
    ]
    page = (ROOT / "docs/compare.md").read_text()
    told = tables(page.partition("## What each gets wrong")[2])[0]
    assert [(int(row[1]), int(row[2])) for row in told] == counted[:-1]
    assert counted[-1] == (32, 0)
