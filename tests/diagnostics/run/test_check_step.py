"""`check_step` names what is wrong with a step, and says nothing of right ones."""

import pytest
from check_step_cases import RIGHT, WRONG

from jmp_scale import diagnostics
from jmp_scale.diagnostics._run.step_rules import RULES

pytestmark = pytest.mark.usefixtures("ranks_promote")
check_step = diagnostics.check_step


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named(name):
    rule, make = WRONG[name]
    step, args = make()
    found = check_step(step, *args)
    problems = {problem.rule: problem for problem in found.problems}
    assert rule in problems
    assert problems[rule].level == RULES[rule].level
    assert found.ok == (RULES[rule].level == "note")
    assert problems[rule].cure in str(found)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_has_no_problem_above_a_note(name):
    step, args = RIGHT[name]()
    found = check_step(step, *args)
    assert found.ok, str(found)
    assert found.calls <= 50
