import contextlib
import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_checks import assert_norm_close, n32
from helpers import EXPLICIT, ONE_AXIS, by_name, sharded, slow
from jax import lax
from jax.sharding import PartitionSpec as P

import jmp_scale
from jmp_scale import _cpu, autocast
from jmp_scale._autocast.dot_general import wide_dot_general
from jmp_scale._tree import cast_floating
from jmp_scale.diagnostics._timing import seconds_of

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
# Half-precision operands and a float32 result, which not every CPU takes.
WIDE = r"dot_general .*\(tensor<[^>]*x{0}>, tensor<[^>]*x{0}>\) -> tensor<[^>]*xf32>"


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
    form = re.search(WIDE.format("f16"), exported.mlir_module())
    assert bool(form) == (platforms != "cpu")
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
        found = _cpu.in_halves(*pair, dims)
        assert (found is None) == (k == 3 and len(dims[0][0]) == 1)
        if found is not None:
            got, wanted = lax.dot_general(*found), lax.dot_general(*pair, dims)
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


FORMS = {
    "x @ w": lambda w, x: x @ w,
    "x @ w.T": lambda w, x: x @ w.T,
    "w @ x.T": lambda w, x: w @ x.T,
    "a batch": lambda w, x: jnp.einsum(
        "ni,nij->nj", x, jnp.sin(x)[:, :, None] * w[None]
    ),
    "vmap": lambda w, x: jax.vmap(lambda row: w.T @ row)(x),
    "solve": lambda w, x: jnp.linalg.solve(2 * jnp.eye(len(w)) + w / 9, (x @ w).T),
    "remat": lambda w, x: jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w)(w, x),
    "layers": lambda w, x: lax.scan(
        lambda x, m: (jnp.tanh(x @ m), None), x, jnp.stack([w, w.T])
    )[0],
    "rows": lambda w, x: lax.scan(lambda c, row: (c, row @ w), 0.0, x)[1],
}
# Rows of x, size of w, axes of the mesh that splits the rows, dtype of what is stored.
ON_UNITS = {
    "even": (8, 16, None, "float32"),
    "one row": (1, 4, None, "float32"),
    "odd rows, stored": (7, 6, None, "bfloat16"),
    "odd size, stored": (8, 33, None, "bfloat16"),
    "explicit": (16, 8, EXPLICIT, "float32"),
    "explicit, stored": (16, 8, EXPLICIT, "bfloat16"),
    "auto": (16, 8, ONE_AXIS, "float32"),
    "auto, stored": (16, 8, ONE_AXIS, "bfloat16"),
}


@pytest.mark.parametrize("name", by_name(["even", "explicit"], ON_UNITS))
def test_matrix_units_of_a_cpu_take_each_form(monkeypatch, name):
    """The forms of their products run on each CPU, whether it has such units or not."""
    monkeypatch.setattr(_cpu, "has_bfloat16_units", lambda: True)
    takes = jax.__version_info__ >= (0, 10, 2)  # the first that is known to run all
    rows, size, mesh, stored = ON_UNITS[name]
    w, x = normal(0, (size, size), stored) / 3, normal(1, (rows, size), "float32")
    # JAX refuses these of rows that are split, also in float32.
    refused = {"rows", "solve"} if mesh is EXPLICIT else set()
    forms = {k: form for k, form in FORMS.items() if k not in refused}
    if mesh is not None:
        x, w = sharded(x, mesh, P("i")), sharded(w, mesh, P())

    def gradients(change, w, x):
        def loss(form, w, x):
            return jnp.mean(jnp.sin(form(w, x)) ** 2)

        return {
            k: jax.grad(change(functools.partial(loss, form)), (0, 1))(w, x)
            for k, form in forms.items()
        }

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        half = functools.partial(autocast, dtype="bfloat16")
        lowered = jax.jit(functools.partial(gradients, half)).lower(w, x)
        found = lowered.compile()(w, x)
        wanted = jax.jit(functools.partial(gradients, lambda f: f))(n32(w), x)
    for form in forms:
        for got, exact in zip(found[form], wanted[form], strict=True):
            assert_norm_close(n32(got), exact, 0.05)
    assert bool(re.search(WIDE.format("bf16"), lowered.as_text())) == takes


@pytest.mark.parametrize("units", [True, False])
def test_a_half_stored_weight_has_the_product_that_units_take(monkeypatch, units):
    monkeypatch.setattr(_cpu, "takes_bfloat16", lambda: units)
    w, x = normal(0, (8, 8), "bfloat16"), normal(1, (6, 8), "float32")
    fun = jax.grad(autocast(lambda w: jnp.mean(jnp.tanh(x @ w)), "bfloat16"))
    lowered = jax.jit(fun).lower(w).as_text()
    assert bool(re.search(WIDE.format("bf16"), lowered)) == units


@pytest.mark.slow
@pytest.mark.skipif(
    not _cpu.has_bfloat16_units() or jax.__version_info__ < (0, 12),
    reason="matrix units of a CPU, which jax 0.12 uses in the forward pass, too",
)
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_matrix_units_of_a_cpu_gain(stored):
    x = normal(0, (1024, 512), "float32")
    ws = [normal(i, (512, 512), "float32") / 20 for i in range(1, 5)]

    def loss(ws):
        return jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x) ** 2)

    half = jax.jit(jax.grad(autocast(loss, "bfloat16"))), cast_floating(ws, stored)
    runs = (jax.jit(jax.grad(loss)), ws), half
    rounds = [
        [seconds_of(functools.partial(*run), 2) for run in runs] for _ in range(9)
    ]
    assert np.median([wide / half for wide, half in rounds]) > 1.5
