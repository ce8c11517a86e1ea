"""Prints the times that a clock wrote, a table for each program that was timed.

    python benchmarks/clocked.py benchmarks/results/amx.jsonl

Each line of the file is a JSON object, as `clock.py` writes them. One with "ms" is a
time: the median of rounds in which all programs of its table took turns, with the
shortest and the longest. One with "temp_mb" has the temporaries of a compiled program.
A control, equal to a program of its table, is a column: its time, the program's = 1.
"""

import argparse
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from _tables import Table, markdown

from jmp_scale.diagnostics._timing import CONTROL

COLUMNS = ["program", "ms", "low", "high", "to the first"]
COLUMNS += ["beside itself", "temporaries, MB"]
MARK = "<!-- clocked -->\n\n"
SO_FAR = " (so far)"  # what was clocked before all of its table was compiled


def tables(rows: Iterable[dict[str, Any]]) -> list[Table]:
    """Times by table. What was clocked again, or further, replaces what was so far."""
    memory: dict[tuple[str, str], float] = {}
    times: dict[str, list[dict[str, Any]]] = {}
    code = ""
    for row in rows:
        code = f", commit {row['commit']}" if "commit" in row else code
        title = row.get("title", "").removesuffix(SO_FAR)
        if "temp_mb" in row:
            memory[title, row["name"]] = row["temp_mb"]
        if "ms" in row:
            if title not in times or times[title][0]["name"] == row["name"]:
                times[title] = []
            times[title].append(row | {"code": code})
    found = []
    for title, timed in times.items():
        table = Table(timed[0]["title"] + timed[0]["code"], COLUMNS, case="")
        all_ms = {row["name"]: row["ms"] for row in timed}
        for row in timed:
            name, ms = row["name"], row["ms"]
            if name.endswith(CONTROL):
                continue
            used = memory.get((title, name), row.get("peak_mb"))
            again = all_ms.get(name + CONTROL)
            cells = [f"{row[key]:.2f}" for key in ("ms", "low", "high")]
            cells += [
                f"{timed[0]['ms'] / ms:.2f}",
                f"{again / ms:.2f}" if again else "-",
            ]
            table.rows.append([name, *cells, f"{used:,.0f}" if used else "-"])
        found.append(table)
    return found


def machines(rows: Iterable[dict[str, Any]]) -> str:
    """What the parts say of their machine, code and load, once for equal ones."""
    parts: dict[str, list[str]] = {}
    for row in rows:
        if "processor" in row:
            units = "with" if row["bfloat16_units"] else "without"
            found = ", ".join(" ".join(pair) for pair in row["versions"].items())
            text = f"{row['device']}; processor {row['processor']}, {units} matrix "
            text += f"units for bfloat16; {row['date']}; {found}"
            parts.setdefault(text, []).append(f"{row['part']} ({row['load'][0]})")
    return "".join(
        f"{text}. Parts, with the load at their start: {', '.join(loads)}.\n"
        for text, loads in parts.items()
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=pathlib.Path, help="lines of JSON")
    parser.add_argument("--into", type=pathlib.Path, help="page that they end")
    args = parser.parse_args(argv)
    rows = [*map(json.loads, args.file.read_text().splitlines())]
    text = f"{machines(rows)}\n{markdown(tables(rows))}\n".lstrip()
    if args.into is None:
        print(text, end="")
    else:
        before, mark, _ = args.into.read_text().partition(MARK)
        args.into.write_text(f"{before}{mark}{text}")


if __name__ == "__main__":
    main()
