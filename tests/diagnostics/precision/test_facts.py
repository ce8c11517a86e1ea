"""The floating-point operations that the report counts, against those by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_scale._jaxpr import PRODUCTS, equations
from jmp_scale.diagnostics._precision.facts import flops

GROUPS = jnp.array([3, 5])


def ragged(w, x):
    return jnp.mean(lax.ragged_dot(x, w, GROUPS) ** 2)


def matrix(w, x):
    return jnp.mean((x @ w) ** 2)


def convolution(w, x):
    return jnp.mean(lax.conv(x, w, (1, 1), "VALID") ** 2)


# Operands, and the multiplications and additions of the product and of each transpose.
PROGRAMS = {
    "dot_general": (matrix, (4, 32), (8, 4), 2 * 8 * 4 * 32),
    "ragged_dot_general": (ragged, (2, 4, 32), (8, 4), 2 * 8 * 4 * 32),
    "conv_general_dilated": (
        convolution,
        (5, 3, 1, 1),
        (2, 3, 6, 6),
        2 * (2 * 6 * 6) * 3 * 5,
    ),
}


@pytest.mark.parametrize("name", sorted(PRODUCTS))
def test_a_product_has_as_many_flops_as_each_of_its_two_transposes(name):
    fun, *shapes, expected = PROGRAMS[name]
    w, x = (jnp.ones(shape) for shape in shapes)
    program = jax.make_jaxpr(jax.grad(fun, (0, 1)))(w, x)
    counts = [flops(eqn) for eqn in equations(program)]
    assert [count for count in counts if count] == [expected] * 3
