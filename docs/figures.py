"""Draws all pictures of the documentation: `python docs/figures.py`.

Needs the extra `examples`, and takes some minutes on a CPU.
"""

import pathlib
import sys

import numpy as np

DOCS = pathlib.Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "examples"))

import _digits  # noqa: E402
import _show  # noqa: E402
import diagnose  # noqa: E402
import gan  # noqa: E402
import jax  # noqa: E402
import linen_resnet  # noqa: E402
import matplotlib.pyplot as plt  # noqa: E402
import nan_image  # noqa: E402
import nnx_transformer  # noqa: E402
import optax  # noqa: E402
import train_digits  # noqa: E402
from matplotlib.patches import FancyBboxPatch  # noqa: E402

import jmp_scale  # noqa: E402
from jmp_scale import diagnostics, plotting  # noqa: E402


def how_it_works(path):
    """The gradients of the digits autoencoder beside float16's range, at two S."""
    images, _ = _digits.load_images()
    params = _digits.init_autoencoder()
    grads = jax.grad(_digits.reconstruction_loss)(params, images[:256])
    entries = np.concatenate([np.ravel(g) for g in jax.tree.leaves(grads)])
    powers = np.frexp(entries[entries != 0])[1] - 1
    exponents, counts = np.unique(powers, return_counts=True)
    share = counts / counts.sum()
    panels = [
        _gradients("At S = 1, float16 loses the small gradients", exponents, share, 0),
        _gradients("At S = 2^15, it holds nearly all of them", exponents, share, 15),
    ]
    _show.figure(path, panels)


def _gradients(title, exponents, share, log2_scale):
    def panel(ax):
        x = exponents + log2_scale
        lost = x < -25  # 2^-25 itself is rounded to 0, what is above it to 2^-24
        ax.bar(x[~lost], 100 * share[~lost], 1, color="#0072b2", label="held")
        ax.bar(x[lost], 100 * share[lost], 1, color="#d55e00", label="lost: zero")
        ax.axvspan(
            -25.5, 15.5, color="#0072b2", alpha=0.12, lw=0, label="float16's range"
        )
        ax.set(
            title=title,
            xlabel="log2 of the scaled gradient",
            ylabel="entries (%)",
            xlim=(-50, 20),
        )
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, loc="upper left")

    return panel


def spikes(path, steps=600):
    """The digits autoencoder in bfloat16 under a guard, with six bad batches."""
    tx = jmp_scale.with_loss_scale(optax.adam(2e-3), guard=jmp_scale.SpikeGuard())
    weights = np.ones(steps, np.float32)
    weights[[220, 340, 341, 342, 430, 540]] = 1e3, 1e4, 300, 100, 1e5, 30

    def step(carry, inputs):
        params, old, history = carry
        images, weight = inputs

        def loss_fn(params):
            return _digits.reconstruction_loss(params, images, weight)

        half_loss = jmp_scale.autocast(loss_fn, "bfloat16")
        loss, grads = jax.value_and_grad(half_loss)(params)
        updates, new = tx.update(grads, old, params, value=loss)
        history = history.push(old, new, loss=loss, grads=grads)
        return (optax.apply_updates(params, updates), new, history), None

    params = _digits.init_autoencoder()
    history = diagnostics.LossScaleHistory.create(steps)
    images = _digits.Batches(_digits.load_images()[0], steps, 64)[:]
    start = params, tx.init(params), history
    _, _, history = jax.lax.scan(step, start, (images, weights))[0]
    top, *_ = plotting.plot_history(history)
    # Twice the pixels of a page of 700, and no background: for light and dark pages.
    top.figure.savefig(path, dpi=200, transparent=True)


# One layer of a transformer: operation, whether it is a product, what of it is saved.
LAYER = [
    ("norm", False, "stream (float32)"),
    ("product: Wq, Wk, Wv", True, "q, k, v (half)"),
    ("product: q, k", True, None),
    ("softmax", False, "probabilities (half)"),
    ("product: v", True, "heads (half)"),
    ("product: Wo", True, None),
    ("add, norm", False, "stream (float32)"),
    ("product: W1", True, "hidden (half)"),
    ("gelu", False, None),
    ("product: W2", True, None),
]
HALF, AGAIN = "#0072b2", "#d55e00"


def autocast(path):
    """One layer under `autocast`: forward (down), what is saved, backward (up)."""
    with plt.rc_context({"text.color": _show.INK}):
        figure, ax = plt.subplots(figsize=(6.6, 6.8), layout="constrained")
        _layer(ax)
        end = len(LAYER) + 1.5
        _box(ax, 0, end, "half precision", half=True)
        _box(ax, 1, end, "float32")
        _box(ax, 2, end, "float32, recomputed", again=True)
        ax.set(xlim=(-0.45, 2.45), ylim=(-end - 0.5, 1.1))
        ax.axis("off")
        figure.savefig(path, dpi=200, transparent=True)


def _layer(ax):
    for column, title in enumerate(("forward", "saved", "backward")):
        ax.text(column, 0.8, title, ha="center", va="center", size=12)
    for row, (name, product, kept) in enumerate(LAYER):
        half = kept is not None and "half" in kept
        again = not product and not half
        _box(ax, 0, row, name, half=product)
        _box(ax, 2, row, _derivative(name, product, again), half=product, again=again)
        _arrow(ax, (0, row + 0.36), (0, row + 0.64))
        _arrow(ax, (2, row + 0.64), (2, row + 0.36))
        if kept:
            # The next operation reads what is saved in half precision; a softmax's
            # derivative reads it too.
            readers = {row + 1 if half else row, row + 1 if product else row}
            _box(ax, 1, row, kept, half=half)
            _arrow(ax, (0.4, row), (0.6, row))
            for reader in readers:
                _arrow(ax, (1.4, row), (1.6, reader))
    _box(ax, 0, len(LAYER), "add: the stream of\nthe next layer")
    _box(ax, 2, len(LAYER), "gradient of\nthe stream")


def _derivative(name, product, again):
    if product:
        return "two products"
    return (
        f"{name.split(', ')[-1]}: recomputed,\nand its derivative"
        if again
        else f"derivative of {name}"
    )


def _box(ax, column, row, text, *, half=False, again=False):
    color = AGAIN if again else HALF if half else _show.INK
    box = FancyBboxPatch(
        (column - 0.39, -row - 0.35),
        0.78,
        0.7,
        boxstyle="round,pad=0,rounding_size=.06",
        facecolor=HALF if half else "none",
        edgecolor=color,
        linestyle="--" if again else "-",
    )
    ax.add_patch(box)
    ink = "white" if half else color
    ax.text(column, -row, text, ha="center", va="center", size=10, color=ink)


def _arrow(ax, start, end):
    style = {"arrowstyle": "-|>", "color": _show.INK, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", (end[0], -end[1]), (start[0], -start[1]), arrowprops=style)


RESULTS = DOCS.parent / "benchmarks/results"


def half_parameters(path):
    """How bfloat16 parameters train, as `benchmarks/half_storage.py` measured it."""
    forms = "float32 parameters", "naive", "remainder", "stochastic"
    panels = [
        _losses(
            "half_storage",
            f"{task}, learning rate {rate}",
            forms,
            scale,
            hidden=forms[2:],
        )
        for task, scale in (("digits", "log"), ("character transformer", "linear"))
        for rate in ("1e-3", "1e-4")
    ]
    _show.figure(path, panels)


def half_states(path):
    """How averages in bfloat16 train, as `benchmarks/half_storage.py` measured it."""
    forms = "float32", "to nearest", "stochastic"
    titles = [
        "AdamW, b2 .999, learning rate 1e-3",
        "RMSprop, decay .999, learning rate 1e-3",
    ]
    _show.figure(path, [_losses("half_storage", x, forms, "log") for x in titles])


def _losses(results, title, forms, scale, hidden=()):
    """A panel of training losses by step, a curve for each form."""
    text = (RESULTS / f"{results}.md").read_text()
    table = text.partition(f"### {title}, by step\n\n")[2]
    lines = table.partition("\n\n")[0].splitlines()
    names, _, *rows = (line.strip("| \n").split(" | ") for line in lines)
    columns = dict(zip(names, np.float64(rows).T, strict=True))
    # Those that lie on the first form's line say so, because only one can be seen.
    names = {form: f"{form} (on the same line)" for form in hidden}
    losses = {names.get(f, f): (columns["step"], columns[f]) for f in forms}
    return _show.curves(title, "training loss", losses, yscale=scale)


def main():
    examples = train_digits, diagnose, nan_image, linen_resnet, nnx_transformer, gan
    for example in examples:
        example.main(["--out", str(DOCS)])
    how_it_works(DOCS / "how_it_works.png")
    spikes(DOCS / "spikes.png")
    autocast(DOCS / "autocast.png")
    half_parameters(DOCS / "half_parameters.png")
    half_states(DOCS / "half_states.png")


if __name__ == "__main__":
    main()
