"""Draws the reports of `jmp_scale.diagnostics`; needs the extra `plot`.

Each function draws into the axes `ax`, or into those of a new figure, and returns them,
so that you can change titles, limits and legends. Nothing is shown or written to disk.
All functions run on the host, and raise `ValueError` for a report with nothing to draw.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from .diagnostics import GradientComparison, LossScaleHistory
from .diagnostics._tables import leaf_name

try:
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.ticker import MaxNLocator, PercentFormatter
except ImportError as error:
    raise ImportError(
        "jmp_scale.plotting needs matplotlib: pip install matplotlib"
    ) from error

# Okabe and Ito's colors, which color-blind readers can tell apart on any page.
_BLUE, _ORANGE, _RED, _PURPLE = "#0072b2", "#e69f00", "#d55e00", "#cc79a7"
_INK = "#7f7f7f"  # of text, legible on light and dark pages


def plot_loss_scale(history: LossScaleHistory, ax: Axes | None = None) -> Axes:
    """Draws log2 S over the recorded steps, and marks skipped steps."""
    recorded = history.to_dict()
    step, log2_scale = recorded["step"], recorded["log2_scale"]
    _check_some("plot_loss_scale", step.size, "a history of at least one step")
    ax = _axes(ax)
    ax.step(step, log2_scale, where="post", color=_BLUE, lw=1.6, label="loss scale S")
    broken = ~recorded["loss_finite"]
    overflow = ~(recorded["grads_finite"] | broken | recorded["spike"])
    label = f"skipped: gradients not finite ({overflow.sum()})"
    _mark(ax, step[overflow], log2_scale[overflow], "v", _RED, label)
    label = f"skipped: the loss is not finite ({broken.sum()})"
    _mark(ax, step[broken], log2_scale[broken], "X", _PURPLE, label)
    ax.set(xlabel="step", ylabel="loss scale S", title="Loss scale", ymargin=0.15)
    _power_of_two_axis(ax.yaxis)
    _finish(ax, grid="both")
    ax.legend(frameon=False)
    return ax


def plot_spikes(
    history: LossScaleHistory, axes: Sequence[Axes] | None = None
) -> tuple[Axes, Axes]:
    """Draws loss and gradient norm, the guard's limits, and the steps it skipped.

    The colors are legible on light and dark pages: `savefig(..., transparent=True)`.

    Args:
      history: with at least one `loss` or `grads`; limits are drawn if it had a guard.
      axes: two axes, for the loss and for the norm; default those of a new figure.
    """
    recorded = history.to_dict()
    known = np.isfinite([recorded["loss"], recorded["grad_norm"]]).any()
    needed = "a history with losses or gradient norms (loss= and grads= of push)"
    _check_some("plot_spikes", known, needed)
    figure = {"figsize": (7.0, 5.0), "layout": "constrained", "sharex": True}
    top, bottom = plt.subplots(2, **figure)[1] if axes is None else axes
    step, spike, applied = (recorded[x] for x in ("step", "spike", "applied"))
    rows = (top, "loss", "loss_limit"), (bottom, "grad_norm", "norm_limit")
    for ax, name, limit in rows:
        pair = recorded[name], recorded[limit]
        y, limits = (np.where(np.isfinite(x), x, np.nan) for x in pair)
        shown = np.where(applied, y, np.nan)
        ax.plot(step, shown, color=_BLUE, lw=1.2, label="applied")
        if np.isfinite(limits).any():
            label = "limit of the guard"
            ax.plot(step, limits, "--", color=_ORANGE, lw=1.4, label=label)
        _mark(ax, step[spike], y[spike], "v", _RED, "skipped")
        # On a linear axis, a spike of a thousand times the loss would flatten the rest.
        if y[np.isfinite(y)].min(initial=1) > 0:
            ax.set_yscale("log")
        ax.set_ylabel(name.replace("grad_norm", "gradient norm"), color=_INK)
        ax.tick_params(colors=_INK, which="both")
        ax.spines[:].set_edgecolor(_INK)
        _finish(ax, grid="both")
    bottom.set_xlabel("step", color=_INK)
    steps = "1 step" if spike.sum() == 1 else f"{spike.sum()} steps"
    top.set_title(f"The guard skipped {steps} of {len(spike):,} as spikes", color=_INK)
    top.legend(frameon=False, labelcolor=_INK)
    return top, bottom


def plot_gradients(comparison: GradientComparison, ax: Axes | None = None) -> Axes:
    """Draws the error of each leaf of a gradient, with the window of loss scales."""
    _check_some("plot_gradients", comparison.leaves, "a gradient of at least one leaf")
    if ax is None:
        ax = _axes(None, (7.0, 0.24 * len(comparison.leaves) + 1.6))
    leaves = comparison.leaves[::-1]  # the first is drawn at the top
    errors = [min(leaf.error, 1.0) for leaf in leaves]
    colors = [_RED if leaf.is_lost or not leaf.finite else _BLUE for leaf in leaves]
    ax.barh(range(len(leaves)), errors, 0.72, color=colors, zorder=3)
    ax.set_yticks(range(len(leaves)), [leaf_name(leaf.path) for leaf in leaves])
    s = _power(np.log2(comparison.loss_scale))
    xlabel = f"error of the gradient at S = {s} (red: lost or not finite)"
    ax.set(xlim=(0, 1), xlabel=xlabel, title="Gradient in half precision")
    window = comparison.window
    if window:
        low, high, start = (_power(np.log2(s)) for s in window)
        ax.set_title(f"Loss scales from {low} to {high} work; start from {start}")
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _finish(ax, grid="x")
    return ax


def _check_some(function: str, some: object, needed: str) -> None:
    if not some:
        raise ValueError(f"{function}: expected {needed}, got none")


def _axes(ax: Axes | None, size: tuple[float, float] = (7.0, 3.6)) -> Axes:
    return plt.subplots(figsize=size, layout="constrained")[1] if ax is None else ax


def _power_of_two_axis(axis: Axis) -> None:
    steps = {"min_n_ticks": 3, "steps": [1, 2, 4, 5, 10]}
    axis.set_major_locator(MaxNLocator(integer=True, **steps))
    axis.set_major_formatter(lambda log2, _: _power(log2))


def _power(log2: float) -> str:
    return f"$2^{{{log2:g}}}$"


def _finish(ax: Axes, grid: Literal["both", "x", "y"] = "y") -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis=grid, color=_INK, alpha=0.25, linewidth=0.8, zorder=0)
    ax.set_axisbelow(True)


def _mark(
    ax: Axes, x: np.ndarray, y: np.ndarray, marker: str, color: str, label: str
) -> None:
    if x.size:
        ax.scatter(x, y, 36, color, marker=marker, lw=0, zorder=4, label=label)
