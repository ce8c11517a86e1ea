"""How traced programs are read, rewritten and run."""

import sys

import equinox  # noqa: F401  # makes primitives of its own
import jax
import jax.experimental.checkify
import jax.experimental.pallas
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_programs import W, X
from jax import lax
from jax.extend.core import Primitive
from jax.extend.source_info_util import NameStack

from jmp_scale import _jaxpr
from jmp_scale._jaxpr import primitives


def traced(fun, *args):
    return jax.make_jaxpr(fun)(*args)


def only(jaxpr):
    (eqn,) = _jaxpr.bare(jaxpr).eqns
    return eqn


def names(jaxpr):
    return [eqn.primitive.name for eqn in _jaxpr.equations(jaxpr)]


# Primitives that only some versions of JAX have.
VERSIONED = {"scaled_dot", "unreduced_psum", "closed_call", "tile"}
TABLES = "PRODUCTS SCALED_PRODUCTS CALLS SAME_ENTRIES SCALINGS CHEAP _UNLISTED"


@pytest.mark.parametrize("table", TABLES.split())
def test_every_primitive_of_a_table_exists(table):
    values = [value for m in [*sys.modules.values()] for value in vars(m).values()]
    there = {value.name for value in values if isinstance(value, Primitive)}
    table = {*getattr(primitives, table)}
    # It is a call, and no primitive: of `jax.nn.scaled_matmul`.
    assert table - there - VERSIONED <= {"scaled_matmul_wrapper"}
    assert table & there


def test_tables_within_tables():
    assert _jaxpr.REARRANGES < _jaxpr.SAME_ENTRIES
    assert _jaxpr.REARRANGES < _jaxpr.LINEAR < _jaxpr.SCALINGS
    assert {"gather"} == _jaxpr.LINEAR - _jaxpr.CHEAP
    assert not _jaxpr.PRODUCTS & _jaxpr.CHEAP
    known = _jaxpr.known_primitives()
    assert {"dot_general", "psum_invariant", "scan", "vprim"} < known
    assert "my_kernel" not in known


def test_types_of_variables():
    jaxpr = traced(lambda x, k: (x * 2, k), X, jax.random.key(0)).jaxpr
    x, key = jaxpr.invars
    two = jaxpr.eqns[0].invars[1]
    assert (_jaxpr.shape(x), _jaxpr.size(x)) == (X.shape, X.size)
    assert (_jaxpr.dtype_name(x), _jaxpr.bytes_per_entry(x)) == ("float32", 4)
    assert _jaxpr.is_float32(x)
    assert _jaxpr.is_floating(x)
    assert not _jaxpr.is_float32(key)
    assert not _jaxpr.is_floating(key)
    assert _jaxpr.bytes_per_entry(key) == 8
    assert _jaxpr.is_literal(two)
    assert not _jaxpr.is_literal(x)
    assert _jaxpr.variables([x, two, key]) == [x, key]
    (complex_,) = traced(lambda x: x, jnp.ones(2, "complex64")).jaxpr.invars
    assert _jaxpr.is_floating(complex_)


def test_constants_are_read_up_to_a_size():
    np.testing.assert_array_equal(_jaxpr.constant(jnp.bfloat16(1.5)), 1.5)
    assert _jaxpr.constant(np.ones(65_536, bool)).dtype == np.float64
    assert _jaxpr.constant(np.ones(65_537)) is None
    assert _jaxpr.constant(jax.random.key(0)) is None
    assert _jaxpr.constant(np.complex64(1j)) is None
    assert _jaxpr.has_infinite_entries(np.array([1, -np.inf], "float16"))
    assert not _jaxpr.has_infinite_entries(np.ones(2))
    assert not _jaxpr.has_infinite_entries("text")


def test_a_jaxpr_is_opened_with_its_constants():
    closed = traced(lambda x: x + jnp.asarray(np.arange(8.0))[:, None], X)
    inner, consts = _jaxpr.open_jaxpr(closed)
    assert len(consts) == len(inner.constvars)
    assert inner is _jaxpr.bare(closed) is _jaxpr.bare(inner)
    if len(inner.constvars) and not hasattr(inner, "consts"):
        assert _jaxpr.open_jaxpr(inner)[1] == [None] * len(inner.constvars)


def test_equations_within_equations():
    @jax.jit
    def layer(x):
        return lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)

    jaxpr = traced(lambda x: -layer(x), X)
    assert {"jit", "neg", "cond", "sin", "cos"} <= {*names(jaxpr)}
    call, neg = jaxpr.jaxpr.eqns
    within = [eqn.primitive.name for eqn in _jaxpr.equations_within(call)]
    assert within == names(jaxpr)[1:-1]
    assert not [*_jaxpr.equations_within(neg)]
    assert _jaxpr.name_of_call(call) == "layer"
    (body,) = _jaxpr.subjaxprs(call)
    assert _jaxpr.fits(body, 1, 1)
    assert not _jaxpr.fits(body, 2, 1)
    assert not _jaxpr.fits(body, 1, 2)


def test_a_function_with_a_rule_has_a_name():
    @jax.custom_jvp
    def with_rule(x):
        return x

    with_rule.defjvp(lambda xs, ts: (xs[0], ts[0]))
    assert _jaxpr.name_of_call(only(traced(with_rule, 1.0))) == "with_rule"


def test_the_layout_of_loops():
    def scan(w, c, xs):
        return lax.scan(lambda c, x: (c @ w + x, c[0]), c, xs)

    jaxpr = traced(scan, W, jnp.ones((16, 16)), jnp.ones((5, 16, 16))).jaxpr
    loop = _jaxpr.loop_of(jaxpr.eqns[-1])
    assert loop[1:] == (1, 1, 0, 5)
    assert loop.carries == _jaxpr.bare(loop.body).invars[1:2]

    def steps(w, n, c):
        return lax.while_loop(
            lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] @ w + w), (0, c)
        )

    loop = _jaxpr.loop_of(traced(steps, W, 3, W).jaxpr.eqns[-1])
    assert loop[1:] == (1, 2, 1, None)
    assert loop.carries == _jaxpr.bare(loop.body).invars[1:3]
    assert _jaxpr.loop_of(only(traced(jnp.sin, 1.0))) is None


def test_a_scan_of_one_step_over_a_vector_of_one_entry_has_a_layout():
    eqn = only(traced(lambda x: lax.scan(lambda c, x: (c, x), (), x), jnp.ones(1)))
    assert _jaxpr.loop_of(eqn)[1:] == (0, 0, 0, 1)


def test_devices_of_a_mesh():
    assert _jaxpr.mesh_size(only(traced(jnp.sin, 1.0))) == 1
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), "a")
    spec = jax.sharding.PartitionSpec("a")
    mapped = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    assert _jaxpr.mesh_size(only(traced(mapped, jnp.ones(8)))) == 4


def test_equal_programs_from_one_line_have_one_key():
    def double(factor):
        return traced(lambda x: x * factor, X).jaxpr

    key = _jaxpr.structural_key
    same, others = [double(2.0) for _ in range(2)], [double(3.0), double(-0.0)]
    assert key(same[0]) == key(same[1])
    assert hash(key(same[0])) == hash(key(same[1]))
    assert len({key(j) for j in [*same, *others, double(0.0)]}) == 4
    elsewhere = traced(lambda x: x * 2.0, X).jaxpr
    assert key(elsewhere) != key(same[0])
    x, y = (traced(lambda x, y, i=i: (x, y)[i] + 1, X, X).jaxpr for i in (0, 1))
    assert key(x) != key(y)


def test_scopes_that_all_equations_share_are_taken_off():
    def f(x):
        with jax.named_scope("a"), jax.named_scope("b"):
            x = x + 1
        with jax.named_scope("a"):
            return -x

    common, jaxpr = _jaxpr.without_common_scope(traced(f, X).jaxpr)
    assert str(common) == "a"
    stacks = [str(eqn.source_info.name_stack) for eqn in jaxpr.eqns]
    assert stacks == ["b", ""]
    empty = _jaxpr.excerpt(jaxpr, [], [], [])
    assert _jaxpr.without_common_scope(empty)[0] == NameStack()


def test_a_precision_is_for_products_that_have_none_at_any_depth():
    @jax.jit
    def f(x, w):
        return x @ w + jnp.dot(x, w, precision="high")

    def precisions(jaxpr):
        found = (e for e in _jaxpr.equations(jaxpr) if e.primitive.name in products)
        return [eqn.params["precision"] for eqn in found]

    products = _jaxpr.PRODUCTS
    high, highest = lax.Precision.HIGH, lax.Precision.HIGHEST
    jaxpr = traced(f, X, W)
    assert precisions(jaxpr) == [None, (high,) * 2]
    changed = _jaxpr.with_precision(jaxpr, "highest")
    assert precisions(changed) == [(highest,) * 2, (high,) * 2]
    assert _jaxpr.with_precision(jaxpr, None) is jaxpr
    assert _jaxpr.with_precision(jaxpr, "BF16_BF16_F32") is jaxpr


def test_calls_are_inlined_with_their_constants_and_scopes():
    table = jnp.asarray(np.arange(128.0, dtype="float32").reshape(8, 16))

    @jax.jit
    def inner(x):
        return jnp.sin(x) * table

    @jax.jit
    def closed(x):
        return x - 1

    def f(x):
        with jax.named_scope("outer"):
            return closed(inner(x)) + 1

    def is_open(eqn):
        return eqn.params.get("name") == "inner"

    program = traced(f, X)
    jaxpr, constants = _jaxpr.inlined(program, is_open)
    found = [eqn.primitive.name for eqn in jaxpr.eqns]
    assert found == ["sin", "mul", "jit", "add"]
    assert {str(e.source_info.name_stack) for e in jaxpr.eqns} == {"outer"}
    whole = jaxpr.replace(constvars=[*constants])
    (got,) = _jaxpr.evaluate_all(whole, [X], [*constants.values()])
    np.testing.assert_allclose(got, f(X), rtol=1e-6)
    # Each time with variables of its own.
    again, _ = _jaxpr.inlined(program, is_open)
    assert not {*again.eqns[0].outvars} & {*jaxpr.eqns[0].outvars}


def test_an_equation_runs_with_other_parameters_in_its_scopes():
    def f(x):
        with jax.named_scope("inner"):
            return jnp.sum(x, 0)

    def run(x):
        with _jaxpr.scope(NameStack().extend("outer")):
            (result,) = _jaxpr.evaluate(eqn, [x], axes=(1,))
        return result

    eqn = only(traced(f, X))
    np.testing.assert_array_equal(run(X), jnp.sum(X, 1))
    assert str(only(traced(run, X)).source_info.name_stack) == "outer/inner"


def test_values_are_changed_where_they_arise():
    def f(x):
        return jnp.sin(x) * 2, 3.0

    jaxpr = traced(f, X).jaxpr
    sine = jaxpr.eqns[0].outvars[0]
    got, three = _jaxpr.evaluate_all(
        jaxpr, [X], change=lambda v, x: -x if v is sine else x
    )
    np.testing.assert_array_equal(got, -jnp.sin(X) * 2)
    assert three.dtype == jnp.float32
    assert three == 3


def test_primitives_of_several_results_run():
    jaxpr = traced(lambda x: jnp.linalg.qr(x)[1], W).jaxpr
    (got,) = _jaxpr.evaluate_all(jaxpr, [W])
    np.testing.assert_array_equal(got, jnp.linalg.qr(W)[1])
