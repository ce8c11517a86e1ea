"""Programs run by their plans, whatever a subclass makes of products."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_programs import PROGRAMS, W, X
from jax import lax

from jmp_scale import _jaxpr
from jmp_scale._autocast_interpreter import Interpreter, Notes, TraceCache
from jmp_scale._autocast_plan import Origin
from jmp_scale._marks import Names


@dataclasses.dataclass(frozen=True)
class Counting(Interpreter):
    """Runs products in float32, and counts them by the parts that they are in."""

    met: list = dataclasses.field(default_factory=list, compare=False)

    def run_products(self, unit, plan, env, halves):
        inputs = [env[v] for v in unit.jaxpr.invars]
        outs = _jaxpr.evaluate_all(unit.jaxpr, inputs)
        results = dict(zip(unit.jaxpr.outvars, outs, strict=True))
        for product, wires in unit.products:
            self.met.append((self.recompute, self.in_loop))
            operands = product.moved([outs[i] for i in wires[:2]])
            rest = [outs[i] for i in wires[2:]]
            eqn = product.jaxpr.eqns[-1]
            (result,) = _jaxpr.evaluate(eqn, [*operands, *rest])
            results[product.result] = result
        return results


def counting(**options):
    dtype = jnp.dtype("bfloat16")
    return Counting(dtype, dtype, Names(), TraceCache(), Notes(set()), **options)


def run(interpreter, fun, *args):
    jaxpr = jax.make_jaxpr(fun)(*args)
    return interpreter.run(jaxpr, [Origin.PARAMETER] * len(args), *args)


NAMES = [n for n, (_, _, halves, jit) in PROGRAMS.items() if halves and jit]


@pytest.mark.parametrize("name", NAMES[::6])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_program_gives_what_it_gave(name, recompute):
    fun, args, *_ = PROGRAMS[name]
    interpreter = counting(recompute=recompute)
    (got,) = jax.jit(lambda *xs: run(interpreter, fun, *xs))(*args)
    np.testing.assert_allclose(got, jax.jit(fun)(*args), rtol=1e-5, atol=1e-6)
    assert interpreter.met


def test_interpreters_know_the_part_that_they_run():
    @jax.custom_jvp
    def ruled(w, x):
        return x @ w

    ruled.defjvp(lambda xs, ts: (ruled(*xs), ts[1] @ xs[0] + xs[1] @ ts[0]))

    def program(w, x):
        x = lax.fori_loop(0, 2, lambda _, c: c @ w, x)
        return ruled(w, x)

    interpreter = counting()
    jax.make_jaxpr(lambda w, x: run(interpreter, program, w, x))(W, X)
    assert {*interpreter.met} == {(True, True), (True, False)}
    interpreter.met.clear()
    args = (W, X), (W, X)
    jax.make_jaxpr(
        lambda *xs: jax.jvp(lambda w, x: run(interpreter, ruled, w, x), *xs)
    )(*args)
    assert {*interpreter.met} == {(False, False)}


def test_equal_parts_are_made_once():
    made = []

    def make(*facts):
        made.append(facts)
        return facts

    cache = TraceCache()
    assert cache.made(make, 1, "a") is cache.made(make, 1, "a")
    assert cache.made(make, 2, "a") == (2, "a")
    assert cache.made(max, 2, 1) == 2
    assert made == [(1, "a"), (2, "a")]


def test_interpreters_are_equal_that_run_programs_alike():
    assert counting() == counting()
    assert counting() != counting(in_loop=True)
    assert counting() != counting(setting="highest")


def test_a_call_that_cannot_be_read_is_told_once_and_runs():
    @jax.custom_vjp
    def kernel(x, w):
        return x @ w

    kernel.defvjp(lambda x, w: (x @ w, w), lambda w, g: (g @ w.T, g.T @ g))
    interpreter = counting()
    with pytest.warns(UserWarning, match=r"kernel \(custom_vjp_call\) holds matrix"):
        (got,) = run(interpreter, lambda w, x: kernel(kernel(x, w), w), W, X)
    np.testing.assert_allclose(got, X @ W @ W, rtol=1e-4, atol=1e-5)
    assert interpreter.notes.warned == {"kernel"}
    assert interpreter.met == []


def test_the_setting_is_for_products_that_stay():
    def f(w, x):
        return x @ w, x[0] @ x[0]

    interpreter = counting(setting="highest")
    jaxpr = jax.make_jaxpr(lambda w, x: run(interpreter, f, w, x))(W, X)
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert {e.params["precision"] for e in products} == {
        None,
        (lax.Precision.HIGHEST,) * 2,
    }
