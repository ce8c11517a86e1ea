import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ONE_AXIS, one_of
from jax import lax
from jax.sharding import PartitionSpec as P

from jmp_scale import autocast
from jmp_scale._autocast.dot_general import wide_dot_general

MATRICES = (((1,), (0,)), ((), ()))
PRODUCTS = {
    "matrices": ((4, 3), (3, 2), MATRICES),
    "a dense layer": ((2, 5, 3), (3, 4), (((2,), (0,)), ((), ()))),
    "a batch": ((2, 5, 3), (2, 4, 3), (((2,), (2,)), ((0,), (0,)))),
    "a batch elsewhere": ((5, 3, 2), (4, 2, 3), (((1,), (2,)), ((2,), (1,)))),
    "vectors": ((3,), (3,), (((0,), (0,)), ((), ()))),
}


def normal(seed, shape, dtype):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.strict_promotion
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", one_of(2, PRODUCTS))
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
    "platforms", one_of(3, ["cpu", "cuda", "cpu cuda", "tpu rocm cuda cpu"])
)
def test_gradients_are_exported_for_several_machines_at_once(platforms):
    w, x = normal(0, (8, 4), "float32"), normal(1, (6, 8), "float32")
    grad = jax.jit(jax.grad(loss))
    exported = jax.export.export(grad, platforms=platforms.split())(w, x)
    # Of each machine's own: a GPU's algorithm, which a CPU refuses.
    algorithms = exported.mlir_module().count("accumulation_type = f32")
    assert algorithms == ("cuda" in platforms)
    if "cpu" in platforms:
        restored = jax.export.deserialize(exported.serialize())
        np.testing.assert_allclose(restored.call(w, x), grad(w, x), 1e-3, 1e-4)


def test_a_gpu_multiplies_by_a_vector_without_an_algorithm_which_it_would_refuse():
    w, x = normal(0, (8, 1), "float32"), normal(1, (6, 8), "float32")
    grad = jax.jit(jax.grad(loss))
    text = jax.export.export(grad, platforms=["cuda"])(w, x).mlir_module()
    assert "accumulation_type" not in text
