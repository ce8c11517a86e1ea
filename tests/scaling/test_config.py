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


FLOAT16 = (jnp.float16, np.float16, np.dtype("float16"))
WIDE = (jnp.bfloat16, jnp.dtype(jnp.bfloat16), np.float64, float)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("none", NoOpLossScale()),
        (" Dynamic ", DynamicLossScale()),
        ("dynamic: 2.**16", DynamicLossScale(2.0**16)),
        ("static:2 ** 10", StaticLossScale(1024.0)),
        ("2**-3", StaticLossScale(0.125)),
        (128, StaticLossScale(128.0)),
        (np.float16(8), StaticLossScale(8.0)),
        (jnp.float32(8), StaticLossScale(8.0)),
        *((name, DynamicLossScale()) for name in ("f16", "FP16", "half", *FLOAT16)),
        *((name, NoOpLossScale()) for name in ("bf16", "float32", "f64", *WIDE)),
    ],
)
def test_a_spec_gives_the_loss_scale_it_names(spec, expected):
    assert_bitwise_equal(get_loss_scale(spec), expected)


def test_the_half_type_of_a_tpu_needs_none(monkeypatch):
    monkeypatch.setattr("jmp_scale._scaling.config.half_dtype", lambda: jnp.bfloat16)
    assert get_loss_scale("half") == NoOpLossScale()


def test_a_loss_scale_passes_unchanged():
    loss_scale = DynamicLossScale(8.0)
    assert get_loss_scale(loss_scale) is loss_scale


def test_only_half_looks_at_the_devices(monkeypatch):
    monkeypatch.setattr("jmp_scale._scaling.config.half_dtype", pytest.fail)
    assert get_loss_scale("dynamic") == DynamicLossScale()
    assert get_loss_scale("bf16") == NoOpLossScale()


@pytest.mark.parametrize("spec", ["9**999999999", "0**-1", "2**2**3"])
def test_a_power_that_is_no_number_is_an_unknown_loss_scale(spec):
    with pytest.raises(ValueError, match="unknown loss scale"):
        get_loss_scale(spec)
