"""What tests of `autocast` compare, and how close it must be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_programs import layer, mean_square
from jax.interpreters import partial_eval

from jmp_scale import _jaxpr, autocast

F16, BF16, F32 = ((name, name) for name in ("float16", "bfloat16", "float32"))
transposes_checkpoints = pytest.mark.skipif(
    getattr(jax.config, "jax_remat3", False),
    reason="JAX_REMAT3 transposes no checkpoint: derivatives save what they compute",
)


# Without this XLA:CPU leaves roundings out, in one of two programs that round alike.
jit_with_roundings = functools.partial(
    jax.jit, compiler_options={"xla_allow_excess_precision": False}
)


def two_layers(w, x):
    return mean_square(layer(w, layer(w, x)))


def assert_close(got, wanted, tolerance):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        if x.size:
            x, y = np.asarray(x, float), np.asarray(y, float)
            assert np.abs(x - y).max() <= tolerance * max(np.abs(y).max(), 1e-3)


def assert_close_gradients(loss, *args, **options):
    """Also its value, cast to float16 and as it is."""
    half = autocast(loss, "float16", **options)
    got, wanted = (jax.jit(jax.value_and_grad(f))(*args) for f in (half, loss))
    assert_close(got, wanted, 0.02)


def assert_norm_close(got, wanted, tolerance):
    assert jnp.linalg.norm(got - wanted) < tolerance * jnp.linalg.norm(wanted)


def n32(x):
    return x.astype(jnp.float32)


def flat(tree):
    """All entries of a tree's arrays."""
    leaves = jax.tree.leaves(tree)
    return np.concatenate([np.ravel(np.asarray(x, float)) for x in leaves])


def what_is_read(program):
    """A program without what nothing reads."""
    jaxpr = _jaxpr.bare(program)
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]
