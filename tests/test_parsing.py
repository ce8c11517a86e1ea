import jax.numpy as jnp
import numpy as np
import pytest

import jmp_scale
from jmp_scale import DynamicLossScale, NoOpLossScale, StaticLossScale, get_loss_scale

pytestmark = pytest.mark.strict_promotion


def configuration(loss_scale):
    """All fields, with S as a number."""
    return type(loss_scale), {
        k: v if isinstance(v, str) else v and float(v)
        for k, v in vars(loss_scale).items()
    }


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("none", NoOpLossScale()),
        ("None", NoOpLossScale()),
        ("dynamic", DynamicLossScale()),
        (" Dynamic ", DynamicLossScale()),
        ("dynamic:2**15", DynamicLossScale(2.0**15)),
        ("dynamic:2**16", DynamicLossScale(2.0**16)),
        ("dynamic: 2.**16", DynamicLossScale(2.0**16)),
        ("dynamic:65536", DynamicLossScale(65536.0)),
        ("static:1024", StaticLossScale(1024.0)),
        ("static:2 ** 10", StaticLossScale(1024.0)),
        ("128", StaticLossScale(128.0)),
        ("2**-3", StaticLossScale(0.125)),
        ("1e3", StaticLossScale(1000.0)),
        ("1", StaticLossScale(1.0)),
        (128, StaticLossScale(128.0)),
        (2.0**15, StaticLossScale(2.0**15)),
        (np.int64(8), StaticLossScale(8.0)),
        (np.float16(8), StaticLossScale(8.0)),
        (np.array(8.0), StaticLossScale(8.0)),
        (jnp.float32(8), StaticLossScale(8.0)),
    ],
)
def test_a_spec_gives_the_loss_scale_it_names(spec, expected):
    assert configuration(get_loss_scale(spec)) == configuration(expected)


@pytest.mark.parametrize(
    "spec",
    [
        "f16",
        "float16",
        "half",
        jnp.float16,
        np.float16,
        np.dtype("float16"),
        jnp.dtype(jnp.float16),
    ],
)
def test_float16_gets_the_dynamic_loss_scale(spec):
    assert configuration(get_loss_scale(spec)) == configuration(DynamicLossScale())


@pytest.mark.parametrize(
    "spec",
    [
        *("bf16", "bfloat16", "f32", "float32", "full", "f64", "float64"),
        *(
            jnp.bfloat16,
            jnp.float32,
            np.float64,
            float,
            np.dtype("float32"),
            jnp.dtype(jnp.bfloat16),
        ),
    ],
)
def test_a_dtype_with_the_range_of_float32_needs_none(spec):
    assert get_loss_scale(spec) == NoOpLossScale()


def test_the_half_type_of_a_tpu_needs_none(monkeypatch):
    monkeypatch.setattr("jmp_scale._parsing.half_dtype", lambda: jnp.bfloat16)
    assert get_loss_scale("half") == NoOpLossScale()


def test_a_policy_and_its_loss_scale_come_from_one_dtype():
    policy = jmp_scale.get_policy("params=float32,compute=float16,output=float32")
    assert isinstance(get_loss_scale(policy.compute_dtype), DynamicLossScale)
    assert isinstance(get_loss_scale(policy.param_dtype), NoOpLossScale)


@pytest.mark.parametrize(
    "loss_scale", [NoOpLossScale(), StaticLossScale(2.0), DynamicLossScale(8.0)]
)
def test_a_loss_scale_passes_unchanged(loss_scale):
    assert get_loss_scale(loss_scale) is loss_scale


@pytest.mark.parametrize(
    "spec",
    [
        *(
            "",
            "dynamics",
            "dynamic:",
            "dynamic:big",
            "dynamic:2**",
            "static",
            "static:",
            "none:1",
            "f16:2",
        ),
        *(
            "int8",
            "float8_e4m3fn",
            "2**15**2",
            "__import__('os')",
            "10**999",
            None,
            True,
            [128],
            {},
        ),
        *(jnp.int32, np.dtype("int8"), int, object()),
    ],
)
def test_an_unknown_spec_is_an_error_that_lists_what_is_known(spec):
    with pytest.raises(
        ValueError,
        match=r"^get_loss_scale: unknown loss scale .*; known are \"none\"; \"dyn",
    ):
        get_loss_scale(spec)


@pytest.mark.parametrize(
    "spec", [0, -1, "0", "-8", "inf", "nan", float("inf"), "dynamic:0", "dynamic:2**30"]
)
def test_a_number_that_no_loss_scale_may_have_is_an_error(spec):
    with pytest.raises(ValueError, match=r"loss_scale must be .*, got"):
        get_loss_scale(spec)
