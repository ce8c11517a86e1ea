import dataclasses
import functools
import inspect
import json
import math
import pathlib
import pickle
import re

import jax
import numpy as np
import pytest

import jmp_scale
from jmp_scale import DynamicLossScale, presets

pytestmark = pytest.mark.strict_promotion

# Runs of the frameworks' own code: see the README there.
TRACES = pathlib.Path(__file__).parent / "golden_traces"
SMALLEST, LARGEST = 2.0**-126, 2.0**126


def renamed(preset, **names):
    """Calls `preset` with the numbers of a run that it has, some of them renamed."""
    taken = inspect.signature(preset).parameters

    def build(config):
        given = {names.get(name, name): value for name, value in config.items()}
        return preset(**{name: x for name, x in given.items() if name in taken})

    return build


def deepspeed(config):
    return presets.deepspeed(
        math.log2(config["init_scale"]),
        config["scale_window"],
        config.get("delayed_shift", 1),
        config.get("consecutive_hysteresis", False),
        config["min_scale"],
    )


def apex_hysteresis(loss_scale, period, factor, backoff_factor, hysteresis):
    # Apex' kernel for Megatron has no preset. Every finite step refills it.
    rule = {"period": period, "factor": factor, "backoff_factor": backoff_factor}
    rule |= {"hysteresis": hysteresis, "hysteresis_reset": "finite"}
    return DynamicLossScale(
        loss_scale, **rule, min_loss_scale=0, max_loss_scale=LARGEST
    )


def paddle_static(config):
    return dataclasses.replace(PADDLE(config), min_loss_scale=config["min"])


def cerebras_tf(config):
    return CEREBRAS(config | {"steps_per_increase": config["increment_period"] - 1})


def openseq2seq(scale_max, scale_min, step_window, step_factor):
    ends = {"min_loss_scale": scale_min, "max_loss_scale": scale_max}
    rule = {"period": step_window, "factor": step_factor, "at_max": "clamp"}
    return DynamicLossScale(scale_max, **ends, **rule)


CEREBRAS = renamed(presets.cerebras, init_scale="initial_loss_scale")
MINDSPORE = renamed(
    presets.mindspore, init_loss_scale="scale_value", loss_scale_value="scale_value"
)
PADDLE = renamed(presets.paddle)
BUILD = {
    "apex_amp_lossscaler": renamed(presets.apex),
    "apex_fp16utils": renamed(presets.fairseq, min_loss_scale="threshold"),
    "apex_update_scale_hysteresis": renamed(
        apex_hysteresis,
        init_scale="loss_scale",
        growth_interval="period",
        growth_factor="factor",
    ),
    "cerebras": CEREBRAS,
    "cerebras_tf_CSDynamicLossScale": cerebras_tf,
    "colossalai": renamed(presets.colossalai),
    "deepspeed_dynamic": deepspeed,
    "deepspeed_fused_optimizer": deepspeed,
    "deepspeed_unfused_optimizer": deepspeed,
    "eformer": renamed(presets.jmp),
    "fairseq": renamed(presets.fairseq),
    "flax_dynamic_scale": renamed(presets.flax),
    "jmp": renamed(presets.jmp),
    "keras3_lso": renamed(presets.keras),
    "keras3_lso_torchbackend": renamed(presets.keras),
    "megatron": renamed(presets.megatron),
    "mindspore_DynamicLossScaleManager": MINDSPORE,
    "mindspore_DynamicLossScaleUpdateCell": MINDSPORE,
    "mindspore_amp_DynamicLossScaler": MINDSPORE,
    "mpx": renamed(presets.mpx),
    "openseq2seq_backoff": renamed(openseq2seq),
    "paddle_gradscaler": PADDLE,
    "paddle_static_kernel": paddle_static,
    "tf1_DynamicLossScale": renamed(presets.tensorflow),
    "tf_keras2_lso": renamed(presets.tf_keras),
    "torch_gradscaler": renamed(presets.pytorch),
    "torch_sharded_gradscaler_cpu": renamed(presets.pytorch),
}
NO_SUCH_RULE = {
    "openseq2seq_logmax": "S follows a mean of the largest gradients, not the flags",
    "optax_apply_if_finite": "skips steps, and has no loss scale",
}
# Apex fp16_utils counts on through a growth.
OTHER_COUNTER = {"apex_fp16utils"}


def all_traces():
    for path in sorted(TRACES.glob("*.json")):
        for trace in json.loads(path.read_text()):
            yield trace.get("peer", path.stem), trace


def tolerates_overflows(trace):
    # The presets have no argument for a share of overflows that changes nothing.
    tolerances = ("tolerance", "overflow_tolerance")
    return any(trace["config"].get(name, 0) > 0 for name in tolerances)


EVERY = {f"{run[0]}-{run[1]['case']}": run for run in all_traces()}
EXPRESSIBLE = {
    k: v
    for k, v in EVERY.items()
    if v[0] not in NO_SUCH_RULE and not tolerates_overflows(v[1])
}
WITHIN = {
    name: (peer, trace)
    for name, (peer, trace) in EXPRESSIBLE.items()
    if SMALLEST <= min(trace["scale"]) <= max(trace["scale"]) <= LARGEST
}
BEYOND = {name: run for name, run in EXPRESSIBLE.items() if name not in WITHIN}


def build(peer, trace):
    return BUILD[peer](trace["config"])


def key(peer, trace):
    """What decides a run: many frameworks have the same rule and sequence."""
    return repr(build(peer, trace)), trace["finite"]


def scan(loss_scales, flags):
    """The loss scales after each step, stacked over steps, all in one program."""

    def step(loss_scales, row):
        loss_scales = list(map(jmp_scale.adjust, loss_scales, row))
        return loss_scales, loss_scales

    return jax.device_get(jax.lax.scan(step, loss_scales, flags)[1])


@functools.cache
def replays():
    """What `scan` gives for each run. Shorter runs are repeated up to the longest."""
    runs = {key(*run): run for run in WITHIN.values()}
    longest = max(len(trace["finite"]) for _, trace in runs.values())
    flags = [np.resize(as_flags(t["finite"]), longest) for _, t in runs.values()]
    states = scan([build(*run) for run in runs.values()], np.stack(flags, axis=1))
    return dict(zip(runs, states, strict=True))


def as_flags(finite):
    return np.array([c == "1" for c in finite])


@pytest.mark.parametrize("name", WITHIN)
def test_s_is_that_of_the_framework_after_every_step(name):
    peer, trace = WITHIN[name]
    steps = len(trace["finite"])
    states = jax.tree.map(lambda x: x[:steps], replays()[key(peer, trace)])
    if all(math.frexp(s)[0] == 0.5 for s in trace["scale"]):  # powers of two
        assert states.loss_scale.tolist() == trace["scale"]
    else:  # f32 rounds at each change of S, some frameworks compute in f64
        np.testing.assert_allclose(states.loss_scale, trace["scale"], rtol=1e-5)
    if "counter" in trace and peer not in OTHER_COUNTER:
        assert states.counter.tolist() == trace["counter"]
    if "hysteresis_tracker" in trace and states.hysteresis_left is not None:
        left = [max(tracker, 0) for tracker in trace["hysteresis_tracker"]]
        assert states.hysteresis_left.tolist() == left


@pytest.mark.parametrize("name", BEYOND)
def test_where_a_framework_leaves_the_range_of_float32_s_ends_at_its_bound(name):
    peer, trace = BEYOND[name]
    (states,) = scan([build(peer, trace)], as_flags(trace["finite"])[:, None])
    s = states.loss_scale.tolist()
    outside = [SMALLEST <= x <= LARGEST for x in trace["scale"]].index(False)
    assert s[:outside] == trace["scale"][:outside]
    assert s[outside] == (SMALLEST if trace["scale"][outside] < SMALLEST else LARGEST)
    assert all(SMALLEST <= x <= LARGEST for x in s)


def test_every_trace_is_replayed_or_listed_with_the_reason_why_not():
    left_out = {name for name in EVERY if name not in EXPRESSIBLE}
    refused = {name for name in left_out if tolerates_overflows(EVERY[name][1])}
    assert {EVERY[name][0] for name in left_out - refused} == set(NO_SUCH_RULE)
    assert {peer for peer, _ in EVERY.values()} == set(BUILD) | set(NO_SUCH_RULE)
    assert (len(EVERY), len(WITHIN), len(BEYOND), len(refused)) == (189, 166, 3, 10)


# Arguments and defaults of the frameworks.
SIGNATURES = {
    "pytorch": "init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, "
    "growth_interval=2000",
    "apex": "init_scale=2.0**16, scale_window=2000, min_loss_scale=None, "
    "max_loss_scale=2.0**24",
    "deepspeed": "initial_scale_power=16, loss_scale_window=1000, hysteresis=2, "
    "consecutive_hysteresis=False, min_loss_scale=1.0",
    "megatron": "initial_scale=2.0**32, min_scale=1.0, growth_factor=2.0, "
    "backoff_factor=0.5, growth_interval=1000, hysteresis=2",
    "colossalai": "initial_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, "
    "growth_interval=1000, min_scale=None, max_scale=None, hysteresis=2",
    "fairseq": "init_scale=2.0**15, scale_factor=2.0, scale_window=2000, "
    "threshold=None",
    "cerebras": "initial_loss_scale=None, steps_per_increase=2000, "
    "min_loss_scale=2.0**-14, max_loss_scale=2.0**15",
    "keras": "initial_scale=2.0**15, dynamic_growth_steps=2000",
    "tf_keras": "initial_scale=2.0**15, dynamic_growth_steps=2000",
    "tensorflow": "initial_loss_scale=2.0**15, increment_period=2000, multiplier=2.0",
    "paddle": "init_loss_scaling=65536.0, incr_ratio=2.0, decr_ratio=0.5, "
    "incr_every_n_steps=2000, decr_every_n_nan_or_inf=1",
    "mindspore": "scale_value, scale_factor, scale_window",
    "flax": "growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, "
    "scale=65536.0, minimum_scale=2.0**-126",
    "jmp": "loss_scale, period=2000, factor=2, min_loss_scale=1",
    "mpx": "loss_scaling, min_loss_scaling, factor=2, period=2000",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_and_defaults_are_those_of_the_framework_and_have_types(name):
    expected = inspect.signature(eval(f"lambda {SIGNATURES[name]}: 0")).parameters
    preset = getattr(presets, name)
    given = inspect.signature(preset).parameters
    assert [*given] == [*expected]
    assert all(given[x].default == expected[x].default for x in given)
    assert pickle.loads(pickle.dumps(preset)) is preset
    # An editor reads them in the text of the module.
    assert f"\ndef {name}(" in pathlib.Path(presets.__file__).read_text()
    assert preset.__annotations__.keys() == {*given, "return"}


def test_presets_shows_its_functions_and_nothing_else():
    assert dir(presets) == sorted(SIGNATURES)
    page = pathlib.Path(__file__).parents[1] / "docs" / "api" / "presets.md"
    entries = re.findall(r"^::: jmp_scale\.presets\.(\w+)$", page.read_text(), re.M)
    assert entries == [*SIGNATURES]


def test_an_initial_s_above_the_cap_starts_there_where_the_framework_does():
    assert presets.apex(init_scale=2.0**30).loss_scale == 2.0**24
    assert presets.cerebras().loss_scale == 2.0**15
    assert presets.mpx(2.0**17, 1).loss_scale == 65504
    with pytest.raises(ValueError, match=r"expected loss_scale to be in"):
        presets.mpx(0.5, 1)


def test_ends_that_a_framework_leaves_open_are_those_of_the_range():
    for made in (presets.apex(max_loss_scale=None), presets.pytorch()):
        assert (made.min_loss_scale, made.max_loss_scale) == (SMALLEST, LARGEST)
