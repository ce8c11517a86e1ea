"""Values of one array with the derivative of another computation."""

import jax
import jax.numpy as jnp
import numpy as np

from jmp_scale._autocast.identities import with_cotangent_of_its_dtype, with_value
from jmp_scale._autocast.recompute.identities import softmax_from

X = jnp.linspace(-1, 2, 12).reshape(3, 4)


def test_a_value_is_returned_and_the_other_array_is_differentiated():
    def f(x, value):
        return jnp.sum(with_value(jnp.sin(x), value) ** 2)

    value = jnp.full_like(X, 3.0)
    grad, of_value = jax.grad(f, (0, 1))(X, value)
    np.testing.assert_allclose(grad, 2 * value * jnp.cos(X), rtol=1e-6)
    assert not of_value.any()


def test_a_softmax_gives_the_derivative_of_its_exponents():
    def scaled(probabilities):
        return jnp.sum(probabilities * jnp.arange(4.0)[None])

    # A factor of the probabilities is divided out: rounded ones do not add up to 1.
    result = jax.nn.softmax(X) * 1.01
    got = jax.grad(lambda x: scaled(softmax_from(x, result, (1,))) / 1.01)(X)
    wanted = jax.grad(lambda x: scaled(jax.nn.softmax(x)))(X)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_rule_that_returns_float32_is_cast():
    @jax.custom_vjp
    def square(x):
        return x * x

    square.defvjp(lambda x: (x * x, x), lambda x, g: (2.0 * x.astype("float32") * g,))
    half = X.astype("bfloat16")
    grad = jax.grad(lambda x: square(with_cotangent_of_its_dtype(x)).sum())(half)
    assert grad.dtype == jnp.bfloat16
    assert with_cotangent_of_its_dtype(3) == 3
