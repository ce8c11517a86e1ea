"""Prints the times that a clock wrote, a table for each program that was timed.

    python benchmarks/clocked.py benchmarks/results/amx.jsonl

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

MARK = "<!-- clocked -->\n\n"
SO_FAR = " (so far)"  # what was clocked before all of its table was compiled


def tables(rows: Iterable[dict[str, Any]]) -> list[Table]:
    """Times by table. What was clocked again, or further, replaces what was so far."""
    memory: dict[tuple[str, str], float] = {}
    times: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        title = row.get("title", "").removesuffix(SO_FAR)
        if "temp_mb" in row:
            memory[title, row["name"]] = row["temp_mb"]
        if "ms" in row:
            timed = times.setdefault(title, [])
            if timed and timed[0]["name"] == row["name"]:
                timed.clear()
            timed.append(row)
    found = []
    for title, timed in times.items():
        columns = ["program", "ms", "low", "high", "to the first", "temporaries, MB"]
        table = Table(timed[0]["title"], columns, case="")
        for row in timed:
            used = memory.get((title, row["name"]), row.get("peak_mb"))
            spread = [f"{row[key]:.2f}" for key in ("ms", "low", "high")]
            ratio = f"{timed[0]['ms'] / row['ms']:.2f}"
            table.rows.append(
                [row["name"], *spread, ratio, f"{used:,.0f}" if used else "-"]
            )
        found.append(table)
    return found


def machines(rows: Iterable[dict[str, Any]]) -> str:
    """What the parts say of their machine, code and load, once for equal ones."""
    parts: dict[str, list[str]] = {}
    for row in rows:
        if "processor" in row:
            units = "with" if row["bfloat16_units"] else "without"
            found = ", ".join(" ".join(pair) for pair in row["versions"].items())
            text = (
                f"{row['device']}; processor {row['processor']}, {units} matrix units "
            )
            code = f", commit {row['commit']}" if "commit" in row else ""
            text += f"for bfloat16; {row['date']}{code}; {found}"
            loads = parts.setdefault(text, [])
            loads.append(f"{row['part']} ({row['load'][0]})")
    return "".join(
        f"{text}. Parts, with the load at their start: {', '.join(loads)}.\n"
        for text, loads in parts.items()
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=pathlib.Path, help="lines of JSON")
    parser.add_argument(
        "--into", type=pathlib.Path, help="page whose text behind this command they are"
    )
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
