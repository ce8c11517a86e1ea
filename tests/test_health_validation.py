"""The benchmark of health: how findings are counted."""

import health_validation as validation
import numpy as np
from health_validation import Run

FALLS = np.linspace(2, 1, 500)


def run(loss, said=(), **fault):
    return Run(loss, np.ones(loss.shape), frozenset(said), **fault)


def test_precision_leaves_out_runs_between_and_recall_is_of_a_kind_of_failure():
    grows, blows_up = np.append(FALLS, FALLS[::-1]), np.append([2, 1e4], FALLS[:498])
    said = {"loss diverges"}
    outcomes = [
        (validation.WRONG, run(grows, said=said)),
        (validation.WRONG, run(grows)),
        (validation.WRONG, run(blows_up, said=said)),
        (validation.WRONG, run(FALLS, fault="bursts")),
        (validation.WELL, run(FALLS, said=said)),
        (validation.BETWEEN, run(FALLS, said=said)),
    ]
    of_its_kind = [2, 1, 1, 2, 1, 1, "0.67", "0.50"]
    assert validation.scores(outcomes, said, "loss diverges") == of_its_kind
    assert validation.scores(outcomes, said) == [4, 1, 1, 2, 1, 1, "0.67", "0.50"]
    assert validation.scores([], said)[-2:] == ["-", "-"]
