"""Programs whose primitives become others under flags of JAX that may become defaults.

`.ci/run newest` sets the flags. Without them these are the programs of today.
"""

import jax
import jax.numpy as jnp
import pytest
from autocast_checks import BF16, assert_norm_close, flat
from autocast_programs import W, X, arrays, mean_square, products
from helpers import slow
from jax import export, lax

from jmp_scale import autocast

(STACK,) = arrays((3, 16, 16))


def step(h, w):
    return jnp.tanh(h @ w), h.sum()


def repeated(w, x):
    return lax.scan(lambda h, _: step(h, w), x, None, length=3)


SCANS = {
    "a weight": repeated,
    "a stack": lambda w, x: lax.scan(step, x, STACK * w[None]),
    "a carry of zeros": lambda w, x: lax.scan(
        lambda h, b: (jnp.tanh(h @ w + b), h.sum()), 0 * x, jnp.arange(3.0)
    ),
    "two carries": lambda w, x: lax.scan(
        lambda c, _: ((step(c[0], w)[0], c[1] + 1), c[1]), (x, x[0]), None, length=3
    ),
    "nested": lambda w, x: lax.scan(
        lambda h, _: (repeated(w, h)[0], h.sum()), x, None, length=2
    ),
    "a checkpoint": lambda w, x: lax.scan(
        jax.checkpoint(lambda h, _: step(h, w)), x, None, length=3
    ),
}


@pytest.mark.parametrize("stored", ["float32", slow("bfloat16")])
@pytest.mark.parametrize("name", SCANS)
def test_products_in_scans_are_half_precision(name, stored):
    fun, w = SCANS[name], (W / 2).astype(stored)
    half = autocast(fun, "bfloat16")
    assert {*products(half, w, X)} == {BF16}  # filters make a warning an error
    got, wanted = (
        jax.jit(lambda v, f=f: jax.jvp(lambda w: f(w, X), (v,), (v,)))(v)
        for f, v in ((half, w), (fun, w.astype("float32")))
    )
    assert_norm_close(flat(got), flat(wanted), 0.05)


def test_a_scan_of_symbolic_length_is_that_of_each_length():
    def fun(w, x):
        return lax.scan(lambda h, row: (jnp.tanh(h @ w) + row, h), x[0], x)[1]

    half = jax.jit(autocast(fun, "bfloat16"))
    rows = jax.ShapeDtypeStruct((*export.symbolic_shape("n"), X.shape[1]), X.dtype)
    assert_norm_close(export.export(half)(W, rows).call(W, X), fun(W, X), 0.02)


def assert_half_products(fun):
    half = autocast(fun, "bfloat16")
    assert {*products(half, W, X)} == {BF16}
    got, wanted = (
        jax.jit(jax.grad(lambda w, f=f: mean_square(f(w, X))))(W) for f in (half, fun)
    )
    assert_norm_close(got, wanted, 0.02)


def test_products_in_the_checkpoints_of_a_flag_are_half_precision():
    """`JAX_REMAT3`, whose equation has no `prevent_cse` in jax 0.10."""
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip("jax 0.8 has no such flag")
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    try:
        assert_half_products(jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w))
        if not getattr(jax.config, "jax_scan3", False):  # it has no reverse mode yet
            assert_half_products(lambda w, x: SCANS["a checkpoint"](w, x)[0])
    finally:
        jax.config.update("jax_remat3", before)


def test_a_traced_function_may_be_called():
    """jax 0.12 calls its jaxpr by a primitive of its own."""
    traced = jax.jit(lambda w: jnp.tanh(X @ w)).trace(W)
    if not callable(traced):
        pytest.skip("jax 0.8 calls none")
    half = autocast(lambda w: traced(w).sum(), "bfloat16")
    assert products(half, W) == [BF16]
