"""What an equation is, where values come from, and how products read them."""

import functools
import operator

import jax
import jax.numpy as jnp
import pytest
from autocast_programs import W, X

from jmp_scale._autocast.casting import Casting
from jmp_scale._autocast.provenance import Origin, read

ROWS_OF = functools.partial(jnp.take, axis=0)


def float32_grads(fun, *args):
    """Of the only product: for each operand, whether its gradient is float32."""
    cast = Casting(forward=jnp.dtype("bfloat16"), backward=jnp.dtype("bfloat16"))
    origins = [Origin.PARAMETER] * len(args)
    reading = read(jax.make_jaxpr(fun)(*args), origins, cast)
    (product,) = (step.product for step in reading.steps if step.product)
    return product.float32_grads


@pytest.mark.parametrize("look_up", [operator.getitem, ROWS_OF])
@pytest.mark.parametrize("steps", [0, 60])  # an index that is read twice in each
def test_rows_that_are_looked_up_by_an_argument_are_data(steps, look_up):
    def doubled(i):
        for _ in range(steps):
            i = (i + i) % 8
        return i

    tokens = jnp.arange(4)
    table = W[:8]
    data = float32_grads(lambda t, i: look_up(t, doubled(i)) @ X.T, table, tokens)
    assert data == (False, False)
    fixed = float32_grads(lambda t: look_up(t, doubled(jnp.arange(4))) @ X.T, table)
    assert fixed == (True, False)
