"""The floating-point operations that the report counts, against those by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_scale._jaxpr import PRODUCTS, equations
from jmp_scale.diagnostics._precision.facts import flops

# Loss, operands, and the operations of the product and of each of its transposes.
PROGRAMS = {
    "dot_general": (lambda w, x: x @ w, (4, 32), (8, 4), 2 * 8 * 4 * 32),
    "ragged_dot_general": (
        lambda w, x: lax.ragged_dot(x, w, jnp.array([3, 5])),
        *((2, 4, 32), (8, 4)),
        2 * 8 * 4 * 32,
    ),
    "conv_general_dilated": (
        lambda w, x: lax.conv(x, w, (1, 1), "VALID"),
        *((5, 3, 1, 1), (2, 3, 6, 6)),
        2 * (2 * 6 * 6) * 3 * 5,
    ),
}


@pytest.mark.parametrize("name", sorted(PRODUCTS))
def test_a_product_has_as_many_flops_as_each_of_its_two_transposes(name):
    product, *shapes, expected = PROGRAMS[name]
    w, x = (jnp.ones(shape) for shape in shapes)
    loss = lambda w, x: jnp.mean(product(w, x) ** 2)  # noqa: E731
    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(w, x)
    counts = [flops(eqn) for eqn in equations(program)]
    assert [count for count in counts if count] == [expected] * 3
