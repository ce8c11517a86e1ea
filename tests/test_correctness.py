"""The benchmark of known mistakes: we make none, and a library that does is seen."""

import correctness
import jax.numpy as jnp
import pytest
from _loops import Step, train_jmp_scale


@pytest.mark.parametrize(
    ("subjects", "check"),
    [pytest.param(*row, id=row[1].__name__) for row in correctness.rows()],
)
def test_this_library_makes_none_of_the_known_mistakes(subjects, check):
    assert correctness.verdict("jmp_scale", subjects, check) == "right"


def test_a_library_that_unscales_with_the_wrong_s_is_seen():
    def train(xs, **kwargs):
        steps = train_jmp_scale(xs, **kwargs)
        return [Step(1 - (1 - step.w) / 2, step.s) for step in steps]

    check = correctness.gradients_stay_true_when_s_grows
    assert correctness.verdict("jmp_scale", {"jmp_scale": train}, check) == "**wrong**"


def test_an_exception_is_an_answer_and_a_missing_function_is_none():
    check = correctness.an_empty_tree_is_finite
    raising = {"jmp_scale": lambda tree: tree["absent"]}
    assert correctness.verdict("jmp_scale", raising, check) == "**KeyError**"
    assert correctness.verdict("jmp_scale", {"other": jnp.isfinite}, check) == "-"
