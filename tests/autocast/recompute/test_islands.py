"""What derivatives of an island read, its softmaxes and its small sums."""

import jax
import jax.numpy as jnp
import numpy as np
from autocast_programs import X
from jax import lax

from jmp_scale import _jaxpr
from jmp_scale._autocast.recompute import islands


def program(fun, *args):
    return jax.make_jaxpr(fun)(*args)


def read(fun, *args, softmaxes=()):
    """Positions of the inputs that the derivative reads, and other primitives."""
    island = program(fun, *args).jaxpr
    found = islands.softmaxes_of(island) if softmaxes == "all" else ()
    atoms = _jaxpr.variables(islands.read_by_derivative(island, found))
    maker = {v: eqn.primitive.name for eqn in island.eqns for v in eqn.outvars}
    return {maker.get(v) or island.invars.index(v) for v in atoms}


def softmax(x, axis=-1):
    e = jnp.exp(x - lax.stop_gradient(jnp.max(x, axis, keepdims=True)))
    return e / jnp.sum(e, axis, keepdims=True)


def test_softmaxes_are_found_and_read_as_results():
    island = program(lambda x: softmax(x, 0) + 1, X).jaxpr
    ((result, found),) = islands.softmaxes_of(island).items()
    maker = {v: e.primitive.name for e in island.eqns for v in e.outvars}
    assert (maker[result], maker[found.exponents]) == ("div", "sub")
    assert found.axes == (0,)
    assert "exp" in read(softmax, X)
    assert "exp" not in read(softmax, X, softmaxes="all")
    scores = lambda x, y: softmax(x * y)  # noqa: E731
    assert read(scores, X, X, softmaxes="all") >= {0, 1}
    others = (
        lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x + 1), -1, keepdims=True),
        lambda x: jnp.exp(x) / jnp.max(jnp.exp(x), -1, keepdims=True),
        lambda x: x / jnp.sum(x, -1, keepdims=True),
        lambda x: 1 / x,
    )
    for fun in others:
        assert not islands.softmaxes_of(program(fun, X).jaxpr)


def test_a_softmax_gives_the_derivative_of_its_exponents():
    def scaled(probabilities):
        return jnp.sum(probabilities * jnp.arange(16.0)[None])

    def derivatives(x):
        # A factor of the probabilities is divided out: rounded ones do not add up to 1.
        result = jax.nn.softmax(x) * 1.01
        own = lambda x: scaled(islands.softmax_from(x, result, (1,))) / 1.01  # noqa: E731
        return jax.grad(own)(x), jax.grad(lambda x: scaled(jax.nn.softmax(x)))(x)

    got, wanted = jax.jit(derivatives)(X)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_small_sums_are_less_than_half_of_their_operand():
    def sums(shape, axis, dtype="float32"):
        x = jax.ShapeDtypeStruct(shape, dtype)
        island = program(lambda x: jnp.sum(x, axis), x).jaxpr
        return len(islands.small_sums(island))

    assert (sums((3, 4), 0), sums((2, 4), 0)) == (1, 0)
    assert (sums((2, 16384), 1), sums((2, 16385), 1)) == (0, 1)
    assert sums((4, 8, 8), (1, 2)) == 1
    assert sums((8, 4), 0, "int32") == 0
