"""Writes tables of figures into the pages, and parts of README into docs/index.md.

`python docs/tables.py` finds each table by its header, on whichever page it stands, and
computes its cells from benchmarks/results: the header says of what, the first cell of a
row of which model or step. Run it after new results, after a new row, or after a change
of README. The tests fail where a page differs.
"""

import decimal
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# The names of rows on the pages, and of models, steps and layouts in the results; one
# model has two sizes, because a TPU's compiler takes minutes for the large one.
MODELS = {
    "LLaMA, written out": "llama4(-1024)?",
    "LLaMA in a `scan`": "llama4(-1024)?-scan",
    "LLaMA, cuDNN's attention": "llama4-cudnn",
    "LLaMA in a `scan`, cuDNN's attention": "llama4-scan-cudnn",
    "GPT-2, written out": "gpt4",
    "the same, vocabulary 50,257": "gpt4-V50257",
    "the same in Equinox": "equinox4",
    "MLP, gelu": "mlp-gelu",
    "MLP, relu": "mlp-relu",
    "ResNet-50": "resnet50-stage3",
}
STEPS = {
    "AdamW": (r"(?<!and )AdamW alone, f32 .* 100 leaves", "f32"),
    "train step": (r"Train step \(AdamW\), .*f16", "f16"),
}
LAYOUTS = {
    "data parallel": ("DP", "u2"),
    "FSDP": ("FSDP", "u2"),
    "tensor parallel, 2 x 4": ("TP", "u2"),
    "a head, vocabulary of 50,304 over 4": ("head by log_softmax, DPxTP", "-"),
}
# A file of results, and the titles of its tables: of JAX, of PyTorch.
TIMED = {
    "H200: AdamW step, GPT-2, 4 layers, vocabulary 50,257": (
        "h200",
        "^gpt2 x 4 V=50257 step$",
        "^torch gpt2 x 4 V=50257 step$",
    ),
    "two CPU cores with AMX: this step, 1,024 tokens": (
        "amx",
        "^step of gpt4, V = 50,257",
        "^torch, step of gpt4, V = 50,257",
    ),
    "H200: gradient, MLP 8 x 4,096 with gelu": ("h200", "^mlp-gelu$", "^-$"),
    "H200: gradient, ResNet-50, stage 3: no gain": ("h200", "^resnet50-stage3$", "^-$"),
}
PROGRAMS_TIMED = (
    ("float32",),
    ("by hand", "by hand bf16"),
    ("autocast", "autocast bf16"),
)
SKIPS_TIMED = {
    "by hand, without scaling": "by hand f16, no scaling",
    "jmp": "by hand f16, jmp",
    "Flax `DynamicScale`": "by hand f16, flax DynamicScale",
    "`autocast`, without scaling": "autocast f16, no scaling",
    "`with_loss_scale`": "autocast f16, with_loss_scale",
}
BLOCKS = {
    "MLP, gelu": "gelu",
    "MLP, relu": "relu",
    "SwiGLU": "SwiGLU",
    "ConvNeXt": "ConvNeXt",
    "attention": "attention",
}
HEADS = {
    "a cast by hand": ("head of 50,257", "by hand"),
    "`autocast`": ("head of 50,257", "autocast"),
    "a scan of `jax.checkpoint`s, 4 chunks": (
        "head of 50,257 in 4 checkpoints",
        "autocast",
    ),
    "the example, 4 chunks": ("head of 50,257 in 4 chunks", "autocast"),
    "the example, 8 chunks": ("head of 50,257 in 8 chunks", "autocast"),
}
TRACED = {
    "twelve layers of GPT-2": "gpt12",
    "in Linen": "linen12",
    "in Equinox": "equinox12",
}
MACHINES = {"CPU": "cpu", "v5e": "tpu-v5e", "v6e": "tpu-v6e", "H100": "h100"}
LIBRARIES = [
    "with_loss_scale",
    "jmp",
    "flax DynamicScale",
    "mpx",
    "optax.apply_if_finite",
]

# What ends the name of a row on the pages, and of its program in the results.
PROGRAMS = {
    ", half parameters, `sum_gradients`": ", half parameters, sum_gradients",
    ", `sum_gradients`": ", sum_gradients",
    ", half parameters": ", half parameters",
    "": "",
}

# What a column shows: a table of results/autocast.md, a program, a column.
MEMORY, BYTES, CYCLES, WIRE = "temporaries, MB", "bytes, GB", "M cycles", "wire, MB"
COMPILED = ("h100, bf16", "autocast", "compile time, s")
SAVED = [
    ("h100, bf16", "autocast", MEMORY),
    ("h100, bf16", "autocast", BYTES),
    ("tpu-v5e, bf16", "autocast", MEMORY),
    ("tpu-v5e, bf16", "autocast", CYCLES),
]
OVER_FLOAT32 = [*SAVED[:2], COMPILED, *SAVED[2:]]
CHECKPOINTED = [
    (machine, program, MEMORY)
    for machine in ("h100, bf16", "tpu-v5e, bf16")
    for program in ("autocast", "autocast, checkpoint")
]

STREAM = [
    ("h100, blocks, bf16", "autocast", BYTES),
    ("h100, blocks, bf16", "autocast, result=half", BYTES),
]
HEAD_COLUMNS = [("h100", MEMORY), ("h100", BYTES)]
HEAD_COLUMNS += [("tpu-v5e", MEMORY), ("tpu-v5e", CYCLES)]
KINDS = "(gradient|minimal programs), bf16$"
BETWEEN_DEVICES = [
    ("h100 x 8", WIRE),
    ("h100 x 8", MEMORY),
    ("h100 x 8", BYTES),
    ("tpu-v5e x 8", WIRE),
    ("tpu-v5e x 8", MEMORY),
    ("tpu-v5e x 8", CYCLES),
]

COMMIT = re.compile(r"\bcommit ([0-9a-f]{7,8})\b")
# A part of README on another page.
PART = re.compile(r"(?<=^<!-- readme: )(\w+)( -->\n).*?(?=<!-- end)", re.M | re.S)

Row = dict[str, str]
Cells = Callable[[list[str]], list[str]]  # of a row as it stands, and as it should


# The commits at which what was read so far was measured.
measured: set[str] = set()


def rows_of(name: str, title: str, model: str = ".*") -> Iterator[Row]:
    """The rows of tables and models that match, as column: cell, and `title`.

    A table names its commits, or the file does before the first one.
    """
    text = (RESULTS / f"{name}.md").read_text()
    _, begin, *sections = re.split(r"^#+ ", text, flags=re.MULTILINE)
    for section in sections:
        heading = section.partition("\n")[0]
        if not re.search(title, heading):
            continue
        lines = [_cells(line) for line in section.splitlines() if line.startswith("|")]
        for line in lines[2:]:
            row = dict(zip(lines[0], line, strict=True)) | {"title": heading}
            if re.fullmatch(model, row.get("model", "")):
                measured.update(COMMIT.findall(section) or COMMIT.findall(begin))
                yield row


def autocast_over(
    base: str, shown: list[tuple[str, str, str]], models: Row = MODELS
) -> Cells:
    """Cells of a model, where those of the program `base` are 1."""

    def cells(row: list[str]) -> list[str]:
        model = _named(row[0], models)
        figures = []
        for title, program, column in shown:
            programs = {
                found["program"]: found[column]
                for found in rows_of("autocast", f"^{title}$", model)
            }
            # The results are ratios to a cast by hand already.
            over = "1" if base == "by hand" else programs[base]
            figures.append(_ratio(programs[program], over) if programs else "-")
        return [row[0], *figures]

    return cells


def cost_of_a_skip() -> Cells:
    """Cells of a step that may be skipped, where those of the plain step are 1."""
    machine = ""

    def cells(row: list[str]) -> list[str]:
        nonlocal machine
        machine = row[0] or machine  # an empty one is that of the row above
        file = next(file for word, file in MACHINES.items() if word in machine)
        title, dtype = _named(row[1], STEPS)
        column = {"time": "time ratio"}.get(row[2], row[2])
        found = {
            line["step"]: _figure(line, column, dtype) for line in rows_of(file, title)
        }
        return [*row[:3], *(_rounded(found[library]) for library in LIBRARIES)]

    return cells


def over_devices() -> Cells:
    """Cells of a layout over 8 devices, where those of a cast by hand are 1."""

    def cells(row: list[str]) -> list[str]:
        ending = next(ending for ending in PROGRAMS if row[0].endswith(ending))
        layout, model = _named(row[0].removesuffix(ending), LAYOUTS)
        program = f"autocast{PROGRAMS[ending]}"
        figures = []
        for machine, column in BETWEEN_DEVICES:
            (found,) = [
                line[column]
                for line in rows_of("sharded", f"^{machine}, {KINDS}")
                if line["layout"] == layout
                if line["model"] == model
                if line["program"] == program
            ]
            figures.append(_rounded(float(found)))
        return [row[0], *figures]

    return cells


def of_heads() -> Cells:
    """Cells of the head of a language model, as the compilers give them."""

    def cells(row: list[str]) -> list[str]:
        layout, program = _named(row[0], HEADS)
        figures = []
        for machine, column in HEAD_COLUMNS:
            (found,) = [
                line[column]
                for line in rows_of("sharded", f"^{machine} x 1, minimal programs")
                if (line["layout"], line["program"]) == (layout, program)
            ]
            figures.append(found)
        return [row[0], *figures]

    return cells


def time_of_a_trace() -> Cells:
    """Cells of a model, where tracing it in float32 is 1."""

    def cells(row: list[str]) -> list[str]:
        model = _named(row[0], TRACED)
        times = {
            found["program"]: found["trace time, s, median of five"]
            for found in rows_of("autocast", "^As traced$", model)
        }
        programs = ("by hand", "autocast", "autocast, checkpoint")
        return [row[0], *(_rounded(float(times[program])) for program in programs)]

    return cells


def clocked() -> Cells:
    """Times of a program, PyTorch's best one, and autocast's memory, by hand = 1."""

    def cells(row: list[str]) -> list[str]:
        file, title, of_torch = TIMED[row[0]]
        timed = {line["program"]: line for line in rows_of(file, title)}
        named = [next(p for p in timed if p in each) for each in PROGRAMS_TIMED]
        memory = (timed[p]["temporaries, MB"].replace(",", "") for p in named[:0:-1])
        torch = [
            line["ms"]
            for line in rows_of(file, of_torch)
            if "bfloat16" in line["program"]
        ]
        ms = [timed[p]["ms"] for p in named]
        ms.insert(2, min(torch, key=float, default="-"))
        return [row[0], *map(_milliseconds, ms), _ratio(*memory)]

    return cells


def _milliseconds(text: str) -> str:
    """Whole ones from a hundred on."""
    is_long = text != "-" and float(text) >= 100
    return f"{round(float(text)):,}" if is_long else text


def of_skips() -> Cells:
    """Times of a step with a loss scale, and what the compiler made of it there."""

    def cells(row: list[str]) -> list[str]:
        program = _named(row[0], SKIPS_TIMED)
        measured.update(COMMIT.findall((RESULTS / "h200.md").read_text()))
        lines = (RESULTS / "h200.jsonl").read_text().splitlines()
        found = {}
        for line in map(json.loads, lines):
            if line["part"] == "step4" and line["name"] == program:
                found |= line
        spread = [f"{found[key]:.2f}" for key in ("ms", "low", "high")]
        kernels = sum(found["kinds"].values())
        return [row[0], *spread, str(kernels), f"{found['bytes'] / 1e9:.1f}"]

    return cells


# How a table's header begins: what makes a function of its rows.
TABLES: dict[str, Callable[[], Cells]] = {
    "| float32 = 1 | H100: memory |": lambda: autocast_over("float32", OVER_FLOAT32),
    "| by hand = 1 | H100: memory |": lambda: autocast_over("by hand", SAVED),
    "| H100, by hand = 1 | bytes moved |": lambda: autocast_over(
        "by hand", STREAM, BLOCKS
    ),
    "| H200, float16 step: ms |": of_skips,
    "| by hand = 1 | H100, without |": lambda: autocast_over("by hand", CHECKPOINTED),
    "| by hand = 1 | H100: communicated |": over_devices,
    "| head of a language model | H100: MB |": of_heads,
    "| bfloat16: ms |": clocked,
    "| tracing, float32 = 1 |": time_of_a_trace,
    "| machine | step | measure |": cost_of_a_skip,
}


def written(page: str) -> str:
    """The page with its tables and parts of README as results and README have them."""
    page = PART.sub(_of_readme, page)
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


def _of_readme(match: re.Match[str]) -> str:
    name, rest = match.groups()
    part = (ROOT / "README.md").read_text().partition(f"<!-- start: {name} -->\n")[2]
    part = part.partition("<!-- end: ")[0].replace("](docs/", "](")
    part = re.sub(r"^<!-- block: .*\n", "", part, flags=re.MULTILINE)
    return f"{name}{rest}{part}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split(" |")]


def _named(name: str, names: dict[str, Any]) -> Any:
    if name not in names:
        raise ValueError(f"{name!r} has no figures; docs/tables.py knows {list(names)}")
    return names[name]


def _ratio(figure: str, base: str) -> str:
    if base == "inf":  # more memory than the machine has
        return "float32 does not fit"
    return "-" if base == "-" else _rounded(float(figure) / float(base))


def _rounded(figure: float) -> str:
    """As people round what they read in the results: 0.975 to 0.98."""
    shown = decimal.Decimal(f"{figure:.6f}")
    return str(shown.quantize(decimal.Decimal("0.01"), "ROUND_HALF_UP"))


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
