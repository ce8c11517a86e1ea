"""What becomes of a product, and what derivatives of operations read."""

import jax
import jax.numpy as jnp
import pytest
from autocast_programs import W, X, arrays
from helpers import EXPLICIT_TWO
from jax import lax
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from jmp_scale import _jaxpr
from jmp_scale._autocast import operations as ops
from jmp_scale._autocast.operations import Fate

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
    assert ops.fate(eqn) is wanted
    assert ops.becomes_half(eqn) == (wanted is Fate.BECOMES_HALF)
    assert ops.stays_float32(eqn) == (wanted not in (Fate.BECOMES_HALF, Fate.IS_HALF))


def test_a_vector_times_a_parameter_is_one_row_of_a_batch():
    eqn = product(jnp.dot, V, W)
    matrix = eqn.invars[1]
    assert ops.fate(eqn) is Fate.BECOMES_HALF
    is_parameter = {matrix: True}.__getitem__
    assert ops.fate(eqn, is_parameter=is_parameter) is Fate.BECOMES_HALF
    assert ops.fate(eqn, is_parameter=lambda v: False) is Fate.IS_SUM
    assert ops.stays_float32(eqn)
    assert not ops.has_matrix_work(eqn)
    assert ops.has_matrix_work(eqn, is_parameter)


def test_a_name_is_asked_last():
    eqn = product(jnp.dot, X, W)
    asked = []
    found = ops.fate(eqn, is_number=lambda v: True, is_exempt=asked.append)
    assert (found, asked) == (Fate.IS_CONSTANT, [])


def test_what_is_cheap_to_compute_again():
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


def read(fun, *args, softmaxes=()):
    """Positions of the inputs that the derivative reads, and other primitives."""
    island = program(fun, *args).jaxpr
    found = ops.softmaxes_of(island) if softmaxes == "all" else ()
    atoms = _jaxpr.variables(ops.read_by_derivative(island, found))
    maker = {v: eqn.primitive.name for eqn in island.eqns for v in eqn.outvars}
    return {maker.get(v) or island.invars.index(v) for v in atoms}


READ = {
    "a sum": (lambda x, y: x + 2 * y.T.T, set()),
    "a product": (lambda x, y: x * y, {0, 1}),
    "a product with a constant": (lambda x, y: x * 2, set()),
    "a product with one that stops": (
        lambda x, y: x * lax.stop_gradient(y),
        {"stop_gradient"},
    ),
    "all of it stops": (lambda x, y: lax.stop_gradient(x * y) + x, set()),
    "a quotient": (lambda x, y: x / y, {0, 1}),
    "a quotient by one that stops": (
        lambda x, y: x / lax.stop_gradient(y),
        {"stop_gradient"},
    ),
    "a choice": (lambda x, y: lax.select(x > 0, x, y), {"gt", 0}),
    "a function": (lambda x, y: jnp.tanh(x) + y, {0}),
    "nobody wants it": (lambda x, y: (jnp.sin(x), jnp.cos(y))[0], {0}),
}


@pytest.mark.parametrize("name", READ)
def test_values_that_a_derivative_reads(name):
    fun, wanted = READ[name]
    assert read(fun, X, X) == wanted


def softmax(x, axis=-1):
    e = jnp.exp(x - lax.stop_gradient(jnp.max(x, axis, keepdims=True)))
    return e / jnp.sum(e, axis, keepdims=True)


def test_softmaxes_are_found_and_read_as_results():
    island = program(lambda x: softmax(x, 0) + 1, X).jaxpr
    ((result, found),) = ops.softmaxes_of(island).items()
    maker = {v: e.primitive.name for e in island.eqns for v in e.outvars}
    assert (maker[result], maker[found.exponents]) == ("div", "sub")
    assert found.axes == (0,)
    assert "exp" in read(softmax, X)
    assert "exp" not in read(softmax, X, softmaxes="all")
    scores = lambda x, y: softmax(x * y)  # noqa: E731
    assert read(scores, X, X, softmaxes="all") >= {0, 1}
    others = (
        lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x + 1), -1, keepdims=True),
        lambda x: jnp.exp(x) / jnp.max(jnp.exp(x), -1, keepdims=True),
        lambda x: x / jnp.sum(x, -1, keepdims=True),
        lambda x: 1 / x,
    )
    for fun in others:
        assert not ops.softmaxes_of(program(fun, X).jaxpr)


def test_small_sums_are_less_than_half_of_their_operand():
    def sums(shape, axis, dtype="float32"):
        island = program(lambda x: jnp.sum(x, axis), jnp.zeros(shape, dtype)).jaxpr
        return len(ops.small_sums(island))

    assert (sums((3, 4), 0), sums((2, 4), 0)) == (1, 0)
    assert (sums((2, 16384), 1), sums((2, 16385), 1)) == (0, 1)
    assert sums((4, 8, 8), (1, 2)) == 1
    assert sums((8, 4), 0, "int32") == 0


def test_tangents_reach_what_is_differentiable():
    def f(x, y):
        z = lax.stop_gradient(x) + 1
        return z, x * 2, jnp.argmax(x), y

    jaxpr = program(f, X, X).jaxpr
    reached = ops.reached_by(jaxpr, jaxpr.invars[:1])
    assert [v in reached for v in jaxpr.outvars] == [False, True, False, False]
