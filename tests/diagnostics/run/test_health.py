"""What `HealthLog` says about a state and a history: one case for each finding."""

import jax.numpy as jnp
import numpy as np
import pytest
from runs import history_of, recorded, state

import jmp_scale
from jmp_scale import diagnostics

pytestmark = pytest.mark.strict_promotion


DYNAMIC, STATIC = jmp_scale.DynamicLossScale, jmp_scale.StaticLossScale
SPIKES = {"grads_finite": True, "spikes": np.int32(4), "guard": jmp_scale.SpikeGuard()}
SPIKED = state(jmp_scale.NoOpLossScale(), 4, 4, **SPIKES)
ONE_LOSS, TWO_LOSSES = ({"nonfinite_losses": np.int32(n)} for n in (1, 2))


def mapping(s):
    """A state as a mapping, which does not hold the rule of S."""
    scale = {"loss_scale": jnp.float32(s), "counter": jnp.int32(0)}
    return state(skipped=12, in_a_row=12)._asdict() | {"loss_scale": scale}


# Words of the finding, if there is one, a state, and what is recorded.
class Floorless(STATIC):
    """A rule of a user, with the field of a floor."""

    min_loss_scale = None


STATES = {
    "old skips": (None, state(skipped=7)),
    "a constant S of 1": (None, state(jmp_scale.NoOpLossScale())),
    "after a warm-up": (None, state(skipped=2), [0, 0, *[1] * 50]),
    "in a warm-up": (None, state(DYNAMIC(2.0**3), 12, 12)),
    "in a recorded warm-up": (None, state(DYNAMIC(2.0**12), 3, 3), [0, 0, 0]),
    "nine in a row": (None, state(DYNAMIC(8.0), 50, 9)),
    "one of another cause": (None, state(None, 3, 1, **ONE_LOSS)),
    "a spike": (None, SPIKED),
    "a spike that overflows": (None, SPIKED._replace(grads_finite=jnp.array(False))),
    "frequent": ("take a longer period", state(skipped=3), [*[1] * 5, 0, 1, 0, 1]),
    "losses": ("last at step 5, 7): the l", state(None, 2), [*[1] * 5, -1, 1, -1, 1]),
    "floor": ("stuck at its floor", state(DYNAMIC(1.0), 40, 30)),
    "loss": ("the loss itself is not finite", state(None, 8, 2), [1, 1, -1, -1]),
    "loss, counted": (
        "The last 2 steps were all skipped: the loss itself is not finite",
        state(STATIC(8), 2, 2, **TWO_LOSSES),
    ),
    "every step": ("something broke", state(DYNAMIC(8.0), 50, 10)),
    "every step, static": ("something broke", state(STATIC(8), 10, 10)),
    "every step, without a floor": ("something broke", state(Floorless(8), 10, 10)),
    "every step, of a mapping": ("something broke", mapping(8.0)),
    "S is NaN": ("scale is nan", mapping(np.nan)),
    "S is infinite": ("scale is inf", mapping(np.inf)),
}


@pytest.mark.parametrize("case", STATES)
def test_what_is_not_normal_is_one_finding_with_the_steps_that_are_known(case):
    expected, opt_state, *flags = STATES[case]
    log = diagnostics.HealthLog()
    found = log(opt_state, *map(recorded, flags))
    assert len(found) == (expected is not None)
    assert log.rules == {finding.rule for finding in found}
    for finding in found:
        assert expected in str(finding)
        assert finding.where == "".join(f"steps 0 to {len(f) - 1}" for f in flags)


def test_a_finding_is_told_when_it_begins_and_when_it_is_over():
    log, floor = diagnostics.HealthLog(), DYNAMIC(1.0)
    assert log(state()) == []
    assert [f.level for f in log(state(floor, 9, 9))] == ["error"]
    assert log(state(floor, 10, 10)) == []
    (over,) = log(state(floor, 10, 0))
    assert over == ("stuck at the floor", "note", "", "over: stuck at the floor.", "")
    assert log(state(floor, 10, 0)) == []


def test_states_are_found_at_any_depth_and_told_apart():
    nested = {
        "gen": ((state(skipped=1),), jnp.ones(2)),
        "dis": [None, state(STATIC(0.5), 10, 10)],
    }
    log = diagnostics.HealthLog()
    (finding,) = log(nested)
    assert finding[:3] == ("every step skipped", "error", "['dis'][1]")
    assert log.rules == {"['dis'][1]: every step skipped"}
    scalars = diagnostics.metrics(nested)
    assert int(scalars["['gen'][0][0].skipped"]) == 1
    assert float(scalars["['dis'][1].loss_scale"]) == 0.5
    nested["dis"][1] = state()
    (over,) = log(nested)
    assert over[:3] == ("every step skipped", "note", "['dis'][1]")


@pytest.mark.parametrize("name", ["HealthLog", "metrics"])
def test_a_tree_without_a_state_is_refused(name):
    function = diagnostics.HealthLog() if name == "HealthLog" else diagnostics.metrics
    with pytest.raises(ValueError, match=f"{name}: found no state of with_loss_scale"):
        function({"mu": jnp.ones(2)})


@pytest.mark.parametrize("skipped", [(99, 150), (50, 99, 150), range(0, 70, 7)])
@pytest.mark.parametrize("cause", ["overflow", "spike"])
def test_up_to_one_skip_in_a_hundred_is_normal(skipped, cause):
    applied = ~np.isin(np.arange(200), skipped)
    columns = {"applied": applied}
    if cause == "overflow":
        columns["grads_finite"] = applied
    said = diagnostics.HealthLog()(state(), history_of(**columns))
    assert len(said) == (len(skipped) > 2)
    count = len(skipped) - (0 in skipped)  # the first is due
    spikes = 0 if cause == "overflow" else count
    words = f"{count} of the last 200 steps were skipped ({count / 2}%, {spikes} as "
    words += f"spikes; last at step {', '.join(map(str, skipped[-5:]))}); more than 1 %"
    assert all(words in str(finding) for finding in said)


def test_parameters_that_an_update_made_nan_are_told_where_they_are_at_hand():
    broken = state(None, 3, 3, nonfinite_losses=np.int32(3))
    for params, kind in (
        (jnp.nan, "parameters not finite"),
        (1.0, "loss not finite"),
        ([0.0, -jnp.inf], "loss not finite"),  # a mask
    ):
        tree = {"params": jnp.array(params, "float32"), "opt": broken}
        (said,) = diagnostics.HealthLog()(tree)
        assert said.rule == kind
        assert "although the gradients before were" in str(said)
    assert diagnostics.HealthLog()({"ema": jnp.float32(jnp.nan), "opt": state()}) == []


def test_the_most_urgent_finding_comes_first():
    applied = ~np.isin(np.arange(200), [100, 110, 120])
    history = history_of(applied=applied, loss=np.repeat([1.0, 50.0], 100))
    found = [finding.rule for finding in diagnostics.HealthLog()(state(), history)]
    assert found == ["loss diverges", "frequent skips"]
