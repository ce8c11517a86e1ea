import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise_equal

import jmp_scale
from jmp_scale import DynamicLossScale, NoOpLossScale, StaticLossScale

pytestmark = pytest.mark.strict_promotion

EVERY_KIND = [NoOpLossScale(), StaticLossScale(2.0**10), DynamicLossScale(2.0**10)]
CAPTURED = DynamicLossScale(2.0**10)


def gradient(w, loss_scale=CAPTURED):
    return jmp_scale.grad(lambda w: jnp.sum(w**2), loss_scale)(w)


BATCH = jnp.ones((3, 3))
SUM_OF_PRODUCTS = jmp_scale.grad(lambda w, x: jnp.sum(w @ x), CAPTURED)


@pytest.mark.parametrize(
    "traced",
    [
        gradient,
        jax.vmap(gradient),
        lambda w: gradient(w, jax.device_get(CAPTURED)),  # from the host
        lambda w: SUM_OF_PRODUCTS(w, BATCH),  # beside a captured batch
    ],
)
def test_a_dynamic_loss_scale_that_a_traced_function_captured_warns(traced):
    message = r"got DynamicLossScale\(loss_scale=1024.*outs"
    with pytest.warns(UserWarning, match=message):
        jax.make_jaxpr(traced)(jnp.ones(3))


@pytest.mark.parametrize(
    "call",
    [
        lambda w: jax.make_jaxpr(gradient)(w, CAPTURED),
        lambda w: jax.make_jaxpr(lambda w: gradient(w, StaticLossScale(8.0)))(w),
        lambda w: jax.vmap(gradient)(w),
        lambda w: jax.lax.map(lambda x: SUM_OF_PRODUCTS(w, x), w),  # micro-batches
    ],
)
def test_a_loss_scale_of_this_step_does_not_warn(call):
    call(jnp.ones((3, 3)))  # filters make a warning an error


@pytest.mark.parametrize("function", ["value_and_grad", "grad"])
@pytest.mark.parametrize(
    ("loss_scale", "has_aux", "argnums"),
    [
        (EVERY_KIND[0], True, 0),
        (EVERY_KIND[1], False, 1),
        (EVERY_KIND[2], True, (0, 1)),
    ],
)
def test_values_and_structure_are_those_of_jax(function, loss_scale, has_aux, argnums):
    def fun(a, b, *, shift):
        loss = (a["w"] ** 2 * b).sum() + shift
        return (loss, {"seen": b + 1}) if has_aux else loss

    args = {"w": jnp.array([1.0, 2.0])}, jnp.array([3.0, 4.0])
    scaled = getattr(jmp_scale, function)(fun, loss_scale, argnums, has_aux)
    plain = getattr(jax, function)(fun, argnums, has_aux)
    assert_bitwise_equal(scaled(*args, shift=1.0), plain(*args, shift=1.0))


@pytest.mark.parametrize("loss_scale", EVERY_KIND)
def test_float16_parameters_get_float32_gradients(loss_scale):
    fun = jmp_scale.value_and_grad(lambda w: (w * w).sum(), loss_scale)
    loss, grads = fun(jnp.ones(2, jnp.float16))
    assert (loss.dtype, grads.dtype) == (jnp.float32, jnp.float32)
    assert (float(loss), grads.tolist()) == (2.0, [2.0, 2.0])


@pytest.mark.parametrize(("s", "gradient"), [(2.0**14, 3.0), (2.0**15, np.inf)])
def test_a_float16_loss_does_not_overflow_by_being_scaled(s, gradient):
    fun = jmp_scale.value_and_grad(lambda w: w * jnp.float16(3.0), DynamicLossScale(s))
    loss, grads = fun(jnp.float16(1.0))
    # 3 * 2^15 overflows float16, which the gradient shows.
    assert (float(loss), float(grads)) == (3.0, gradient)


def test_the_loss_is_returned_as_fun_gives_it_whatever_s_is():
    for value, s in ((3e38, 2.0**15), (0.1, 3.0), (1 / 3, 1000.0)):
        fun = jmp_scale.value_and_grad(lambda w: w * 1.0, StaticLossScale(s))
        assert fun(jnp.float32(value))[0] == np.float32(value)


def test_integer_arguments_get_float0_gradients_with_allow_int():
    def fun(tree):
        return (tree["w"] * tree["n"].astype(jnp.float32)).sum()

    gradient = jmp_scale.grad(fun, DynamicLossScale(), allow_int=True)
    grads = gradient({"w": jnp.ones(2), "n": jnp.arange(2)})
    assert grads["n"].dtype == jax.dtypes.float0
    assert grads["w"].tolist() == [0, 1]


NEXT_SCALE = np.float32(0.1)


@jax.custom_vjp
def float8_layer(x, scale):
    return x * scale


# As Flax's float8 layers do: the "gradient" of a scale is its next value.
float8_layer.defvjp(
    lambda x, scale: (x * scale, scale),
    lambda scale, g: (g * scale, jnp.full_like(scale, NEXT_SCALE)),
)


FLOAT8 = "_overwrite_with_gradient"


def float8_params(dtype):
    return {"w": jnp.asarray(2.0, dtype), FLOAT8: {"layer": {"scale": dtype(1.0)}}}


def float8_loss(*several):
    outputs = [float8_layer(p["w"], p[FLOAT8]["layer"]["scale"]) for p in several]
    return sum(y.astype(jnp.float32) for y in outputs)


@pytest.mark.parametrize(
    ("dtype", "argnums"), [(np.float16, 0), (np.float32, (0,)), (np.float32, [1, 0])]
)
def test_float8_scales_come_back_as_the_transform_gave_them(dtype, argnums):
    gradient = jmp_scale.grad(float8_loss, DynamicLossScale(1000.0), argnums)
    grads = gradient(float8_params(dtype), float8_params(dtype))
    for one in [grads] if argnums == 0 else grads:
        assert_bitwise_equal(one[FLOAT8]["layer"]["scale"], dtype(NEXT_SCALE))
        assert one["w"] == pytest.approx(1.0)


def test_equinox_filters_as_it_does_without_scaling():
    args = eqx.nn.MLP(2, "scalar", 4, 0, key=jax.random.key(0)), jnp.ones(2)
    fun, transform = lambda model, x: model(x), eqx.filter_value_and_grad
    scaled = jmp_scale.value_and_grad(fun, DynamicLossScale(), transform=transform)
    assert_bitwise_equal(scaled(*args), transform(fun)(*args))


def test_fun_may_return_loss_and_aux_in_a_list():
    fun = jmp_scale.value_and_grad(lambda w: [w, 3], StaticLossScale(8.0), has_aux=True)
    value, grads = fun(jnp.float32(2.0))
    assert (value, grads) == ((2, 3), 1)
