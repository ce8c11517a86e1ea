"""Writes what the examples print, for their page: `python docs/outputs.py [NAME ...]`.

Runs all examples that have a file in examples/outputs, or those that are named, some
minutes each on a CPU.
"""

import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
OUTPUTS = ROOT / "examples/outputs"


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
    for name in sys.argv[1:] or sorted(path.stem for path in OUTPUTS.glob("*.txt")):
        print(name, file=sys.stderr)
        (OUTPUTS / f"{name}.txt").write_text(f"{printed(name)}\n")


if __name__ == "__main__":
    main()
