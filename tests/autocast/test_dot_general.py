import functools

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import EXPLICIT_TWO, ONE_AXIS, TWO_AXES, assert_bitwise_equal, one_of
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_scale

MATRICES = (((1,), (0,)), ((), ()))
PRODUCTS = {
    "matrices": ((4, 3), (3, 2), MATRICES),
    "both transposed": ((3, 4), (2, 3), (((0,), (1,)), ((), ()))),
    "a dense layer": ((2, 5, 3), (3, 4), (((2,), (0,)), ((), ()))),
    "two dimensions": ((5, 4, 3), (3, 4, 2), (((2, 1), (0, 1)), ((), ()))),
    "a batch": ((2, 5, 3), (2, 4, 3), (((2,), (2,)), ((0,), (0,)))),
    "a batch elsewhere": ((5, 3, 2), (4, 2, 3), (((1,), (2,)), ((2,), (1,)))),
    "nothing in common": ((2,), (3,), (((), ()), ((), ()))),
    "vectors": ((3,), (3,), (((0,), (0,)), ((), ()))),
}


def normal(seed, shape, dtype):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *one_of(3, [(name, jnp.float16) for name in PRODUCTS]),
        ("two dimensions", jnp.bfloat16),
        ("two dimensions", jnp.float32),
    ],
)
def test_product_and_gradients_are_those_of_jax(name, dtype):
    if dtype == jnp.bfloat16 and jax.__version_info__ < (0, 9):
        pytest.skip("its CPU backend lacks bfloat16 products with a float32 result")
    lhs_shape, rhs_shape, dims = PRODUCTS[name]
    lhs, rhs = normal(0, lhs_shape, dtype), normal(1, rhs_shape, dtype)

    @jax.jit
    def both(lhs, rhs, key):
        results = []
        for dot_general in (jmp_scale.dot_general, lax.dot_general):
            out, vjp = jax.vjp(lambda *xs, f=dot_general: f(*xs, dims), lhs, rhs)
            results.append((out, vjp(jax.random.normal(key, out.shape, dtype))))
        return results

    (got, ours), (expected, theirs) = both(lhs, rhs, jax.random.key(2))
    np.testing.assert_array_equal(got, expected)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        # A unit in the last place of sums of a few numbers near 1.
        tolerance = 8 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.float32(a), np.float32(b), tolerance, tolerance)


@pytest.mark.parametrize("name", one_of(3, PRODUCTS))
def test_forward_mode_gives_what_jax_gives(name):
    lhs_shape, rhs_shape, dims = PRODUCTS[name]
    operands = normal(0, lhs_shape, "float16"), normal(1, rhs_shape, "float16")
    moved = normal(2, lhs_shape, "float16"), normal(3, rhs_shape, "float16")

    def derivatives(dot_general):
        def f(lhs, rhs):
            return jnp.square(dot_general(lhs, rhs, dims).astype(jnp.float32)).sum()

        return [*jax.jvp(f, operands, moved), *jax.hessian(f, 1)(*operands)]

    both = jmp_scale.dot_general, lax.dot_general
    compiled = jax.jit(lambda: [derivatives(dot_general) for dot_general in both])
    for ours, theirs in zip(*compiled(), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), 0.02, 0.02)


def grad_of_sum(dot_general, lhs, rhs, factor=1.0, **options):
    """Of a sum over 4 x 3 and 3 x 2 matrices, with the gradients of both."""

    def loss(lhs, rhs):
        product = dot_general(lhs, rhs, MATRICES, **options)
        return (product.astype(jnp.float32) * factor).sum()

    return jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)


# The cotangents, 1e5 and 1e-9, are infinite and 0 in float16, the gradients of w not.
@pytest.mark.parametrize(
    ("x", "factor", "expected"), [(1e-3, 1e5, 400), (1e3, 1e-9, 4e-6)]
)
def test_the_cotangent_of_a_float32_product_stays_float32(x, factor, expected):
    x, w = jnp.full((4, 3), x, jnp.float16), jnp.zeros((3, 2), jnp.float16)
    wide = {"preferred_element_type": jnp.float32}
    _, got = grad_of_sum(jmp_scale.dot_general, x, w, factor, **wide)
    assert got.dtype == jnp.float16
    # float16 is subnormal at 4e-6, with steps of 6e-8.
    np.testing.assert_allclose(np.float32(got), expected, rtol=2e-3, atol=6e-8)


@pytest.mark.strict_promotion
@pytest.mark.parametrize("result", one_of(2, [jnp.float32, None]))
@pytest.mark.parametrize(
    ("lhs", "rhs", "precision"),
    [
        (jnp.float16, jnp.float16, None),
        (jnp.float16, jnp.float16, ["highest", "default"]),
        (jnp.float8_e4m3fn, jnp.float8_e4m3fn, None),
        (jnp.float8_e4m3fn, jnp.float8_e5m2, None),
    ],
)
def test_float8_and_lists_of_precisions_work_as_in_jax(lhs, rhs, precision, result):
    x, w = jnp.full((4, 3), 2.0, lhs), jnp.full((3, 2), 0.5, rhs)
    options = {"precision": precision, "preferred_element_type": result}
    expected = grad_of_sum(lax.dot_general, x, w, **options)
    assert_bitwise_equal(grad_of_sum(jmp_scale.dot_general, x, w, **options), expected)


def test_the_precision_holds_in_the_backward_pass_too():
    x, w = jnp.ones((4, 3), jnp.float16), jnp.ones((3, 2), jnp.float16)
    dot_general = functools.partial(jmp_scale.dot_general, precision="highest")
    grads = jax.jit(functools.partial(grad_of_sum, dot_general))
    lines = grads.lower(x, w).as_text().splitlines()
    products = [line for line in lines if "stablehlo.dot_general" in line]
    assert len(products) >= 2
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


@pytest.mark.parametrize("mesh", one_of(2, [EXPLICIT_TWO, TWO_AXES]))
def test_sharded_gradients_are_those_of_one_device(mesh):
    x, w = normal(0, (8, 6), jnp.float16), normal(1, (6, 4), jnp.float16)

    def squares(x, w):
        product = jmp_scale.dot_general(x, w, MATRICES)
        return jnp.square(product.astype(jnp.float32)).sum()

    grads = jax.jit(jax.grad(squares, (0, 1)))
    expected = grads(x, w)
    with jax.set_mesh(mesh):
        shardings = NamedSharding(mesh, P("i")), NamedSharding(mesh, P(None, "j"))
        got = grads(*jax.device_put((x, w), shardings))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=4e-3, atol=4e-3)


def test_parts_that_float16_cannot_hold_are_summed_in_shard_map():
    # Each device's part is beyond float16, and their sum is 0.
    sign = np.repeat([1, 1, 1, 1, -1, -1, -1, -1], 4)[:, None]
    x = jnp.asarray(30000.0 * sign * np.ones(3), jnp.float16)
    w = jnp.ones((3, 2), jnp.float16)

    def grad(x, w):
        def loss(w):
            product = jmp_scale.dot_general(x, w, MATRICES)
            return product.astype(jnp.float32).sum()

        return jax.grad(loss)(w)

    summed = jax.shard_map(grad, mesh=ONE_AXIS, in_specs=(P("i"), P()), out_specs=P())
    np.testing.assert_array_equal(jax.jit(summed)(x, w), 0)


def test_it_is_what_flax_s_dense_layers_take():
    x = normal(0, (4, 3), jnp.float32)
    options = {"dtype": jnp.float16, "dot_general": jmp_scale.dot_general}
    linen = nn.Dense(2, **options)
    params = jax.jit(linen.init)(jax.random.key(0), x)
    loss = lambda p: linen.apply(p, x).astype(jnp.float32).sum()  # noqa: E731
    grads = jax.jit(jax.grad(loss))(params)
    assert grads["params"]["kernel"].dtype == jnp.float32

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0), **options)
    model.kernel[...] = params["params"]["kernel"]
    grads_nnx = nnx.jit(nnx.grad(lambda m: m(x).astype(jnp.float32).sum()))(model)
    np.testing.assert_array_equal(grads_nnx["kernel"][...], grads["params"]["kernel"])


def test_einsum_takes_it():
    x, w = normal(0, (4, 5, 3), jnp.float16), normal(1, (3, 2), jnp.float16)
    got = jnp.einsum("abc,cd->abd", x, w, _dot_general=jmp_scale.dot_general)
    np.testing.assert_array_equal(got, jnp.einsum("abc,cd->abd", x, w))


def autocast_loss(w, x):
    return jmp_scale.autocast(lambda w, x: jnp.mean(jnp.tanh(x @ w)), "float16")(w, x)


def dot_general_loss(w, x):
    pair = x.astype("float16"), w.astype("float16")
    product = jmp_scale.dot_general(*pair, MATRICES)
    return jnp.mean(jnp.tanh(product.astype("float32")))


@pytest.mark.parametrize("loss", [autocast_loss, dot_general_loss])
@pytest.mark.parametrize(
    "platforms", one_of(3, ["cpu", "cuda", "cpu cuda", "tpu rocm cuda cpu"])
)
def test_gradients_are_exported_for_several_machines_at_once(loss, platforms):
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
    grad = jax.jit(jax.grad(dot_general_loss))
    text = jax.export.export(grad, platforms=["cuda"])(w, x).mlir_module()
    assert "accumulation_type" not in text
