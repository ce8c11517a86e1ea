"""Prints the times that a clock wrote, a table for each program that was timed.

    python benchmarks/clocked.py benchmarks/results/h200.jsonl

Each line of the file is a JSON object. One with "ms" is a time: the median of rounds in
which all programs of its table took turns, with the shortest and the longest. One with
"temp_mb" has the temporaries of the compiled program.
"""

import argparse
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from _tables import Table, markdown


def tables(rows: Iterable[dict[str, Any]]) -> list[Table]:
    """Times by table, in the order in which they were taken."""
    memory: dict[tuple[str, str], float] = {}
    times: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "temp_mb" in row:
            memory[row["title"], row["name"]] = row["temp_mb"]
        if "ms" in row:
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=pathlib.Path, help="lines of JSON")
    lines = parser.parse_args(argv).file.read_text().splitlines()
    print(markdown(tables(map(json.loads, lines))))


if __name__ == "__main__":
    main()
