"""What the examples share beside the training: arguments, progress, tables, figures."""

import argparse
import functools
import operator
import os
import pathlib
import warnings

import jax
import numpy as np
from tqdm import tqdm

from jmp_scale import diagnostics

# XLA may leave out roundings to float16, and does so on a GPU, which would hide what
# float16 loses. The flag is read when JAX looks for devices, so after this import.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"
)

# What float16 loses without a loss scale is what some examples show.
warnings.filterwarnings("ignore", "autocast: float16 gradients without a loss scale")

# No background, and a grey that can be read on white and on a dark page.
INK = "#7f7f7f"
TEXT = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
STYLES = (("#0072b2", "-"), ("#d55e00", "-"), ("#009e73", "--"), ("#cc79a7", ":"))


def parser(description, steps, *, seeds=None, seed=False, out=False):
    """A command line with --steps, and on request --seeds, --seed and --out."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_number(parser, "--steps", "training steps", steps)
    if seeds:
        add_number(parser, "--seeds", "runs of each", seeds)
    if seed:
        parser.add_argument("--seed", type=int, default=0, help="of all randomness (0)")
    if out:
        parser.add_argument(
            "--out", type=pathlib.Path, default="out", help="folder to write to (out)"
        )
    return parser


def add_number(parser, name, what, default=None):
    """Adds an argument: a whole number of at least 1."""
    what = f"{what} ({default or 'none'})"
    parser.add_argument(name, type=positive_int, default=default, help=what)


def positive_int(text):
    """An argument such as a number of steps."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at least 1, got {text!r}"
        )
    return int(text)


def scan(train_step, carry, inputs, name="training", chunk=50):
    """`jax.lax.scan(train_step, carry, inputs)` with a progress bar.

    Compiles chunks of steps. Returns the last carry, and what the steps returned as
    NumPy arrays, whose first axis is the step.
    """
    steps, records = len(jax.tree.leaves(inputs)[0]), []
    with tqdm(total=steps, desc=f"{name:24}", unit="step") as progress:
        for start in range(0, steps, chunk):
            part = slice(start, start + chunk)
            batches = jax.tree.map(operator.itemgetter(part), inputs)
            carry, record = run_chunk(train_step)(carry, batches)
            records.append(jax.device_get(record))
            progress.update(min(chunk, steps - start))
    return carry, jax.tree.map(lambda *parts: np.concatenate(parts), *records)


@functools.cache
def run_chunk(train_step, **static):
    """`jax.lax.scan(train_step, ...)`, compiled once for each length."""
    step = functools.partial(train_step, **static)
    return jax.jit(functools.partial(jax.lax.scan, step))


def power(s):
    """A loss scale as text: "2^15"."""
    return f"2^{np.log2(float(s)):.0f}"


def mean(values):
    """The mean, or NaN of nothing."""
    return np.mean(values) if len(values) else np.nan


def spread(values):
    """The median, the least and the largest value, as texts."""
    return [f"{of(values):.2g}" for of in (np.median, np.min, np.max)]


def table(header, rows):
    """Prints rows of texts: the first column to the left, the others to the right."""
    rows = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for first, *others in rows:
        cells = zip(others, widths[1:], strict=True)
        print(f"{first:{widths[0]}}  " + "  ".join(f"{x:>{n}}" for x, n in cells))


def players(records):
    """Prints each player's loss, S, and first skipped steps, counted from 1."""
    rows = []
    for name, x in records.items():
        loss, s = f"{np.median(x['loss'][-100:]):.3f}", power(x["S"][-1])
        skipped = np.flatnonzero(x["skipped"]) + 1
        first = " ".join(map(str, skipped[:8])) or "-"
        rows.append([name, loss, s, len(skipped), first])
    table(["", "loss", "last S", "skipped", "first skipped steps"], rows)


def history(record, rows=6):
    """Prints a table of some steps of a record: for each name an array over steps."""
    steps = np.linspace(0, len(next(iter(record.values()))) - 1, rows)
    cells = [
        [step + 1] + [f"{column[step]:.6g}" for column in record.values()]
        for step in np.unique(steps.astype(int))
    ]
    table(["step", *record], cells)


def figure(path, panels, columns=2, letters=False, heights=None):
    """Writes a figure of panels: functions that draw into the axes they are given.

    With `letters` the panels are marked (a), (b), ... for a text that names them.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = -(-len(panels) // columns)
    heights = heights or [3.6] * rows  # inches
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(dict.fromkeys(TEXT, INK)):
        figure = plt.figure(figsize=(5.6 * columns, sum(heights)), layout="constrained")
        grid = figure.add_gridspec(rows, columns, height_ratios=heights)
        for i, panel in enumerate(panels):
            row, column = divmod(i, columns)
            end = columns if i == len(panels) - 1 else column + 1  # the last: the rest
            axes = figure.add_subplot(grid[row, column:end])
            panel(axes)
            if letters:
                place = {"transform": axes.transAxes, "weight": "bold"}
                axes.text(-0.13, 1.03, f"({'abcdefgh'[i]})", **place)
        figure.savefig(path, dpi=200, transparent=True)
    plt.close(figure)
    print(f"figure: {path}")


def curves(title, ylabel, lines, *, xlabel="step", draw="plot", **settings):
    """A panel of one curve for each name: y, or (x, y)."""

    def panel(ax):
        for (name, y), (color, style) in zip(lines.items(), STYLES, strict=False):
            xy = y if isinstance(y, tuple) else (np.arange(len(y)), y)
            getattr(ax, draw)(*xy, label=name, color=color, linestyle=style)
        ax.set(title=title, xlabel=xlabel, ylabel=ylabel, **settings)
        ax.spines[["top", "right"]].set_visible(False)
        if len(lines) > 1:
            ax.legend(frameon=False)

    return panel


def scales(title, runs):
    """A panel of the loss scale over steps, for each name an array."""
    log2_s = {name: np.log2(s) for name, s in runs.items()}
    return curves(title, "log2 S", log2_s, draw="step")


def learning(path, titles, record):
    """A figure of the loss and of the loss scale of one run."""
    loss = curves(titles[0], "training loss", {"loss": record["loss"]})
    figure(path, [loss, scales(titles[1], {"S": record["S"]})])


def findings(name, state, history, *details):
    """Prints what `HealthLog` says of a run, details, and as the last a verdict."""
    health = diagnostics.HealthLog()(state, history) or ["nothing to report."]
    *others, verdict = details
    lines = ["health:", *health, *others, "verdict:", verdict]
    print(f"\n--- {name} ---", *lines, sep="\n")


def diagnosis(path, report, falls, stays):
    """The figure of `diagnose.py`: the error by leaf, and two histories of S."""
    from jmp_scale import plotting

    def history(title, of):
        return lambda ax: plotting.plot_history(of, [ax])[0].set_title(title)

    panels = [
        lambda ax: plotting.plot_gradients(report, ax=ax),
        history("An overflow in the forward pass sends S to its floor", falls),
        history("Batches with a NaN image do not lower S", stays),
    ]
    figure(path, panels, letters=True)


def images(title, rows):
    """A panel of rows of digits: for each name an array of shape [n, 64]."""

    def panel(ax):
        strips = [np.asarray(row).reshape(-1, 8, 8) for row in rows.values()]
        strips = [
            np.concatenate(np.pad(x, [(0, 0), (1, 1), (1, 1)]), 1) for x in strips
        ]
        ax.imshow(np.concatenate(strips), cmap="gray_r", vmin=0, vmax=1)
        ax.set(title=title, xticks=[], yticks=10 * np.arange(len(rows)) + 4.5)
        ax.set_yticklabels(rows)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)

    return panel
