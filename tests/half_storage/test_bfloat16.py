"""bfloat16 values and remainders that no step of an optimizer leaves together."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_scale._half_storage import bfloat16


def test_a_value_far_from_a_bfloat16_leaves_the_remainder_that_is_nearest():
    # As after an update that `optax.apply_updates` rounded more coarsely.
    made = jnp.full(2, 1.0, jnp.bfloat16)
    remainder = bfloat16.remainder(jnp.float32([1.25, 0.75]), made)
    assert remainder.tolist() == [2**15 - 1, -(2**15)]


def test_a_zero_with_an_old_remainder_is_not_nan():
    zeros = jnp.float32([0.0, -0.0])
    joined = bfloat16.joined(zeros, jnp.full(2, -1, jnp.int16))
    np.testing.assert_array_equal(joined, zeros)
    assert np.signbit(joined).tolist() == [False, True]
    assert lax.bitcast_convert_type(joined, jnp.int32).tolist() == [0, -(2**31)]
