"""Names that keep products float32, and the mark of `autocast` in a traced program."""

import inspect

import jax
import pytest
from autocast_programs import W, X
from jax import lax

from jmp_scale import _jaxpr, in_half
from jmp_scale._autocast import marks as _marks
from jmp_scale._autocast.marks import Names


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


def test_a_jitted_function_is_traced_anew_for_each_dtype():
    jitted = jax.jit(in_half(lambda x: x * 1))

    def dtypes(half):
        with _marks.tracing(half):
            jaxpr = jax.make_jaxpr(jitted)(X)
        return {_jaxpr.dtype_name(e.outvars[0]) for e in _jaxpr.equations(jaxpr)}

    assert "float16" in dtypes("float16")
    assert "float16" not in dtypes("bfloat16")
