"""Names that keep products float32, and the mark of `autocast` in a traced program."""

import copy
import inspect
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_programs import W, X
from helpers import slow
from jax import lax

from jmp_scale import _jaxpr, autocast, in_half, keep_float32
from jmp_scale._autocast import marks as _marks
from jmp_scale._autocast.marks import matched


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
        ("head", True),
        ("head.dense", True),
        ("dense.head", False),
        ("hea", False),
        (f"test_marks.py:{LINE}", True),
        (f"test_marks.py:{LINE + 1}", False),
        ("dot_general", False),
    ],
)
def test_a_product_is_named_by_functions_scopes_and_places(name, is_exempt):
    match = matched({name, "nothing"}, product(Model().layer))
    assert match.is_exempt == is_exempt
    assert match.found == ({name} if is_exempt else set())
    assert {"energy", "layer", "head", "dense"} <= match.there
    assert "nothing" not in match.there
    assert not match.there & {"matmul", "dot_general", "bind", "ArrayImpl"}


def test_frames_outside_of_a_nested_trace_do_not_name_a_product():
    """jax 0.8 keeps them; it fails where JAX renames the function that traces."""

    def first(w, x):
        return lax.scan(lambda c, _: (c @ w, None), x, length=2)[0]

    def outside(w, x):
        return first(w, x)

    eqn = product(outside)
    match = matched({"outside"}, eqn)
    assert not match.is_exempt
    assert "outside" not in match.there


def test_a_jitted_function_is_traced_anew_for_each_dtype():
    jitted = jax.jit(in_half(lambda x: x * 1))

    def dtypes(half):
        with _marks.tracing(half):
            jaxpr = jax.make_jaxpr(jitted)(X)
        return {_jaxpr.dtype_name(e.outvars[0]) for e in _jaxpr.equations(jaxpr)}

    assert "float16" in dtypes("float16")
    assert "float16" not in dtypes("bfloat16")


MARKS = pytest.mark.parametrize("mark", [keep_float32, slow(in_half)])


class Net(eqx.Module):
    first: eqx.nn.Linear
    head: eqx.nn.Linear

    def __call__(self, x):
        return self.head(jnp.tanh(self.first(x)))


@MARKS
def test_a_marked_layer_stays_in_its_model(mark):
    keys = jax.random.split(jax.random.key(0))
    plain = Net(*(eqx.nn.Linear(16, 16, key=key) for key in keys))
    marked = eqx.tree_at(lambda m: m.head, plain, replace_fn=mark)
    at_call = eqx.tree_at(
        lambda m: m.head, plain, replace_fn=lambda h: lambda x: mark(h)(x)
    )

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    half = eqx.filter_jit(eqx.filter_grad(autocast(loss, "float16")))
    arrays = jax.tree.leaves(eqx.filter(marked, eqx.is_array))
    assert len(arrays) == 4
    assert marked.head.weight is marked.head.fun.weight
    grads = half(marked, X)
    assert float(jnp.abs(grads.head.weight).max()) > 0
    np.testing.assert_array_equal(grads.first.weight, half(at_call, X).first.weight)


@MARKS
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_marked_layer_is_copied_with_its_mark(mark, copied):
    layer = mark(eqx.nn.Linear(16, 16, key=jax.random.key(0)))
    other = copied(layer)
    assert jax.tree.structure(other) == jax.tree.structure(layer)
    np.testing.assert_array_equal(other(X[0]), layer(X[0]))
    assert repr(other).startswith("MarkedLayer(fun=Linear(")
    with pytest.raises(AttributeError, match="nothing"):
        layer.nothing  # noqa: B018


@MARKS
def test_a_class_cannot_be_marked(mark):
    name = mark.__name__
    with pytest.raises(TypeError, match=rf"^{name}: .* {name}\(Linear\(...\)\)"):
        mark(eqx.nn.Linear)
