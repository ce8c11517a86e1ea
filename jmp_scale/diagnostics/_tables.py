"""Formats results: loss scales, names of leaves, shares, and tables."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

C = TypeVar("C", bound=type)
T = TypeVar("T")


def power(s: float) -> str:
    """Formats S as a power of two, "2^15"; or as "nan", "inf" and "0"."""
    return f"2^{math.log2(s):.4g}" if 0 < s < math.inf else f"{s:g}"


def percent(share: float) -> str:
    """Formats a share with two digits, "9.4 %"; a factor of 100 or more as it is."""
    if not math.isfinite(share) or share >= 100:
        return f"{share:.2g}"
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def said(error: Exception) -> str:
    """Returns the line of an error that says what is wrong, of a callback's too."""
    text = str(error).strip()
    of_callback = re.search(r"^\w[\w.]*: .*", text.partition("Traceback")[2], re.M)
    return of_callback[0] if of_callback else text.partition("\n")[0]


def leaf_name(path: str) -> str:
    """Returns the path of a leaf, or of a tree that is a leaf itself."""
    return path or "(the whole tree)"


def table(
    rows: Sequence[tuple[str, ...]], names: int = 1, k: int | None = None
) -> list[str]:
    """Formats a head and k rows, or all: names, then cells of 12 characters."""
    k = len(rows) if k is None else k
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows[: k + 1]:
        left = "  ".join(map(str.ljust, row[:names], widths))
        lines.append(left + "".join(cell.rjust(12) for cell in row[names:]))
    more = len(rows) - 1 - k
    return [*lines, f"and {more} more"] if more > 0 else lines


def printed(cls: C) -> C:
    """Makes `str` and `repr` of a result its `summary()`, as a notebook shows it."""
    cls.__str__ = cls.__repr__ = cls.summary  # pyright: ignore[reportAttributeAccessIssue]
    return cls


def with_progress(items: Sequence[T], name: str) -> Iterable[T]:
    """Returns the items, with a progress bar if tqdm is installed."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return items
    return tqdm(items, name, leave=False)
