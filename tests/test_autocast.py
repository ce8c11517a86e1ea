"""`autocast`: products in half precision, the rest as it was, for whatever program."""

import jax
import numpy as np
import pytest
from autocast_programs import PROGRAMS

from jmp_scale import _jaxpr, autocast

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")


def products(fun, *args):
    """The dtypes of both operands of each product, nested ones too."""

    def of(jaxpr):
        for eqn in _jaxpr.open_jaxpr(jaxpr)[0].eqns:
            if eqn.primitive.name in PRODUCTS:
                yield tuple(_jaxpr.dtype_name(v) for v in eqn.invars[:2])
            for body in _jaxpr.subjaxprs(eqn):
                yield from of(body)

    return list(of(jax.make_jaxpr(fun)(*args)))


def assert_close(got, wanted, tolerance):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        if x.size:
            x, y = np.asarray(x, float), np.asarray(y, float)
            assert np.abs(x - y).max() <= tolerance * max(np.abs(y).max(), 1e-3)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:autocast")
def test_a_program_has_the_value_and_gradient_of_the_float32_one(name):
    fun, args, halves, jit, options = PROGRAMS[name]
    cast = autocast(fun, "float16", **options)
    compiled = jax.jit if jit else lambda f: f
    wanted = compiled(jax.value_and_grad(fun))(*args)
    got = compiled(jax.value_and_grad(cast))(*args)
    assert_close(got, wanted, 0.02)
    dtypes = products(jax.value_and_grad(cast), *args)
    assert (("float32", "float32") in dtypes) == (not halves)
    assert any("float16" in pair for pair in dtypes)


@pytest.mark.parametrize("name", ["attention", "scan_over_layers", "remat"])
def test_x64_changes_nothing_for_a_float32_program(name):
    fun, args, *_ = PROGRAMS[name]
    wanted = jax.value_and_grad(autocast(fun, "float16"))(*args)
    with jax.enable_x64(True):
        got = jax.value_and_grad(autocast(fun, "float16"))(*args)
    assert_close(got, wanted, 1e-2)
