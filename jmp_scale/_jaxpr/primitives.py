"""Sets of JAX's primitives by their properties, for autocast, report and skip.

Names are those in a printed jaxpr.
"""

import functools

import jax
import jax.extend.core.primitives
from jax.extend.core import Primitive


def words(text: str) -> frozenset[str]:
    """Splits a text into a set of names."""
    return frozenset(text.split())


# Matrix products and convolutions.
PRODUCTS = words("conv_general_dilated dot_general ragged_dot_general")
# Products with scales: `jax.lax.scaled_dot` and `jax.nn.scaled_matmul`.
SCALED_PRODUCTS = words("scaled_dot scaled_matmul_wrapper")
# Calls of a function without a custom derivative rule.
CALLS = words("closed_call jit")

# The result has each element of the only operand once, in another order or shape.
REARRANGES = words("copy reshape rev sharding_constraint squeeze transpose")
# Elements of the result are elements of the first operand; the others say where.
LOOKUPS = words("dynamic_slice gather")
# Elements of the result are elements of the first operand, possibly cast.
SAME_ENTRIES = REARRANGES | words("""
    broadcast_in_dim convert_element_type device_put dynamic_slice gather name
    optimization_barrier pbroadcast pvary reduce_precision slice stop_gradient tile
""")
# The result is linear in floating-point operands, so that no derivative reads them.
LINEAR = REARRANGES | words("""
    add add_any broadcast_in_dim concatenate conj convert_element_type dynamic_slice
    gather imag name neg optimization_barrier pad pbroadcast pvary real reduce_sum
    reshard select_n slice split stop_gradient sub
""")
# The result counts as a parameter if an operand is a parameter.
SCALINGS = LINEAR | words("div mul")
# The result is cheaper to recompute than to save. `gather` is excluded: on a sharded
# table, recomputing it costs communication.
CHEAP = LINEAR - {"gather"} | words("""
    abs acos acosh and argmax argmin asin asinh atan atan2 atanh bitcast_convert_type
    cbrt ceil clamp cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
    integer_pow iota is_finite le lgamma log log1p logistic lt max min mul ne nextafter
    not or population_count pow reduce_and reduce_max reduce_min reduce_or
    reduce_precision reduce_prod rem round rsqrt shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square tan tanh xor
""")
# Parts of the names of primitives that wait for a condition, or pass their operands to
# the host: io_callback, pure_callback, debug_callback, pallas_call.
WAITS_OR_SHOWS = words("while cond check callback ffi_call custom_call pallas")

# Primitives of JAX that are not in any public module, and Equinox's primitives, which
# mark values and compute nothing.
_UNLISTED = words("""
    addupdate freeze new_ref pbroadcast platform_index psum_invariant pvary
    ragged_dot_general random_clone random_unwrap random_wrap reduce_scatter reshard
    scaled_dot shard_map unreduced_psum announce_jaxpr maybe_set nonbatchable
    nondifferentiable_backward nontraceable select_if_vmap unvmap_all unvmap_any
    unvmap_max vprim
""")


@functools.cache
def known_primitives() -> frozenset[str]:
    """Returns names of JAX's primitives; new and foreign primitives are opaque."""
    # JAX has no list of its primitives, so they are collected from public modules.
    return _UNLISTED.union(
        primitive.name
        for module in (jax.lax, jax.extend.core.primitives)
        for primitive in vars(module).values()
        if isinstance(primitive, Primitive)
    )
