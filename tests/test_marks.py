"""Names that keep products float32, and the mark of `autocast` in a traced program."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from autocast_programs import W, X
from jax import lax

from jmp_scale import _jaxpr, _marks, autocast, in_half, keep_float32
from jmp_scale._marks import Names


def energy(w, x):
    with jax.named_scope("head"), jax.named_scope("dense"):
        return x @ w


class Model:
    def layer(self, w, x):
        return energy(w, x)


LINE = inspect.getsourcelines(energy)[1] + 2


def product(fun=energy):
    (eqn,) = (
        eqn
        for eqn in _jaxpr.equations(jax.make_jaxpr(fun)(W, X))
        if eqn.primitive.name == "dot_general"
    )
    return eqn


@pytest.mark.parametrize(
    ("name", "is_exempt"),
    [
        ("energy", True),
        ("layer", True),
        ("Model.layer", True),
        ("Model", True),
        ("head", True),
        ("dense", True),
        ("head.dense", True),
        ("dense.head", False),
        ("hea", False),
        ("ense", False),
        (f"test_marks.py:{LINE}", True),
        (f"marks.py:{LINE}", False),
        (f"test_marks.py:{LINE + 1}", False),
        ("dot_general", False),
    ],
)
def test_a_product_is_named_by_functions_scopes_and_places(name, is_exempt):
    names = Names(frozenset({name, "nothing"}))
    assert names.exempt(product(Model().layer)) == is_exempt
    assert names.found == ({name} if is_exempt else set())
    assert {"energy", "layer", "head", "dense"} <= names.there
    assert "nothing" not in names.there


def test_a_call_is_named_by_its_function():
    @jax.jit
    def jitted(w, x):
        return x @ w

    call = jax.make_jaxpr(lambda w, x: jitted(w, x))(W, X).eqns[0]
    assert Names(frozenset({"jitted"})).exempt(call)
    assert not Names(frozenset({"other"})).exempt(call)


def test_frames_outside_of_a_nested_trace_do_not_name_a_product():
    """jax 0.8 keeps them; it fails where JAX renames the function that traces."""

    def first(w, x):
        return lax.scan(lambda c, _: (c @ w, None), x, length=2)[0]

    def outside(w, x):
        return first(w, x)

    eqn = product(outside)
    names = Names(frozenset({"outside"}))
    assert not names.exempt(eqn)
    assert "outside" not in names.there


def test_a_function_that_is_marked_stays_float32_without_names():
    assert Names().exempt(product(keep_float32(energy)))
    assert Names(frozenset({"x"})).exempt(product(keep_float32(energy)))
    assert not Names().exempt(product())
    assert not Names().there


def test_names_are_strings():
    assert _marks.checked_names("layer").names == {"layer"}
    assert _marks.checked_names(["a", "b"]).names == {"a", "b"}
    with pytest.raises(
        TypeError, match=r"names in keep_float32, got function 'energy'"
    ):
        _marks.checked_names([energy])


def test_marked_functions_get_the_dtype_of_the_trace():
    dtypes = []

    def note(*xs):
        dtypes.append([x.dtype.name for x in xs])
        return xs[0]

    ids = jnp.arange(3)
    half = in_half(lambda x, ids: (note(x, ids), keep_float32(note)(x, ids))[0])
    assert half(X, ids).dtype == jnp.float32
    with _marks.tracing(jnp.float16):
        assert half(X, ids).dtype == jnp.float32
    assert dtypes[:2] == [["float32", "int32"]] * 2
    assert dtypes[2:] == [["float16", "int32"], ["float32", "int32"]]


def test_a_jitted_function_is_traced_anew_for_each_dtype():
    jitted = jax.jit(in_half(lambda x: x * 1))

    def dtypes(half):
        with _marks.tracing(half):
            jaxpr = jax.make_jaxpr(jitted)(X)
        return {_jaxpr.dtype_name(e.outvars[0]) for e in _jaxpr.equations(jaxpr)}

    assert "float16" in dtypes("float16")
    assert "float16" not in dtypes("bfloat16")


def test_a_traced_program_names_the_units_of_autocast():
    def names(fun):
        calls = _jaxpr.equations(jax.make_jaxpr(fun)(W, X))
        return [_jaxpr.name_of_call(e) for e in calls if _jaxpr.subjaxprs(e)]

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) @ w)

    assert names(autocast(loss, "float16")).count(_marks.UNIT) == 3
    assert _marks.UNIT not in names(jax.jit(loss))
