"""The lines of docs/coming-from/state-dicts.md, on the frameworks' own runs, cut."""

import dataclasses
import functools
import pathlib
import re
import types

import flax.serialization
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from helpers import by_name, count_traces
from test_presets import EVERY, as_flags, build

import jmp_scale
from jmp_scale import presets

PAGE = pathlib.Path(__file__).parents[1] / "docs/coming-from/state-dicts.md"
LINES = dict(re.findall(r"^\| (.*?) \|.* `(.*)` \|$", PAGE.read_text(), re.MULTILINE))


def evaluate(line, **names):
    names |= {"dataclasses": dataclasses, "jmp_scale": jmp_scale}
    return eval(compile(LINES[line], str(PAGE), "eval"), names)


def numbers(trace, k, **names):
    """Numbers of a trace after step k, by the names that a framework gives them."""
    return {name: trace[field][k] for name, field in names.items()}


def deepspeed_state(trace, k):
    return {
        "cur_scale": trace["scale"][k],
        "cur_iter": k,
        "last_overflow_iter": trace["finite"].rfind("0", 0, k),
        "scale_window": trace["config"]["scale_window"],
        "cur_hysteresis": trace.get("cur_hysteresis", [1] * (k + 1))[k],
    }


def megatron_state(trace, k):
    names = {"growth_tracker": "counter", "hysteresis_tracker": "hysteresis_tracker"}
    return {"scale": np.float32([trace["scale"][k]]), **numbers(trace, k, **names)}


def flax_state(trace, k):
    scale = DynamicScale(scale=jnp.float32(trace["scale"][k]))
    scale = scale.replace(fin_steps=jnp.int32(trace["counter"][k]))
    return flax.serialization.to_state_dict(scale)


def jmp_state(trace, k):
    s, counter = jnp.float32(trace["scale"][k]), jnp.int32(trace["counter"][k])
    return jmp.DynamicLossScale(s, counter)


def attributes(state_of):
    """The same numbers as attributes."""
    return lambda trace, k: types.SimpleNamespace(**state_of(trace, k))


TORCH = functools.partial(numbers, scale="scale", _growth_tracker="counter")
APEX = functools.partial(numbers, loss_scale="scale", unskipped="counter")
KERAS = functools.partial(numbers, dynamic_scale="scale", step_counter="counter")
KERAS_2 = functools.partial(numbers, loss_scale="scale", dynamic_counter="counter")
STATES = {
    "torch_gradscaler": ("PyTorch `GradScaler`", TORCH),
    "apex_amp_lossscaler": ("Apex `amp`", APEX),
    "deepspeed_dynamic": ("DeepSpeed ZeRO", attributes(deepspeed_state)),
    "deepspeed_fused_optimizer": ("DeepSpeed `FP16_Optimizer`", deepspeed_state),
    "megatron": ("Megatron-LM", megatron_state),
    "keras3_lso": ("Keras 3", KERAS),
    "tf_keras2_lso": ("tf_keras 2", attributes(KERAS_2)),
    "flax_dynamic_scale": ("Flax", flax_state),
    "jmp": ("jmp", jmp_state),
}
SOME = ("megatron-edges_h3",)
CUT = [
    name
    for name, (peer, trace) in EVERY.items()
    if peer in STATES and re.match("edges|period1", trace["case"])
]


def with_the_start(trace):
    """The trace with its state before the first step in front of those after each."""
    config = trace["config"]
    names = ("init_scale", "initial_scale", "scale", "loss_scale")
    hysteresis = config.get("hysteresis", config.get("delayed_shift"))
    first = {"scale": next(config[x] for x in names if x in config), "counter": 0}
    first |= dict.fromkeys(("hysteresis_tracker", "cur_hysteresis"), hysteresis)
    return trace | {k: [v, *trace[k]] for k, v in first.items() if k in trace}


@jax.jit
def continued(loss_scale, flags):
    """S after each further step of runs that were cut, all at once."""

    def step(loss_scale, finite):
        loss_scale = loss_scale.adjust(finite)
        return loss_scale, loss_scale.loss_scale

    return jax.lax.scan(step, loss_scale, flags)[1]


@pytest.mark.parametrize("name", by_name(SOME, CUT))
def test_a_run_cut_anywhere_goes_on_as_it_would_have_there(name):
    peer, trace = EVERY[name]
    line, state_of = STATES[peer]
    preset, longer = build(peer, trace), with_the_start(trace)
    steps = len(trace["finite"])
    cuts = range(0, steps, 7)  # no multiple of the traces' growth interval of 5
    states = [state_of(longer, cut) for cut in cuts]
    resumed = [evaluate(line, preset=preset, state=state) for state in states]
    assert jax.tree.structure(resumed[0]) == jax.tree.structure(preset)
    # Each run's flags are those from its cut on, and then padding.
    flags = as_flags(trace["finite"] + "1" * steps)
    shifted = np.stack([flags[cut : cut + steps] for cut in cuts], axis=1)
    history = continued(jax.tree.map(lambda *x: jnp.stack(x), *resumed), shifted)
    for run, cut in enumerate(cuts):
        assert history[: steps - cut, run].tolist() == trace["scale"][cut:]


def test_every_row_has_runs():
    peers = {EVERY[name][0] for name in CUT}
    rows = {STATES[peer][0] for peer in peers}
    assert rows == {row for row, _ in STATES.values()}
    assert rows == {row for row in LINES if "state" in LINES[row]}


def test_a_scale_is_read_and_set_without_another_compilation():
    tx = jmp_scale.with_loss_scale(optax.sgd(1.0), presets.pytorch(growth_interval=9))
    update, traces = count_traces(tx.update)
    opt_state, params = tx.init(jnp.ones(2)), jnp.ones(2)
    _, opt_state = jax.jit(update)(params, opt_state, params)
    names = {"loss_scale": opt_state.loss_scale, "new_scale": 512.0}
    new = evaluate("`scaler.update(new_scale)`", **names)
    opt_state = opt_state._replace(loss_scale=new)
    assert evaluate("`scaler.get_scale()`", loss_scale=opt_state.loss_scale) == 512
    assert opt_state.loss_scale.counter == 1
    _, opt_state = jax.jit(update)(jnp.array([jnp.inf, 1.0]), opt_state, params)
    assert opt_state.loss_scale.loss_scale == 256
    assert len(traces) == 1
