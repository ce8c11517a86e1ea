"""What an equation is, where values come from, and how products read them."""

import operator

import jax
import jax.numpy as jnp
import pytest
from autocast_programs import W, X

from jmp_scale._autocast.provenance import Origin, Rules, read


def reading_of(fun, *args):
    return read(
        jax.make_jaxpr(fun)(*args),
        [Origin.PARAMETER] * len(args),
        Rules(jnp.dtype("bfloat16"), jnp.dtype("bfloat16")),
    )


def products_of(fun, *args):
    return [step.product for step in reading_of(fun, *args).steps if step.product]


def provenance_of(fun, *args):
    """That of the only result."""
    reading = reading_of(fun, *args)
    return reading.provenance[reading.jaxpr.outvars[0]]


PROVENANCE = {
    "a scaled argument": (lambda w, x: (w * 2).T, (Origin.PARAMETER, False, False)),
    "a function of one": (lambda w, x: jnp.sin(w), (Origin.ARGUMENTS, False, False)),
    "a product": (lambda w, x: x @ w, (Origin.DATA, False, False)),
    "what a product gave": (lambda w, x: jnp.sin(x @ w), (Origin.DATA, False, False)),
    "numbers": (lambda w, x: jnp.sin(jnp.arange(3.0)), (Origin.ARGUMENTS, True, True)),
    "integers": (
        lambda w, x: jnp.argmax(w).astype("float32"),
        (Origin.ARGUMENTS, True, False),
    ),
}


@pytest.mark.parametrize("name", ["a scaled argument", "a function of one"])
def test_gradients_of_what_arguments_alone_make_are_float32(name):
    assert provenance_of(PROVENANCE[name][0], W, X).has_float32_grad


@pytest.mark.parametrize("name", PROVENANCE)
def test_each_value_comes_from_somewhere(name):
    fun, wanted = PROVENANCE[name]
    assert provenance_of(fun, W, X)[:3] == wanted


def float32_grads(fun, *args):
    (product,) = products_of(fun, *args)
    return product.float32_grads


def take(table, ids):
    return jnp.take(table, ids, axis=0)


@pytest.mark.parametrize("look_up", [operator.getitem, take])
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
