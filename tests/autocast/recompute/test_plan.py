"""Plans: where values come from, what runs together, what is saved and recomputed."""

import operator

import jax
import jax.numpy as jnp
import pytest
from autocast_programs import W, X

from jmp_scale import _jaxpr, autocast
from jmp_scale._autocast.casting import Casting
from jmp_scale._autocast.derivatives import CAST
from jmp_scale._autocast.provenance import Origin, Step, read
from jmp_scale._autocast.recompute.plan import Unit, make_plan


def reading_of(fun, *args):
    half, origins = jnp.dtype("bfloat16"), [Origin.PARAMETER] * len(args)
    cast = Casting(forward=half, backward=half)
    return read(jax.make_jaxpr(fun)(*args), origins, cast)


def plan_of(fun, *args, joins=True):
    return make_plan(reading_of(fun, *args), joins=joins)


def units_of(fun, *args):
    return [part for part in plan_of(fun, *args) if isinstance(part, Unit)]


@pytest.mark.parametrize("look_up", [operator.getitem, lambda t, i: jnp.take(t, i, 0)])
@pytest.mark.parametrize("steps", [0, 60])  # an index that is read twice in each
def test_rows_that_are_looked_up_by_an_argument_are_data(steps, look_up):
    def doubled(i):
        for _ in range(steps):
            i = (i + i) % 8
        return i

    def float32_grads(fun, *args):
        (product,) = (e.product for e in reading_of(fun, *args).steps if e.product)
        return product.float32_grads

    tokens, table = jnp.arange(4), W[:8]
    data = float32_grads(lambda t, i: look_up(t, doubled(i)) @ X.T, table, tokens)
    assert data == (False, False)
    fixed = float32_grads(lambda t: look_up(t, doubled(jnp.arange(4))) @ X.T, table)
    assert fixed == (True, False)


@pytest.mark.parametrize("joins", [True, False])
def test_each_product_is_in_one_unit_and_without_islands_alone(joins):
    def f(w, x):
        y = x @ w
        return jnp.tanh(y) @ w, jnp.sin(y) @ w.T, y.T @ y

    plan = plan_of(f, W, X, joins=joins)
    units = [part for part in plan if isinstance(part, Unit)]
    assert sum(len(unit.products) for unit in units) == 4
    assert not any(part.half_product for part in plan if isinstance(part, Step))
    if not joins:
        assert [(len(u.products), u.jaxpr.eqns) for u in units] == [(1, [])] * 4
        others = [part.eqn.primitive.name for part in plan if isinstance(part, Step)]
        assert sorted(others) == ["sin", "tanh"]


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

    adds = lambda eqn: eqn.primitive.name == "add"  # noqa: E731
    (unit,) = (u for u in units_of(f, W, X) if any(map(adds, u.jaxpr.eqns)))
    assert bool(unit.places("is_saved_in_half")) == is_saved


def test_what_a_unit_runs_has_the_name_by_which_reports_know_autocast():
    def f(w, x):
        return jnp.tanh(x @ w) @ w

    program = jax.make_jaxpr(autocast(f, "bfloat16"))(W, X)
    calls = [e for e in _jaxpr.equations(program) if "jvp" in _jaxpr.name_of(e)]
    assert {_jaxpr.name_of_call(call) for call in calls} == {CAST}
