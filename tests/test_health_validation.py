"""The benchmark of health: how runs are judged, and how findings are counted."""

import health_validation as validation
import numpy as np
import pytest
from _health_runs import CHECK, Run, Setting


def run(loss, norm=1.0, said=()):
    loss = np.asarray(loss, float)
    norms = np.broadcast_to(np.asarray(norm, float), loss.shape)
    return Run(Setting(), loss, norms, [(CHECK, frozenset(said))])


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
    grows, blows_up = np.append(FALLS, FALLS[::-1]), np.append([2, 1e4], FALLS[:498])
    said = {"loss diverges"}
    outcomes = [
        (validation.WRONG, run(grows, said=said)),
        (validation.WRONG, run(grows)),
        (validation.WRONG, run(blows_up, said=said)),
        (validation.WELL, run(FALLS, said=said)),
        (validation.BETWEEN, run(FALLS, said=said)),
    ]
    of_its_kind = [2, 1, 1, 2, 1, 1, "0.67", "0.50"]
    assert validation.scores(outcomes, said, "loss diverges") == of_its_kind
    assert validation.scores(outcomes, said) == [3, 1, 1, 2, 1, 1, "0.67", "0.67"]
    assert validation.scores([], said)[-2:] == ["-", "-"]
