"""Tables of JAX's primitives, by what they do: autocast, report and skip read them.

A primitive is named as in a printed jaxpr.
"""

import functools

import jax
import jax.extend.core.primitives
from jax.extend.core import Primitive


def words(text: str) -> frozenset[str]:
    """The words of a text: a set of names that reads well in the source."""
    return frozenset(text.split())


# Matrix products and convolutions.
PRODUCTS = words("conv_general_dilated dot_general ragged_dot_general")
# Products with scales: `jax.lax.scaled_dot` and `jax.nn.scaled_matmul`.
SCALED_PRODUCTS = words("scaled_dot scaled_matmul_wrapper")
# Calls of a function without a rule of its own.
CALLS = words("closed_call jit")

# The result has the entries of the only array, each once, in another order or shape.
REARRANGES = words("copy reshape rev sharding_constraint squeeze transpose")
# The result is entries of the first operand, at the places that the others say.
LOOKUPS = words("dynamic_slice gather")
# Entries of the result are entries of the first operand, perhaps cast.
SAME_ENTRIES = REARRANGES | words("""
    broadcast_in_dim convert_element_type device_put dynamic_slice gather name
    optimization_barrier pbroadcast pvary reduce_precision slice stop_gradient tile
""")
# The derivative reads no floating-point operand: the result is linear in these.
LINEAR = REARRANGES | words("""
    add add_any broadcast_in_dim concatenate conj convert_element_type dynamic_slice
    gather imag name neg optimization_barrier pad pbroadcast pvary real reduce_sum
    reshard select_n slice split stop_gradient sub
""")
# The result is another parameter, if an operand is one.
SCALINGS = LINEAR | words("div mul")
# The result costs less to compute again than to keep. That of a gather may not: over
# devices, as of the rows of a table, it communicates.
CHEAP = LINEAR - {"gather"} | words("""
    abs acos acosh and argmax argmin asin asinh atan atan2 atanh bitcast_convert_type
    cbrt ceil clamp cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
    integer_pow iota is_finite le lgamma log log1p logistic lt max min mul ne nextafter
    not or population_count pow reduce_and reduce_max reduce_min reduce_or
    reduce_precision reduce_prod rem round rsqrt shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square tan tanh xor
""")
# Parts of the names of primitives that wait for a condition, or show their operands to
# the host: io_callback, pure_callback, debug_callback, pallas_call.
WAITS_OR_SHOWS = words("while cond check callback ffi_call custom_call pallas")

# Primitives of JAX that no public module lists, and Equinox's own, which mark values
# and compute nothing that could be read wrongly.
_UNLISTED = words("""
    addupdate freeze new_ref pbroadcast platform_index psum_invariant pvary
    ragged_dot_general random_clone random_unwrap random_wrap reduce_scatter reshard
    scaled_dot shard_map unreduced_psum announce_jaxpr maybe_set nonbatchable
    nondifferentiable_backward nontraceable select_if_vmap unvmap_all unvmap_any
    unvmap_max vprim
""")


@functools.cache
def known_primitives() -> frozenset[str]:
    """Names of JAX's own primitives; new and foreign ones are "not looked into"."""
    # JAX has no list of its primitives.
    return _UNLISTED.union(
        primitive.name
        for module in (jax.lax, jax.extend.core.primitives)
        for primitive in vars(module).values()
        if isinstance(primitive, Primitive)
    )
