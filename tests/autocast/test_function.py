"""The result of autocast is a function, named, bound and pickled like its own."""

import copy
import functools
import inspect
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import jmp_scale
import jmp_scale.nnx
from jmp_scale import autocast


def loss(w, x=2.0):
    """A product of w with itself."""
    return jnp.sum(w @ w) * x


@functools.partial(autocast, dtype="bfloat16")
def decorated(w):
    return jnp.sum(w @ w)


W = jnp.eye(4)


@pytest.mark.parametrize("transform", [autocast, jmp_scale.nnx.autocast])
def test_name_documentation_and_signature_are_those_of_the_function(transform):
    half = transform(loss, "bfloat16")
    assert inspect.signature(half) == inspect.signature(loss)
    assert inspect.unwrap(half) is loss
    assert inspect.getdoc(half) == inspect.getdoc(loss)
    names = ("__name__", "__qualname__", "__module__")
    assert all(getattr(half, name) == getattr(loss, name) for name in names)
    assert "loss" in jax.jit(half).lower(W).as_text().splitlines()[0]


class Plain:
    s = 2.0

    @functools.partial(autocast, dtype="bfloat16")
    def loss(self, w):
        return self.s * jnp.sum(w @ w)


class Model(eqx.Module):
    w: jax.Array

    @functools.partial(autocast, dtype="bfloat16")
    def __call__(self, x):
        return jnp.sum(x @ self.w)


def test_a_decorated_method_is_bound_to_its_object():
    assert inspect.ismethod(Plain().loss)
    assert float(jax.jit(Plain().loss)(W)) == 8
    assert float(jax.jit(lambda w: Plain.loss(Plain(), w))(W)) == 8


def test_a_decorated_method_of_a_module_is_differentiated():
    model = Model(2 * W)
    assert float(eqx.filter_jit(model)(W)) == 8
    grads = eqx.filter_jit(eqx.filter_grad(Model.__call__))(model, W)
    assert grads.w.tolist() == jnp.ones((4, 4)).tolist()


def test_a_decorated_function_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert copy.deepcopy(decorated) is decorated
