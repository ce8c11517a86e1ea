"""Contexts of JAX: a jitted function is retraced in another one."""

import jax

# Whether `value_and_grad` differentiates unscaled; None outside of it.
UNSCALED = jax.make_user_context(None)
