"""Plans: which equations run together, what is kept, and what is made again."""

import operator

import jax
import jax.numpy as jnp
import pytest
from autocast_programs import W, X

from jmp_scale import _jaxpr
from jmp_scale._autocast.marks import Names
from jmp_scale._autocast.plan import Origin, make_plan, needed_for


def plan_of(fun, *args):
    jaxpr = jax.make_jaxpr(fun)(*args)
    origins = [Origin.PARAMETER] * len(args)
    return make_plan(jaxpr, origins, "bfloat16", Names(), share_casts=False, join=True)


def primitives(unit):
    return [eqn.primitive.name for eqn in unit.jaxpr.eqns]


def test_a_softmax_is_kept_that_the_next_product_reads():
    def f(w, x):
        return jax.nn.softmax(x @ w) @ w

    (unit,) = (u for u in plan_of(f, W, X).units if u.softmaxes)
    assert unit.kept == unit.softmaxes
    # Not if something else reads it: that would not be what the forward pass read.

    def g(w, x):
        p = jax.nn.softmax(x @ w)
        return jnp.sin(p) @ w + p @ w

    assert not any(unit.softmaxes for unit in plan_of(g, W, X).units)


def test_operands_are_read_before_they_are_moved():
    def f(w, x):
        h = jnp.tanh(x @ w)
        return h.T @ h.T.reshape(8, 16)

    product = plan_of(f, W, X).units[1].products[0][0]
    moves = [eqn.primitive.name for eqn in product.jaxpr.eqns]
    assert moves == ["transpose", "transpose", "reshape", "dot_general"]
    assert product.moves == 1
    lhs, rhs = product.jaxpr.invars
    assert lhs is rhs
    assert product.wide_sides == (False, False)


def test_what_is_known_is_not_computed_again():
    island = jax.make_jaxpr(lambda x, y: jnp.sin(x) * y)(X, X).jaxpr
    x, y = island.invars
    (sine,), (product,) = (eqn.outvars for eqn in island.eqns)
    assert needed_for(island, [product], ()) == {product, sine, x, y}
    assert needed_for(island, [product], {sine}) == {product, y}


def test_small_sums_are_known_to_the_backward_pass():
    def f(w, x):
        h = jnp.tanh(x @ w)
        return (h / jnp.sum(h, 0, keepdims=True)) @ w

    (unit,) = (u for u in plan_of(f, W, X).units if u.known)
    (known,) = unit.known
    assert _jaxpr.shape(unit.jaxpr.outvars[known]) == (16,)


def test_what_a_product_alone_reads_is_kept_once():
    """A sum of these costs nothing to make again, and is not kept too."""

    def f(w, x):
        h = [x @ w, x @ w.T, x @ (2 * w)]
        others = [y @ w for y in h]
        stream = others[0] + h[0] + h[1] + h[2]
        return jnp.cos(stream + jnp.sin(stream) @ w) + others[1] + others[2]

    (unit,) = (u for u in plan_of(f, W, X).units if "sin" in primitives(u))
    assert unit.known == ()

    def g(w, x):
        h = [x @ w, x @ w.T, x @ (2 * w)]
        stream = h[0] @ w + h[0] + h[1] + h[2]
        return jnp.cos(stream + jnp.sin(stream) @ w)

    (unit,) = (u for u in plan_of(g, W, X).units if "sin" in primitives(u))
    assert len(unit.known) == 1


@pytest.mark.parametrize(("columns", "is_kept"), [(12, False), (16, True)])
def test_an_operand_is_made_again_of_less_than_its_copy(columns, is_kept):
    """Of a product's result, two bytes an entry, and of an argument, which is there."""

    def f(w, x):
        h = x @ w[:, :columns] + x[:, :columns]
        return jnp.pad(h, ((0, 0), (0, 16 - columns))) @ w

    (unit,) = (u for u in plan_of(f, W, X).units if "add" in primitives(u))
    assert bool(unit.kept) == is_kept


def test_what_only_a_later_island_reads_runs_there():
    def f(w, x):
        y = jnp.tanh(x @ w)
        early = jnp.sin(y)
        return (y @ w) * early

    (unit,) = (u for u in plan_of(f, W, X).units if "mul" in primitives(u))
    assert "sin" in primitives(unit)


def wide_sides(fun, *args):
    (product,) = [p for unit in plan_of(fun, *args).units for p, _ in unit.products]
    return product.wide_sides


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
    data = wide_sides(lambda t, i: look_up(t, doubled(i)) @ X.T, table, tokens)
    assert data == (False, False)
    fixed = wide_sides(lambda t: look_up(t, doubled(jnp.arange(4))) @ X.T, table)
    assert fixed == (True, False)


def test_matrices_that_are_looked_up_are_weights():
    """Those of experts, each of which one token chooses."""
    stack = jnp.stack([W, W.T])

    def f(stack, i, x):
        return jnp.einsum("bn,bnm->bm", jnp.sin(x @ W), stack[i])[:, None] @ W

    products = [
        p
        for unit in plan_of(f, stack, jnp.arange(2), X[:2]).units
        for p, _ in unit.products
    ]
    assert (False, True) in [p.wide_sides for p in products]
