"""The benchmark of known mistakes: we make none, and a library that does is seen."""

import pathlib
import re

import correctness
import pytest
from _loops import Step, train_jmp_scale

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("subjects", "check"),
    [pytest.param(*row, id=row[1].__name__) for row in correctness.rows()],
)
def test_this_library_makes_none_of_the_known_mistakes(subjects, check):
    assert correctness.verdict("jmp_scale", subjects, check) == "right"


def test_a_library_that_unscales_with_the_wrong_s_is_seen():
    def train(xs, **kwargs):
        steps = train_jmp_scale(xs, **kwargs)
        return [Step(1 - (1 - step.w) / 2, step.s) for step in steps]

    check = correctness.gradients_stay_true_when_s_grows
    assert correctness.verdict("jmp_scale", {"jmp_scale": train}, check) == "**wrong**"


def table(text):
    """The first table of a text as rows of cells, without its head."""
    lines = re.search(r"(?:^\|.*\|\n)+", text, re.MULTILINE)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("| ").split(" |")] for line in lines]


def test_the_mistakes_of_the_comparison_are_counted_from_the_benchmark():
    benchmarks = (ROOT / "benchmarks/README.md").read_text()
    part = benchmarks.partition("[start:correctness]")[2].partition("[end:")[0]
    columns = list(zip(*table(part), strict=True))[1:]
    counted = [
        (
            sum(cell != "-" for cell in cells),
            sum(cell not in ("-", "right") for cell in cells),
        )
        for cells in columns
    ]
    page = (ROOT / "docs/compare.md").read_text()
    told = table(page.partition("## Mistakes that each makes")[2])
    assert [(int(row[1]), int(row[2])) for row in told] == counted[:-1]
    assert counted[-1] == (32, 0)
