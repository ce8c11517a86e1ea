"""Loops, calls and branches run as before with bodies that are put in their place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_programs import W, X
from helpers import ONE_AXIS
from jax import lax
from jax.sharding import PartitionSpec as P

from jmp_scale import _jaxpr
from jmp_scale._higher_order import RUNS

ROWS = jnp.stack([X, 2 * X, 3 * X])


def scan(reverse):
    def step(c, x):
        return jnp.tanh(c @ W + x), jnp.sum(c)

    return lambda w, x: lax.scan(step, x, ROWS, reverse=reverse, unroll=2)


def steps(w, x):
    def is_short(state):
        return state[0] < 3 * jnp.size(w, 0)

    return lax.while_loop(is_short, lambda s: (s[0] + 9, jnp.tanh(s[1] @ w)), (0, x))


@jax.custom_jvp
def with_rule(w, x):
    return jnp.sin(x @ w)


@with_rule.defjvp
def _(primals, tangents):
    return with_rule(*primals), 3 * tangents[1] @ primals[0] + tangents[0][:8]


sharded = jax.shard_map(
    lambda w, x: lax.pmean(x @ w, "i"),
    mesh=ONE_AXIS,
    in_specs=(P(), P("i")),
    out_specs=P(),
)

PROGRAMS = {
    "scan": (scan(False), "scan", ["loop"]),
    "scan in reverse": (scan(True), "scan", ["loop"]),
    "while": (steps, "while", ["loop", "loop"]),
    "cond": (
        lambda w, x: lax.cond(x[0, 0] > 0, jnp.dot, lambda x, w: x, x, w),
        "cond",
        ["", ""],
    ),
    "switch": (
        lambda w, x: lax.switch(2, [lambda x: x, jnp.sin, lambda x: x @ w], x),
        "cond",
        ["", "", ""],
    ),
    "checkpoint": (jax.checkpoint(lambda w, x: jnp.sin(x @ w)), "remat2", [""]),
    "checkpoint with a policy": (
        jax.checkpoint(
            lambda w, x: jnp.sin(x @ w), policy=jax.checkpoint_policies.dots_saveable
        ),
        "remat2",
        ["rule"],
    ),
    "a rule": (with_rule, "custom_jvp_call", ["", "rule"]),
    "shard_map": (sharded, "shard_map", [""]),
}


def replaced(fun, primitive, *args, parts):
    """`fun`, in which equations of a primitive are run by `RUNS`."""
    jaxpr = jax.make_jaxpr(fun)(*args)

    def body(nested, *, places, part_of):
        inner, consts = _jaxpr.open_jaxpr(nested)
        assert len(inner.invars) == len(places)
        parts.append((part_of, tuple(places)))
        return functools.partial(evaluate, inner, consts)

    def evaluate(jaxpr, consts, *values):
        return _jaxpr.evaluate_all(jaxpr, values, consts)

    def run(*args):
        inner, consts = _jaxpr.open_jaxpr(jaxpr)
        values = dict(
            zip([*inner.constvars, *inner.invars], [*consts, *args], strict=True)
        )
        for eqn in inner.eqns:
            operands = [_jaxpr.value_of(v, values) for v in eqn.invars]
            if eqn.primitive.name == primitive:
                results = RUNS[primitive](eqn, operands, body)
            else:
                results = _jaxpr.evaluate(eqn, operands)
            if results is None:
                return None
            values.update(zip(eqn.outvars, results, strict=True))
        return _jaxpr.results_of(inner, values)

    return run


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_derivatives_are_those_of_the_program(name):
    fun, primitive, wanted_parts = PROGRAMS[name]
    parts = []
    run = replaced(fun, primitive, W, X, parts=parts)

    def with_tangents(fun):
        tangents = jnp.ones_like(W), jnp.cos(X)
        return jax.tree.leaves(jax.jvp(fun, (W, X), tangents))

    got = jax.jit(lambda: with_tangents(run))()
    wanted = jax.jit(lambda: with_tangents(fun))()
    for a, b in zip(got, wanted, strict=True):
        if a.dtype == jnp.float32:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert {part for part, _ in parts} == {*wanted_parts}
    run(W, X)
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(run)(W, X).eqns]
    assert primitive in names


def loop_over_rows(w, x):
    return lax.scan(lambda c, row: (c @ w + row, ()), x, ROWS)[0]


def loop_with_a_condition_on(w, x):
    is_large = jnp.sum(w) > 3
    return lax.while_loop(
        lambda s: (s[0] < 3) & is_large, lambda s: (s[0] + 1, s[1] @ w), (0, x)
    )


@pytest.mark.parametrize(
    ("fun", "primitive", "wanted"),
    [
        (loop_over_rows, "scan", [(0, None, 2)]),
        (loop_with_a_condition_on, "while", [(1, None, None), (0, None, None)]),
        (PROGRAMS["cond"][0], "cond", [(1, 2), (1, 2)]),
        (PROGRAMS["checkpoint"][0], "remat2", [(0, 1)]),
    ],
)
def test_places_name_the_operands_that_are_the_same_in_every_run(
    fun, primitive, wanted
):
    parts = []
    replaced(fun, primitive, W, X, parts=parts)(W, X)
    assert [places for _, places in parts] == wanted


def test_a_loop_of_many_conditions_and_a_branch_by_platform_cannot_be_put_back():
    def until(w, x):
        def one(x):
            return lax.while_loop(lambda c: c[0] < 2, lambda c: c + c @ w + 1, x)

        return jax.vmap(one)(x)

    def by_platform(w, x):
        return lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)

    assert replaced(until, "while", W, X, parts=[])(W, X) is None
    assert replaced(by_platform, "cond", W, X, parts=[])(W, X) is None


def test_an_unreadable_rule_cannot_be_put_back():
    (eqn,) = jax.make_jaxpr(with_rule)(W, X).eqns
    broken = eqn.replace(params={**eqn.params, "jvp_jaxpr_fun": None})
    assert RUNS["custom_jvp_call"](broken, [W, X], None) is None


def test_an_unreadable_scan_cannot_be_put_back():
    (eqn,) = jax.make_jaxpr(lambda x: lax.scan(lambda c, _: (c, c), x, None, 2))(X).eqns
    two_bodies = eqn.replace(params={**eqn.params, "another": eqn.params["jaxpr"]})
    assert RUNS["scan"](two_bodies, [X], None) is None


def test_a_policy_of_checkpoint_sees_the_product_within_a_function_with_a_rule():
    @jax.custom_jvp
    def product(x, w):
        return x @ w

    product.defjvp(lambda xs, ts: (product(*xs), ts[0] @ xs[1] + xs[0] @ ts[1]))
    asked = []

    def policy(primitive, *_, **params):
        asked.append((primitive.name, "dimension_numbers" in params))
        return False

    fun = jax.checkpoint(lambda x, w: jnp.sin(product(x, w)), policy=policy)
    run = replaced(fun, "remat2", X, W, parts=[])
    asked.clear()
    jax.make_jaxpr(lambda x, w: jax.vjp(run, x, w)[0])(X, W)
    assert ("dot_general", True) in asked
    assert ("custom_jvp_call", False) not in asked
