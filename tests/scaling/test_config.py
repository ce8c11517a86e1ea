import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise_equal

from jmp_scale import (
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
    get_loss_scale,
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
    monkeypatch.setattr("jmp_scale._scaling.config.half_dtype", lambda: jnp.bfloat16)
    assert get_loss_scale("half") == NoOpLossScale()


def test_a_loss_scale_passes_unchanged():
    for loss_scale in (NoOpLossScale(), StaticLossScale(2.0), DynamicLossScale(8.0)):
        assert get_loss_scale(loss_scale) is loss_scale


@pytest.mark.parametrize(
    "spec",
    [
        *("", "dynamics", "dynamic:", "dynamic:big", "dynamic:2**", "static"),
        *("static:", "none:1", "f16:2", "int8", "float8_e4m3fn", "2**15**2", "10**999"),
        *(None, True, [128], {}, {"loss_scale": 0}, jnp.int32, int, object()),
    ],
)
def test_an_unknown_spec_is_an_error_that_lists_what_is_known(spec):
    message = r"^get_loss_scale: unknown loss scale .*; known are \"none\"; \"dyn"
    with pytest.raises(ValueError, match=message):
        get_loss_scale(spec)


OUT_OF_RANGE = (0, -1, "0", "-8", "inf", "nan", float("inf"))


@pytest.mark.parametrize("spec", [*OUT_OF_RANGE, "dynamic:0", "dynamic:2**30"])
def test_a_number_out_of_range_is_an_error(spec):
    with pytest.raises(ValueError, match=r"expected loss_scale to be .*, got"):
        get_loss_scale(spec)
