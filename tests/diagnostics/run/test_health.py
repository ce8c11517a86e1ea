"""What `HealthLog` says about a state and a history: one case for each finding."""

import dataclasses
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import history_of, recorded, state

import jmp_scale
from jmp_scale import diagnostics

pytestmark = pytest.mark.strict_promotion


def test_nothing_is_said_when_all_is_well():
    assert diagnostics.HealthLog()(state()) == []
    assert diagnostics.HealthLog()(state(skipped=7)) == []
    assert diagnostics.HealthLog()(state(DYNAMIC(2.0**24), skipped=1)) == []
    assert diagnostics.HealthLog()(state(jmp_scale.NoOpLossScale())) == []
    assert diagnostics.HealthLog()(state(), recorded([1] * 50)) == []
    assert (
        diagnostics.HealthLog()(state(), diagnostics.LossScaleHistory.create(9)) == []
    )
    after_warm_up = recorded([0, 0, *[1] * 50])
    assert diagnostics.HealthLog()(state(skipped=2), after_warm_up) == []


def spiked(in_a_row, spikes):
    """A state whose last steps were skipped as spikes."""
    return state(
        jmp_scale.NoOpLossScale(),
        spikes,
        in_a_row,
        grads_finite=True,
        spikes=np.int32(spikes),
        guard=jmp_scale.SpikeGuard(),
    )


def without_rule(in_a_row):
    """A mapping, which does not hold the rule of S."""
    as_dict = state(skipped=20, in_a_row=in_a_row)._asdict()
    as_dict["loss_scale"] = {"loss_scale": jnp.float32(8), "counter": jnp.int32(0)}
    return {"opt_state": as_dict}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Halving(jmp_scale.LossScale):
    """A loss scale of a user: it falls by one half, and never grows."""

    loss_scale: jax.Array
    min_loss_scale: ClassVar[float] = 4.0

    def scale(self, tree):
        return jax.tree.map(lambda x: x * self.loss_scale, tree)

    def unscale(self, tree):
        return jax.tree.map(lambda x: x / self.loss_scale, tree)

    def adjust(self, grads_finite, *, loss_finite=True):
        return Halving(jnp.where(grads_finite, 1, 0.5) * self.loss_scale)


DYNAMIC, STATIC = jmp_scale.DynamicLossScale, jmp_scale.StaticLossScale
ONE_LOSS, TWO_LOSSES = ({"nonfinite_losses": np.int32(n)} for n in (1, 2))
# Words of the sentence, a state, recorded flags (-1: the loss itself is not finite).
FINDINGS = {
    "warm-up": ("unscaled. Its floor is 2^0", state(DYNAMIC(2.0**12), 3, 3)),
    "warm-up, recorded": ("warm-up", state(DYNAMIC(2.0**12), 3, 3), [0, 0, 0]),
    "resumed": ("all skipped; in total 5 by ov", state(DYNAMIC(8.0), 5, 3), [0, 0, 0]),
    "one": ("normal if rare", state(None, 5, 1)),
    "frequent": ("take a longer period", state(skipped=3), [*[1] * 5, 0, 1, 0, 1]),
    "losses": ("22.2%; at step 5, 7): the l", state(None, 2), [*[1] * 5, -1, 1, -1, 1]),
    "floor": ("stuck at its floor of 2^0", state(DYNAMIC(1.0), 40, 30)),
    "loss": ("the loss itself is not finite", state(None, 8, 2), [1, 1, -1, -1]),
    "cause unknown": (
        "skipped; in total 2 by overflow, 1 by a broken loss: normal if rare. diag",
        state(None, 3, 1, **ONE_LOSS),
    ),
    "no warm-up": (
        "skipped; in total 1 by overflow, 1 by a broken loss: normal if rare",
        state(None, 2, 2, **ONE_LOSS),
    ),
    "nine in a row": ("normal if rare", state(DYNAMIC(8.0), 50, 9)),
    "every step": ("something broke", state(DYNAMIC(8.0), 50, 10)),
    "one step, static": (
        "The last step was skipped; in total 1 by overflow: normal if rare",
        state(STATIC(8), 1, 1),
    ),
    "often, static": ("take a lower S", state(STATIC(8), 3), [*[1] * 5, 0, 1, 0, 1]),
    "below 1": ("2^-2, below 1", state(DYNAMIC(0.25, min_loss_scale=0))),
    "float16": (
        ".inner_state['mu'] is float16",
        state(inner={"mu": jnp.ones(2, jnp.float16)}),
    ),
    "loss, counted": (
        "The last 2 steps were all skipped: the loss itself is not finite",
        state(STATIC(8), 2, 2, **TWO_LOSSES),
    ),
    "cap": (
        "at its cap of 2^24 and has never overflowed. That can be right; but do the",
        state(DYNAMIC(2.0**24)),
    ),
    "a spike that overflows": (
        "skipped as a spike",
        spiked(1, 3)._replace(grads_finite=jnp.array(False)),
    ),
    "spike": ("skipped as a spike", spiked(1, 3)),
    "spikes in a row": ("(4 skipped in a row; in total 4 by a spike)", spiked(4, 4)),
    "three in a row, of a mapping": ("normal if rare", without_rule(3)),
    "floor of one's own": ("at its floor of 2^2", state(Halving(jnp.float32(4)), 9, 9)),
    "one's own, at first": ("warm-up", state(Halving(jnp.float32(8)), 2, 2)),
    "one's own, below 1": ("2^-1, below 1", state(Halving(jnp.float32(0.5)))),
}


@pytest.mark.parametrize("case", FINDINGS)
def test_each_finding_is_one_sentence_that_ends_with_the_name_of_its_section(case):
    expected, opt_state, *recorded_flags = FINDINGS[case]
    history, log = None, diagnostics.HealthLog()
    for flags in recorded_flags:
        loss_finite = [flag >= 0 for flag in flags]
        history = recorded([flag > 0 for flag in flags], loss_finite=loss_finite)
    (sentence,) = diagnostics.HealthLog()(opt_state, history)
    assert expected in sentence
    assert log(opt_state, history) == [sentence]
    assert sentence.endswith(f". [{', '.join(log.kinds)}]")


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
        "dis": [None, state(STATIC(0.5))],
    }
    log = diagnostics.HealthLog()
    (sentence,) = log(nested)
    assert sentence.startswith("['dis'][1]: The loss scale is 2^-1")
    assert log.kinds == {"['dis'][1]: loss scale below 1"}
    scalars = diagnostics.metrics(nested)
    assert int(scalars["['gen'][0][0].skipped"]) == 1
    assert float(scalars["['dis'][1].loss_scale"]) == 0.5


@pytest.mark.parametrize("name", ["HealthLog", "metrics"])
def test_a_tree_without_a_state_is_refused(name):
    function = diagnostics.HealthLog() if name == "HealthLog" else diagnostics.metrics
    with pytest.raises(ValueError, match=f"{name}: found no state of with_loss_scale"):
        function({"mu": jnp.ones(2)})


def test_health_refuses_several_replicas_of_a_state():
    replicas = jax.tree.map(lambda x: jnp.stack([x, x]), state())
    words = r"got \(2,\) of .* jax.tree.map\(lambda x: x\[0\], state"
    with pytest.raises(ValueError, match=words):
        diagnostics.HealthLog()(replicas)


@pytest.mark.parametrize("s", [jnp.nan, jnp.inf, 0.0, -4.0])
def test_a_loss_scale_that_is_not_a_positive_number_is_the_first_finding(s):
    broken = jax.tree.map(lambda _: jnp.float32(s), DYNAMIC())
    for in_a_row in (0, 1, 50):
        said = diagnostics.HealthLog()(state(broken, in_a_row, in_a_row))
        assert said[0].startswith(f"The loss scale is {float(s):g}. No step can")
        assert len(said) == 1 + (in_a_row > 0)


@pytest.mark.parametrize("skipped", [(99, 150), (50, 99, 150), range(0, 70, 7)])
@pytest.mark.parametrize("cause", ["overflow", "spike"])
def test_up_to_one_skip_in_a_hundred_is_normal(skipped, cause):
    applied = ~np.isin(np.arange(200), skipped)
    columns = {"applied": applied}
    if cause == "overflow":
        columns["grads_finite"] = applied
    said = diagnostics.HealthLog()(state(), history_of(**columns))
    assert len(said) == (len(skipped) > 2)
    words = f"{len(skipped)} of the last 200 steps ({len(skipped) / 2}%; at step "
    if cause == "overflow" and 0 in skipped:
        words = words.replace("10 of", "9 of").replace("5.0", "4.5")  # the first is due
    last = ", ".join(["..."] * (len(skipped) > 5) + [str(x) for x in skipped[-5:]])
    assert all(f"{words}{last}); more than 1 % is too many" in text for text in said)


def test_overflows_and_spikes_that_may_overflow_are_judged_apart():
    steps = np.arange(200)
    flags = {"grads_finite": ~np.isin(steps, [50, 90, 130, 140])}
    flags["applied"] = flags["grads_finite"] & ~np.isin(steps, [120, 125])
    flags["spike"] = np.isin(steps, [120, 125, 130])
    found = diagnostics.HealthLog()(state(), history_of(**flags))
    assert len(found) == 2
    assert "guard skipped 3 of the last 200 steps (1.5%; at step 120, 125," in found[0]
    assert "in 3 of the last 200 steps (1.5%; at step 50, 90, 140)" in found[1]


def test_the_most_urgent_finding_comes_first():
    applied = ~np.isin(np.arange(200), [100, 110, 120])
    below_one = state(DYNAMIC(0.25, min_loss_scale=0))
    history = history_of(applied=applied, loss=np.repeat([1.0, 50.0], 100))
    found = " ".join(diagnostics.HealthLog()(below_one, history))
    kinds = "loss diverges", "frequent spikes", "loss scale below 1"
    assert re.findall(r"\[(.*?)\]", found) == [*kinds]


def test_a_run_with_a_guard_is_counted_by_cause_from_end_to_end():
    """Of its bad batches, at steps 40 and 59, the second overflows, as step 50 does."""
    scale, guard = jmp_scale.DynamicLossScale(2.0**10), jmp_scale.SpikeGuard(warmup=20)
    tx = jmp_scale.with_loss_scale(optax.sgd(0.1), scale, guard=guard)
    opt_state, history = tx.init(jnp.float32(0)), diagnostics.LossScaleHistory.create()

    @jax.jit
    def step(old, history, g, loss):
        with jax.numpy_dtype_promotion("standard"):  # on which optimizers rely
            _, opt_state = tx.update(g, old, value=loss)
        return opt_state, history.push(old, opt_state, loss=loss, grads=g)

    for i in range(60):
        loss = jnp.float32(1e4 if i in (40, 59) else 1.0)
        g = jnp.float32({40: 1e5, 50: jnp.inf, 59: jnp.inf}.get(i, 2.0))
        opt_state, history = step(opt_state, history, g, loss)
    counts = "1 by overflow, 0 by a broken loss, 2 by a spike"
    assert history.summary() == f"3 of 60 steps skipped: {counts}"
    recorded_limits = history.to_dict()["norm_limit"]
    assert np.isinf(recorded_limits[:20]).all()
    assert (recorded_limits[20:] < 10).all()
    found = diagnostics.HealthLog()(opt_state, history)
    assert "last step was skipped as a spike" in found[0]  # and it overflows
    assert "[frequent spikes]" not in found


IDENTITY = jmp_scale.with_loss_scale(optax.identity(), DYNAMIC())
UPDATE = jax.jit(IDENTITY.update)


def updated(opt_state, *causes, loss_scale=None):
    """The state after steps that are fine, overflow, or have a broken loss."""
    opt_state = opt_state or IDENTITY.init(jnp.float32(0))
    opt_state = opt_state._replace(loss_scale=loss_scale or opt_state.loss_scale)
    for cause in causes:
        g = jnp.float32(1.0 if cause == "fine" else jnp.inf)
        loss = jnp.float32(jnp.nan if cause == "loss" else 1.0)
        _, opt_state = UPDATE(g, opt_state, value=loss)
    return opt_state


def test_a_log_tells_the_cause_of_a_skip_by_what_is_new_since_its_last_call():
    log, opt_state, kinds = diagnostics.HealthLog(), None, []
    for cause in ("overflow", "fine", "fine", "loss", "fine", "overflow"):
        opt_state = updated(opt_state, cause)
        log(opt_state)
        kinds.append(set(log.kinds))
    nothing = set()
    loss, overflow = {"loss not finite"}, {"skipped step"}
    assert kinds == [{"warm-up"}, nothing, nothing, loss, nothing, overflow]
    # A new log has no last call, so it names no cause that the totals do not tell.
    (said,) = diagnostics.HealthLog()(opt_state)
    assert "in total 2 by overflow, 1 by a broken loss" in said
    assert said.endswith("[skipped step]")


@pytest.mark.parametrize(
    ("causes", "kind"),
    [
        (["loss"], "loss not finite"),
        (["overflow", "loss"], "skipped step"),
        (["loss", "fine", "loss", "loss"], "loss not finite"),
        (["overflow", "fine", "overflow"], "skipped step"),
        (["loss", "fine"], "loss not finite"),  # between two calls
        (["overflow", "fine"], None),  # as S grows
        (["a constant S", "overflow", "fine"], "skipped step"),
    ],
)
def test_a_log_names_only_a_cause_that_all_new_skips_have(causes, kind):
    log, loss_scale = diagnostics.HealthLog(), None
    if causes[0] == "a constant S":
        causes, loss_scale = causes[1:], jmp_scale.StaticLossScale(8)
    opt_state = updated(None, "fine", "loss", "overflow", "fine", loss_scale=loss_scale)
    log(opt_state)
    log(updated(opt_state, *causes, loss_scale=loss_scale))
    assert log.kinds == ({kind} if kind else set())


def adam_state(dtype, **changes):
    """The state of Adam on parameters of a dtype."""
    tx = jmp_scale.with_loss_scale(optax.adam(1e-3, **changes))
    return tx.init({"w": jnp.ones(4, dtype), "b": jnp.ones((), dtype)})


BF16_PARAMS = jnp.ones(2, jnp.bfloat16)
MOMENTUM = jmp_scale.with_loss_scale(optax.sgd(0.1, momentum=0.9)).init(BF16_PARAMS)
STATE_OF_V = jmp_scale.with_loss_scale(optax.adam(0.1, mu_dtype=jnp.bfloat16)).init(
    {"v": jnp.ones(2)}
)
# Words about the dtypes of parameters and moments; None if nothing is said.
LEAVES = {
    "['p'] is float16: keep master parameters": {
        "p": jnp.ones(2, jnp.float16),
        "s": state(),
    },
    "float16 (and 3 more)": adam_state(jnp.float16),
    ".nu['b'] is bfloat16 (and 1 more): with a b2 above": adam_state(jnp.bfloat16),
    "": [
        adam_state(jnp.float32),
        adam_state(jnp.float32, mu_dtype=jnp.bfloat16),
        (MOMENTUM, BF16_PARAMS),
        (STATE_OF_V, {"v": BF16_PARAMS}),  # no second moment, but a parameter
    ],
}


@pytest.mark.parametrize("words", LEAVES)
def test_narrow_parameters_and_second_moments_are_named_and_counted(words):
    said = diagnostics.HealthLog()(LEAVES[words])
    assert len(said) == bool(words)
    assert all(words in sentence for sentence in said)


def test_a_log_of_a_run_that_goes_back_to_a_checkpoint_starts_from_its_totals():
    log, checkpoint = diagnostics.HealthLog(), updated(None, "fine")
    log(updated(checkpoint, "overflow", "loss", "overflow"))
    log(updated(checkpoint, "loss"))
    assert log.kinds == {"loss not finite"}
