"""Numbers and tables of the diagnostics as text, on the host."""

import math
from typing import Any

_SHARES = ("zero", "flushed", "subnormal", "overflow", "nonfinite")


def power(s: float) -> str:
    """S as a power of two: "2^15", or "nan", "inf" and "0" as they are."""
    return f"2^{math.log2(s):.4g}" if 0 < s < math.inf else f"{s:g}"


def report_table(report: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str:
    """`GradReport.to_dict()` as a headline and a table of some of its leaves."""
    lines = [_headline(report)]
    if not rows:
        return lines[0]
    width = max(len(name) for name in ("leaf", *map(_leaf_name, rows)))
    heads = "".join(f"{name:>12}" for name in (*_SHARES, "amax", "headroom", "range"))
    lines += [f"{'leaf':{width}}{'entries':>12}{heads}"]
    for path, row in rows.items():
        cells = [_percent(row[name], row["size"]) for name in _SHARES]
        # A leaf of zeros, or without finite entries, has neither headroom nor range.
        cells += [f"{row['amax']:.2e}" if row["amax"] else "-"]
        for name in ("headroom_bits", "dynamic_range_bits"):
            # Adding 0.0 turns a rounded -0.0 into 0.0.
            cells += [f"{round(row[name], 1) + 0.0:.1f} bits" if row["amax"] else "-"]
        columns = "".join(f"{cell:>12}" for cell in cells)
        lines += [f"{_leaf_name(path):{width}}{row['size']:>12,.0f}{columns}"]
    return "\n".join(lines)


def _headline(report: dict[str, Any]) -> str:
    s, log2 = report["loss_scale"], report["recommended_log2_scale"]
    start = f"gradients at loss scale {power(s)}, cast to {report['dtype']}"
    leaves = list(report["leaves"])
    if not leaves:
        return f"{start}: no floating-point leaves"
    finite = "all finite"
    if not report["all_finite"]:
        first = leaves[report["first_nonfinite"]]
        finite = f"not finite from {_leaf_name(first)} on"
    advice = f"recommended loss scale at most 2^{log2:g}"
    if math.isnan(log2):
        advice = "no loss scale to recommend, since no entry is finite and non-zero"
    return f"{start}: {finite}; {advice}"


def _leaf_name(path: str) -> str:
    return path or "(the whole tree)"


def _percent(count: float, size: float) -> str:
    if count == 0 or size == 0:
        return "0"
    share = 100 * count / size
    return f"{share:.1f} %" if share >= 0.05 else "< 0.1 %"
