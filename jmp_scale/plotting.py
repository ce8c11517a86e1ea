"""Draws the reports of `jmp_scale.diagnostics`; needs the extra `plot`.

Both functions draw into given axes, or into those of a new figure, and return them, so
that you can change titles, limits and legends. Nothing is shown or written to disk.
They run on the host, and raise `ValueError` for a report with nothing to draw.
"""

from collections.abc import Iterable

import numpy as np

from .diagnostics import GradientComparison, LossScaleHistory
from .diagnostics._tables import leaf_name

try:
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.ticker import MaxNLocator, PercentFormatter
except ImportError as error:
    raise ImportError(
        "jmp_scale.plotting needs matplotlib: pip install matplotlib"
    ) from error

# Okabe and Ito's colors, which color-blind readers can tell apart on any page.
_BLUE, _RED, _PURPLE = "#0072b2", "#d55e00", "#cc79a7"
_INK = "#7f7f7f"  # of text, legible on light and dark pages
# What a history may have, and labels.
_ROWS = {"loss": "loss", "grad_norm": "gradient norm", "log2_scale": "loss scale S"}


def plot_history(
    history: LossScaleHistory, axes: Iterable[Axes] | None = None
) -> tuple[Axes, ...]:
    """Draws losses, gradient norms and S of the recorded steps, and the skipped ones.

    The colors are legible on light and dark pages: `savefig(..., transparent=True)`.

    Args:
      history: with losses, gradient norms, or an S other than 1.
      axes: one for each of these three that the history has, in this order.
    """
    recorded = history.to_dict()
    rows = [k for k in _ROWS if (np.isfinite(recorded[k]) & (recorded[k] != 0)).any()]
    if not rows:
        raise ValueError(
            "plot_history: expected steps with a loss, a gradient norm or a loss "
            "scale, got none"
        )
    if axes is None:
        figure = plt.figure(figsize=(7, 1 + 2.2 * len(rows)), layout="constrained")
        axes = figure.subplots(len(rows), squeeze=False, sharex=True)[:, 0]
    drawn = tuple(axes)
    for ax, name in zip(drawn, rows, strict=True):
        _draw_row(ax, name, recorded)
    skipped, steps = (~recorded["applied"]).sum(), len(recorded["step"])
    drawn[0].set_title(f"{skipped:,} of {steps:,} steps skipped", color=_INK)
    drawn[0].legend(frameon=False, labelcolor=_INK)
    drawn[-1].set_xlabel("step", color=_INK)
    return drawn


def _draw_row(ax: Axes, name: str, recorded: dict[str, np.ndarray]) -> None:
    finite = {k: np.where(np.isfinite(x), x, np.nan) for k, x in recorded.items()}
    step, y = recorded["step"], finite[name]
    if name == "log2_scale":
        ax.step(step, y, where="post", color=_BLUE, label="S")
        ax.margins(y=0.15)
        ax.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        ax.yaxis.set_major_formatter(lambda log2, _: _power(log2))
    else:
        shown = np.where(recorded["applied"], y, np.nan)
        ax.plot(step, shown, color=_BLUE, lw=1.2, label="applied")
        # On a linear axis, a spike of a thousand times the loss would flatten the rest.
        if np.nanmin(y) > 0:
            ax.set_yscale("log")
    spike, broken = recorded["spike"], ~recorded["loss_finite"]
    overflow = ~(recorded["grads_finite"] | broken | spike)
    for cause, flags, marker, color in (
        ("spike", spike, "v", _RED),
        ("gradients not finite", overflow, "^", _RED),
        ("the loss is not finite", broken, "X", _PURPLE),
    ):
        if flags.any():
            ax.plot(step[flags], y[flags], marker, c=color, label=f"skipped: {cause}")
    ax.set_ylabel(_ROWS[name], color=_INK)
    ax.tick_params(colors=_INK, which="both")
    ax.spines[:].set_edgecolor(_INK)
    _finish(ax)


def plot_gradients(comparison: GradientComparison, ax: Axes | None = None) -> Axes:
    """Draws the error of each leaf of a gradient, with the window of loss scales."""
    leaves = comparison.leaves[::-1]  # the first is drawn at the top
    if not leaves:
        raise ValueError("plot_gradients: expected at least one leaf, got none")
    if ax is None:
        size = 7.0, 0.24 * len(leaves) + 1.6
        ax = plt.subplots(figsize=size, layout="constrained")[1]
    errors = [min(leaf.error, 1.0) for leaf in leaves]
    colors = [_RED if leaf.is_lost or not leaf.finite else _BLUE for leaf in leaves]
    ax.barh(range(len(leaves)), errors, 0.72, color=colors, zorder=3)
    ax.set_yticks(range(len(leaves)), [leaf_name(leaf.path) for leaf in leaves])
    s = _power(np.log2(comparison.loss_scale))
    xlabel = f"error of the gradient at S = {s} (orange: lost or not finite)"
    ax.set(xlim=(0, 1), xlabel=xlabel, title="Gradient in half precision")
    if comparison.window:
        low, high, start = map(_power, np.log2(comparison.window))
        ax.set_title(f"Loss scales from {low} to {high} work; start from {start}")
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _finish(ax)
    return ax


def _power(log2: float) -> str:
    return f"$2^{{{log2:g}}}$"


def _finish(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color=_INK, alpha=0.25, linewidth=0.8, zorder=0)
    ax.set_axisbelow(True)
