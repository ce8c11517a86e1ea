"""Plans: which equations run together, what is saved, and what is recomputed."""

import jax
import jax.numpy as jnp
import pytest
from autocast_programs import W, X

from jmp_scale._autocast.provenance import Origin, Rules, read
from jmp_scale._autocast.recompute.plan import Unit, make_plan


def plan_of(fun, *args):
    origins = [Origin.PARAMETER] * len(args)
    return make_plan(
        read(jax.make_jaxpr(fun)(*args), origins, Rules(*[jnp.dtype("bfloat16")] * 2))
    )


def units_of(fun, *args):
    return [part for part in plan_of(fun, *args) if isinstance(part, Unit)]


def primitives(unit):
    return [eqn.primitive.name for eqn in unit.jaxpr.eqns]


def test_a_softmax_is_saved_that_the_next_product_reads():
    def f(w, x):
        return jax.nn.softmax(x @ w) @ w

    (unit,) = (u for u in units_of(f, W, X) if u.places("is_softmax"))
    assert unit.places("is_saved_in_half") == unit.places("is_softmax")
    # Not if something else reads it: that would not be what the forward pass read.

    def g(w, x):
        p = jax.nn.softmax(x @ w)
        return jnp.sin(p) @ w + p @ w

    assert not any(unit.places("is_softmax") for unit in units_of(g, W, X))


@pytest.mark.parametrize(("columns", "is_saved"), [(12, False), (16, True)])
def test_an_operand_is_recomputed_of_less_than_its_copy(columns, is_saved):
    """Of a product's result, two bytes an entry, and of an argument, which is there."""

    def f(w, x):
        h = x @ w[:, :columns] + x[:, :columns]
        return jnp.pad(h, ((0, 0), (0, 16 - columns))) @ w

    (unit,) = (u for u in units_of(f, W, X) if "add" in primitives(u))
    assert bool(unit.places("is_saved_in_half")) == is_saved
