"""How traced programs are read, rewritten and run."""

import sys

import equinox  # noqa: F401  # makes primitives of its own
import jax
import jax.experimental.checkify
import jax.experimental.pallas
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

from jmp_scale import _jaxpr


def traced(fun, *args):
    return jax.make_jaxpr(fun)(*args)


def only(jaxpr):
    (eqn,) = _jaxpr.bare(jaxpr).eqns
    return eqn


# Primitives that only some versions of JAX have.
VERSIONED = {"scaled_dot", "unreduced_psum", "closed_call", "tile"}
VERSIONED |= {"log2", "one_minus_square", "stack"}
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


def test_what_cannot_be_read_is_told():
    scan = only(traced(lambda x: lax.scan(lambda c, _: (c, c), x, None, 2), 1.0))
    two_bodies = scan.replace(params={**scan.params, "more": scan.params["jaxpr"]})
    assert _jaxpr.loop_of(two_bodies) is None
    rule = only(traced(jax.nn.relu, 1.0))
    without = rule.replace(params={})
    assert _jaxpr.jvp_rule(without) is None
