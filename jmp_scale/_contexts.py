"""Contexts in which programs are traced, which those who trace and mark them share.

A context of JAX is a part of the keys of its caches: a jitted function is retraced in
another one.
"""

import jax

# Whether `value_and_grad` differentiates unscaled; None outside of it.
UNSCALED = jax.make_user_context(None)
