"""Losses whose float16 backward pass is known exactly."""

import jax.numpy as jnp


def forgetful(w, x):
    """Its gradient, 2^-30 for x = 1, is zero in float16 below S = 2^6."""
    half = w.astype(jnp.float16) * x.astype(jnp.float16)
    return (half * jnp.float16(2.0**-10)).astype(jnp.float32).sum() * 2.0**-20
