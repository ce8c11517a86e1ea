import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_scale import DynamicLossScale, StaticLossScale

pytestmark = pytest.mark.strict_promotion

NAN, INF = float("nan"), float("inf")
BEYOND_INT32 = [2**31, -(2**31) - 1, 1e300, NAN, 3.7, 10**400]
OUT_OF_RANGE = {
    "period": [0, -1, 2.5, NAN, INF, 2**31, 10**400],
    "factor": [1, 0.5, -2, INF, NAN, 10**400],
    "backoff_factor": [0, 1, 2.0, -0.5, NAN],
    "min_loss_scale": [-1, INF, NAN, 2.0**25],
    "max_loss_scale": [0, -1, INF, NAN],
    "loss_scale": [0.0, -8.0, INF, NAN, 0.5, np.float32(2.0**25), np.zeros(3), 10**400],
    "growth_delay": [-1, 0.5],
    "hysteresis": [0, 1.5],
    "counter": BEYOND_INT32,
    "hysteresis_left": BEYOND_INT32,
    "hysteresis_reset": ["never"],
    "at_max": ["stop"],
}
WRONG_TYPE = {
    "period": ["2000", None, [2000], True, np.arange(2), np.True_],
    "factor": [None, "2", 2j],
    "backoff_factor": ["half"],
    "hysteresis_reset": [1],
    "loss_scale": ["2**15", True, 2j, [2.0**15]],
    "counter": ["0"],
}


@pytest.mark.parametrize(
    ("error", "argument", "value"),
    [
        (error, argument, value)
        for error, table in ((ValueError, OUT_OF_RANGE), (TypeError, WRONG_TYPE))
        for argument, values in table.items()
        for value in values
    ],
)
def test_a_wrong_value_is_an_error_that_names_argument_and_value(
    error, argument, value
):
    message = rf"(?s)^DynamicLossScale: expected {argument} to be .*, got "
    with pytest.raises(error, match=message) as raised:
        DynamicLossScale(**{"hysteresis": 2, argument: value})
    if argument != "loss_scale":
        assert str(raised.value).endswith(repr(value))


@pytest.mark.parametrize("counter", [-(2**31), 2**31 - 1])
def test_a_counter_may_be_any_int32(counter):
    assert DynamicLossScale(counter=counter).counter == counter


@pytest.mark.parametrize("ends", [(1.0, 0.5), (0.8, 0.7)])
def test_a_floor_above_the_cap_is_a_value_error(ends):
    floor, cap = ends
    # A cap that float32 cannot hold is not below itself.
    DynamicLossScale(cap, min_loss_scale=cap, max_loss_scale=cap)
    message = f"min_loss_scale to be at most max_loss_scale = {cap}, got {floor}"
    with pytest.raises(ValueError, match=message):
        DynamicLossScale(cap, min_loss_scale=floor, max_loss_scale=cap)


def test_a_traced_configuration_is_a_type_error():
    with pytest.raises(TypeError, match=r"expected period to be .* concrete"):
        jax.jit(lambda p: DynamicLossScale(period=p))(3)


@pytest.mark.parametrize(
    ("error", "value"),
    [(ValueError, x) for x in (0, 0.0, -1, NAN, INF, 2.0**127, 2.0**-127)]
    + [(TypeError, x) for x in (None, "8", True, 1j, [8.0], np.ones(2))],
)
def test_a_static_loss_scale_must_be_a_number_in_the_range(error, value):
    with pytest.raises(error, match=r"^StaticLossScale: expected loss_scale to be a"):
        StaticLossScale(value)


@pytest.mark.parametrize(
    "convert", [np.asarray, jnp.asarray, np.float16, np.float32, float, lambda x: x]
)
def test_configuration_may_come_as_concrete_arrays(convert):
    given = {"period": 20, "hysteresis": 2}
    given |= {"factor": 4.0, "min_loss_scale": 0.25, "max_loss_scale": 64.0}
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


@pytest.mark.parametrize("name", ["loss_scale", "min_loss_scale"])
def test_an_integer_array_for_a_scale_warns(name):
    message = f"Expected floating type for {name}"
    with pytest.warns(UserWarning, match=message) as record:
        DynamicLossScale(**{"loss_scale": 8.0, name: jnp.asarray(1, jnp.int32)})
    assert record[0].filename == __file__


def assert_is_strong(x, dtype):
    assert (x.dtype, x.shape, x.weak_type) == (dtype, (), False)


@pytest.mark.parametrize("x64", [False, True])
def test_leaves_are_strong_float32_and_int32_whatever_is_given(x64):
    scales = [2**15, 2.0**15, np.float64(2**15), np.ones(()) * 2**15]
    with jax.enable_x64(x64):
        scales += [jnp.asarray(2**15, jnp.float16), jnp.asarray(2.0**15)]
        for s in scales:
            assert DynamicLossScale(s).loss_scale == 2**15
            assert_is_strong(DynamicLossScale(s).loss_scale, jnp.float32)
        for counter in (None, 3, 3.0, np.int64(3), np.zeros((), np.int8)):
            loss_scale = DynamicLossScale(8.0, counter, period=1)
            for adjusted in (loss_scale, loss_scale.adjust(jnp.array(True))):
                assert_is_strong(adjusted.loss_scale, jnp.float32)
                assert_is_strong(adjusted.counter, jnp.int32)


@pytest.mark.parametrize("compile_", [lambda x: x, jax.jit])
def test_a_device_array_is_brought_into_the_range_of_normal_numbers(compile_):
    make = compile_(lambda x: DynamicLossScale(x, min_loss_scale=0.25).loss_scale)
    given = jnp.array([0.0, INF, 8.0, NAN, -INF], jnp.float32)
    expected = [2.0**-126, 2.0**126, 8.0, 0.25, 2.0**-126]
    assert make(given).tolist() == make(given.astype(jnp.float16)).tolist() == expected
    assert make(given[1]) == 2.0**126


@pytest.mark.parametrize("end", [0.7, 1e-3, 1 / 3, np.float64(0.1), 3e-30])
def test_a_run_resumes_from_the_float_of_any_floor_or_cap(end):
    start = DynamicLossScale(1.0, min_loss_scale=end, factor=2.0**100)
    s = float(start.adjust(False).loss_scale)
    for given in (s, np.float32(s), end):
        resumed = dataclasses.replace(start, loss_scale=given)
        assert resumed.adjust(False).loss_scale == resumed.loss_scale == s
    rule = {"period": 1, "factor": 1 / end, "max_loss_scale": 1 / end}
    for at_max in ("clamp", "hold"):
        start = DynamicLossScale(1.0, at_max=at_max, **rule)
        s = float(start.adjust(True).loss_scale)
        assert dataclasses.replace(start, loss_scale=s).loss_scale == s


def test_a_counter_takes_the_shape_of_the_loss_scale():
    several = DynamicLossScale(np.full(3, 8.0), counter=1, hysteresis=2)
    assert several.counter.tolist() == [1, 1, 1]
    assert several.hysteresis_left.tolist() == [2, 2, 2]
