"""Linear functions whose transposes recompute all but the residuals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_checks import transposes_checkpoints
from helpers import ONE_AXIS, slow
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec as P

from jmp_scale import _jaxpr
from jmp_scale._autocast.derivatives import linear, with_value

X, T = jnp.linspace(0.1, 2, 8), jnp.linspace(1, -1, 8)


@jax.custom_jvp
def f(x):
    return jnp.sin(x) ** 2


@f.defjvp
def _(primals, tangents):
    (x,), unread = primals, 3 * primals[0]

    def moved(residuals, t):
        return {"y": 2 * jnp.sin(residuals[0]) * jnp.cos(residuals[0]) * t}

    return f(x), linear(moved, (x, unread), tangents[0])["y"]


def plain(x):
    return jnp.sin(x) ** 2


def sharded(f):
    spec = P("i")
    return jax.shard_map(f, mesh=ONE_AXIS, in_specs=(spec, spec), out_specs=spec)


AROUND = {
    "jvp": lambda f: lambda x, t: jax.jvp(f, (x,), (t,)),
    "vjp": lambda f: lambda x, t: jax.vjp(f, x)[1](t),
    "hvp": lambda f: lambda x, t: jax.jvp(jax.grad(lambda x: f(x).sum()), (x,), (t,)),
    "grad of grad": lambda f: jax.vmap(lambda x, t: t * jax.grad(jax.grad(f))(x)),
    "vmap": lambda f: jax.vmap(lambda x, t: jax.vjp(f, x)[1](t)),
    "hessian": lambda f: lambda x, t: jax.hessian(lambda x: f(x * t).sum())(x),
    "checkpoint": lambda f: lambda x, t: jax.vjp(jax.checkpoint(f), x)[1](t),
    "shard_map": lambda f: sharded(lambda x, t: jax.vjp(f, x)[1](t)),
    "linear_transpose": lambda f: (
        lambda x, t: jax.linear_transpose(lambda t: jax.jvp(f, (x,), (t,))[1], t)(t)
    ),
}


@pytest.mark.parametrize("compile_", [jax.jit, slow(lambda f: f)])
@pytest.mark.parametrize("around", AROUND)
def test_its_derivatives_are_those_of_the_function(around, compile_):
    got, wanted = (compile_(AROUND[around](g))(X, T) for g in (f, plain))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@transposes_checkpoints
def test_what_it_reads_is_saved_and_nothing_that_it_computes():
    saved = jax.tree.leaves(jax.vjp(f, X)[1])
    assert [x.shape for x in saved] == [X.shape]
    np.testing.assert_array_equal(saved[0], X)


def test_results_that_nobody_reads_are_not_computed():
    def first(t):
        def both(x, t):
            return jnp.sin(x) * t, jnp.cos(x) * t

        return linear(both, X, t)[0].sum()

    traced = _jaxpr.bare(jax.make_jaxpr(first)(T))
    needed, _ = partial_eval.dce_jaxpr(traced, [True])
    names = [eqn.primitive.name for eqn in _jaxpr.equations(needed)]
    assert "sin" in names
    assert "cos" not in names


def test_a_value_is_returned_and_the_other_array_is_differentiated():
    def f(x, value):
        return jnp.sum(with_value(jnp.sin(x), value) ** 2)

    value = jnp.full_like(X, 3.0)
    grad, of_value = jax.jit(jax.grad(f, (0, 1)))(X, value)
    np.testing.assert_allclose(grad, 2 * value * jnp.cos(X), rtol=1e-6)
    assert not of_value.any()
