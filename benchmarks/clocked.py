"""Prints the times that a clock wrote, a table for each program that was timed.

    python benchmarks/clocked.py benchmarks/results/h200.jsonl

Each line of the file is a JSON object, as `clock.py` writes them. One with "ms" is a
time: the median of rounds in which all programs of its table took turns, with the
shortest and the longest. One with "temp_mb" has the temporaries of a compiled program.
"""

import argparse
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from _tables import Table, markdown

SO_FAR = " (so far)"  # what was clocked before all of its table was compiled


def tables(rows: Iterable[dict[str, Any]]) -> list[Table]:
    """Times by table, in the order in which they were taken."""
    memory: dict[tuple[str, str], float] = {}
    times: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "temp_mb" in row:
            memory[row["title"], row["name"]] = row["temp_mb"]
        if "ms" in row and not row["title"].endswith(SO_FAR):
            times.setdefault(row["title"], []).append(row)
    found = []
    for title, timed in times.items():
        columns = ["program", "ms", "low", "high", "to the first", "temporaries, MB"]
        table = Table(title, columns, case="")
        for row in timed:
            used = memory.get((title, row["name"]), row.get("peak_mb"))
            ratio = timed[0]["ms"] / row["ms"]
            spread = [f"{row[key]:.2f}" for key in ("ms", "low", "high")]
            cells = [
                row["name"],
                *spread,
                f"{ratio:.2f}",
                f"{used:,.0f}" if used else "-",
            ]
            table.rows.append(cells)
        found.append(table)
    return found


def machine(rows: Iterable[dict[str, Any]]) -> str:
    """What the first part says of the machine; nothing if no part says it."""
    for row in rows:
        if "processor" in row:
            units = "with" if row["bfloat16_units"] else "without"
            found = ", ".join(" ".join(pair) for pair in row["versions"].items())
            load = row["load"][0]
            return (
                f"{row['device']}; processor {row['processor']}, {units} matrix units "
                f"for bfloat16, load {load} at the start; {row['date']}; {found}.\n"
            )
    return ""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=pathlib.Path, help="lines of JSON")
    lines = parser.parse_args(argv).file.read_text().splitlines()
    rows = [*map(json.loads, lines)]
    if text := machine(rows):
        print(text)
    print(markdown(tables(rows)))


if __name__ == "__main__":
    main()
