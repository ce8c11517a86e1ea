"""The benchmarks: what the pages claim of their results holds, and the commands run."""

import json
import os
import pathlib
import re

import _clock_parts
import autocast
import clocked
import correctness
import faulty_runs
import half_storage
import jax
import jax.numpy as jnp
import optax
import overhead
import pytest
from _clock import Clock
from compilers import targets

import jmp_scale

ROOT = pathlib.Path(__file__).parents[1]
ROWS = {check.__name__: (subjects, check) for subjects, check in correctness.rows()}


@pytest.mark.parametrize("name", ROWS)
def test_this_library_makes_none_of_the_known_mistakes(name):
    assert correctness.verdict("jmp_scale", *ROWS[name]) == "right"


def table_below(line, page):
    """The rows of a page's first table below a line, as cells, without its head."""
    text = (ROOT / page).read_text().partition(line)[2]
    lines = re.search(r"(?:^\|.*\|\n)+", text, re.MULTILINE)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("| ").split(" |")] for line in lines]


def test_the_mistakes_of_the_comparison_are_counted_from_the_benchmark():
    verdicts = table_below("[start:correctness]", "benchmarks/README.md")
    counted = []
    for cells in list(zip(*verdicts, strict=True))[1:]:
        tried = [cell for cell in cells if cell != "-"]
        counted.append((len(tried), sum(cell != "right" for cell in tried)))
    told = table_below("## Mistakes that each makes", "docs/compare.md")
    assert [(int(row[1]), int(row[2])) for row in told] == counted[:-1]
    assert counted[-1] == (21, 0)


BYTES = {  # rows of a page's table, which adds up remainders and moments
    "**`with_half_storage(tx)`**": {},
    "`remainders=False`, with a `key`": {"remainders": False},
    '`averages=("mu", "nu")`, with a `key`': {"averages": ("mu", "nu")},
    "both": {"remainders": False, "averages": ("mu", "nu")},
}


@pytest.mark.parametrize("row", BYTES)
def test_a_state_has_the_bytes_of_the_table(row):
    page = (ROOT / "docs/half-parameters.md").read_text()
    (cells,) = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", page, re.MULTILINE)
    parameter, beside, moments, *_ = (cell.strip() or "0" for cell in cells.split("|"))
    key, params = jax.random.key(0), jnp.ones(1000, jnp.bfloat16)
    tx = jmp_scale.with_half_storage(optax.adamw(1e-3), key=key, **BYTES[row])
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(tx.init(params)))
    assert parameter == "2"
    assert size // 1000 == int(beside) + int(moments)


# The commands: small runs print the tables that the pages are filled from.

COMMANDS = {
    faulty_runs: (
        "--parts guard --tasks classifier --seeds 1 --steps 350 --clean-steps 50",
        "| classifier | 1 of 1 + 0 | 6 of 6 + 0 |",
    ),
    half_storage: (
        "--parts parameters averages --tasks digits --rates 1e-3 --seeds 2 --steps 20 "
        "--optimizers Lion",
        "### Lion, learning rate 1e-3, by step\n",
    ),
    autocast: (
        "--parts error --targets h100 --models mlp --programs autocast",
        "error of the gradient",
    ),
    overhead: (
        "--parts optimizer --dtypes f16 --layers 1 --width 16 --optimizers lion "
        "--peers with_loss_scale --no-times",
        "### Lion alone, f16 gradients",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("script", COMMANDS, ids=lambda script: script.__name__)
def test_a_command_prints_its_table(script, monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    monkeypatch.setattr(autocast, "SEEDS", 2)
    options, printed = COMMANDS[script]
    script.main(options.split())
    assert printed in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("part", _clock_parts.PARTS)
def test_each_part_of_the_clock_runs_at_a_tiny_size(part, tmp_path, ranks_promote):
    path = tmp_path / "rows.jsonl"
    clock = Clock(part, seconds=300, rows=path)
    _clock_parts.PARTS[part].run(clock, _clock_parts.SIZES["tiny"])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows
    assert not [row for row in rows if "error" in row]


def test_a_compiler_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="--group tpu-compile"):
        overhead.main(["--target", "tpu-v6e"])


@pytest.mark.parametrize("machine", ["h200", "epyc", "amx"])
def test_the_page_of_a_machines_times_is_what_the_command_prints(machine, capsys):
    results = ROOT / "benchmarks/results"
    clocked.main([str(results / f"{machine}.jsonl")])
    page = (results / f"{machine}.md").read_text()
    assert page.endswith(capsys.readouterr().out)
