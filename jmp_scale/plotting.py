"""Draws the reports of `jmp_scale.diagnostics`; needs the extra `plot`.

Each function draws into the axes `ax`, or into those of a new figure, and returns them,
so that you can change titles, limits and legends. Nothing is shown or written to disk.
All functions run on the host, and raise `ValueError` for a report with nothing to draw.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jax.typing import DTypeLike

from .diagnostics import Calibration, ExponentHistogram, GradReport, LossScaleHistory
from .diagnostics._run.casts import limits
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
_BLUE, _SKY, _ORANGE, _RED = "#0072b2", "#56b4e9", "#e69f00", "#d55e00"
_PURPLE, _GREY = "#cc79a7", "#999999"
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


def plot_exponent_histogram(
    histogram: ExponentHistogram,
    log2_scale: int = 0,
    dtype: DTypeLike = "float16",
    ax: Axes | None = None,
) -> Axes:
    """Draws the shares of non-zero entries by power of two, and a dtype's range at S.

    Source: Micikevicius et al., "Mixed Precision Training", 2018, figure 3.

    Args:
      histogram: of unscaled gradients.
      log2_scale: log2 of S.
      dtype: see `grad_report`.
    """
    counts = np.asarray(histogram.counts, np.float64).sum(0)
    _check_some("plot_exponent_histogram", counts.any(), "finite non-zero entries")
    cast, ax = limits("plot_exponent_histogram", dtype), _axes(ax)
    shares, exponents = counts / counts.sum(), histogram.exponents
    flushed, normal, overflow = np.log2(cast[:3]) - log2_scale
    used = exponents[counts > 0]
    margin = 0.2 * (overflow - flushed)  # room for the words "zero" and "overflow"
    left = min(used.min() - 1, flushed - margin)
    right = max(used.max() + 2, overflow + margin)
    # Shares of the height, so that the words stand under the top edge.
    words = {"transform": ax.get_xaxis_transform(), "ha": "center", "va": "top"}
    for start, end, color, label in (
        (left, flushed, _RED, "zero"),
        (flushed, normal, _ORANGE, "subnormal"),
        (normal, overflow, _SKY, "normal"),
        (overflow, right, _GREY, "overflow"),
    ):
        ax.axvspan(start, end, color=color, alpha=0.22, linewidth=0)
        ax.text((start + end) / 2, 0.975, label, size="small", **words)
    ax.bar(exponents + 0.05, shares, 0.9, align="edge", color=_BLUE, zorder=3)
    lost = shares[exponents < flushed].sum()
    ax.set(xlim=(left, right), ylim=(0, 1.22 * shares.max()))
    ax.set(xlabel="unscaled magnitude", ylabel="share of non-zero entries")
    place = f"{np.dtype(dtype).name} at S = {_power(log2_scale)}"
    ax.set_title(f"{place}: {lost:.1%} of the non-zero entries lost")
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _power_of_two_axis(ax.xaxis)
    _finish(ax)
    return ax


def plot_flushed(report: GradReport, k: int = 24, ax: Axes | None = None) -> Axes:
    """Draws the share of each leaf that S and the cast lose, by cause.

    Args:
      report: a report of `grad_report`.
      k: draw at most the k worst leaves, in the order of the tree.
    """
    rows = report.to_dict()["leaves"]
    _check_some("plot_flushed", rows, "a report of at least one leaf")
    worst = report.worst(k)
    paths = [path for path in rows if path in worst][::-1]
    ax = _leaf_axes(ax, paths)
    nonzero = [max(rows[path]["size"] - rows[path]["zero"], 1) for path in paths]
    left, y = np.zeros(len(paths)), range(len(paths))
    for label, color, names in (
        ("overflow or not finite", _PURPLE, ("overflow", "nonfinite")),
        ("flushed to zero", _RED, ("flushed",)),
        ("subnormal", _ORANGE, ("subnormal",)),
    ):
        lost = [sum(rows[path][name] for name in names) for path in paths]
        share = np.array(lost) / nonzero
        ax.barh(y, share, 0.72, left, color=color, label=label, zorder=3)
        left += share
    ax.set(xlim=(0, 1), xlabel="share of the leaf's non-zero entries")
    place = f"{report.dtype} at S = {_power(np.log2(float(report.loss_scale)))}"
    ax.set_title(f"{place}: what is lost of each leaf", pad=28)
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _finish(ax, grid="x")
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1)}
    ax.legend(**above, ncols=3, frameon=False, handlelength=1)
    return ax


def plot_calibration(calibration: Calibration, ax: Axes | None = None) -> Axes:
    """Draws the share of zero entries by leaf and log2 S, and the window of S."""
    paths, log2_scales = calibration.paths, np.asarray(calibration.log2_scales)
    low, high = float(calibration.log2_low), float(calibration.log2_high)
    best = float(calibration.recommended_log2_scale)
    ax = _leaf_axes(ax, paths)
    middles = (log2_scales[1:] + log2_scales[:-1]) / 2
    edges = np.concatenate([[log2_scales[0] - 1], middles, [log2_scales[-1] + 1]])
    rows = np.arange(len(paths) + 1) - 0.5
    colors = np.asarray(calibration.zero_fraction).T
    mesh = ax.pcolormesh(edges, rows, colors, cmap="Blues", vmin=0, vmax=1)
    bar = ax.figure.colorbar(mesh, ax=ax, label="entries that are zero", pad=0.02)
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    hatched = {"facecolor": "0.85", "edgecolor": "0.6", "hatch": "///", "linewidth": 0}
    for column in np.flatnonzero(~np.asarray(calibration.finite)):
        ax.axvspan(edges[column], edges[column + 1], **hatched)
    title = "No loss scale works"
    if not np.isnan(low):
        start = "" if np.isnan(best) else f"; start from {_power(best)}"
        title = f"Loss scales from {_power(low)} to {_power(high)} work{start}"
        first, last = np.searchsorted(log2_scales, [low, high])
        frame = {"fill": False, "edgecolor": _RED, "linewidth": 2.5, "zorder": 4}
        ax.axvspan(*edges[[first, last + 1]], **frame)
        ax.axvline(best, color=_RED, linestyle="--", linewidth=1.5, zorder=4)
    ax.set(title=title, xlabel="loss scale S (hatched: gradients overflow)")
    ax.set_ylim(len(paths) - 0.5, -0.5)
    _power_of_two_axis(ax.xaxis)
    return ax


def _check_some(function: str, some: object, needed: str) -> None:
    if not some:
        raise ValueError(f"{function}: expected {needed}, got none")


def _axes(ax: Axes | None, size: tuple[float, float] = (7.0, 3.6)) -> Axes:
    return plt.subplots(figsize=size, layout="constrained")[1] if ax is None else ax


def _leaf_axes(ax: Axes | None, paths: Sequence[str]) -> Axes:
    """Returns axes with one row for each leaf."""
    ax = _axes(ax, (7.0, 0.24 * len(paths) + 1.6))
    ax.set_yticks(range(len(paths)), [leaf_name(path) for path in paths])
    return ax


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
