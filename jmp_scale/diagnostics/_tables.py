"""Formats results: loss scales, names of leaves, shares, tables, and repr."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

C = TypeVar("C", bound=type)
T = TypeVar("T")

_LONGEST = 200  # characters of a repr


def power(s: float) -> str:
    """Formats S as a power of two, "2^15"; or as "nan", "inf" and "0"."""
    return f"2^{math.log2(s):.4g}" if 0 < s < math.inf else f"{s:g}"


def percent(share: float) -> str:
    """Formats a share with two digits, "9.4 %"; a factor of 100 or more as it is."""
    if not math.isfinite(share) or share >= 100:
        return f"{share:.2g}"
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


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
    """Makes `str` of a result its `summary()`, and `repr` a short constructor's line.

    A decorator of named tuples and dataclasses. `str` of a result whose numbers are not
    known (traced, donated, of several runs at once) is its `repr`.
    """

    def short(self: object) -> str:
        names = getattr(cls, "__match_args__", ())
        parts = [f"{name}={_shown(getattr(self, name))}" for name in names]
        line = f"{cls.__name__}({', '.join(parts)})"
        if len(line) <= _LONGEST:
            return line
        cut = line[: _LONGEST - len(", ...)")]
        return cut[: cut.rindex(", ")] + ", ...)"

    def summary_or_short(self: Any) -> str:
        try:
            return self.summary()
        except (TypeError, ValueError, RuntimeError):
            return short(self)

    cls.__repr__ = short  # pyright: ignore[reportAttributeAccessIssue]
    if hasattr(cls, "summary"):
        cls.__str__ = summary_or_short  # pyright: ignore[reportAttributeAccessIssue]
    return cls


def _shown(value: object) -> str:
    """Formats a value; of a large one dtype and shape, length, or the beginning."""
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):  # several numbers, or unknown
            return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = repr(value)
    if isinstance(value, str):
        return text if len(text) <= 50 else f"{text[:46]}...{text[0]}"
    if isinstance(value, tuple) and len(text) > 50:
        return f"({len(value)} of {type(value[0]).__name__})"
    return text


def with_progress(items: Sequence[T], name: str) -> Iterable[T]:
    """Returns the items, with a progress bar if tqdm is installed."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return items
    return tqdm(items, name, leave=False)
