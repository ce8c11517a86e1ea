import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_checks import assert_norm_close
from autocast_programs import PROGRAMS
from helpers import ONE_AXIS, by_name, slow
from jax import lax
from jax.sharding import PartitionSpec as P

import jmp_scale
from jmp_scale import autocast
from jmp_scale._autocast import dot_general
from jmp_scale._autocast.dot_general import in_halves, wide_dot_general

MATRICES = (((1,), (0,)), ((), ()))
PRODUCTS = {
    "matrices": ((4, 3), (3, 2), MATRICES),
    "a dense layer": ((2, 5, 3), (3, 4), (((2,), (0,)), ((), ()))),
    "a batch": ((2, 5, 3), (2, 4, 3), (((2,), (2,)), ((0,), (0,)))),
    "a batch elsewhere": ((5, 3, 2), (4, 2, 3), (((1,), (2,)), ((2,), (1,)))),
    "vectors": ((3,), (3,), (((0,), (0,)), ((), ()))),
    "two dimensions": ((2, 3, 4), (3, 4, 5), (((1, 2), (0, 1)), ((), ()))),
}
QUICK = by_name(["matrices", "a batch"], PRODUCTS)


def normal(seed, shape, dtype):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.strict_promotion
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", QUICK)
def test_the_gradient_of_the_float32_operand_is_a_float32_product(name, side):
    *shapes, dims = PRODUCTS[name]
    pair = [normal(i, shape, "float16") for i, shape in enumerate(shapes)]
    other, wide = pair[1 - side], pair[side].astype("float32")

    def gradients(product):
        def run(x):
            return product(*((other, x) if side else (x, other)))

        out, vjp = jax.vjp(run, wide)
        (found,) = vjp(normal(2, out.shape, "float16").astype(out.dtype))
        moved = jax.jvp(run, (wide,), (wide,))[1]
        return found, out, moved

    def exact(lhs, rhs):
        pair = lhs.astype("float32"), rhs.astype("float32")
        return lax.dot_general(*pair, dims, precision="highest")

    ours = lambda lhs, rhs: wide_dot_general(lhs, rhs, dims, "float16")  # noqa: E731
    found, *values = jax.jit(gradients, static_argnums=0)(ours)
    wanted, *expected = jax.jit(gradients, static_argnums=0)(exact)
    assert found.dtype == jnp.float32
    # Products of 11 bits are exact in float32, and few are added.
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    for x, y in zip(values, expected, strict=True):
        assert x.dtype == jnp.float16
        np.testing.assert_allclose(np.float32(x), y, rtol=1e-3, atol=1e-3)


def test_parts_that_float16_cannot_hold_are_summed_in_shard_map():
    # Each device's part is beyond float16, and their sum is 0.
    sign = np.repeat([1, 1, 1, 1, -1, -1, -1, -1], 4)[:, None]
    x = jnp.asarray(30000.0 * sign * np.ones(3), jnp.float32)

    def grad(x, w):
        return jax.grad(autocast(lambda w: (x @ w).sum(), "float16"))(w)

    summed = jax.shard_map(grad, mesh=ONE_AXIS, in_specs=(P("i"), P()), out_specs=P())
    np.testing.assert_array_equal(jax.jit(summed)(x, jnp.ones((3, 2))), 0)


def loss(w, x):
    return autocast(lambda w, x: jnp.mean(jnp.tanh(x @ w)), "float16")(w, x)


@pytest.mark.parametrize(
    "platforms", ["cpu", "tpu rocm cuda cpu", slow("cuda"), slow("cpu cuda")]
)
def test_gradients_are_exported_for_several_machines_at_once(platforms):
    w, x = normal(0, (8, 4), "float32"), normal(1, (6, 8), "float32")
    grad = jax.jit(jax.grad(loss))
    exported = jax.export.export(grad, platforms=platforms.split())(w, x)
    # Half-precision operands and a float32 result, which a CPU refuses.
    form = (
        r"dot_general .*\(tensor<[^>]*xf16>, tensor<[^>]*xf16>\) -> tensor<[^>]*xf32>"
    )
    assert bool(re.search(form, exported.mlir_module())) == (platforms != "cpu")
    if "cpu" in platforms:
        restored = jax.export.deserialize(exported.serialize())
        np.testing.assert_allclose(restored.call(w, x), grad(w, x), 1e-3, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_product_that_names_an_algorithm_runs_where_it_is_missing(dtype):
    attention = jmp_scale.in_half(jax.nn.dot_product_attention)
    q = normal(0, (2, 8, 4, 8), "float32")

    def loss(attention, q):
        return jnp.mean(attention(q, q, q) ** 2)

    half = autocast(functools.partial(loss, attention), dtype)
    gradient = jax.jit(jax.value_and_grad(half))
    wanted = jax.value_and_grad(functools.partial(loss, jax.nn.dot_product_attention))
    for found, exact in zip(gradient(q), wanted(q), strict=True):
        assert_norm_close(found, exact, 0.02)
    module = jax.export.export(gradient, platforms=["cpu", "cuda"])(q).mlir_module()
    assert "accumulation_type" in module


@pytest.mark.parametrize("name", by_name(["vectors", "two dimensions"], PRODUCTS))
def test_a_product_of_halves_is_the_product(name):
    """The form in which a CPU's matrix units take it."""
    *shapes, dims = PRODUCTS[name]
    for k in (3, 4, 6):
        sized = [
            tuple(k if d in c else n for d, n in enumerate(shape))
            for shape, c in zip(shapes, dims[0], strict=True)
        ]
        pair = [normal(i, shape, "float32") for i, shape in enumerate(sized)]
        found = in_halves(*pair, dims)
        assert (found is None) == (k == 3 and len(dims[0][0]) == 1)
        if found is not None:
            got, wanted = lax.dot_general(*found), lax.dot_general(*pair, dims)
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


OF_MATRICES = "attention", "reshaped_weight", "vmap", "remat", "ragged_dot"


@pytest.mark.parametrize("stored", ["float32", slow("bfloat16")])
@pytest.mark.parametrize("name", by_name(["attention"], OF_MATRICES))
def test_matrix_units_of_a_cpu_take_each_product(monkeypatch, name, stored):
    """Their products' forms run on each CPU, whether it has such units or not."""
    monkeypatch.setattr(dot_general, "has_bfloat16_units", lambda: True)
    fun, (w, x), *_ = PROGRAMS[name]
    exact = jax.jit(jax.grad(fun))(w, x)
    found = jax.jit(jax.grad(autocast(fun, "bfloat16")))(w.astype(stored), x)
    assert_norm_close(found.astype("float32"), exact, 0.05)
