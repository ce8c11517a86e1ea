"""The figures show the numbers of the reports, in the axes that are given."""

import sys

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
from runs import history_of, recorded

from jmp_scale import diagnostics, plotting


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


LEAVES = [
    diagnostics.LeafComparison("['w']", 2.0, 0.02, 0.1, True, 0.0),
    diagnostics.LeafComparison("['t']", 1e-9, 1.0, 1.0, True, 0.0),
]
GRADIENTS = diagnostics.GradientComparison(
    loss=1.0,
    half_loss=1.0,
    error=0.02,
    scaled_error=0.7,
    leaves=tuple(LEAVES),
    float32_error=0.0,
    loss_scale=1.0,
    window=diagnostics.Window(2.0**6, 2.0**22, 2.0**20),
)
FIGURES = {
    "loss_scale": recorded([1, 0, 1, 0], loss_finite=[1, 1, 1, 0]),
    "gradients": GRADIENTS,
}


def plot(name, *args, **kwargs):
    return getattr(plotting, f"plot_{name}")(FIGURES[name], *args, **kwargs)


def texts(ax):
    """Whatever text the axes show, as matplotlib's objects."""
    legend = ax.get_legend().get_texts() if ax.get_legend() else []
    labels = [ax.title, ax.xaxis.label, ax.yaxis.label, *ax.get_yticklabels()]
    return [x for x in (*ax.texts, *legend, *labels) if x.get_text()]


def words(ax):
    return " ".join(x.get_text() for x in texts(ax))


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn_into_the_given_axes_or_into_new_ones(name):
    figure, ax = plt.subplots()
    assert plot(name, ax=ax) is ax
    figure.canvas.draw()
    new = plot(name)
    assert new.figure is not figure
    assert new.get_xlabel()
    assert new.get_title()


def test_the_loss_scale_is_drawn_with_its_two_kinds_of_skipped_steps():
    ax = plot("loss_scale")
    assert ax.lines[0].get_ydata().tolist() == [15, 15, 14, 14]
    marks = [points.get_offsets().tolist() for points in ax.collections]
    assert marks == [[[1, 15]], [[3, 14]]]  # gradients, loss
    assert "skipped: gradients not finite (1)" in words(ax)


def spike_history(spikes=(3,), loss=2.0, limits=True):
    """Ten steps, of which some were skipped as spikes."""
    applied = ~np.isin(np.arange(10), spikes)
    factor = np.where(applied, np.float32(1), np.float32(100))
    columns = {"applied": applied, "loss": loss * factor, "grad_norm": 0.5 * factor}
    if limits:
        columns |= {"loss_limit": np.full(10, 4.0), "norm_limit": np.full(10, 2.0)}
    return history_of(**columns)


def test_spikes_are_drawn_above_the_limits_that_they_passed():
    top, bottom = plotting.plot_spikes(spike_history())
    assert top.get_title() == "The guard skipped 1 step of 10 as spikes"
    (loss_spikes,), (norm_spikes,) = top.collections, bottom.collections
    assert loss_spikes.get_offsets().tolist() == [[3, 200]]
    assert norm_spikes.get_offsets().tolist() == [[3, 50]]
    applied, limit = top.lines
    assert np.isnan(applied.get_ydata()[3])
    assert (limit.get_ydata() < 200).all()
    assert (limit.get_ydata() > 2).all()
    assert bottom.get_xlabel() == "step"


@pytest.mark.parametrize("loss", [2.0, -2.0])
def test_a_run_without_spikes_and_limits_is_drawn_whatever_its_losses(loss):
    figure, axes = plt.subplots(1, 2)
    history = spike_history((), loss, limits=False)
    top, bottom = plotting.plot_spikes(history, axes)
    assert (top, bottom) == tuple(axes)
    assert top.get_title() == "The guard skipped 0 steps of 10 as spikes"
    assert (len(top.lines), len(top.collections)) == (1, 0)
    assert top.get_yscale() == ("log" if loss > 0 else "linear")
    figure.canvas.draw()


def relative_luminance(color):
    """By the Web Content Accessibility Guidelines 2.1."""
    rgb = np.array(mpl.colors.to_rgb(color))
    linear = np.where(rgb <= 0.03928, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def test_the_spikes_can_be_read_on_a_light_and_on_a_dark_page():
    for ax in plotting.plot_spikes(spike_history()):
        for text in texts(ax):
            own = relative_luminance(text.get_color())
            for page in ("white", "#0d1117"):  # GitHub's dark page
                bright, dark = sorted([own, relative_luminance(page)], reverse=True)
                assert (bright + 0.05) / (dark + 0.05) > 3  # large text, level AA


def test_each_leaf_shows_its_error_below_the_window_of_loss_scales():
    ax = plot("gradients")
    assert "from $2^{6}$ to $2^{22}$ work; start from $2^{20}$" in ax.get_title()
    assert "at S = $2^{0}$" in ax.get_xlabel()
    (bars,) = ax.containers
    names = [label.get_text() for label in ax.get_yticklabels()]
    errors = dict(zip(names, [bar.get_width() for bar in bars], strict=True))
    assert errors == {"['t']": 1, "['w']": 0.02}  # from below
    lost, held = (bar.get_facecolor() for bar in bars)
    assert lost != held
    figure, other = plt.subplots()
    without = plotting.plot_gradients(GRADIENTS._replace(window=None), ax=other)
    assert without.get_title() == "Gradient in half precision"
    figure.canvas.draw()


EMPTY = {
    "loss_scale": (diagnostics.LossScaleHistory.create(3), "a history of at least one"),
    "gradients": (GRADIENTS._replace(leaves=()), "a gradient of at least one leaf"),
    "spikes": (recorded([1, 0]), "a history with losses or gradient norms"),
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty_reports_are_refused(name):
    empty, expected = EMPTY[name]
    with pytest.raises(ValueError, match=f"plot_{name}: expected {expected}"):
        getattr(plotting, f"plot_{name}")(empty)


def test_without_matplotlib_the_error_names_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "jmp_scale.plotting")
    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        __import__("jmp_scale.plotting")
