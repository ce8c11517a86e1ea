"""Writes what the examples print into their page: `python docs/outputs.py [NAME ...]`.

Runs all examples whose output docs/examples.md shows, or those that are named, some
minutes each on a CPU.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs/examples.md"
# What an example prints, before the link to its program.
SHOWN = re.compile(
    r"^(```[^\n]*\n)([^`]*)(```\n\n\[The program\]\(\.\./examples/(\w+)\.py\))$", re.M
)


def shown() -> dict[str, str]:
    """What the page shows of each example."""
    return {name: text for _, text, _, name in SHOWN.findall(PAGE.read_text())}


def printed(name: str) -> str:
    """What an example prints, without the lines that name a file that it wrote."""
    command = [sys.executable, str(ROOT / f"examples/{name}.py")]
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
        )
    wrote = ("figure: ", "metrics: ", "checkpoint: ")
    lines = run.stdout.replace(str(ROOT), "/home/me").strip("\n").splitlines()
    return "\n".join(line.rstrip() for line in lines if not line.startswith(wrote))


def main() -> None:
    texts = {}
    for name in sys.argv[1:] or shown():
        print(name, file=sys.stderr)
        texts[name] = f"{printed(name)}\n"

    def fresh(match: re.Match[str]) -> str:
        before, old, after, name = match.groups()
        return f"{before}{texts.get(name, old)}{after}"

    PAGE.write_text(SHOWN.sub(fresh, PAGE.read_text()))


if __name__ == "__main__":
    main()
