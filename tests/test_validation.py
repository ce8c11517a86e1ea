import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_scale import DynamicLossScale, StaticLossScale

pytestmark = pytest.mark.strict_promotion

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("period", 0), ("period", -1), ("period", 2.5), ("period", NAN), ("period", INF), ("period", 2**31),
        ("factor", 1), ("factor", 0.5), ("factor", -2), ("factor", INF), ("factor", NAN),
        ("backoff_factor", 0), ("backoff_factor", 1), ("backoff_factor", 2.0), ("backoff_factor", -0.5),
        ("backoff_factor", NAN),
        ("min_loss_scale", -1), ("min_loss_scale", INF), ("min_loss_scale", NAN), ("min_loss_scale", 2.0**25),
        ("max_loss_scale", 0), ("max_loss_scale", -1), ("max_loss_scale", INF), ("max_loss_scale", NAN),
        ("loss_scale", 0), ("loss_scale", 0.0), ("loss_scale", -8.0), ("loss_scale", INF),
        ("loss_scale", NAN), ("loss_scale", 0.5), ("loss_scale", 2.0**25), ("loss_scale", np.float32(0.5)),
        ("loss_scale", np.zeros(3)),
        ("growth_delay", -1), ("growth_delay", 0.5), ("hysteresis", 0), ("hysteresis", 1.5),
        ("hysteresis_reset", "never"), ("at_max", "stop"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_a_value_error_that_names_argument_and_value(
    argument, value
):
    with pytest.raises(ValueError, match=f"(?s){argument} must be .*got") as error:
        DynamicLossScale(**{argument: value})
    if argument != "loss_scale":
        assert repr(float(value) if not isinstance(value, str) else value) in str(
            error.value
        )


def test_a_floor_above_the_cap_is_a_value_error():
    with pytest.raises(
        ValueError,
        match=r"min_loss_scale must be at most max_loss_scale = 0.5, got 1.0",
    ):
        DynamicLossScale(0.5, max_loss_scale=0.5)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("period", "2000"), ("period", None), ("period", [2000]), ("period", True), ("factor", None),
        ("factor", "2"), ("factor", 2j), ("backoff_factor", "half"), ("min_loss_scale", None),
        ("max_loss_scale", "inf"), ("growth_delay", None), ("hysteresis", False), ("hysteresis_reset", 1),
        ("at_max", None), ("loss_scale", "2**15"), ("loss_scale", True), ("loss_scale", 2j),
        ("loss_scale", [2.0**15]), ("counter", "0"), ("period", np.arange(2)), ("period", np.True_),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_a_type_error(argument, value):
    with pytest.raises(TypeError, match="must be"):
        DynamicLossScale(**{argument: value})


def test_a_traced_configuration_is_a_type_error():
    with pytest.raises(TypeError, match=r"period must be .* concrete"):
        jax.jit(lambda p: DynamicLossScale(period=p))(3)


@pytest.mark.parametrize("value", [0, 0.0, -1, NAN, INF, 2.0**127, 2.0**-127])
def test_a_static_loss_scale_out_of_range_is_a_value_error(value):
    with pytest.raises(ValueError, match="loss_scale must be a finite number"):
        StaticLossScale(value)


@pytest.mark.parametrize("value", [None, "8", True, 1j, [8.0], np.ones(2)])
def test_a_static_loss_scale_that_is_no_number_is_a_type_error(value):
    with pytest.raises(TypeError, match="loss_scale must be"):
        StaticLossScale(value)


@pytest.mark.parametrize(
    "convert", [np.asarray, jnp.asarray, np.float32, float, lambda x: x]
)
def test_configuration_may_come_as_concrete_arrays(convert):
    loss_scale = DynamicLossScale(
        8.0,
        None,
        convert(20.0),
        convert(4.0),
        convert(0.25),
        max_loss_scale=convert(64.0),
        hysteresis=convert(2.0),
    )
    fields = (
        loss_scale.period,
        loss_scale.factor,
        loss_scale.min_loss_scale,
        loss_scale.max_loss_scale,
    )
    assert fields == (20, 4, 0.25, 64)
    assert [type(f) for f in (*fields, loss_scale.hysteresis)] == [
        int,
        float,
        float,
        float,
        int,
    ]
    hash(fields)


def test_bounds_beyond_the_normal_range_become_its_ends():
    loss_scale = DynamicLossScale(1.0, min_loss_scale=0.0, max_loss_scale=3.4e38)
    assert (loss_scale.min_loss_scale, loss_scale.max_loss_scale) == (
        2.0**-126,
        2.0**126,
    )


@pytest.mark.parametrize("name", ["loss_scale", "min_loss_scale"])
def test_an_integer_array_for_a_scale_warns(name):
    with pytest.warns(
        UserWarning, match=f"Expected floating type for {name}"
    ) as record:
        DynamicLossScale(**{"loss_scale": 8.0, name: jnp.asarray(1, jnp.int32)})
    assert record[0].filename == __file__


def test_python_numbers_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DynamicLossScale(2**15, 0, 2000, 2, 1)


@pytest.mark.parametrize(
    "value", [2**15, 2.0**15, np.float16(2**15), np.float64(2**15), np.ones(()) * 2**15]
)
def test_the_loss_scale_is_a_strong_float32_whatever_is_given(value):
    for x in (value, jnp.asarray(value, jnp.float16), jnp.asarray(float(value))):
        loss_scale = DynamicLossScale(x).loss_scale
        assert (loss_scale.dtype, loss_scale.shape, loss_scale.weak_type) == (
            jnp.float32,
            (),
            False,
        )
        assert loss_scale == 2**15


@pytest.mark.parametrize("value", [None, 3, 3.0, np.int64(3), np.zeros((), np.int8)])
def test_the_counter_is_a_strong_int32_whatever_is_given(value):
    counter = DynamicLossScale(counter=value).counter
    assert (counter.dtype, counter.shape, counter.weak_type) == (jnp.int32, (), False)


def test_leaves_keep_their_types_in_x64_mode():
    with jax.enable_x64(True):
        loss_scale = DynamicLossScale(np.float64(8), np.int64(0), period=1)
        for _ in range(2):
            assert (loss_scale.loss_scale.dtype, loss_scale.counter.dtype) == (
                jnp.float32,
                jnp.int32,
            )
            loss_scale = loss_scale.adjust(jnp.array(True))


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0, 2.0**-126), (INF, 2.0**126), (8.0, 8.0)]
)
def test_a_device_array_is_brought_into_the_range_of_normal_numbers(value, expected):
    assert DynamicLossScale(jnp.float32(value)).loss_scale == expected


def test_a_counter_takes_the_shape_of_the_loss_scale():
    several = DynamicLossScale(np.full(3, 8.0), counter=1, hysteresis=2)
    assert several.counter.tolist() == [1, 1, 1]
    assert several.hysteresis_left.tolist() == [2, 2, 2]


def test_a_counter_that_is_no_whole_number_is_a_value_error():
    with pytest.raises(ValueError, match=r"counter must be an integer, got 3\.7"):
        DynamicLossScale(counter=3.7)
