"""Gradients of weights stored in half precision: float32 sums, rounded once."""

import functools
import itertools
import math
import types
import warnings
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_checks import flat, n32, what_is_read
from autocast_programs import arrays, products
from flax import nnx
from helpers import EXPLICIT, ONE_AXIS, by_name
from jax import lax
from jax.experimental import checkify
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_scale.nnx
from jmp_scale import _jaxpr, autocast
from jmp_scale._autocast.values import Stored

N, MANY = 16, 512
W, X, STACK, TABLE = arrays((N, N), (MANY, 4, N), (4, N, N), (40, N), scale=0.2)
B = jnp.zeros(N)
norm = jnp.linalg.norm


class Data(NamedTuple):
    x: jax.Array
    ids: jax.Array  # a quarter of them is 3
    y: jax.Array  # not 0 in the mean


IDS = np.where(np.arange(4 * MANY) % 4, np.arange(4 * MANY) % 37, 3)
DATA = Data(X, jnp.asarray(IDS), 1 + arrays((4 * MANY, N), seed=1)[0])


def near(y, wanted=1.0):
    return jnp.mean((y - wanted) ** 2)


def rows_of(lookup):
    return lambda d, t, w: near(n32(lookup(t, d.ids)) @ w, d.y)


def tied(d, t):
    return -jnp.mean(jax.nn.log_softmax(n32(t[d.ids]) @ t.T)[:, d.ids[::-1]])


def experts(d, stack):
    w = jnp.take(stack, d.ids[:MANY] % 4, 0)
    return near(jnp.einsum("tbi,tij->tbj", d.x, w), d.y[:MANY, None])


def moved(d, w, s):
    ends = jnp.concatenate([s[2, :8], s[3, 8:]])
    made = [w.T, (w * 2).reshape(N, N), s[1], ends]

    def body(h, x):
        for each in made:
            h = jnp.tanh(h @ each + x)
        return h, h

    return near(lax.scan(body, d.x[0], d.x)[1])


def carried(change):
    """The weight is in the carry of a loop."""

    @jax.checkpoint
    def turn(carry, x):
        h, w = carry
        step = (h.T @ x / MANY).astype(w.dtype)[None]
        return 0.99 * h + 0.01 * jnp.tanh(h @ w[0] + x), change(w, step)

    def fun(d, *weights):
        carry = d.x[0], jnp.stack([w.T for w in weights])
        return near(lax.scan(lambda c, x: (turn(c, x), None), carry, d.x)[0][0])

    return fun


def made(make):
    """The weight is made by a call before the loop."""

    def fun(d, *weights):
        w = make(d, *weights)
        return near(lax.map(lambda x: jnp.tanh(x @ w), d.x))

    return fun


@jax.custom_vjp
def straight(w):
    return jnp.round(w * 64) / 64


straight.defvjp(lambda w: (straight(w), None), lambda _, g: (g,))


def referred(d, w):
    ref = jax.new_ref(w)
    return near(lax.map(lambda x: jnp.tanh(x @ ref[...]), d.x))


def cancelling(d, gain, bias, w):
    def phi(x):
        return jnp.tanh(x * jax.nn.softplus(gain)[None] + bias[None])

    x = d.x[:64, 0]
    return near((phi(x + x[::-1] / 100) - phi(x)) @ w * 100)


def checked(x, w):
    jax.debug.callback(lambda w: None, w)
    checkify.check(x[0, 0] < 9, "an activation is large")
    return jnp.tanh(x @ w)


def mapped(fun):
    return lambda d, *weights: near(lax.map(lambda x: fun(x, *weights), d.x))


def loop_over(x, w, scale=1.0):
    return lax.map(lambda x: jnp.tanh(scale * x @ w), x)


def with_rules(fun):
    """`fun` as a custom_jvp function and as a custom_vjp one."""
    forward, reverse = jax.custom_jvp(fun), jax.custom_vjp(fun)
    forward.defjvp(lambda primals, tangents: jax.jvp(fun, primals, tangents))
    reverse.defvjp(lambda *of: jax.vjp(fun, *of), lambda backward, g: backward(g))
    return {"custom_jvp": forward, "custom_vjp": reverse}


PROGRAMS = {
    "index": (rows_of(lambda t, ids: t[ids]), TABLE, W),
    "rows of a sum": (
        rows_of(lambda t, ids: jnp.take(jnp.roll(t, 1, 0) + 1, ids, 0, fill_value=0.1)),
        TABLE,
        W,
    ),
    "rows in a call": (
        rows_of(lambda t, ids: lax.cond(ids[0] > 0, lambda: -t[ids], lambda: t[ids])),
        TABLE,
        W,
    ),
    "loop without a product": (
        lambda d, b: near(lax.map(lambda x: n32(x * b[None]), d.x) @ W - 1),
        W[0],
    ),
    "product": (lambda d, t, w: near(n32((t @ w)[d.ids]) @ W, d.y), TABLE, W),
    "tied": (tied, TABLE),
    "experts": (experts, STACK),
    "map": (mapped(lambda x, w, b: jax.nn.gelu(x @ w + n32(b[None]))), W, B),
    "moved": (moved, W, STACK),
    "cond": (
        mapped(lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w.T)),
        W,
    ),
    "pipeline": (
        mapped(lambda x, s: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, s)[0]),
        STACK,
    ),
    "checkpoint": (mapped(jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w)), W),
    "carry, data": (carried(lambda w, step: w - step), W),
    "made by scan": (
        made(lambda d, s: lax.scan(lambda c, w: (c, w.T), 0, s)[1][2]),
        STACK,
    ),
    "made by a rule": (made(lambda d, w: straight(w)), W),
    "made in float32": (made(lambda d, w: 4 * w / norm(n32(w)).astype(w.dtype)), W),
    "reference": (referred, W),
    "checked": (lambda d, w: checkify.checkify(mapped(checked))(d, w)[1], W),
    "cancelling": (cancelling, 1 + W[0], W[1], W),
    "loop with a rule": (
        lambda d, w: near(with_rules(loop_over)["custom_jvp"](d.x, w)),
        W,
    ),
}


def gradient_of(fun, weights):
    return jax.grad(fun, argnums=range(1, 1 + len(weights)))


def evaluated(gradient, weights, wrap=jax.jit):
    found = wrap(gradient)(DATA, *weights)
    assert [g.dtype for g in found] == [w.dtype for w in weights]
    return flat(found)


def distance(found, exact):
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


def of_float32(fun, weights, dtype, wrap=jax.jit):
    """The gradient of the rounded weights in float32, and its error by `autocast`."""
    wide = [w.astype(dtype).astype("float32") for w in weights]
    exact, found = (
        evaluated(gradient_of(f, wide), wide, wrap) for f in (fun, autocast(fun, dtype))
    )
    return exact, distance(found, exact)


@functools.cache
def of_program(name, dtype):
    fun, *weights = PROGRAMS[name]
    return of_float32(fun, weights, dtype)


def errors_of(name, dtype, half=autocast):
    """Errors of half-stored and of float32 weights' gradients, both of `autocast`."""
    fun, *weights = PROGRAMS[name]
    stored = [w.astype(dtype) for w in weights]
    found = evaluated(gradient_of(half(fun, dtype), stored), stored)
    exact, wide = of_program(name, dtype)
    return distance(found, exact), wide


# One rounding of each entry: 2^-9 of it at most.
ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
# One of each kind runs by default, in the dtype with the larger errors.
QUICK = "index", "tied", "cancelling"
CASES = by_name(
    [(name, "bfloat16") for name in QUICK],
    itertools.product(PROGRAMS, ROUNDING),
)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_gradient_is_a_float32_sum_that_is_rounded_once(name, dtype):
    if name == "loop with a rule" and jax.__version_info__ < (0, 9):
        pytest.skip("jax 0.8 cannot transpose a loop that moves values and tangents")
    error, wide = errors_of(name, dtype)
    assert error <= 1.5 * wide + ROUNDING[dtype]
    # Without a loss scale, float16 loses small cotangents of float32 weights too.
    assert error < {"bfloat16": 5e-3, "float16": 2e-2}[dtype]


def by_closure(fun, dtype):
    return lambda d, *weights: autocast(lambda d: fun(d, *weights), dtype)(d)


def unplanned(fun, dtype):
    return autocast(fun, dtype, recompute=False)


def mixed(fun, dtype):
    return autocast(fun, "float16", backward="bfloat16")


def of_attribute(fun, dtype):
    """Its weights are in an object that JAX cannot look into."""

    def run(d, *weights):
        held = types.SimpleNamespace(weights=weights)
        return autocast(lambda d: fun(d, *held.weights), dtype)(d)

    return run


def as_given(fun, dtype):
    """It names a half-precision dtype, so that float32 weights raise in it."""

    def checked(d, *weights):
        assert all(w.dtype == dtype for w in weights)
        return fun(d, *weights)

    half, wide = autocast(checked, dtype), autocast(fun, dtype)
    return lambda d, *ws: (half if ws[0].dtype == dtype else wide)(d, *ws)


WAYS = [
    (unplanned, "index"),
    # Of a closure, what it holds is found and traced as float32, too.
    (by_closure, "carry, data"),
    # What cannot be traced as float32: each reader casts a float32 value.
    (of_attribute, "tied"),
    (of_attribute, "experts"),
]
MORE_WAYS = [(unplanned, "cancelling"), (mixed, "index"), (by_closure, "product")]
MORE_WAYS += [(as_given, "map"), (as_given, "experts")]
AS_GIVEN = "made by scan", "rows of a sum", "rows in a call", "loop without a product"
MORE_WAYS += itertools.product([of_attribute, as_given], AS_GIVEN)


@pytest.mark.parametrize(("half", "name"), by_name(WAYS, MORE_WAYS))
def test_it_is_one_however_autocast_gets_the_weight(half, name):
    error, wide = errors_of(name, "bfloat16", half)
    assert error <= 1.5 * wide + 2.0**-9


def test_it_is_one_where_the_program_takes_the_gradient_itself():
    fun, *weights = PROGRAMS["index"]
    stored = [w.astype("bfloat16") for w in weights]
    found = evaluated(autocast(gradient_of(fun, weights), "bfloat16"), stored)
    exact, wide = of_program("index", "bfloat16")
    assert distance(found, exact) <= 1.5 * wide + 2.0**-9


MAP = mapped(lambda x, w: jnp.tanh(x @ w))


def in_shards(gradient):
    """Its gradient, of which each device has a part of the batch."""

    def local(d, *weights):
        grads = gradient(d, *weights)
        return jax.tree.map(lambda g: lax.pmean(g, "i"), grads)

    def run(d, *weights):
        specs = {"in_specs": (P("i"), *[P() for _ in weights]), "out_specs": P()}
        fun = jax.shard_map(local, mesh=ONE_AXIS, **specs, check_vma=False)
        return jax.jit(fun)(d, *weights)

    return run


def read_in_shards(d, t, w):
    specs = {"in_specs": (P(), P("i")), "out_specs": P("i")}
    read = jax.shard_map(lambda t, ids: n32(t[ids]), mesh=ONE_AXIS, **specs)
    return near(read(t, d.ids) @ w, d.y)


def rows_on_explicit_axes(gradient):
    """Its gradient, whose lookup says where the rows lie."""

    def run(d, *weights):
        with jax.set_mesh(EXPLICIT):
            ids = jax.device_put(d.ids, NamedSharding(EXPLICIT, P(None)))
            return jax.jit(gradient)(d._replace(ids=ids), *weights)

    return run


def placed_rows(table, ids):
    return table.at[ids].get(out_sharding=NamedSharding(EXPLICIT, P(None, None)))


AROUND = {  # what is around, the program and its weights
    "shard_map": (in_shards, MAP, W),
    "Explicit axes, a table": (rows_on_explicit_axes, rows_of(placed_rows), TABLE, W),
    "within": (jax.jit, read_in_shards, TABLE, W),
}


@pytest.mark.parametrize("around", AROUND)
def test_it_is_one_whatever_is_around(around):
    wrap, fun, *weights = AROUND[around]
    stored = [w.astype("bfloat16") for w in weights]
    half = gradient_of(autocast(fun, "bfloat16"), stored)
    exact, wide = of_float32(fun, weights, "bfloat16", wrap)
    # jax 0.8 rounds the part of each device too.
    roundings = 2 if around == "within" and jax.__version_info__ < (0, 9) else 1
    error = distance(evaluated(half, stored, wrap), exact)
    assert error <= 1.5 * wide + roundings * 2.0**-9


def test_half_precision_arrays_of_a_float32_program_stay_as_cast():
    def fun(w, x, ids):
        ref = jax.new_ref(jnp.zeros_like(x))
        ref[...] = 1.2345 * x
        y = jax.nn.one_hot(ids, N, dtype="bfloat16")[ids % 4]
        return ref[...].astype("bfloat16") * 3, y @ w

    args = W, X[0], DATA.ids[:8]
    half = autocast(fun, "bfloat16", recompute=False)
    got, wanted = (jax.jit(f)(*args)[0] for f in (half, fun))
    np.testing.assert_array_equal(got, wanted)
    assert str(jax.make_jaxpr(half)(*args)).count(" gather[") == 1


def test_what_a_lookup_fills_in_is_not_rounded():
    def fun(table):
        rows = table.at[jnp.asarray([0, 99])].get(mode="fill", fill_value=1e6)
        return jnp.sum(rows @ W) * 1e-6

    table = TABLE.astype("float16")
    np.testing.assert_allclose(
        autocast(fun, "bfloat16")(table), fun(n32(table)), rtol=0.02
    )


def test_a_while_reads_the_stored_values():
    def fun(d, w):
        def turn(carry):
            i, h = carry
            return i + 1, jnp.tanh(h @ w + d.x[i])

        return near(lax.while_loop(lambda c: c[0] < 8, turn, (0, d.x[0]))[1])

    def along(fun, w):
        return jax.jvp(jax.jit(functools.partial(fun, DATA)), (w,), (w,))

    cast, half = autocast(fun, "bfloat16"), W.astype("bfloat16")
    assert products(cast, DATA, half) == [("bfloat16", "bfloat16")]
    got, wanted = along(cast, half), along(fun, n32(half))
    np.testing.assert_allclose(got, wanted, rtol=0.01)


def passed_on(x, w):
    return lax.scan(lambda w, x: (straight(w), jnp.tanh(x @ n32(w))), w, x)[1]


CALLS = {  # what adds up, and its loop
    "custom_vjp": (with_rules(loop_over)["custom_vjp"], loop_over),
    "branches of platforms": (
        lambda *of: lax.platform_dependent(*of, cpu=loop_over, default=loop_over),
        loop_over,
    ),
    "custom_vjp, carry": (passed_on, passed_on),
}


@pytest.mark.filterwarnings("ignore:autocast")
@pytest.mark.parametrize("name", by_name(["custom_vjp", "custom_vjp, carry"], CALLS))
def test_it_is_one_in_a_call_that_autocast_does_not_enter(name):
    run, _ = CALLS[name]
    fun, stored = lambda d, w: near(n32(run(d.x, w))), [W.astype("bfloat16")]
    found = evaluated(gradient_of(autocast(fun, "bfloat16"), stored), stored)
    exact, wide = of_float32(fun, stored, "bfloat16")
    assert distance(found, exact) <= 1.5 * wide + 2.0**-9


def told(run, w):
    """The warnings of loops that add up in half precision, in a gradient of `w`."""
    fun = of_attribute(lambda d, w: near(n32(run(d.x, w))), "bfloat16")
    gradient = jax.grad(functools.partial(fun, DATA))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert jax.eval_shape(gradient, w).dtype == w.dtype
    return [s for s in (str(each.message) for each in seen) if "a loop (" in s]


@pytest.mark.filterwarnings("ignore:autocast")
@pytest.mark.parametrize("name", CALLS)
def test_a_sum_out_of_reach_is_told_by_line_and_a_cast_cures_it(name):
    (run, loop), half = CALLS[name], W.astype("bfloat16")
    (message,) = told(run, half)
    line = loop.__code__.co_firstlineno + 1
    assert f"test_types_first.py:{line}" in message
    assert "a bfloat16 array (16x16)" in message
    assert "cast it before the loop" in message
    assert not told(lambda x, w: run(x, n32(w)), half)


def test_what_gets_no_gradient_is_not_told():
    w = W.astype("bfloat16")
    for fixed in (lambda _: w, lax.stop_gradient):
        assert not told(lambda x, w, f=fixed: passed_on(x, f(w)) * w[0, 0], w)


@pytest.mark.filterwarnings("ignore:autocast")
@pytest.mark.parametrize("rule", ["custom_jvp", "custom_vjp"])
def test_a_single_reader_out_of_reach_is_not_told(rule):
    one = with_rules(lambda x, w: jnp.tanh(x @ w))[rule]
    assert not told(lambda x, w: lax.map(lambda x: one(x, w), x), W.astype("bfloat16"))


def test_of_an_nnx_module_too():
    model = nnx.Linear(N, N, rngs=nnx.Rngs(0))

    def loss(model, x):
        return near(nnx.scan(lambda m, x: (m, jnp.tanh(m(x))))(model, x)[1])

    def gradient(fun, dtype):
        nnx.update(model, jax.tree.map(lambda p: p.astype(dtype), nnx.state(model)))
        return flat(nnx.jit(nnx.grad(fun))(model, DATA.x).kernel[...])

    half = jmp_scale.nnx.autocast(loss, "bfloat16")
    found = gradient(half, "bfloat16")
    wide, exact = gradient(half, "float32"), gradient(loss, "float32")
    assert distance(found, exact) <= 1.5 * distance(wide, exact) + 2.0**-9


def test_a_constant_of_a_loop_has_its_gradient_once():
    """It is the weight twice: what products read has no gradient."""

    def both(w):
        constant = Stored.of(w).as_constant()
        return jnp.sum(constant.wide) + jnp.sum(n32(constant.half))

    assert (jax.grad(both)(W.astype("bfloat16")) == 1).all()


def test_second_derivatives_too():
    def along(fun, w):
        gradient = jax.jit(jax.grad(functools.partial(fun, DATA)))
        return flat(jax.jvp(gradient, (w,), (w,))[1])

    half = W.astype("bfloat16")
    found = along(autocast(MAP, "bfloat16"), half)
    assert distance(found, along(MAP, n32(half))) < 0.01


def test_devices_gather_a_matrix_and_add_up_its_gradient_in_half():
    def loss(w):
        return near(jnp.tanh(X[0] @ jax.sharding.reshard(w, P())))

    with jax.set_mesh(EXPLICIT):
        half = jax.device_put(W.astype("bfloat16"), P(EXPLICIT.axis_names[0]))
        gradient = jax.make_jaxpr(jax.grad(autocast(loss, "bfloat16")))(half)
    moves = [e for e in _jaxpr.equations(gradient) if e.primitive.name == "reshard"]
    sent = [v for e in moves for v in e.outvars if _jaxpr.shape(v) == W.shape]
    assert {*map(_jaxpr.dtype_name, sent)} == {"bfloat16"}


def constants_of_loops(jaxpr):
    """Shapes of the float32 arrays that loops read in each turn."""
    for eqn in _jaxpr.equations(jaxpr):
        if loop := _jaxpr.loop_of(eqn):
            inner, _ = _jaxpr.open_jaxpr(loop.body)
            wide = filter(_jaxpr.is_float32, inner.invars[: loop.consts])
            yield from map(_jaxpr.shape, wide)


@pytest.mark.parametrize("name", ["map", "checkpoint", "pipeline"])
def test_no_loop_reads_a_float32_copy_of_a_weight(name):
    if jax.__version_info__ >= (0, 11):
        pytest.skip("a loop has a constant that XLA drops, because nothing reads it")
    fun, *weights = PROGRAMS[name]
    stored = [w.astype("bfloat16") for w in weights]
    argnums = tuple(range(1, 1 + len(weights)))
    grad = jax.make_jaxpr(jax.grad(autocast(fun, "bfloat16"), argnums))(DATA, *stored)
    sizes = [*map(math.prod, constants_of_loops(what_is_read(grad)))]
    assert max(sizes, default=0) < N * N


def test_layers_that_compare_dtypes_take_half_precision_weights():
    layer = eqx.nn.Conv2d(3, 4, 3, dtype="bfloat16", key=jax.random.key(0))
    x = jnp.ones((3, 8, 8))

    def loss(layer, x):
        return jnp.mean(layer(x) ** 2)

    with pytest.raises(TypeError, match="same dtypes"):
        loss(layer, x)
    half = eqx.filter_jit(eqx.filter_value_and_grad(autocast(loss, "bfloat16")))
    value, gradient = half(layer, x)
    wide = jax.tree.map(lambda w: w.astype("float32"), layer, is_leaf=eqx.is_array)
    assert (value.dtype, gradient.weight.dtype) == ("float32", "bfloat16")
    np.testing.assert_allclose(value, loss(wide, x), rtol=0.02)
