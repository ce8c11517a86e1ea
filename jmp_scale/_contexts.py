"""Contexts of JAX, part of the key by which `jit` finds an earlier trace."""

import jax

# Whether `value_and_grad` differentiates unscaled; None outside of it.
UNSCALED = jax.make_user_context(None)
