"""`precision_report` finds planted faults at their lines, wherever they run."""

import jax
import jax.numpy as jnp
import precision_faults as faults
import pytest
from helpers import slow
from jax import lax
from precision_checks import assert_finds, planted

from jmp_scale.diagnostics import precision_report

pytestmark = pytest.mark.usefixtures("ranks_promote")

# One or two of each rule: the others differ in the operation, not in where it runs.
SOME = """
    sum_in_float16 gradient_of_a_bias square softmax mask_constant mask_by_full
    epsilon_in_a_division epsilon_in_a_root_below integers moving_average
"""


def mean(array):
    return jnp.mean(array.astype(jnp.float32))


def in_a_branch(fault):
    def one_or_other(x):
        over_rows = jax.vmap(jax.jit(lambda x: mean(fault(x))))
        rows = jnp.stack([x, x + 1])
        return lax.cond(x[0] > 0, over_rows, lambda rows: rows[:, 0], rows)

    return one_or_other


def in_remat(fault):
    def over_rows(x):
        step = jax.checkpoint(lambda total, row: (total, mean(fault(row))))
        return lax.scan(step, 0.0, jnp.stack([x, x + 1, x + 2]))[1]

    return jax.jit(over_rows)


def of_float32(name):
    """The fault, after a cast of a float32 vector to the dtype that it takes."""
    function, dtype = faults.FAULTS[name]
    return lambda x: function(x.astype(dtype))


def assert_found(name, wrap=lambda fault: fault):
    wrapped, (function, _) = wrap(of_float32(name)), faults.FAULTS[name]
    return assert_finds([function], lambda x: mean(wrapped(x)), jnp.ones(64))


@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_planted_fault_is_found_at_its_line_and_nothing_else(name):
    assert planted(faults.FAULTS[name][0])
    assert_found(name)


@pytest.mark.parametrize("wrap", [in_a_branch, slow(in_remat)])
@pytest.mark.parametrize("name", SOME.split())
def test_a_fault_is_found_wherever_it_runs(wrap, name):
    assert_found(name, wrap)


def test_a_second_report_of_a_jitted_function_says_the_same():
    masked = of_float32("mask_by_full")
    jitted = jax.jit(lambda x: mean(masked(x) + jax.nn.gelu(x)))
    first = precision_report(jitted, jnp.ones(64))
    assert first.findings == precision_report(jitted, jnp.ones(64)).findings
    assert [f.rule for f in first.findings] == ["half-constant"]
