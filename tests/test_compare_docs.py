"""docs/compare.md counts the mistakes that benchmarks/README.md tells."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
BENCHMARKS = (ROOT / "benchmarks/README.md").read_text()


def table(text):
    """The first table of a text as rows of cells, without its head."""
    lines = re.search(r"(?:^\|.*\|\n)+", text, re.MULTILINE)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("| ").split(" |")] for line in lines]


def test_the_mistakes_of_the_comparison_are_counted_from_the_benchmark():
    part = BENCHMARKS.partition("[start:correctness]")[2].partition("[end:")[0]
    columns = list(zip(*table(part), strict=True))[1:]
    counted = [
        (
            sum(cell != "-" for cell in cells),
            sum(cell not in ("-", "right") for cell in cells),
        )
        for cells in columns
    ]
    page = (ROOT / "docs/compare.md").read_text()
    told = table(page.partition("## What each gets wrong")[2])
    assert [(int(row[1]), int(row[2])) for row in told] == counted[:-1]
    assert counted[-1] == (32, 0)
