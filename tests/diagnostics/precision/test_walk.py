"""What the report does where it cannot read an equation, or where a rule fails."""

import warnings

import jax.numpy as jnp
import pytest
from autocast_hostile import HOSTILE, W, X
from autocast_programs import PROGRAMS
from helpers import one_of

from jmp_scale import autocast
from jmp_scale.diagnostics import precision_report
from jmp_scale.diagnostics._precision import walk

pytestmark = pytest.mark.usefixtures("ranks_promote")
ALL = PROGRAMS | {name: (fun, (W, X)) for name, fun in HOSTILE.items()}


def loss(w, x):
    h = x.astype(jnp.float16) @ w.astype(jnp.float16)
    return jnp.mean(jnp.exp(h).astype(jnp.float32)) + jnp.mean(jnp.log(h))


def with_a_rule(monkeypatch, rule):
    """Adds a rule to those of one operation."""
    faults = walk.faults

    def more_faults(step):
        rule(step)
        return faults(step)

    monkeypatch.setattr(walk, "faults", more_faults)


def test_a_rule_that_fails_is_told_beside_the_findings_of_the_others(monkeypatch):
    def fails(step):
        if step.name == "exp" and not step.backward:
            assert step.eqn.params["renamed"] is not None

    with_a_rule(monkeypatch, fails)
    with pytest.warns(UserWarning, match="a rule failed at exp.*KeyError") as record:
        report = precision_report(loss, W, X)
    assert {warning.filename for warning in record} == {__file__}
    assert [name for name, _ in report.not_looked_into] == ["exp"]
    assert [finding.primitive for finding in report.findings] == ["log"]


@pytest.mark.parametrize("name", one_of(5, sorted(ALL)))
def test_no_rule_fails_in_a_program_or_where_autocast_has_changed_it(name):
    fun, args, *_ = ALL[name]
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for program in (fun, autocast(fun, "float16")):
            precision_report(program, *args)
    failures = [w for w in record if "a rule failed" in str(w.message)]
    assert len(failures) == 0
