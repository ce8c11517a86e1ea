"""Colors, axes and marks that the figures of `plotting` share; needs no matplotlib."""

from typing import Any

import numpy as np

# From the palette of Okabe and Ito, which the color-blind can tell apart. Each stands
# out from white and from a dark page.
BLUE, SKY, ORANGE, RED = "#0072b2", "#56b4e9", "#e69f00", "#d55e00"
PURPLE, GREY = "#cc79a7", "#999999"
INK = "#7f7f7f"  # of text, which can be read on both


def power(log2: float) -> str:
    """A power of two as mathematical text."""
    return f"$2^{{{log2:g}}}$"


def finish(ax: Any, grid: str = "y", legend: bool = True) -> None:
    """Removes two spines, and adds the grid and the legend."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis=grid, color="0.9", linewidth=0.8, zorder=0)
    ax.set_axisbelow(True)
    if legend:
        ax.legend(frameon=False, loc="best")


def make_legible(ax: Any) -> None:
    """Gives texts, ticks and spines a color that stands out from white and black."""
    ax.tick_params(colors=INK, which="both")
    ax.xaxis.label.set_color(INK)
    ax.yaxis.label.set_color(INK)
    for spine in ax.spines.values():
        spine.set_edgecolor(INK)
    ax.grid(color=INK, alpha=0.25)
    legend = ax.get_legend()
    for text in legend.get_texts() if legend else ():
        text.set_color(INK)


def draw_skipped(ax: Any, step: Any, y: Any, marker: str, color: str, **style) -> None:
    """Marks for skipped steps; nothing, and no entry in the legend, for none."""
    if len(step):
        style = {"s": 36, "linewidth": 0, "zorder": 4, **style}
        ax.scatter(step, y, marker=marker, color=color, **style)


def draw_limited(
    ax: Any, recorded: dict[str, Any], name: str, limit: str, spike: Any
) -> None:
    """A recorded number, the limit above which it is a spike, and the spikes."""
    step = recorded["step"]
    y, limits = (
        np.where(np.isfinite(recorded[key]), recorded[key], np.nan)
        for key in (name, limit)
    )
    applied = np.where(recorded["applied"], y, np.nan)
    ax.plot(step, applied, color=BLUE, linewidth=1.2, label="applied", zorder=2)
    if np.isfinite(limits).any():
        style = {"color": ORANGE, "linestyle": "--", "linewidth": 1.4, "zorder": 3}
        ax.plot(step, limits, label="limit of the guard", **style)
    draw_skipped(ax, step[spike], y[spike], "v", RED, s=40, label="skipped")
    if name == "loss" and np.isfinite(y).any() and np.nanmin(y) > 0:
        # A spike a thousand times the loss would leave nothing to see of the rest.
        ax.set_yscale("log")
