"""How traced programs are read, rewritten and run."""

import sys

import equinox  # noqa: F401  # makes primitives of its own
import jax
import jax.experimental.checkify
import jax.experimental.pallas
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_programs import X
from jax import lax
from jax.extend.core import Primitive

from jmp_scale import _jaxpr, _jaxpr_rewrite


def traced(fun, *args):
    return jax.make_jaxpr(fun)(*args)


def only(jaxpr):
    (eqn,) = _jaxpr.bare(jaxpr).eqns
    return eqn


# Primitives that only some versions of JAX have.
VERSIONED = {"scaled_dot", "unreduced_psum", "closed_call", "tile"}
VERSIONED |= {"log2", "one_minus_square"}
TABLES = "PRODUCTS CALLS SAME_ENTRIES SCALINGS CHEAP _UNLISTED"


@pytest.mark.parametrize("table", TABLES.split())
def test_every_primitive_of_a_table_exists(table):
    values = [value for m in [*sys.modules.values()] for value in vars(m).values()]
    there = {value.name for value in values if isinstance(value, Primitive)}
    table = {*getattr(_jaxpr, table)}
    assert table - there <= VERSIONED
    assert table & there


def test_constants_are_read_up_to_a_size():
    np.testing.assert_array_equal(_jaxpr.constant(jnp.bfloat16(1.5)), 1.5)
    assert _jaxpr.constant(np.ones(65_536, bool)).dtype == np.float64
    assert _jaxpr.constant(np.ones(65_537)) is None
    assert _jaxpr.constant(jax.random.key(0)) is None
    assert _jaxpr.constant(np.complex64(1j)) is None
    assert _jaxpr.has_infinite_entries(np.array([1, -np.inf], "float16"))
    assert not _jaxpr.has_infinite_entries(np.ones(2))
    assert not _jaxpr.has_infinite_entries("text")


def test_a_scan_of_one_step_over_a_vector_of_one_entry_has_a_layout():
    eqn = only(traced(lambda x: lax.scan(lambda c, x: (c, x), (), x), jnp.ones(1)))
    assert _jaxpr.loop_of(eqn)[1:] == (0, 0, 0, 1)


def test_what_cannot_be_read_is_told():
    scan = only(traced(lambda x: lax.scan(lambda c, _: (c, c), x, None, 2), 1.0))
    two_bodies = scan.replace(params={**scan.params, "more": scan.params["jaxpr"]})
    assert _jaxpr.loop_of(two_bodies) is None
    rule = only(traced(jax.nn.relu, 1.0))
    without = rule.replace(params={})
    assert _jaxpr.jvp_rule(without) is None


def test_only_equal_programs_from_one_line_have_one_key():
    def double():
        return traced(lambda x: x * 2.0, X).jaxpr

    here = {_jaxpr_rewrite.structural_key(double()) for _ in range(2)}
    assert len(here) == 1
    assert _jaxpr_rewrite.structural_key(traced(lambda x: x * 2.0, X).jaxpr) not in here


def test_an_equation_is_evaluated_in_its_scopes():
    eqn = only(traced(jax.named_scope("inner")(jnp.sin), X))

    @jax.named_scope("outer")
    def again(x):
        return _jaxpr.evaluate(eqn, [x])

    assert str(only(traced(again, X)).source_info.name_stack) == "outer/inner"


def test_constants_of_a_bare_jaxpr_are_unknown():
    inner = _jaxpr.bare(traced(lambda x: x + jnp.asarray(np.arange(16.0)), X[0]))
    if not hasattr(inner, "consts"):  # as in jax 0.12
        assert _jaxpr.open_jaxpr(inner)[1] == [None] * len(inner.constvars)


def test_devices_of_a_mesh():
    assert _jaxpr.mesh_size(only(traced(jnp.sin, 1.0))) == 1
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), "a")
    spec = jax.sharding.PartitionSpec("a")
    mapped = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    assert _jaxpr.mesh_size(only(traced(mapped, jnp.ones(8)))) == 4
