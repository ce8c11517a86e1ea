"""What is said of a state and a history: each finding by one case of it."""

import jax
import jax.numpy as jnp
import pytest
from runs import recorded, state

import jmp_scale
from jmp_scale import diagnostics

pytestmark = pytest.mark.strict_promotion


def test_nothing_is_said_when_all_is_well():
    assert diagnostics.health(state()) == []
    assert diagnostics.health(state(skipped=7)) == []
    assert diagnostics.health(state(jmp_scale.NoOpLossScale())) == []
    assert diagnostics.health(state(), recorded([1] * 50)[0]) == []
    assert (
        diagnostics.health(state(skipped=2), recorded([0, 0, *[1] * 50])[0]) == []
    )  # the warm-up is over


FINDINGS = {
    "warm-up": (
        state(jmp_scale.DynamicLossScale(2.0**12), 3, 3),
        None,
        "At most 12 more skips",
    ),
    "warm-up, recorded": (
        state(jmp_scale.DynamicLossScale(2.0**12), 3, 3),
        [0, 0, 0],
        "warm-up",
    ),
    "occasional": (state(skipped=5, in_a_row=1), None, "normal if rare"),
    "occasional, recorded": (state(skipped=1), [*[1] * 30, 0, 1], "(3.1%): normal"),
    "frequent": (state(skipped=3), [*[1] * 5, 0, 1, 0, 1], "22.2%"),
    "broken batches": (
        state(skipped=2),
        [*[1] * 5, -1, 1, -1, 1],
        "loss itself was not finite",
    ),
    "floor": (
        state(jmp_scale.DynamicLossScale(1.0), 40, 30),
        None,
        "stuck at its floor of 2^0",
    ),
    "loss": (
        state(skipped=8, in_a_row=2),
        [1, 1, -1, -1],
        "the loss itself is not finite",
    ),
    "loss, not recorded": (
        state(skipped=60, in_a_row=60),
        None,
        "the loss itself is not finite",
    ),
    "every step": (
        state(jmp_scale.DynamicLossScale(8.0), 14, 12),
        None,
        "something broke",
    ),
    "every step, static": (
        state(jmp_scale.StaticLossScale(8), 12, 12),
        None,
        "does not adapt: take",
    ),
    "one step, static": (
        state(jmp_scale.StaticLossScale(8), 1, 1),
        None,
        "normal if it stays the only one",
    ),
    "below 1": (
        state(jmp_scale.DynamicLossScale(0.25, min_loss_scale=0)),
        None,
        "2^-2, below 1",
    ),
    "float16": (
        state(inner={"mu": jnp.ones(2, jnp.float16)}),
        None,
        ".inner_state['mu'] is float16",
    ),
}


@pytest.mark.parametrize("case", FINDINGS)
def test_each_finding_is_one_sentence(case):
    opt_state, flags, expected = FINDINGS[case]
    history = None
    if flags is not None:  # -1: the loss itself is not finite
        history, _ = recorded(
            [flag > 0 for flag in flags], loss_finite=[flag >= 0 for flag in flags]
        )
    sentences = diagnostics.health(opt_state, history)
    assert len(sentences) == 1
    assert expected in sentences[0]


@pytest.mark.parametrize("in_a_row", [9, 10])
def test_a_run_is_long_from_ten_steps_on(in_a_row):
    sentence = diagnostics.health(state(jmp_scale.DynamicLossScale(8.0), 50, in_a_row))[
        0
    ]
    assert ("something broke" in sentence) == (in_a_row == 10)


def test_a_finding_is_told_when_it_begins_and_when_it_is_over():
    log = diagnostics.HealthLog()
    floor = jmp_scale.DynamicLossScale(1.0)
    assert log(state()) == []
    assert "stuck" in log(state(floor, 9, 9))[0]
    assert log(state(floor, 10, 10)) == []
    assert log(state(floor, 10, 0)) == ["Over: stuck at the floor."]
    assert log(state(floor, 10, 0)) == []


def test_states_are_found_at_any_depth_and_told_apart():
    nested = {
        "gen": ((state(skipped=1),), jnp.ones(2)),
        "dis": [None, state(jmp_scale.StaticLossScale(0.5))],
    }
    assert diagnostics.health(nested) == [
        sentence
        for sentence in diagnostics.health(nested)
        if sentence.startswith("['dis'][1]: The loss scale is 2^-1")
    ]
    assert len(diagnostics.health(nested)) == 1
    scalars = diagnostics.metrics(nested)
    assert int(scalars["['gen'][0][0].skipped"]) == 1
    assert float(scalars["['dis'][1].loss_scale"]) == 0.5


@pytest.mark.parametrize("function", [diagnostics.health, diagnostics.metrics])
def test_a_tree_without_a_state_is_refused(function):
    with pytest.raises(
        ValueError, match=f"{function.__name__}: found no state of with_loss_scale"
    ):
        function({"mu": jnp.ones(2)})


def test_health_refuses_several_replicas_of_a_state():
    replicas = jax.tree.map(lambda x: jnp.stack([x, x]), state())
    with pytest.raises(
        ValueError, match=r"health: expected one state, got \(2,\) of them"
    ):
        diagnostics.health(replicas)
