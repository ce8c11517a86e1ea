"""What derivatives of an island read, its softmaxes and its small sums."""

import jax
import jax.numpy as jnp
from autocast_programs import X
from jax import lax

from jmp_scale._autocast.recompute import islands


def softmax(x):
    e = jnp.exp(x - lax.stop_gradient(jnp.max(x, 0, keepdims=True)))
    return e / jnp.sum(e, 0, keepdims=True)


def test_a_derivative_of_a_saved_softmax_reads_what_its_exponents_read():
    island = jax.make_jaxpr(lambda x, y: softmax(x * y))(X, X).jaxpr
    read = islands.read_by_derivative(island, islands.softmaxes_of(island))
    assert all(v in read for v in island.invars)


def test_small_sums_are_less_than_half_of_their_operand():
    def sums(shape, axis, dtype="float32"):
        x = jax.ShapeDtypeStruct(shape, dtype)
        island = jax.make_jaxpr(lambda x: jnp.sum(x, axis))(x).jaxpr
        return len(islands.small_sums(island))

    assert (sums((3, 4), 0), sums((2, 4), 0)) == (1, 0)
    assert (sums((2, 16384), 1), sums((2, 16385), 1)) == (0, 1)
    assert sums((4, 8, 8), (1, 2)) == 1
    assert sums((8, 4), 0, "int32") == 0
