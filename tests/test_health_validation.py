"""The benchmark of health: how runs are judged, and how findings are counted."""

import health_validation as validation
import numpy as np
import pytest
from _health_runs import CHECK, PLANS, Run, Setting, bad_steps


def run(loss, norm=1.0, said=(), bad=0):
    loss = np.asarray(loss, float)
    norms = np.broadcast_to(np.asarray(norm, float), loss.shape)
    return Run(Setting(bad=bad), loss, norms, [(CHECK, frozenset(said))])


FALLS = np.linspace(2, 1, 500)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (FALLS, validation.WELL),
        (np.linspace(2, 1.5, 500), validation.BETWEEN),
        (np.full(500, 2.0), validation.WRONG),
        (np.append(FALLS[:-1], np.nan), validation.WRONG),
    ],
)
def test_a_run_is_judged_by_its_share_of_the_possible_fall(loss, expected):
    assert validation.judged(run(loss), best=1.1) == expected


@pytest.mark.parametrize(
    ("loss", "norm", "expected"),
    [
        (np.append(FALLS, FALLS[::-1]), 1, {"loss diverges"}),
        (np.append([2, 1e4], np.full(498, 2.0)), 1, {"loss blew up"}),
        (np.full(500, 2.0), 1e-5 ** np.linspace(0, 1, 500), {"gradients vanished"}),
        (np.linspace(2, 1e3, 500), 1, {"loss diverges", "loss blew up"}),
        (FALLS, 1, set()),
    ],
)
def test_a_run_is_a_case_of_what_its_numbers_show(loss, norm, expected):
    assert validation.cases(run(loss, norm)) == expected


def test_precision_leaves_out_runs_between_and_recall_is_of_a_kind_of_failure():
    spike, row = (list(PLANS).index(plan) for plan in ("spike", "spikes in a row"))
    outcomes = [
        (validation.WRONG, run(FALLS, said={"spike"}, bad=spike)),
        (validation.WRONG, run(FALLS, bad=spike)),
        (validation.WRONG, run(FALLS, said={"spike"}, bad=row)),
        (validation.WELL, run(FALLS, said={"spike"})),
        (validation.BETWEEN, run(FALLS, said={"spike"})),
    ]
    of_its_kind = [2, 1, 1, 2, 1, 1, "0.67", "0.50"]
    assert validation.scores(outcomes, {"spike"}, "spike") == of_its_kind
    assert validation.scores(outcomes, {"spike"}) == [3, 1, 1, 2, 1, 1, "0.67", "0.67"]
    assert validation.scores([], {"spike"})[-2:] == ["-", "-"]


def test_bad_batches_stand_where_their_sentence_is_due():
    last = np.flatnonzero(bad_steps("spike", 500))
    row = np.flatnonzero(bad_steps("spikes in a row", 500))
    assert (last % CHECK).tolist() == [CHECK - 1]
    assert (row % CHECK).tolist() == [CHECK - 3, CHECK - 2, CHECK - 1]
    assert bad_steps("frequent spikes", 500).sum() == 12
    assert not bad_steps("none", 500).any()
