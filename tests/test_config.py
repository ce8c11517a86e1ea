import re
import types

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise_equal

import jmp_scale
from jmp_scale import (
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
    get_loss_scale,
    presets,
)

pytestmark = pytest.mark.strict_promotion


FLOAT16 = ("f16", "float16", "fp16", "FP16", "half", jnp.float16, np.dtype("float16"))
WIDE = ("bf16", "bfloat16", "f32", "float32", "fp32", "full", "f64", "float64")
WIDE += (jnp.bfloat16, jnp.float32, np.float64, float, jnp.dtype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("none", NoOpLossScale()),
        ("dynamic", DynamicLossScale()),
        (" Dynamic ", DynamicLossScale()),
        ("dynamic:2**15", DynamicLossScale(2.0**15)),
        ("dynamic: 2.**16", DynamicLossScale(2.0**16)),
        ("dynamic:65536", DynamicLossScale(65536.0)),
        ("static:2 ** 10", StaticLossScale(1024.0)),
        ("128", StaticLossScale(128.0)),
        ("2**-3", StaticLossScale(0.125)),
        ("1e3", StaticLossScale(1000.0)),
        (128, StaticLossScale(128.0)),
        (2.0**15, StaticLossScale(2.0**15)),
        (np.int64(8), StaticLossScale(8.0)),
        (np.float16(8), StaticLossScale(8.0)),
        (np.array(8.0), StaticLossScale(8.0)),
        (jnp.float32(8), StaticLossScale(8.0)),
        *((spec, DynamicLossScale()) for spec in FLOAT16),
        *((spec, NoOpLossScale()) for spec in WIDE),
    ],
)
def test_a_spec_gives_the_loss_scale_it_names(spec, expected):
    assert_bitwise_equal(get_loss_scale(spec), expected)


def test_the_half_type_of_a_tpu_needs_none(monkeypatch):
    monkeypatch.setattr("jmp_scale._config.half_dtype", lambda: jnp.bfloat16)
    assert get_loss_scale("half") == NoOpLossScale()


@pytest.mark.parametrize(
    "loss_scale", [NoOpLossScale(), StaticLossScale(2.0), DynamicLossScale(8.0)]
)
def test_a_loss_scale_passes_unchanged(loss_scale):
    assert get_loss_scale(loss_scale) is loss_scale


DEEPSPEED_DEFAULTS = {"enabled": True, "auto_cast": False, "loss_scale": 0}
DEEPSPEED_DEFAULTS |= {"initial_scale_power": 16, "loss_scale_window": 1000}
DEEPSPEED_DEFAULTS |= {"hysteresis": 2, "consecutive_hysteresis": False}
DEEPSPEED_DEFAULTS |= {"min_loss_scale": 1, "fp16_master_weights_and_grads": False}
DYNAMIC = {"loss_scaling_factor": "dynamic"}  # of Cerebras
GRAD_SCALER = {"init_scale": 2.0**14, "growth_factor": 4, "growth_interval": 10}
MEGATRON = {"initial_loss_scale": 2**32, "loss_scale_window": 500, "hysteresis": 3}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (DEEPSPEED_DEFAULTS, presets.deepspeed()),
        ({"enabled": True}, presets.deepspeed()),
        ({"initial_scale_power": 12, "hysteresis": 3}, presets.deepspeed(12, 1000, 3)),
        (
            {"consecutive_hysteresis": True, "loss_scale": None},
            presets.deepspeed(consecutive_hysteresis=True),
        ),
        ({"loss_scale_window": 50}, presets.deepspeed(loss_scale_window=50)),
        ({"min_loss_scale": 0.25}, presets.deepspeed(min_loss_scale=0.25)),
        (DEEPSPEED_DEFAULTS | {"loss_scale": 128}, StaticLossScale(128.0)),
        (DEEPSPEED_DEFAULTS | {"loss_scale": "1e3"}, StaticLossScale(1000.0)),
        (DEEPSPEED_DEFAULTS | {"enabled": False, "loss_scale": 8}, NoOpLossScale()),
        (DYNAMIC, presets.cerebras()),
        ({"loss_scale": "dynamic"}, presets.cerebras()),
        ({"enabled": True, "fp16_type": "float16"}, presets.cerebras()),
        ({"steps_per_increase": 10}, presets.cerebras(steps_per_increase=10)),
        (
            DYNAMIC
            | {"initial_loss_scale": 2.0**12, "min_loss_scale": "2**-10"}
            | {"steps_per_increase": 100, "max_loss_scale": 2.0**14}
            | {"max_gradient_norm": None, "log_loss_scale": True}
            | {"precision_opt_level": 1},
            presets.cerebras(2.0**12, 100, 2.0**-10, 2.0**14),
        ),
        (
            {"loss_scale": "dynamic", "init_scale": 2.0**9, "overflow_tolerance": 0.0},
            presets.cerebras(2.0**9),
        ),
        (DYNAMIC | {"fp16_type": "cbfloat16"}, presets.cerebras(max_loss_scale=2**31)),
        (DYNAMIC | {"fp16_type": "bfloat16"}, NoOpLossScale()),
        (DYNAMIC | {"enabled": False}, NoOpLossScale()),
        ({"loss_scaling_factor": 64.0}, StaticLossScale(64.0)),
        ({"loss_scaling_factor": "64"}, StaticLossScale(64.0)),
        ({"growth_interval": 10}, presets.pytorch(growth_interval=10)),
        ({"init_scale": "2**9", "device": "cuda"}, presets.pytorch(512)),
        (GRAD_SCALER | {"enabled": True}, presets.pytorch(2.0**14, 4, 0.5, 10)),
        (GRAD_SCALER | {"enabled": False}, NoOpLossScale()),
        (MEGATRON, presets.megatron(growth_interval=500, hysteresis=3)),
        (
            MEGATRON | {"fp16": True, "min_loss_scale": 2, "loss_scale": None},
            presets.megatron(min_scale=2, growth_interval=500, hysteresis=3),
        ),
        (MEGATRON | {"fp16": True, "loss_scale": 128}, StaticLossScale(128)),
        (MEGATRON | {"bf16": True}, NoOpLossScale()),
        (MEGATRON | {"fp16": False}, NoOpLossScale()),
        (
            MEGATRON | {"bf16": False},
            presets.megatron(growth_interval=500, hysteresis=3),
        ),
        ({"bf16": False}, NoOpLossScale()),
    ],
)
def test_a_section_of_a_framework_is_its_preset(section, expected):
    assert_bitwise_equal(get_loss_scale(types.MappingProxyType(section)), expected)


def test_numbers_in_a_section_of_cerebras_may_be_those_of_its_documentation():
    ends = {"initial_loss_scale": 2e15, "min_loss_scale": "2e-14"}
    with pytest.warns(UserWarning, match=r"read as 2\*\*") as record:
        loss_scale = get_loss_scale(DYNAMIC | ends)
    assert_bitwise_equal(loss_scale, presets.cerebras())
    assert {warning.filename for warning in record} == {__file__}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"initial_scale_pwer": 4, "hysteresis": 2}, r"\['initial_scale_pwer'\]; k"),
        ({"enabled": True, "growth": 2}, r"DeepSpeed, got \['growth'\]; known .*hyst"),
        (DYNAMIC | {"scale": 2}, r"Cerebras, .* \['scale'\]; known are .*max_loss"),
        ({"steps_per_increase": 3, "hysteresis": 2}, "got .*'steps_per_inc.*; know"),
        ({"growth_interval": 3, "scale": 8.0}, r"PyTorch, .*\['scale'\]; known .*gr"),
        ({"fp16": True, "bf16": 1}, "expected bf16 to be True or False, got 1"),
        ({"enabled": "yes"}, "expected enabled to be True or False, got 'yes'"),
        ({"enabled": True, "loss_scale": -2}, "expected loss_scale to be a finite"),
        ({"enabled": True, "hysteresis": 0}, "presets.deepspeed: expected hysteresis"),
        ({"loss_scale": "dynamc"}, "expected loss_scale to be .dynamic. .*, got 'dyn"),
        (DYNAMIC | {"overflow_tolerance": 0.05}, "be 0, got 0.05; a tolerated share"),
        ({"fp16_type": "float8"}, "expected fp16_type to be one of 'float16', 'cbfl"),
        (DYNAMIC | {"max_gradient_norm": 1.0}, r"clip_by_global_norm\(1.0\), tx\)"),
        (DYNAMIC | {"max_gradient_value": 0.5}, r"chain\(optax.clip\(0.5\), tx\)"),
        (DYNAMIC | {"loss_scale": 8}, "loss_scale or .*_factor to be given only once"),
    ],
)
def test_a_wrong_section_is_an_error_that_says_what_to_do(section, message):
    with pytest.raises(ValueError, match=message):
        get_loss_scale(section)


@pytest.mark.parametrize("s", [1024.0, 65536.0])
def test_an_init_scale_alone_names_the_calls_of_both_frameworks(s):
    with pytest.raises(ValueError, match=r"for Cerebras .*, for a GradSc") as error:
        get_loss_scale({"init_scale": s, "enabled": True})
    calls = re.findall(r"(?:use|write) (.*?\))", str(error.value))
    actual = [eval(call, {"jmp_scale": jmp_scale}) for call in calls]
    assert_bitwise_equal(actual, [presets.cerebras(s), presets.pytorch(s)])


@pytest.mark.parametrize(
    ("section", "cure", "works"),
    [
        ({"loss_scale": "auto"}, 'replace "auto" by', {"loss_scale": 0}),
        ({"enabled": "auto"}, 'replace "auto" by', {"enabled": True}),
        ({"loss_scaling_factor": "static"}, ".* number", {"loss_scaling_factor": 1024}),
        (
            {"fp16": {"enabled": True}, "zero_optimization": {}},
            r"pass the section config\['fp16'\]",
            {"enabled": True},
        ),
    ],
)
def test_a_section_that_cannot_be_read_says_first_what_to_do(section, cure, works):
    with pytest.raises(ValueError, match=rf"^get_loss_scale: {cure}"):
        get_loss_scale(section)
    assert get_loss_scale(works) is not None


@pytest.mark.parametrize("key", ["enabled", "loss_scale", "hysteresis"])
def test_a_list_in_a_section_is_an_error_that_names_its_key(key):
    with pytest.raises((TypeError, ValueError), match=f"expected {key} to be"):
        get_loss_scale({"auto_cast": False, key: [1]})


@pytest.mark.parametrize(
    "spec",
    [
        *("", "dynamics", "dynamic:", "dynamic:big", "dynamic:2**", "static"),
        *("static:", "none:1", "f16:2", "int8", "float8_e4m3fn", "2**15**2", "10**999"),
        *(None, True, [128], {}, jnp.int32, np.dtype("int8"), int, object()),
    ],
)
def test_an_unknown_spec_is_an_error_that_lists_what_is_known(spec):
    message = r"^get_loss_scale: unknown loss scale .*; known are \"none\"; \"dyn"
    with pytest.raises(ValueError, match=message):
        get_loss_scale(spec)


OUT_OF_RANGE = (0, -1, "0", "-8", "inf", "nan", float("inf"), 10**400)


@pytest.mark.parametrize("spec", [*OUT_OF_RANGE, "dynamic:0", "dynamic:2**30"])
def test_a_number_out_of_range_is_an_error(spec):
    with pytest.raises(ValueError, match=r"expected loss_scale to be .*, got"):
        get_loss_scale(spec)
