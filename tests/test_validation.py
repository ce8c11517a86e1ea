import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_scale import DynamicLossScale, StaticLossScale, _validation

pytestmark = pytest.mark.strict_promotion

NAN, INF = float("nan"), float("inf")
OUT_OF_RANGE = {
    "period": [0, -1, 2.5, NAN, INF, 2**31],
    "factor": [1, 0.5, -2, INF, NAN],
    "backoff_factor": [0, 1, 2.0, -0.5, NAN],
    "min_loss_scale": [-1, INF, NAN, 2.0**25],
    "max_loss_scale": [0, -1, INF, NAN],
    "loss_scale": [0, 0.0, -8.0, INF, NAN, 0.5, 2.0**25, np.float32(0.5), np.zeros(3)],
    "growth_delay": [-1, 0.5],
    "hysteresis": [0, 1.5],
    "counter": [2**31, -(2**31) - 1, 1e300, NAN, 3.7],
    "hysteresis_left": [2**31, -(2**31) - 1, 1e300, NAN, 3.7],
    "hysteresis_reset": ["never"],
    "at_max": ["stop"],
}
WRONG_TYPE = {
    "period": ["2000", None, [2000], True, np.arange(2), np.True_],
    "factor": [None, "2", 2j],
    "backoff_factor": ["half"],
    "min_loss_scale": [None],
    "max_loss_scale": ["inf"],
    "growth_delay": [None],
    "hysteresis": [False],
    "hysteresis_reset": [1],
    "at_max": [None],
    "loss_scale": ["2**15", True, 2j, [2.0**15]],
    "counter": ["0"],
}


def each_value(table):
    pairs = [(name, value) for name, values in table.items() for value in values]
    return pytest.mark.parametrize(("argument", "value"), pairs)


@each_value(OUT_OF_RANGE)
def test_a_value_out_of_range_is_a_value_error_that_names_argument_and_value(
    argument, value
):
    message = rf"(?s)^DynamicLossScale: expected {argument} to be .*, got "
    with pytest.raises(ValueError, match=message) as error:
        DynamicLossScale(**{"hysteresis": 2, argument: value})
    if argument != "loss_scale":
        assert str(error.value).endswith(repr(value))


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


@each_value(WRONG_TYPE)
def test_a_value_of_the_wrong_type_is_a_type_error(argument, value):
    message = f"^DynamicLossScale: expected .*{argument}.* to be .*, got"
    with pytest.raises(TypeError, match=message):
        DynamicLossScale(**{argument: value})


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


@pytest.mark.parametrize("convert", [int, np.asarray, jnp.asarray, np.float16])
def test_a_static_loss_scale_given_as_an_array_becomes_a_hashable_number(convert):
    loss_scale = StaticLossScale(convert(8.0))
    assert type(loss_scale.loss_scale) is float
    assert hash(loss_scale) == hash(StaticLossScale(8.0))


@pytest.mark.parametrize(
    "convert", [np.asarray, jnp.asarray, np.float32, float, lambda x: x]
)
def test_configuration_may_come_as_concrete_arrays(convert):
    given = {"period": 20, "hysteresis": 2}
    given |= {"factor": 4.0, "min_loss_scale": 0.25, "max_loss_scale": 64.0}
    converted = {name: convert(float(value)) for name, value in given.items()}
    loss_scale = DynamicLossScale(8.0, **converted)
    for name, value in given.items():
        field = getattr(loss_scale, name)
        assert (field, type(field)) == (value, type(value))


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


@pytest.mark.parametrize(
    "value", [2**15, 2.0**15, np.float16(2**15), np.float64(2**15), np.ones(()) * 2**15]
)
def test_the_loss_scale_is_a_strong_float32_whatever_is_given(value):
    for x in (value, jnp.asarray(value, jnp.float16), jnp.asarray(float(value))):
        loss_scale = DynamicLossScale(x).loss_scale
        assert_is_strong(loss_scale, jnp.float32)
        assert loss_scale == 2**15


def assert_is_strong(x, dtype):
    assert (x.dtype, x.shape, x.weak_type) == (dtype, (), False)


@pytest.mark.parametrize("value", [None, 3, 3.0, np.int64(3), np.zeros((), np.int8)])
def test_the_counter_is_a_strong_int32_whatever_is_given(value):
    assert_is_strong(DynamicLossScale(counter=value).counter, jnp.int32)


def test_leaves_keep_their_types_in_x64_mode():
    with jax.enable_x64(True):
        loss_scale = DynamicLossScale(np.float64(8), np.int64(0), period=1)
        for _ in range(2):
            assert_is_strong(loss_scale.loss_scale, jnp.float32)
            assert_is_strong(loss_scale.counter, jnp.int32)
            loss_scale = loss_scale.adjust(jnp.array(True))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, 2.0**-126), (INF, 2.0**126), (8.0, 8.0), (NAN, 0.25), (-INF, 2.0**-126)],
)
@pytest.mark.parametrize("compile_", [lambda x: x, jax.jit])
def test_a_device_array_is_brought_into_the_range_of_normal_numbers(
    value, expected, compile_
):
    def make(x):
        return DynamicLossScale(x, min_loss_scale=0.25)

    assert compile_(make)(jnp.float32(value)).loss_scale == expected
    several = jnp.array([value, 4.0], jnp.float16)
    assert compile_(make)(several).loss_scale.tolist() == [expected, 4.0]


ENDS = [0.7, 1e-3, 1 / 3, np.float64(0.1), 3e-30]


@pytest.mark.parametrize("floor", ENDS)
def test_a_run_resumes_from_the_float_of_any_floor(floor):
    start = DynamicLossScale(1.0, min_loss_scale=floor, factor=2.0**100)
    s = float(start.adjust(False).loss_scale)
    for given in (s, np.float32(s), floor):
        resumed = dataclasses.replace(start, loss_scale=given)
        assert resumed.adjust(False).loss_scale == resumed.loss_scale == s


@pytest.mark.parametrize("cap", [1 / floor for floor in ENDS])
@pytest.mark.parametrize("at_max", ["clamp", "hold"])
def test_a_run_resumes_from_the_float_of_any_cap(cap, at_max):
    rule = {"period": 1, "factor": cap, "at_max": at_max, "max_loss_scale": cap}
    start = DynamicLossScale(1.0, **rule)
    s = float(start.adjust(True).loss_scale)
    resumed = dataclasses.replace(start, loss_scale=s)
    assert resumed.loss_scale == s


def test_a_counter_takes_the_shape_of_the_loss_scale():
    several = DynamicLossScale(np.full(3, 8.0), counter=1, hysteresis=2)
    assert several.counter.tolist() == [1, 1, 1]
    assert several.hysteresis_left.tolist() == [2, 2, 2]


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 1e300, NAN, 3.7])
@pytest.mark.parametrize("name", ["counter", "hysteresis_left"])
def test_a_counter_beyond_int32_is_a_value_error_that_names_it(name, value):
    with pytest.raises(ValueError, match=rf"expected {name} to be an integer in .*got"):
        DynamicLossScale(hysteresis=2, **{name: value})


@pytest.mark.parametrize("argument", ["loss_scale", "period", "factor", "counter"])
def test_an_integer_beyond_float64_is_a_value_error_that_names_the_argument(argument):
    with pytest.raises(ValueError, match=f"expected {argument} to be "):
        DynamicLossScale(**{argument: 10**5000})


@_validation.renamed(size="width", dim="axis")
def area(width, axis=0):
    """Of a square."""
    return width**2 + axis


def test_an_argument_under_its_earlier_name_works_and_warns_at_the_user_s_line():
    with pytest.warns(DeprecationWarning, match="^area: .* size is now width; write"):
        assert area(size=3) == 9
    with pytest.warns(DeprecationWarning, match="dim is now axis") as warned:
        assert area(3, dim=1) == 10
    assert [w.filename for w in warned] == [__file__]
    assert area(3, axis=1) == 10  # without a warning, which would be an error here
    with pytest.raises(TypeError, match=r"^area: expected width alone, got size too"):
        area(width=3, size=3)
    assert list(inspect.signature(area).parameters) == ["width", "axis"]
    assert area.__doc__ == "Of a square."
