"""What becomes of a product, and which calls are cheap."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_programs import IMAGE, K3, W, X, arrays, convolve
from flax import nnx
from helpers import EXPLICIT_TWO, slow
from jax import lax
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from jmp_scale import autocast
from jmp_scale._autocast import products as ops
from jmp_scale._autocast.products import Fate, fate

(V, ROW, BATCH) = arrays((16,), (1, 16), (3, 8, 16))
HALF = X.astype("bfloat16")


def program(fun, *args):
    return jax.make_jaxpr(fun)(*args)


def product(fun, *args):
    (eqn,) = (e for e in program(fun, *args).eqns if e.primitive.name in ops.PRODUCTS)
    return eqn


def dot(precision=None, result="float32"):
    def fun(x, w):
        return lax.dot(x, w, precision=precision, preferred_element_type=result)

    return fun


FATES = {
    "float32": (dot(), (X, W), Fate.BECOMES_HALF),
    "high precision": (dot("high"), (X, W), Fate.STAYS),
    "a weight stored in half": (dot(), (X, W.astype("float16")), Fate.BECOMES_HALF),
    "half": (dot(result=None), (HALF, W.astype("bfloat16")), Fate.IS_HALF),
    "a half result": (dot(result="float16"), (X, W), Fate.IS_HALF),
    "integers": (dot(result=None), (X.astype(int), W.astype(int)), Fate.STAYS),
    "complex": (jnp.dot, (X.astype("complex64"), W), Fate.STAYS),
    "outer product": (lambda x, y: jnp.einsum("i,j->ij", x, y), (V, V), Fate.STAYS),
    "contracts one entry": (dot(), (V[:, None], ROW), Fate.STAYS),
    "one row": (dot(), (ROW, W), Fate.BECOMES_HALF),
    "a row and a column for each index": (
        lambda x, y: jnp.einsum("bik,bkj->bij", x, y),
        (BATCH[:, :1], BATCH.transpose(0, 2, 1)[..., :1]),
        Fate.STAYS,
    ),
    "a matrix for each index": (
        lambda x, y: jnp.einsum("bik,bjk->bij", x, y),
        (BATCH, BATCH),
        Fate.BECOMES_HALF,
    ),
}


@pytest.mark.parametrize("name", FATES)
def test_the_fate_of_a_product(name):
    fun, args, wanted = FATES[name]
    eqn = product(fun, *args)
    assert fate(eqn) is wanted
    assert ops.becomes_half(eqn) == (wanted is Fate.BECOMES_HALF)
    assert ops.stays_float32(eqn) == (wanted not in (Fate.BECOMES_HALF, Fate.IS_HALF))


def test_elementwise_operations_sums_and_moves_are_cheap():
    def cheap(fun, *args):
        return ops.is_cheap(program(fun, *args).eqns[-1])

    assert cheap(jnp.tanh, X)
    assert cheap(jax.jit(jnp.tanh), X)
    assert cheap(jax.nn.relu, X)
    assert cheap(lambda x: lax.reduce_max(x, (0,)), X)
    assert not cheap(lambda x, i: x[i], X, jnp.arange(3))
    assert not cheap(lambda x: lax.sort(x), X)
    assert not cheap(jax.jit(jnp.sort), X)
    assert not cheap(lambda x: lax.scan(lambda c, _: (c + 1, None), x, length=2), X)
    assert not cheap(lambda x: jax.debug.print("{}", x), X)


def test_a_reshard_within_a_mesh_is_cheap_and_to_another_one_is_not():
    mesh = EXPLICIT_TWO
    other = jax.sharding.Mesh(
        mesh.devices.T, mesh.axis_names, axis_types=mesh.axis_types
    )
    (eqn,) = program(lambda x: reshard(x, NamedSharding(mesh, P("i"))), X).eqns[-1:]
    (moved,) = program(lambda x: reshard(x, NamedSharding(other, P("j"))), X).eqns[-1:]
    (before,) = eqn.outvars
    assert ops.mesh_of(before) == mesh.abstract_mesh
    assert ops.is_cheap(eqn.replace(invars=[before]))
    assert not ops.is_cheap(moved.replace(invars=[before]))


def head(x, w):
    return x @ w


def convolution(x, w):
    return convolve(x, w, (1, 1), "SAME")


class Head(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, use_bias=False, name="lm_head")(x)


def in_linen(x, w):
    return Head().apply({"params": {"lm_head": {"kernel": w}}}, x)


def in_nnx(x, w):
    layer = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel[...] = w
    return layer(x)


NAMED = {
    "a function": ("head", head, X, W),
    "a convolution": ("convolution", convolution, IMAGE, K3),
    "a weight stored in half": ("head", head, X, W.astype("bfloat16")),
    "a Linen module": ("lm_head", in_linen, X, W),
    "a class of Linen": ("Dense", in_linen, X, W),
    "a class of NNX": ("Linear", in_nnx, X, W),
}


@pytest.mark.parametrize("recompute", [True, slow(False)])
@pytest.mark.parametrize("name", NAMED)
def test_a_named_product_has_half_operands_and_a_float32_result(name, recompute):
    called, fun, *args = NAMED[name]
    half = functools.partial(autocast, fun, "bfloat16", recompute=recompute)
    # Half operands have exact products, whose sums are float32.
    exact = fun(*(x.astype("bfloat16").astype("float32") for x in args))
    found = half(float32_results=(called,))(*args)
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-6)
    assert float(jnp.max(jnp.abs(half()(*args) - exact))) > 1e-4


@pytest.mark.parametrize(
    "options",
    [{}, slow({"recompute": False}), slow({"backward": "bfloat16"})],
    ids=str,
)
def test_a_float32_result_halves_the_error_of_a_head(options):
    h, w = arrays((64, 64), (64, 2048), scale=1)
    y = jax.random.categorical(jax.random.key(0), h @ w)  # as of a trained model

    def loss(w, h):
        logs = jax.nn.log_softmax(head(h, w))
        return -jnp.mean(jnp.take_along_axis(logs, y[:, None], 1))

    def error(fun):
        return np.linalg.norm(jax.jit(jax.grad(fun))(w, h) - jax.grad(loss)(w, h))

    cast = functools.partial(autocast, loss, "float16", **options)
    # A backward pass in bfloat16 has an error of its own.
    share = 0.9 if "backward" in options else 0.7
    assert error(cast(float32_results="head")) < share * error(cast())
