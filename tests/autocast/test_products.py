"""What becomes of a product, and which calls are cheap."""

import jax
import jax.numpy as jnp
import pytest
from autocast_programs import W, X, arrays
from helpers import EXPLICIT_TWO
from jax import lax
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P

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
    """The product of two matrices."""

    def fun(x, w):
        return lax.dot(x, w, precision=precision, preferred_element_type=result)

    return fun


FATES = {
    "float32": (dot(), (X, W), Fate.BECOMES_HALF),
    "default precision": (dot("default"), (X, W), Fate.BECOMES_HALF),
    "high precision": (dot("high"), (X, W), Fate.OWN_PRECISION),
    "a weight stored in half": (dot(), (X, W.astype("float16")), Fate.BECOMES_HALF),
    "half": (dot(result=None), (HALF, W.astype("bfloat16")), Fate.IS_HALF),
    "half with a float32 result": (dot(), (HALF, HALF.T), Fate.IS_HALF),
    "a half result": (dot(result="float16"), (X, W), Fate.IS_HALF),
    "integers": (dot(result=None), (X.astype(int), W.astype(int)), Fate.OTHER_DTYPE),
    "complex": (jnp.dot, (X.astype("complex64"), W), Fate.OTHER_DTYPE),
    "outer product": (lambda x, y: jnp.einsum("i,j->ij", x, y), (V, V), Fate.IS_SUM),
    "contracts one entry": (dot(), (V[:, None], ROW), Fate.IS_SUM),
    "two vectors": (jnp.dot, (V, V), Fate.IS_SUM),
    "one row": (dot(), (ROW, W), Fate.BECOMES_HALF),
    "one row and one column": (dot(), (ROW, ROW.T), Fate.BECOMES_HALF),
    "a row and a column for each index": (
        lambda x, y: jnp.einsum("bik,bkj->bij", x, y),
        (BATCH[:, :1], BATCH.transpose(0, 2, 1)[..., :1]),
        Fate.IS_SUM,
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


def test_a_vector_times_a_parameter_is_one_row_of_a_batch():
    eqn = product(jnp.dot, V, W)
    matrix = eqn.invars[1]
    assert fate(eqn) is Fate.BECOMES_HALF
    is_parameter = {matrix: True}.__getitem__
    assert fate(eqn, is_parameter=is_parameter) is Fate.BECOMES_HALF
    assert fate(eqn, is_parameter=lambda v: False) is Fate.IS_SUM
    assert ops.stays_float32(eqn)
    assert not ops.has_matrix_work(eqn, lambda v: False)
    assert ops.has_matrix_work(eqn, is_parameter)


def test_a_name_is_asked_last():
    eqn = product(jnp.dot, X, W)
    asked = []
    found = fate(eqn, is_constant=lambda v: True, is_exempt=asked.append)
    assert (found, asked) == (Fate.IS_CONSTANT, [])


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
