"""The figures show the numbers of the reports, in the axes that are given."""

import importlib
import sys

import numpy as np
import pytest
from runs import history_of, recorded

from jmp_scale import diagnostics


# Matplotlib takes long to import: not in each process that collects the tests.
@pytest.fixture
def plotting():
    plotting = importlib.import_module("jmp_scale.plotting")
    plotting.plt.switch_backend("Agg")
    yield plotting
    plotting.plt.close("all")


LEAVES = (
    diagnostics.LeafComparison("['w']", 2.0, 0.02, 0.1, True, 0.0),
    diagnostics.LeafComparison("['t']", 1e-9, 1.0, 1.0, True, 0.0),
)
WINDOW = diagnostics.Window(2.0**6, 2.0**22, 2.0**20)
GRADIENTS = diagnostics.GradientComparison(
    1.0, 1.0, 0.02, 0.7, LEAVES, float32_error=0.0, loss_scale=1.0, window=WINDOW
)


def marked(ax, label):
    """The points that a label marks."""
    (line,) = [x for x in ax.lines if x.get_label() == label]
    return line.get_xydata().tolist()


def test_the_loss_scale_is_drawn_with_its_two_kinds_of_skipped_steps(plotting):
    figure, given = plotting.plt.subplots()
    history = recorded([1, 0, 1, -1])
    (ax,) = plotting.plot_history(history, [given])
    assert ax is given
    assert ax.lines[0].get_ydata().tolist() == [15, 15, 14, 14]
    assert marked(ax, "skipped: gradients not finite") == [[1, 15]]
    assert marked(ax, "skipped: the loss is not finite") == [[3, 14]]
    assert ax.get_title() == "2 of 4 steps skipped"
    figure.canvas.draw()
    assert "$2^{15}$" in [text.get_text() for text in ax.get_yticklabels()]


def spike_history(spikes, loss):
    """Ten steps, of which some were skipped as spikes."""
    applied = ~np.isin(np.arange(10), spikes)
    factor = np.where(applied, np.float32(1), np.float32(100))
    return history_of(applied=applied, loss=loss * factor, grad_norm=0.5 * factor)


def test_spikes_are_drawn_above_the_losses_and_norms_of_applied_steps(plotting):
    top, bottom = plotting.plot_history(spike_history([3], 2.0))
    assert marked(top, "skipped: spike") == [[3, 200]]
    assert marked(bottom, "skipped: spike") == [[3, 50]]
    assert np.isnan(marked(top, "applied")[3][1])
    assert bottom.get_xlabel() == "step"


@pytest.mark.parametrize(("loss", "scale"), [(2.0, "log"), (-2.0, "linear")])
def test_a_run_without_spikes_is_drawn_whatever_its_losses(plotting, loss, scale):
    figure, axes = plotting.plt.subplots(1, 2)
    top, bottom = plotting.plot_history(spike_history([], loss), axes)
    assert (top, bottom) == tuple(axes)
    assert (len(top.lines), top.get_yscale()) == (1, scale)
    figure.canvas.draw()


def test_each_leaf_shows_its_error_below_the_window_of_loss_scales(plotting):
    ax = plotting.plot_gradients(GRADIENTS)
    assert "from $2^{6}$ to $2^{22}$ work; start from $2^{20}$" in ax.get_title()
    assert "at S = $2^{0}$" in ax.get_xlabel()
    (bars,) = ax.containers
    names = [label.get_text() for label in ax.get_yticklabels()]
    errors = dict(zip(names, [bar.get_width() for bar in bars], strict=True))
    assert errors == {"['t']": 1, "['w']": 0.02}  # from below
    lost, held = (bar.get_facecolor() for bar in bars)
    assert lost != held
    _, given = plotting.plt.subplots()
    without = plotting.plot_gradients(GRADIENTS._replace(window=None), ax=given)
    assert without is given
    assert without.get_title() == "Gradient in half precision"


def test_reports_with_nothing_to_draw_are_refused(plotting):
    with pytest.raises(ValueError, match="plot_history: expected steps with a loss, a"):
        plotting.plot_history(diagnostics.LossScaleHistory.create(3))
    with pytest.raises(ValueError, match="plot_gradients: expected at least one leaf"):
        plotting.plot_gradients(GRADIENTS._replace(leaves=()))


def test_without_matplotlib_the_error_names_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "jmp_scale.plotting")
    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        __import__("jmp_scale.plotting")
