"""`autocast`: products in half precision, the rest as it was, for whatever program."""

import contextlib
import copy
import functools
import gc
import inspect
import pickle
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_checks import (
    BF16,
    F32,
    assert_close,
    assert_close_gradients,
    jit_with_roundings,
    n32,
    two_layers,
)
from autocast_programs import (
    B3,
    PROGRAMS,
    N,
    W,
    X,
    convolve,
    layer,
    mean_square,
    products,
)
from helpers import by_name, slow
from jax import lax

import jmp_scale.nnx
from jmp_scale import autocast

QUICK = "layer_norm", "scan_reversed_and_unrolled", "custom_vjp_with_products"
QUICK += "scatter_and_gather", "reference", "custom_vjp_without_products"
# Under flags of JAX that may become defaults their primitives are others.
QUICK += "custom_jvp", "remat", "cross_entropy", "softmax_without_a_rule"


@pytest.mark.parametrize("name", by_name(QUICK, PROGRAMS))
@pytest.mark.filterwarnings("ignore:autocast")
def test_a_program_has_the_value_and_gradient_of_the_float32_one(name):
    fun, args, halves = PROGRAMS[name]
    cast = autocast(fun, "float16")
    assert_close_gradients(fun, *args)
    dtypes = products(jax.value_and_grad(cast), *args)
    assert (F32 in dtypes) == (not halves)
    assert any("float16" in pair for pair in dtypes)


def test_x64_changes_nothing_for_a_float32_program():
    fun, args, *_ = PROGRAMS["attention"]
    grad = jax.value_and_grad(autocast(fun, "float16"))
    wanted = jax.jit(grad)(*args)
    with jax.enable_x64(True):
        got = jax.jit(grad)(*args)
    assert_close(got, wanted, 1e-2)


@pytest.mark.parametrize("dtype", ["bf16", jnp.bfloat16])
def test_a_dtype_is_a_name_or_a_dtype(dtype):
    assert products(autocast(layer, dtype), W, X) == [BF16]


STACK = jnp.stack([W, W.T])
LAYERS_OF_A_STACK = [
    lambda x: lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x @ STACK[i]), x),
    lambda x: lax.fori_loop(0, 2, lambda i, x: x @ jnp.take(STACK, i, axis=0), x),
    lambda x: x @ STACK[jnp.argmax(x @ W) % 2],  # an expert
]


@pytest.mark.parametrize(
    ("fun", "row", "batch"),
    [
        (lambda x: jnp.tanh(x @ W) @ W[:, :1], X[:1], X),
        (lambda x: x @ W / 2 @ (W.T * 0.5)[:8].T, X[0], X),
        (jax.vmap(lambda x: W @ x), X[:1], X),
        (lambda x: jnp.einsum("hk,hkn->hn", x, B3), X[:4, :8], None),
        (lambda x: (x @ W) @ (x[:1] @ W).T, X[:1], None),
        *((fun, X[0], X) for fun in LAYERS_OF_A_STACK),
    ],
)
def test_one_row_is_half_precision_as_a_batch_of_rows(fun, row, batch):
    half = autocast(fun, "bfloat16")
    assert {*products(half, row)} == {BF16}
    if batch is not None:
        got, wanted = map(jit_with_roundings(half), (row, batch))
        wanted = wanted[: len(row)] if row.ndim > 1 else wanted[0]
        np.testing.assert_allclose(got, wanted, 1e-6)


HALF_STORED = {
    "dot": lambda w, x: jnp.dot(x, w),
    "einsum": lambda w, x: jnp.einsum("bi,io->ob", x, w),
    "cast": lambda w, x: x @ w.T.astype(jnp.float32).T,
    "scan": lambda w, x: lax.scan(lambda x, w: (x @ w, None), x, w[None])[0],
    "ragged_dot": lambda w, x: lax.ragged_dot(x, n32(w[None]), jnp.array([8])),
    "convolution": lambda w, x: convolve(
        x.reshape(1, 8, 1, N), n32(w[None, None]), (1, 1), "SAME"
    ),
    "one row": lambda w, x: w @ x[0],
}


@pytest.mark.parametrize("dtype", ["float16", slow("bfloat16")])
@pytest.mark.parametrize("stored", ["bfloat16", slow("float16")])
@pytest.mark.parametrize("name", by_name(["dot", "cast", "ragged_dot"], HALF_STORED))
def test_a_product_runs_in_the_dtype_of_a_weight_stored_in_half(name, stored, dtype):
    fun, w = HALF_STORED[name], W.astype(stored)
    loss = lambda w, x: mean_square(jnp.tanh(fun(w, jnp.sin(x))))  # noqa: E731
    half = jax.value_and_grad(autocast(loss, dtype))
    assert {*products(half, w, X)} == {(stored, stored)}
    value, grad = jax.jit(half)(w, X)
    wanted, wanted_grad = jax.value_and_grad(loss)(n32(w), X)
    assert grad.dtype == w.dtype
    assert_close(value, wanted, 0.02)
    assert_close(n32(grad), wanted_grad, 0.05)


@pytest.mark.parametrize(
    ("dtype", "result", "stored"),
    [
        ("bfloat16", "bfloat16", "float32"),
        ("bfloat16", "float32", "bfloat16"),
        ("float8_e4m3fn", "float32", "float32"),
        ("int8", "float32", "float32"),
    ],
)
def test_what_the_user_cast_stays_as_cast(dtype, result, stored):
    def f(w, x):
        x, w = (9 * x).astype(dtype), (9 * w).astype(dtype)
        return jnp.sum(jnp.dot(x, w, preferred_element_type=result).astype("float32"))

    half, w = autocast(f, "float16"), W.astype(stored)
    # A product that is half precision already is no reason to warn.
    warns = contextlib.nullcontext()
    if dtype != "bfloat16":
        warns = pytest.warns(UserWarning, match="no product became half")
    with warns:
        assert products(half, w, X) == [(dtype, dtype)]
    assert half(w, X) == f(w, X)


@pytest.mark.filterwarnings("ignore:autocast. no product became")
def test_a_program_without_products_stays_bit_for_bit():
    def fun(w, x):
        return lax.scan(lambda c, y: (c + jnp.sin(y), c), x[0] * w[0], x)[0].sum()

    half, grad = autocast(fun, "float16"), jax.jit(jax.value_and_grad(fun))
    found, wanted = jax.jit(jax.value_and_grad(half))(W, X), grad(W, X)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_allclose(found[1], wanted[1], 1e-5, 1e-6)


@pytest.mark.filterwarnings("ignore:autocast. no product became")
def test_float64_programs_stay_as_they_are():
    with jax.enable_x64(True):
        w, x = np.float64(W), jnp.asarray(np.float64(X))
        f = lambda x: layer(jnp.asarray(w), x)  # noqa: E731
        np.testing.assert_array_equal(autocast(f, "float16")(x), f(x))


def test_nothing_of_a_program_is_kept_after_its_trace():
    references = []

    def loss(w, x):
        factor = np.full((N, N), 2.0)
        references.append(weakref.ref(factor))
        act = jax.custom_jvp(jnp.sin)
        act.defjvp(lambda p, t: (act(*p), t[0] * factor[0, 0]))
        return mean_square(act(x @ w))

    half = autocast(loss, "float16")
    jax.block_until_ready(jax.jit(jax.grad(half))(W, X))
    jax.clear_caches()
    gc.collect()
    assert references
    assert all(reference() is None for reference in references)


def test_constant_results_are_arrays():
    half = autocast(lambda w: (X @ w, jnp.int32(3), jnp.asarray(1.0)), "float16")
    for x, dtype in zip(half(W)[1:], ("int32", "float32"), strict=True):
        assert x.at[...].add(1).dtype == dtype


def test_whatever_is_no_float_array_passes():
    def f(w, x, key, flags, *, name, nothing=None):
        assert name == "static"
        assert flags["train"] is True
        y = layer(w, x) + 0 * jax.random.uniform(key)
        return {"y": y, "n": 3, "name": name, "nothing": nothing, "key": key}, None

    args = (W, X, jax.random.key(0), {"train": True})
    out, none = autocast(f, "float16")(*args, name="static")
    assert (out["n"], out["name"], out["nothing"], none) == (3, "static", None, None)
    assert out["key"] == args[2]
    assert out["y"].dtype == jnp.float32


def test_numpy_arrays_are_arguments_as_in_jit():
    """Not constants, whose products stay float32."""
    half = autocast(two_layers, "bfloat16")
    assert half(np.float64(W), np.float64(X)) == half(W, X) != two_layers(W, X)


def test_effects_keep_their_order():
    seen = []

    def see(i, x):
        jax.debug.callback(lambda _: seen.append(i), x[0, 0], ordered=True)

    def f(w, x):
        y = layer(w, layer(w, x))
        for i, value in enumerate((x, y, layer(w, y), y, x)):  # also of earlier ones
            see(i, value)
        return y

    jax.block_until_ready(jax.jit(autocast(f, "float16"))(W, X))
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3, 4]


@functools.partial(autocast, dtype="bfloat16")
def decorated(model, w):
    return jnp.sum(w @ model.w)


class Plain:
    w, loss = jnp.eye(4), decorated


class Model(eqx.Module):
    w: jax.Array
    loss = decorated


@pytest.mark.parametrize("transform", [autocast, jmp_scale.nnx.autocast])
def test_name_documentation_and_signature_are_those_of_the_function(transform):
    def loss(w, x=2.0):
        """A product of w with itself."""
        return jnp.sum(w @ w) * x

    half = transform(loss, "bfloat16")
    assert inspect.signature(half) == inspect.signature(loss)
    assert inspect.unwrap(half) is loss
    assert inspect.getdoc(half) == inspect.getdoc(loss)
    names = ("__name__", "__qualname__", "__module__")
    assert all(getattr(half, name) == getattr(loss, name) for name in names)
    assert "loss" in jax.jit(half).lower(W).as_text().splitlines()[0]


def test_a_decorated_method_is_bound_to_its_object():
    assert inspect.ismethod(Plain().loss)
    assert float(jax.jit(Plain().loss)(Plain.w)) == 4
    assert float(jax.jit(lambda w: Plain.loss(Plain(), w))(Plain.w)) == 4


def test_a_decorated_method_of_a_module_is_differentiated():
    model = Model(2 * Plain.w)
    assert float(eqx.filter_jit(model.loss)(Plain.w)) == 8
    grads = eqx.filter_jit(eqx.filter_grad(Model.loss))(model, Plain.w)
    assert grads.w.tolist() == jnp.ones((4, 4)).tolist()


def test_a_decorated_function_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert copy.deepcopy(decorated) is decorated
