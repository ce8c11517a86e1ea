"""Writes the tables of figures into the pages, from benchmarks/results.

`python docs/tables.py` finds each table by its header, on whichever page it stands, and
computes its cells from the results: the header says of what, the first cell of a row of
which model or step. Run it after new results, or after a new row. The tests fail where
a page and the results differ.
"""

import decimal
import pathlib
import re
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# The names of rows on the pages, and those of the models in results/autocast.md.
MODELS = {
    "4 layers of GPT-2 small (8 x 1024 tokens, vocabulary 8,192)": "gpt4",
    "the same with a vocabulary of 50,257": "gpt4-V50257",
    "the same, attention in a `jax.checkpoint`": "gpt4-no-scores",
    "the same in Equinox": "equinox4",
    "12 of them in a `scan`": "gpt12-scan",
    "MLP, 8 x 4096, 8,192 rows, gelu": "mlp-gelu",
    "the same with relu": "mlp-relu",
    "MLP-Mixer, 8 blocks": "mixer8",
    "ResNet-50, stage 3, batch 32, `share_casts=True`": "resnet50-stage3",
    # Where there is no room:
    "GPT-2 small, 4 layers": "gpt4",
    "MLP, 8 x 4096, gelu": "mlp-gelu",
    "ResNet-50, stage 3": "resnet50-stage3",
}
AUTOCAST_COLUMNS = {
    "h100, bf16": ["temporaries, MB", "bytes, GB"],
    "tpu-v5e, bf16": ["temporaries, MB", "M cycles"],
}

# The same of the cost of a skip: files, titles of their tables, and names of columns.
MACHINES = {"CPU": "cpu", "v5e": "tpu-v5e", "v6e": "tpu-v6e", "H100": "h100"}
STEPS = {
    "AdamW": r"(?<!and )AdamW alone, f32 .* 100 leaves",
    "clip and AdamW": r"Clipping .* and AdamW alone, f32 .* 100 leaves",
    "a train step": r"Train step \(AdamW\), .*f32",
    "a train step in float16": r"Train step \(AdamW\), .*f16",
}
MEASURES = {"time": "time ratio"}
LIBRARIES = [
    "with_loss_scale",
    "jmp",
    "flax DynamicScale",
    "mpx",
    "optax.apply_if_finite",
]

Row = dict[str, str]


def rows_of(name: str, title: str) -> Iterator[Row]:
    """The rows of a file's tables whose title matches, as column: cell, and `title`."""
    text = (RESULTS / f"{name}.md").read_text()
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE):
        heading = section.partition("\n")[0]
        if not re.search(title, heading):
            continue
        lines = [_cells(line) for line in section.splitlines() if line.startswith("|")]
        for line in lines[2:]:
            yield dict(zip(lines[0], line, strict=True)) | {"title": heading}


def autocast_over(base: str) -> Callable[[list[str]], list[str]]:
    """Cells of `autocast`, where those of the program `base` are 1."""

    def cells(row: list[str]) -> list[str]:
        if row[0] not in MODELS:
            raise ValueError(f"no model is named {row[0]!r}: add it to MODELS")
        shown = []
        for title, columns in AUTOCAST_COLUMNS.items():
            programs = {
                found["program"]: found
                for found in rows_of("autocast", f"^{title}$")
                if found["model"] == MODELS[row[0]]
            }
            for column in columns:
                # The results are ratios to a cast by hand already.
                over = "1" if base == "by hand" else programs[base][column]
                shown.append(_ratio(programs["autocast"][column], over))
        return [row[0], *shown]

    return cells


def cost_of_a_skip() -> Callable[[list[str]], list[str]]:
    """Cells of a step that may be skipped, where those of the plain step are 1."""
    machine = ""

    def cells(row: list[str]) -> list[str]:
        nonlocal machine
        machine = row[0] or machine  # an empty one is that of the row above
        name = next(file for word, file in MACHINES.items() if word in machine)
        dtype = "f16" if row[1].endswith("float16") else "f32"
        column = MEASURES.get(row[2], row[2])
        digits = 1 if row[2] == "time" else 2
        found = {
            line["step"]: _figure(line, column, dtype)
            for line in rows_of(name, STEPS[row[1]])
        }
        figures = [_rounded(found[library], digits) for library in LIBRARIES]
        return [*row[:3], *figures]

    return cells


# How a table's header begins: what makes a function of its rows.
TABLES: dict[str, Callable[[], Callable[[list[str]], list[str]]]] = {
    "| float32 = 1 | H100": lambda: autocast_over("float32"),
    "| by hand = 1 | H100": lambda: autocast_over("by hand"),
    "| machine | step | measure |": cost_of_a_skip,
}


def written(page: str) -> str:
    """The page with its tables as the results have them."""
    lines = page.splitlines(keepends=True)
    cells = None
    for i, line in enumerate(lines):
        begins = [make for header, make in TABLES.items() if line.startswith(header)]
        if begins:
            cells = begins[0]()
        elif not line.startswith("|"):
            cells = None
        elif cells and not line.startswith("|---"):
            lines[i] = _line(cells(_cells(line)))
    return "".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split(" |")]


def _ratio(figure: str, base: str) -> str:
    if base == "inf":  # more memory than the machine has
        return "fits, float32 does not"
    return "-" if base == "-" else _rounded(float(figure) / float(base), 2)


def _rounded(figure: float, digits: int) -> str:
    """As people round what they read in the results: 0.975 to 0.98."""
    shown = decimal.Decimal(f"{figure:.6f}")
    return str(shown.quantize(decimal.Decimal(1).scaleb(-digits), "ROUND_HALF_UP"))


def _figure(row: Row, column: str, dtype: str) -> float:
    """The ratio in a cell of one dtype: `1.2`, `1.2 / 1.1`, or `150 (1.2)`."""
    cell = row.get(f"{column} ({dtype})") or row[column]
    both = cell.split(" / ")
    cell = both[-1] if dtype == "f16" else both[0]
    counted = re.fullmatch(r"\d+ \((.+)\)", cell)
    return float(counted[1] if counted else cell.partition(" ")[0])


def main() -> None:
    for path in PAGES:
        text = path.read_text()
        if text != written(text):
            path.write_text(written(text))
            print(f"{path.relative_to(ROOT)}: new figures")


if __name__ == "__main__":
    main()
