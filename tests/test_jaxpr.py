"""How traced programs are read, rewritten and run."""

import sys

import equinox  # noqa: F401  # makes primitives of its own
import jax
import jax.experimental.checkify
import jax.experimental.pallas
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

from jmp_scale import _jaxpr


def equations(fun, *args):
    return _jaxpr.bare(jax.make_jaxpr(fun)(*args)).eqns


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


# Why a primitive is in no table, so that `autocast` runs it as traced and saves it.
IN_NO_TABLE = {
    "its nested programs are read, not its name": """
        call cond core_map custom_jvp_call custom_lin custom_linear_solve
        custom_vjp_call pallas_call reduce remat2 run_state scan shard_map while
        xla_pmap""",
    "devices talk to each other": """
        all_gather all_to_all axis_index pmax pmin ppermute psum psum_invariant
        ragged_all_to_all reduce_scatter unreduced_psum""",
    "an algorithm that costs more than to save its result": """
        approx_top_k cholesky cumlogsumexp cummax cummin cumprod cumsum eig eigh fft
        hessenberg householder_product lu qr reduce_window reduce_window_max
        reduce_window_min reduce_window_sum schur select_and_gather_add
        select_and_scatter select_and_scatter_add sort svd top_k triangular_solve
        tridiagonal tridiagonal_solve""",
    "random bits, saved because they cost as much as an algorithm": """
        random_bits random_clone random_fold_in random_gamma random_seed random_split
        random_unwrap random_wrap rng_bit_generator rng_uniform threefry2x32""",
    "a series or a loop within, dearer than an elementwise operation": """
        bessel_i0e bessel_i1e igamma igamma_grad_a igammac polygamma polynomial
        regularized_incomplete_beta zeta""",
    "it writes into an operand": """
        addupdate dynamic_update_slice scatter scatter-add scatter-max scatter-min
        scatter-mul scatter-sub swap""",
    "a reference, or an order of effects": """
        after_all create_token dce_sink freeze get new_ref""",
    "integers, complex numbers or an order of floats: not in a network": """
        clz complex eq_to le_to lt_to mulhi reduce_xor""",
    "it has several results, or none of an operand": "empty2 unstack",
    "a product with scales of its own": "scaled_dot",
    "it marks values for a transformation, or asks for the platform": """
        announce_jaxpr maybe_set nonbatchable nondifferentiable_backward nontraceable
        platform_index select_if_vmap stage unvmap_all unvmap_any unvmap_max vprim""",
    "it waits for the host": """
        check debug_callback debug_print ffi_call io_callback pure_callback""",
}


def test_each_primitive_is_in_a_table_or_in_a_group_that_says_why_not():
    tables = "PRODUCTS CALLS REARRANGES LOOKUPS SAME_ENTRIES LINEAR SCALINGS CHEAP"
    listed = frozenset().union(*(getattr(_jaxpr, each) for each in tables.split()))
    explained = [name for names in IN_NO_TABLE.values() for name in names.split()]
    assert _jaxpr.known_primitives() - listed - {*explained} == set()
    assert listed.isdisjoint(explained)
    assert len({*explained}) == len(explained)


def test_a_body_has_the_operands_at_its_places():
    def step(carry, x):
        return carry + x, carry

    def loop(x, xs):
        first, _ = lax.scan(step, x, xs)
        return lax.cond(first > 1, jnp.sin, jnp.cos, jax.jit(jnp.tanh)(first))

    eqns = equations(loop, 1.0, jnp.ones(3))
    found = {e.primitive.name: _jaxpr.bodies(e) for e in eqns if _jaxpr.subjaxprs(e)}
    places = {name: [*map(list, (b.places for b in found[name]))] for name in found}
    assert places == {"scan": [[0, 1]], "jit": [[0]], "cond": [[1], [1]]}
    add = next(e for e in eqns if e.primitive.name == "gt")
    assert _jaxpr.bodies(add) == []


def test_what_cannot_be_read_is_told():
    (scan,) = equations(lambda x: lax.scan(lambda c, _: (c, c), x, None, 2), 1.0)
    two_bodies = scan.replace(params={**scan.params, "more": scan.params["jaxpr"]})
    assert _jaxpr.loop_of(two_bodies) is None
    (rule,) = equations(jax.nn.relu, 1.0)
    assert _jaxpr.jvp_rule(rule.replace(params={})) is None
