import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_scale import DynamicLossScale, StaticLossScale

pytestmark = pytest.mark.strict_promotion


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray, np.float16, float])
def test_configuration_may_come_as_concrete_arrays(convert):
    ends = {"min_loss_scale": 0.25, "max_loss_scale": 64.0}
    given = {"period": 20, "hysteresis": 2, "factor": 4.0, **ends}
    converted = {name: convert(float(value)) for name, value in given.items()}
    loss_scale = DynamicLossScale(8.0, **converted)
    for name, value in given.items():
        field = getattr(loss_scale, name)
        assert (field, type(field)) == (value, type(value))
    static = StaticLossScale(convert(8.0))
    assert type(static.loss_scale) is float
    assert hash(static) == hash(StaticLossScale(8))


def test_bounds_beyond_the_normal_range_become_its_ends():
    loss_scale = DynamicLossScale(1.0, min_loss_scale=0.0, max_loss_scale=3.4e38)
    ends = loss_scale.min_loss_scale, loss_scale.max_loss_scale
    assert ends == (2.0**-126, 2.0**126)


def test_an_integer_array_for_a_scale_warns():
    message = "Expected floating type for loss_scale"
    with pytest.warns(UserWarning, match=message) as record:
        DynamicLossScale(jnp.asarray(8, jnp.int32))
    assert record[0].filename == __file__


@pytest.mark.parametrize("x64", [False, True])
def test_leaves_are_strong_float32_and_int32_whatever_is_given(x64):
    with jax.enable_x64(x64):
        half = jnp.asarray(2**15, jnp.float16)
        for s, counter in ((2**15, 3), (np.float64(2**15), 3.0), (half, np.int64(3))):
            loss_scale = DynamicLossScale(s, counter, period=1)
            assert loss_scale.loss_scale == 2**15
            adjusted = loss_scale.adjust(jnp.array(True))
            for leaves in map(jax.tree.leaves, (loss_scale, adjusted)):
                types = [(x.dtype, x.shape, x.weak_type) for x in leaves]
                assert types == [(jnp.float32, (), False), (jnp.int32, (), False)]


@pytest.mark.parametrize("compile_", [lambda x: x, jax.jit])
def test_an_array_is_brought_into_the_range_of_normal_numbers(compile_):
    make = compile_(lambda x: DynamicLossScale(x, min_loss_scale=0.25).loss_scale)
    given = jnp.array([0.0, jnp.inf, 8.0, jnp.nan, -jnp.inf], jnp.float32)
    expected = [2.0**-126, 2.0**126, 8.0, 0.25, 2.0**-126]
    assert make(given).tolist() == make(given.astype(jnp.float16)).tolist() == expected
    assert make(given[1]) == 2.0**126


@pytest.mark.parametrize("end", [0.7, 1 / 3, 3e-30])
def test_a_run_resumes_from_the_float_of_any_floor_or_cap(end):
    floor = DynamicLossScale(1.0, min_loss_scale=end, factor=2.0**100)
    cap = {"factor": 1 / end, "max_loss_scale": 1 / end, "at_max": "clamp"}
    cap = DynamicLossScale(1.0, period=1, **cap)
    for start, finite in ((floor, False), (cap, True)):
        s = float(start.adjust(finite).loss_scale)
        assert dataclasses.replace(start, loss_scale=s).loss_scale == s


def test_a_counter_takes_the_shape_of_the_loss_scale():
    several = DynamicLossScale(np.full(3, 8.0), counter=1, hysteresis=2)
    assert several.counter.tolist() == [1, 1, 1]
    assert several.hysteresis_left.tolist() == [2, 2, 2]
