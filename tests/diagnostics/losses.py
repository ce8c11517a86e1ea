"""Losses whose float16 backward pass is known exactly."""

import jax.numpy as jnp


def forgetful(w, x):
    """A loss whose float16 backward pass makes 2^-30 per entry of x = 1 at S = 1: zero below S = 2^6."""
    half = w.astype(jnp.float16) * x.astype(jnp.float16)
    return (half * jnp.float16(2.0**-10)).astype(jnp.float32).sum() * 2.0**-20
