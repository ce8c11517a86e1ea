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

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        rows = ["| " + " | ".join(map(_cell, line)) + " |" for line in lines]
        return "\n\n".join([f"### {self.title}", "\n".join(rows), *self.notes])


def markdown(tables: Sequence[Table]) -> str:
    """All tables, those of one title and several cases as one."""
    groups: dict[Any, list[Table]] = {}
    for table in tables:
        groups.setdefault(table.title if table.case else id(table), []).append(table)
    return "\n\n".join(folded(group).markdown() for group in groups.values())


def folded(tables: Sequence[Table]) -> Table:
    """Tables of several cases as one, with the cells of all cases where they differ."""
    rows = [
        [" / ".join(_alike_once(cells)) for cells in zip(*lines, strict=True)]
        for lines in zip(*(table.rows for table in tables), strict=True)
    ]
    title = tables[0].title.format(" / ".join(table.case for table in tables))
    notes = {note: None for table in tables for note in table.notes}
    return Table(title, tables[0].columns, rows, list(notes))


def _alike_once(cells: Sequence[Any]) -> list[str]:
    texts = list(map(_cell, cells))
    return texts if len(set(texts)) > 1 else texts[:1]


def compared(value: float | None, base: float | None) -> str:
    """A figure, as a ratio to its base where there is one."""
    if value is None:
        return "-"
    shown = f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
    return f"{value / base:.3f}" if base else shown


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
