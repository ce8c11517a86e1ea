"""Tables of results, and how they are printed as Markdown."""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass
class Table:
    """Column names, rows of strings and numbers, and notes below them.

    Attributes:
      title: holds "{}" where the case stands.
      columns: names.
      rows: the first entry of each names it.
      notes: paragraphs below the table.
      case: of several that have one title and the same rows, such as a dtype; they are
        printed as one table.
    """

    title: str
    columns: list[str]
    rows: list[list[Any]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    case: str = ""

    def keep(self, names: Sequence[str] | None) -> None:
        """Drops the columns that are not named, except the first; None keeps all."""
        kept = [
            position
            for position, name in enumerate(self.columns)
            if position == 0 or names is None or name in names
        ]
        self.columns, *self.rows = (
            [line[position] for position in kept] for line in [self.columns, *self.rows]
        )

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        table = "\n".join(
            "| " + " | ".join(_cell(c) for c in line) + " |" for line in lines
        )
        return "\n\n".join([f"### {self.title}", table, *self.notes])


def markdown(tables: Sequence[Table]) -> str:
    """All tables, those of one title and several cases as one."""
    groups: dict[Any, list[Table]] = {}
    for table in tables:
        groups.setdefault(table.title if table.case else id(table), []).append(table)
    return "\n\n".join(
        (folded(group) if group[0].case else group[0]).markdown()
        for group in groups.values()
    )


def folded(tables: Sequence[Table]) -> Table:
    """Tables of several cases as one.

    A column whose entries are the same in several cases stands once for all of them.
    What is the same in all rows and cases is told in a note instead.
    """
    first, *names = tables[0].columns
    columns, entries = [first], [[row[0] for row in tables[0].rows]]
    constant = []
    for position, name in enumerate(names, start=1):
        cases: dict[tuple[Any, ...], list[str]] = {}
        for table in tables:
            column = tuple(row[position] for row in table.rows)
            cases.setdefault(column, []).append(table.case)
        alike = {entry for column in cases for entry in column}
        if len(alike) == 1 and len(entries[0]) > 1:
            constant.append(f"{name} {_cell(alike.pop())}")
            continue
        for column, labels in cases.items():
            suffix = f" ({', '.join(labels)})" if len(cases) > 1 else ""
            columns.append(name + suffix)
            entries.append(list(column))
    notes = [f"In all rows: {', '.join(constant)}."] if constant else []
    title = tables[0].title.format(_joined([table.case for table in tables]))
    rows = [list(row) for row in zip(*entries, strict=True)]
    return Table(title, columns, rows, notes + _notes(tables))


def _notes(tables: Sequence[Table]) -> list[str]:
    """The tables' notes, each once, with its case where they differ."""
    cases: dict[str, list[str]] = {}
    for table in tables:
        for note in table.notes:
            cases.setdefault(note, []).append(table.case)
    return [
        note if len(labels) == len(tables) else f"{', '.join(labels)}: {note}"
        for note, labels in cases.items()
    ]


def _joined(labels: Sequence[str]) -> str:
    *others, last = labels
    return f"{', '.join(others)} and {last}" if others else last


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
