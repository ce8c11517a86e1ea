"""Plans: which equations run together, what is kept, and what is made again."""

import jax
import jax.numpy as jnp
import pytest
from autocast_programs import W, X, arrays
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jmp_scale import _jaxpr, keep_float32
from jmp_scale._autocast_plan import Origin, make_plan, needed_for
from jmp_scale._marks import Names

BATCH, (WIDE,) = arrays((4, 8, 16))[0], arrays((16, 64))


def plan_of(fun, *args, share_casts=False, join=True, dtype="bfloat16", names=()):
    jaxpr = jax.make_jaxpr(fun)(*args)
    origins = [Origin.PARAMETER] * len(args)
    names = Names(frozenset(names))
    return make_plan(jaxpr, origins, dtype, names, share_casts=share_casts, join=join)


def kinds(plan):
    return [unit.kind for unit in plan.units]


def primitives(unit):
    return [eqn.primitive.name for eqn in unit.jaxpr.eqns]


def block(w, x):
    h = x + jax.nn.gelu(x @ w, approximate=False) @ w
    return jnp.sum((h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True))) @ w)


def test_an_island_is_a_unit_with_the_products_that_read_it():
    first, second, third, last = plan_of(block, W, X).units
    assert (primitives(first), len(first.products)) == ([], 1)
    assert len(second.products) == len(third.products) == 1
    assert "erf" in str(primitives(second))
    assert {"rsqrt", "add"} <= {*primitives(third)}
    assert (primitives(last), last.products) == (["reduce_sum"], ())
    # Of gelu and of the norm the product's operand is made again.
    assert second.kept == third.kept == ()


def test_without_joining_islands_stay_as_traced():
    plan = plan_of(block, W, X, join=False)
    assert [
        unit for unit in plan.units if unit.kind == "half" and unit.jaxpr.eqns
    ] == []
    assert kinds(plan).count("half") == 3


def test_products_that_read_one_operand_run_together():
    def f(w, x):
        h = jnp.tanh(x @ w)
        return h @ w + h @ w.T

    unit = plan_of(f, W, X).units[1]
    assert len(unit.products) == 2
    assert {wires[0] for _, wires in unit.products} == {0}


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


@pytest.mark.parametrize(
    ("fun", "kind"),
    [
        (lambda w, x: x @ w, "half"),
        (lambda w, x: keep_float32(jnp.dot)(x, w), "other"),
        (lambda w, x: x[0] @ x[0], "other"),
        (lambda w, x: jnp.ones((8, 16)) @ jnp.ones((16, 16)), "other"),
        (lambda w, x: jnp.dot(x, w, precision="highest"), "other"),
        (lambda w, x: lax.fori_loop(0, 2, lambda _, c: c @ w, x), "call"),
        (jax.jit(lambda w, x: x @ w), "half"),
        (lambda w, x: x @ w.astype("float16").astype("float32"), "own"),
    ],
)
def test_the_kind_of_a_unit(fun, kind):
    assert kinds(plan_of(fun, W, X))[-1] == kind


def test_a_weight_stored_in_another_half_has_units_of_its_own():
    def f(w, x):
        return x @ w.astype("float32")

    assert kinds(plan_of(f, W.astype("float16"), X)) == ["own"]
    assert kinds(plan_of(f, W.astype("bfloat16"), X)) == ["half"]
    (unit,) = plan_of(f, W.astype("float16"), X).units
    assert unit.products[0][0].dtype == "float16"


def test_names_keep_products_and_calls():
    @jax.jit
    def head(w, x):
        return x @ w

    def f(w, x):
        return jnp.sum(head(w, jnp.tanh(x @ w)))

    assert kinds(plan_of(f, W, X)).count("half") == 3
    kept = plan_of(f, W, X, names=["head"])
    assert "other" in kinds(kept)
    assert sum(len(unit.products) for unit in kept.units) == 1


def test_the_origins_of_values():
    def f(w, x):
        scaled = 2 * w.T
        moved = jnp.sin(x)
        y = moved @ scaled
        return y + 1, scaled, moved

    plan = plan_of(f, W, X)
    data, scaled, moved = plan.jaxpr.outvars
    assert plan.origins[scaled] == Origin.PARAMETER
    assert plan.origins[moved] == Origin.ARGUMENTS
    assert data not in plan.origins
    (unit,) = (u for u in plan.units if u.products)
    ((product, _),) = unit.products
    assert product.wide_sides == (True, True)
    assert product.result in plan.halves


def test_operands_are_read_before_they_are_moved():
    def f(w, x):
        h = jnp.tanh(x @ w)
        return h.T @ h.reshape(2, 4, 16).reshape(8, 16)

    product = plan_of(f, W, X).units[1].products[0][0]
    moves = [eqn.primitive.name for eqn in product.jaxpr.eqns]
    assert moves == ["transpose", "reshape", "reshape", "dot_general"]
    assert product.moves == 1
    lhs, rhs = product.jaxpr.invars
    assert lhs is rhs
    assert product.wide_sides == (False, False)


def test_casts_are_shared_of_what_a_product_reads():
    def f(w, x):
        h = jnp.tanh(x @ w)
        return h @ w + h

    plan = plan_of(f, W, X, share_casts=True)
    (shared,) = plan.shared
    assert shared in plan.halves
    assert shared not in plan.given
    (unit,) = (unit for unit in plan.units if unit.shared)
    assert unit.jaxpr.outvars[unit.shared[0]] is shared
    assert not plan_of(f, W, X).shared


def test_unread_equations_are_left_out_and_effects_stay_in_order():
    def f(w, x):
        jnp.sin(x @ w) @ w
        jax.debug.print("{}", x[0, 0])
        return jnp.cos(x)

    plan = plan_of(f, W, X)
    names = [name for unit in plan.units for name in primitives(unit)]
    assert "cos" in names
    assert "sin" not in names
    assert not any(unit.products for unit in plan.units)
    assert any("debug" in name for name in names)


def test_what_a_value_is_computed_from():
    def f(x, y):
        z = jnp.sin(x)
        return z * y, jnp.cos(y)

    island = jax.make_jaxpr(f)(X, X).jaxpr
    x, y = island.invars
    product, cosine = island.outvars
    (sine,) = island.eqns[0].outvars
    assert needed_for(island, [cosine], ()) == {cosine, y}
    assert needed_for(island, [product], ()) == {product, sine, x, y}
    assert needed_for(island, [product], {sine}) == {product, y}


def test_small_sums_are_known_to_the_backward_pass():
    def f(w, x):
        h = jnp.tanh(x @ w)
        return (h / jnp.sum(h, 0, keepdims=True)) @ w

    (unit,) = (u for u in plan_of(f, W, X).units if u.known)
    (known,) = unit.known
    assert _jaxpr.shape(unit.jaxpr.outvars[known]) == (16,)


def test_what_only_a_later_island_reads_runs_there():
    def f(w, x):
        y = jnp.tanh(x @ w)
        early = jnp.sin(y)
        return (y @ w) * early

    (unit,) = (u for u in plan_of(f, W, X).units if "mul" in primitives(u))
    assert "sin" in primitives(unit)


def test_an_island_is_joined_with_products_of_the_context_in_which_it_ends():
    def f(w, x, inside):
        h = jnp.tanh(x @ w)
        with set_xla_metadata(mark="1"):
            h = jnp.sin(h)
            if inside:
                return h @ w
        return h @ w

    def joined(inside):
        units = plan_of(lambda w, x: f(w, x, inside), W, X).units
        return any("tanh" in primitives(unit) and unit.products for unit in units)

    assert (joined(True), joined(False)) == (True, False)


def wide_sides(fun, *args):
    (product,) = [p for unit in plan_of(fun, *args).units for p, _ in unit.products]
    return product.wide_sides


@pytest.mark.parametrize("steps", [0, 60])  # an index that is read twice in each
def test_rows_that_are_looked_up_by_an_argument_are_data(steps):
    def doubled(i):
        for _ in range(steps):
            i = (i + i) % 8
        return i

    tokens = jnp.arange(4)
    table = W[:8]
    assert wide_sides(lambda t, i: t[doubled(i)] @ X.T, table, tokens) == (False, False)
    fixed = wide_sides(lambda t: t[doubled(jnp.arange(4))] @ X.T, table)
    assert fixed == (True, False)
