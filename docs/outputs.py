"""Writes into docs/examples.md what the examples print: `python docs/outputs.py`.

Runs each example whose output the page shows, some minutes each on a CPU, or those that
are named: `python docs/outputs.py quickstart gan`.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs/examples.md"
# An output, and the example that the page includes below it.
SHOWN = re.compile(
    r"^(``` ?(?:text|\{ \.text \.wrap \})\n)(.*?)(^```\n"
    r'(?:(?!^```).)*?^ +--8<-- "examples/([a-z]\w+)\.py")',
    re.DOTALL | re.MULTILINE,
)


def printed(name: str) -> str:
    """What an example prints, without the lines that name a file that it wrote."""
    script = ROOT / f"examples/{name}.py"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(script)]
        run = subprocess.run(
            command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
        )
    lines = run.stdout.replace(str(ROOT), "/home/me").strip("\n").splitlines()
    wrote = ("figure: ", "metrics: ", "checkpoint: ")
    return "\n".join(line.rstrip() for line in lines if not line.startswith(wrote))


def main() -> None:
    names = sys.argv[1:]

    def written(match: re.Match[str]) -> str:
        if names and match[4] not in names:
            return match[0]
        print(match[4], file=sys.stderr)
        return f"{match[1]}{printed(match[4])}\n{match[3]}"

    PAGE.write_text(SHOWN.sub(written, PAGE.read_text()))


if __name__ == "__main__":
    main()
