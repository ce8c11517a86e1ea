"""`autocast`: products in half precision, the rest as it was, for whatever program."""

import collections
import functools
import gc
import re
import weakref
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_programs import (
    B3,
    PRODUCTS,
    PROGRAMS,
    N,
    W,
    X,
    convolve,
    layer,
    mean_square,
    products,
)
from flax import linen, nnx
from flax.training.dynamic_scale import DynamicScale
from helpers import EXPLICIT, ONE_AXIS, one_of, sharded
from jax import export, lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.experimental import jet, pallas
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_scale.nnx
from jmp_scale import _jaxpr, autocast, in_half, keep_float32

F16, BF16, F32 = ((name, name) for name in ("float16", "bfloat16", "float32"))


def two_layers(w, x):
    return mean_square(layer(w, layer(w, x)))


def assert_close(got, wanted, tolerance):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        if x.size:
            x, y = np.asarray(x, float), np.asarray(y, float)
            assert np.abs(x - y).max() <= tolerance * max(np.abs(y).max(), 1e-3)


def assert_close_gradients(loss, *args, tolerance=0.02):
    """Also its value, cast to float16 and as it is."""
    half = autocast(loss, "float16")
    got, wanted = (jax.jit(jax.value_and_grad(f))(*args) for f in (half, loss))
    assert_close(got, wanted, tolerance)


@pytest.mark.parametrize("name", one_of(5, PROGRAMS))
@pytest.mark.filterwarnings("ignore:autocast")
def test_a_program_has_the_value_and_gradient_of_the_float32_one(name):
    fun, args, halves, jit = PROGRAMS[name]
    cast = autocast(fun, "float16")
    compiled = jax.jit if jit else lambda f: f
    wanted = compiled(jax.value_and_grad(fun))(*args)
    got = compiled(jax.value_and_grad(cast))(*args)
    assert_close(got, wanted, 0.02)
    dtypes = products(jax.value_and_grad(cast), *args)
    assert (F32 in dtypes) == (not halves)
    assert any("float16" in pair for pair in dtypes)


def test_x64_changes_nothing_for_a_float32_program():
    fun, args, *_ = PROGRAMS["attention"]
    grad = jax.value_and_grad(autocast(fun, "float16"))
    wanted = jax.jit(grad)(*args)
    with jax.enable_x64(True):
        got = jax.jit(grad)(*args)
    assert_close(got, wanted, 1e-2)


def kept(fun, *args):
    """Types of the arrays that the backward pass keeps, except arguments and casts."""

    def backward(*args):
        return jax.tree.leaves(jax.vjp(fun, *args)[1])

    jaxpr = jax.make_jaxpr(backward)(*args).jaxpr
    given, casts = {*jaxpr.invars}, ("convert_element_type", "stop_gradient")
    for eqn in jaxpr.eqns:
        name, own = eqn.primitive.name, given.issuperset(_jaxpr.variables(eqn.invars))
        # A function of one array that returns it: its value, and its gradient.
        returns = name == "custom_jvp_call" and not eqn.params["call_jaxpr"].eqns
        if own and (name in casts or returns):
            given.update(eqn.outvars)
    results = [v for v in jaxpr.outvars if not _jaxpr.is_literal(v)]
    return [v.aval for v in dict.fromkeys(results) if v not in given]


@pytest.mark.parametrize("dtype", ["float32", "half", int])
def test_a_dtype_that_is_not_half_precision_is_an_error(dtype):
    names = 'float16 or bfloat16, got .*"f16" and "bf16"'
    with pytest.raises(ValueError, match=f"expected dtype {names}"):
        autocast(layer, dtype)
    with pytest.raises(ValueError, match=f"expected backward {names}"):
        autocast(layer, "float16", backward=dtype)


@pytest.mark.parametrize("dtype", ["bf16", jnp.bfloat16])
def test_a_dtype_is_a_name_or_a_dtype_and_a_partial_decorates(dtype):
    @functools.partial(autocast, dtype=dtype)
    def decorated(w, x):
        """What it does."""
        return layer(w, x)

    assert products(decorated, W, X) == [BF16]
    assert (decorated.__name__, decorated.__doc__) == ("decorated", "What it does.")


@pytest.mark.parametrize("recompute", [True, False])
def test_only_gradients_of_weights_are_added_in_float32(recompute):
    """Also if the products are in different places of the program."""

    def loss(w, b, x):
        h = x @ W + b
        small = lax.stop_gradient(h.T @ h) * 0 + jnp.eye(N) / 512
        return jnp.sum(h @ w) + jnp.sum(h @ small) + jnp.sum(h @ (w / 512))

    grad = jax.grad(autocast(loss, "bfloat16", recompute=recompute), (0, 1))
    of_weight, of_activation = grad(jnp.eye(N), jnp.ones((8, N)), 0 * X)
    # Each entry is one of 1, 1/512 and 1/512. In bfloat16 the first one alone is left.
    assert {*np.unique(of_activation)} == {1.0}
    np.testing.assert_array_equal(of_weight, 8 * (1 + 1 / 512))


def sizes_of(fun, *args):
    """How many arrays of the size of `X` are kept, by dtype."""
    avals = [a for a in kept(fun, *args) if a.size >= X.size]
    assert all(a.size == X.size for a in avals)
    return collections.Counter(a.dtype.name for a in avals)


@pytest.mark.skipif(
    getattr(jax.config, "jax_remat3", False),
    reason="JAX_REMAT3 transposes no checkpoint: derivatives save what they compute",
)
def test_a_layer_keeps_its_stream_and_the_results_of_its_products():
    def loss(w, x):
        for _ in range(3):
            y = jax.nn.gelu(x @ w) @ w
            x = x + jax.nn.standardize(y, epsilon=1e-6)
        return mean_square(x)

    # Of six products the results, of two streams what a product or the loss reads.
    assert sizes_of(autocast(loss, "float16"), W, X) == {"float16": 7, "float32": 1}
    # Also with a weight that is stored in half precision.
    assert sizes_of(autocast(loss, "float16"), W.astype("float16"), X).total() == 8
    plain = sizes_of(autocast(loss, "float16", recompute=False), W, X)
    assert plain["float32"] > 9


def test_no_gradient_of_what_was_stopped_is_computed():
    def loss(w, x):
        y = layer(w, x)
        return mean_square(y[:4] @ w) + mean_square(lax.stop_gradient(jnp.sin(y)) @ w)

    half, plain = (products(jax.grad(f), W, X) for f in (autocast(loss, "f16"), loss))
    assert len(half) == len(plain)


def test_a_bfloat16_backward_pass_needs_no_loss_scale():
    def loss(w, x):
        return two_layers(w, x) * 1e-9

    half = autocast(loss, "float16", backward="bfloat16")
    both = products(jax.grad(half), W, X)
    assert both[:2] == [F16, F16]
    assert all("bfloat16" in pair for pair in both[2:])
    plain = autocast(loss, "float16")
    got, wanted, lost = (jax.jit(jax.grad(f))(W, X) for f in (half, loss, plain))
    assert_close(got * 1e9, wanted * 1e9, 0.03)
    assert not lost.any()  # all of it underflows


def test_what_is_marked_stays_float32():
    def exact(x, transposed, *, factor=1.0, note=None):
        assert transposed is False
        assert note == "static"
        return factor * (x @ (W.T if transposed else W)), note

    def loss(w, x):
        y, note = keep_float32(exact)(layer(w, x), False, factor=2.0, note="static")
        assert note == "static"
        return mean_square(y)

    assert products(autocast(loss, "float16"), W, X) == [F16, F32]
    assert keep_float32(exact)(X, False, note="static")[0].dtype == jnp.float32


@pytest.mark.parametrize("setting", ["highest", "tensorfloat32"])
def test_the_setting_for_precision_holds_for_what_stays_float32(setting):
    def loss(w, x):
        exact = keep_float32(jax.jit(jnp.dot))(layer(w, x), w)
        own = jnp.dot(exact, w, precision="highest")
        return mean_square(layer(w, own))

    def precisions(fun):
        jaxpr = jax.make_jaxpr(fun)(W, X)
        found = [e for e in _jaxpr.equations(jaxpr) if e.primitive.name in PRODUCTS]
        return [(_jaxpr.dtype_name(e.invars[0]), e.params["precision"]) for e in found]

    with jax.default_matmul_precision(setting):
        wanted = precisions(loss)[1][1]
        got = precisions(autocast(loss, "float16"))
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert got[0] == got[3] == ("float16", None)
    assert got[1:3] == [("float32", wanted), ("float32", highest)]


@pytest.mark.parametrize("setting", ["highest", "BF16_BF16_F32"])
def test_the_setting_for_precision_holds_around_a_linear_solve(setting):
    def loss(w, x):
        return mean_square(x @ jnp.linalg.solve(w.T @ w + jnp.eye(len(w)), w))

    with jax.default_matmul_precision(setting):
        assert jax.eval_shape(jax.grad(autocast(loss, "bfloat16")), W, X)


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: jnp.sin(x),
        lambda w, x: jnp.dot(x, w, precision="highest"),
        lambda w, x: x[0] @ jnp.sin(x.T),
        lambda w, x: jnp.dot(X, W),
    ],
)
def test_a_function_in_which_nothing_becomes_half_warns_once(fun):
    half = autocast(fun, "float16")
    with pytest.warns(
        UserWarning, match=r"no product became half.*\n.*: pass parameters"
    ):
        half(W, X)
    assert F16 not in products(half, W, X)  # filters make a warning an error


@pytest.mark.parametrize(
    ("stored", "result"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_a_product_that_was_cast_by_hand_stays_and_does_not_warn(stored, result):
    def fun(w, x):
        x, w = x.astype("bfloat16"), w.astype("bfloat16")
        return jnp.dot(x, w, preferred_element_type=result)

    half, w = autocast(fun, "bfloat16"), W.astype(stored)
    assert products(half, w, X) == [BF16]  # filters make a warning an error
    np.testing.assert_array_equal(half(w, X), fun(w, X))


STACK = jnp.stack([W, W.T])
LAYERS_OF_A_STACK = [
    lambda x: lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x @ STACK[i]), x),
    lambda x: lax.fori_loop(0, 2, lambda i, x: x @ jnp.take(STACK, i, axis=0), x),
    lambda x: x @ STACK[jnp.argmax(x @ W) % 2],  # an expert
]


@pytest.mark.parametrize(
    ("fun", "row", "batch"),
    [
        (lambda x: jnp.tanh(x @ W) @ W[:, :1], X[:1], X),
        (lambda x: x @ W / 2 @ (W.T * 0.5)[:8].T, X[0], X),
        (jax.vmap(lambda x: W @ x), X[:1], X),
        (lambda x: jnp.einsum("hk,hkn->hn", x, B3), X[:4, :8], None),
        (lambda x: (x @ W) @ (x[:1] @ W).T, X[:1], None),
        *((fun, X[0], X) for fun in LAYERS_OF_A_STACK),
    ],
)
def test_one_row_is_half_precision_as_a_batch_of_rows(fun, row, batch):
    half = jax.jit(autocast(fun, "bfloat16"))
    assert {*products(half, row)} == {BF16}
    if batch is not None:
        # Without this XLA:CPU leaves roundings out, not the same for both.
        options = {"xla_allow_excess_precision": False}
        got, wanted = (half.lower(x).compile(options)(x) for x in (row, batch))
        wanted = wanted[: len(row)] if row.ndim > 1 else wanted[0]
        np.testing.assert_allclose(got, wanted, 1e-6)


HALF_STORED = {
    "dot": lambda w, x: jnp.dot(x, w),
    "einsum": lambda w, x: jnp.einsum("bi,io->ob", x, w),
    "cast": lambda w, x: x @ w.T.astype(jnp.float32).T,
    "scan": lambda w, x: lax.scan(lambda x, w: (x @ w, None), x, w[None])[0],
    "ragged_dot": lambda w, x: lax.ragged_dot(x, n32(w[None]), jnp.array([8])),
    "convolution": lambda w, x: convolve(
        x.reshape(1, 8, 1, N), n32(w[None, None]), (1, 1), "SAME"
    ),
    "one row": lambda w, x: w @ x[0],
}


@pytest.mark.parametrize("dtype", one_of(2, ["float16", "bfloat16"]))
@pytest.mark.parametrize("stored", one_of(2, ["bfloat16", "float16"]))
@pytest.mark.parametrize("name", one_of(2, HALF_STORED))
def test_a_product_runs_in_the_dtype_of_a_weight_stored_in_half(name, stored, dtype):
    fun, w = HALF_STORED[name], W.astype(stored)
    loss = lambda w, x: mean_square(jnp.tanh(fun(w, jnp.sin(x))))  # noqa: E731
    half = jax.value_and_grad(autocast(loss, dtype))
    assert {*products(half, w, X)} == {(stored, stored)}
    value, grad = jax.jit(half)(w, X)
    wanted, wanted_grad = jax.value_and_grad(loss)(n32(w), X)
    assert grad.dtype == w.dtype
    assert_close(value, wanted, 0.02)
    assert_close(n32(grad), wanted_grad, 0.05)


def head(w, x):
    with jax.named_scope("logits"):
        return x @ w


def test_products_of_a_name_stay_float32():
    jitted = jax.jit(layer)  # one jaxpr, called twice

    def loss(w, x):
        with jax.named_scope("first"):
            x = jitted(w, x)
        return mean_square(head(w, jitted(w, x)))

    for names, dtypes in (
        (("first", "head"), [F32, F16, F32]),
        (["layer"], [F32, F32, F16]),
        ("logits", [F16, F16, F32]),
    ):
        half = autocast(loss, "float16", keep_float32=names)
        assert products(half, W, X) == dtypes


def test_a_name_that_matches_nothing_warns_and_lists_what_there_is():
    names = "typo", "head"
    half = autocast(lambda w, x: head(w, x) @ w, "float16", keep_float32=names)
    with pytest.warns(UserWarning, match=r"\['typo'\].*head.*logits"):
        half(W, X)
    with pytest.raises(TypeError, match=r"got a function 'head'.*keep_float32\(fun\)"):
        autocast(head, "float16", keep_float32=(head,))


NO_SCALE = "float16 gradients without a loss scale"
SCALE = jmp_scale.StaticLossScale(8.0)


def traced(fun, *args):
    """Traces anew, as `jax.jit` does, and compiles nothing."""
    return jax.eval_shape(lambda *args: fun(*args), *args)


@pytest.mark.filterwarnings("error:autocast")
def test_float16_gradients_of_no_loss_scale_warn_once():
    half = autocast(two_layers, "float16")

    def train(fun, loss_scale):
        value_and_grad = jmp_scale.value_and_grad(lambda *args: fun(*args), loss_scale)
        return traced(value_and_grad, W, X)

    # Filters make a warning an error.
    none = jmp_scale.NoOpLossScale()
    train(half, SCALE)
    train(lambda w, x: jmp_scale.grad(half, SCALE)(w, x).sum(), none)
    train(autocast(two_layers, "bfloat16"), none)
    train(autocast(two_layers, "float16", backward="bf16"), none)
    with pytest.warns(UserWarning, match=NO_SCALE) as record:
        train(half, none)
    assert [warning.filename for warning in record] == [__file__]
    train(half, none)


def scaled(w, x):
    return SCALE.scale(two_layers(w, x))


FORGOTTEN = {
    "grad": jax.grad,
    "of a jit": lambda f: jax.grad(jax.jit(f)),
    "a vmap": lambda f: lambda w, x: jax.vmap(jax.grad(f), (None, 0))(w, x[None]),
    "Equinox": lambda f: eqx.filter_jit(eqx.filter_grad(f)),
    "NNX": nnx.value_and_grad,
}
SCALED = {
    "after it": lambda half: jax.grad(lambda w, x: SCALE.scale(half(w, x))),
    "within it": lambda half: jax.grad(autocast(scaled, "float16")),
    "by a cotangent": lambda half: lambda w, x: jax.vjp(half, w, x)[1](jnp.float32(8)),
    "by Flax": lambda half: lambda w, x: DynamicScale().value_and_grad(half)(w, x)[2],
    "by value_and_grad": lambda half: jmp_scale.grad(half, SCALE),
    "no derivative": lambda half: half,
}


@pytest.mark.filterwarnings("error:autocast")
@pytest.mark.parametrize("how", FORGOTTEN)
def test_a_forgotten_loss_scale_warns_once(how):
    gradient = FORGOTTEN[how](autocast(two_layers, "float16"))
    with pytest.warns(UserWarning, match=NO_SCALE) as record:
        traced(gradient, W, X)
    assert len(record) == 1
    traced(gradient, W, X[1:])


@pytest.mark.filterwarnings("error:autocast")
@pytest.mark.parametrize("how", SCALED)
def test_a_loss_that_is_scaled_does_not_warn(how):
    traced(SCALED[how](autocast(two_layers, "float16")), W, X)


SECOND = {
    "reverse over reverse": lambda f: jax.grad(lambda w: jnp.vdot(jax.grad(f)(w), V)),
    "reverse over forward over reverse": lambda f: jax.grad(
        lambda w: jnp.vdot(jax.jvp(jax.grad(f), (w,), (V,))[1], V)
    ),
}
V = jnp.roll(W, 1, 0)


@pytest.mark.parametrize("derivative", one_of(2, SECOND))
def test_second_derivatives_have_the_range_of_the_backward_pass(derivative):
    def loss(w):  # so small that no cotangent is a float16 number but 0
        h = X + jnp.tanh(X @ w) @ w.T
        return 1e-9 * mean_square(jax.nn.softmax(h @ w) @ w + jnp.sin(h @ w))

    def computed(fun):
        lowered = jax.jit(SECOND[derivative](fun)).lower(W)
        # Else XLA:CPU leaves roundings out, in one of two programs that round alike.
        return lowered.compile({"xla_allow_excess_precision": False})(W)

    halved = functools.partial(autocast, loss, "float16", backward="bfloat16")
    got, plain = (computed(halved(recompute=r)) for r in (True, False))
    assert_norm_close(got, computed(loss), 0.03)
    assert_norm_close(got, plain, 0.01)


def assert_norm_close(got, wanted, tolerance):
    assert jnp.linalg.norm(got - wanted) < tolerance * jnp.linalg.norm(wanted)


@jax.custom_vjp
def kernel(q, k, n):
    """Like a fused kernel: one dtype, and a derivative of its own."""
    assert q.dtype == k.dtype
    return q @ k * n


def n32(x):
    return x.astype(jnp.float32)


# The rule computes in float32, and casts nothing back.
kernel.defvjp(
    lambda q, k, n: (kernel(q, k, n), (q, k, n)),
    lambda r, g: (
        n32(g) @ n32(r[1]).T * r[2],
        n32(r[0]).T @ n32(g) * r[2],
        np.zeros((), jax.dtypes.float0),
    ),
)
WITHIN = {
    "plain": lambda f: f,
    "remat": jax.checkpoint,
    # The rule of the kernel does not sum the gradient of `k` over devices.
    "shard_map": lambda f: jax.shard_map(
        f, mesh=ONE_AXIS, in_specs=(P("i"), P()), out_specs=P("i"), check_vma=False
    ),
    "scan": lambda f: (
        lambda q, k: lax.scan(lambda c, k: (f(c, k), None), q, k[None])[0]
    ),
}


@pytest.mark.parametrize("recompute", one_of(2, [True, False]))
@pytest.mark.parametrize("within", WITHIN)
def test_a_kernel_gets_half_precision_and_its_rule_may_return_float32(
    within, recompute
):
    doubled = in_half(lambda q, k: kernel(q, k, jnp.int32(2)))
    fused = WITHIN[within](doubled)

    def loss(w, x):
        return mean_square(fused(x @ w, w * w))

    half = autocast(loss, "bfloat16", recompute=recompute)
    assert products(half, W, X).count(BF16) >= 2
    got, wanted = (jax.jit(jax.grad(f, (0, 1)))(W, X) for f in (half, loss))
    assert_close(got, wanted, 0.05)
    assert doubled(X, W).dtype == jnp.float32


def test_the_inner_one_of_in_half_and_keep_float32_decides():
    def inner(q, k):
        y = keep_float32(lambda q, k: jnp.sin(q @ k))(q, k)
        assert y.dtype == jnp.bfloat16
        return y

    dot = lambda q, k: q @ k  # noqa: E731
    for fun, wanted in ((keep_float32(in_half(dot)), BF16), (in_half(inner), F32)):
        half = autocast(lambda w, x, f=fun: f(x @ w, w), "bfloat16")
        assert products(half, W, X) == [BF16, wanted]


def masked_attention(w, bias):
    """Also of rows that see nothing, as those of padding."""

    def attend(q, k, v, bias):
        scores = (q @ k.T).astype("float32") / 4 + bias
        return jax.nn.softmax(scores).astype(v.dtype) @ v

    return mean_square(in_half(attend)(X @ w, X @ w.T, X, bias))


LEAST = float(jnp.finfo("float32").min)
MASKS = [("bfloat16", LEAST), *(("float16", -v) for v in (1e9, 1e10, 1e30, -LEAST))]


@pytest.mark.parametrize("numpy", one_of(2, [jnp, np]))
@pytest.mark.parametrize(("dtype", "value"), MASKS)
def test_a_row_of_a_finite_mask_has_a_finite_gradient_in_half(dtype, value, numpy):
    # The last three rows see nothing.
    seen = np.tri(8, dtype=bool) & (np.arange(8) < 5)[:, None]
    bias = numpy.where(seen, numpy.float32(0), numpy.float32(value))
    half = autocast(lambda w: masked_attention(w, bias), dtype)
    held = jnp.maximum(bias, jnp.finfo(dtype).min.astype("float32"))
    w, wanted = W, jax.jit(jax.grad(masked_attention))(W, held)
    for _ in range(2):
        got = jax.jit(jax.grad(half))(w)
        assert_norm_close(got, wanted, 0.03)
        w = w - 1e-3 * got


def test_in_half_changes_no_infinity_and_no_overflow():
    values = jnp.array([-jnp.inf, LEAST, -1e9, -1e6, -7e4, 1e9, jnp.inf, jnp.nan])
    same = autocast(lambda x, w: (in_half(lambda x: x * 1)(x), w @ w), "float16")
    low, inf = float(jnp.finfo("float16").min), np.inf
    wanted = [-inf, low, low, -inf, -inf, inf, inf, np.nan]
    np.testing.assert_array_equal(same(values, W)[0], wanted)


def pallas_kernel(x, w):
    def body(x, w, y):
        y[...] = x[...] @ w[...]

    result = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pallas.pallas_call(body, result, interpret=True)(x, w)


def test_a_pallas_kernel_gets_half_precision():
    seen = []

    def spied(fun):
        def spy(*args, **kwargs):
            seen.append({x.dtype.name for x in args})
            return fun(*args, **kwargs)

        return in_half(spy)

    def fun(w, x):
        return spied(pallas_kernel)(x, w)

    for each in (fun, autocast(fun, "bfloat16")):
        jax.eval_shape(each, W, X)
    assert seen[-2:] == [{"float32"}, {"bfloat16"}]


@functools.partial(
    jax.shard_map, mesh=ONE_AXIS, in_specs=(P("i"), P("i")), out_specs=P("i")
)
def gathered(shard, x):
    return x @ lax.all_gather(shard, "i", tiled=True)


@pytest.mark.parametrize("around", ["scan", "cond", "loop", "all_gather", "experts"])
def test_gradients_of_weights_are_float32_whatever_is_done_to_them(around):
    big = jnp.full((512, N), 300.0)  # whose sums of 512 float16 cannot hold

    def total(w):
        return 400 * jnp.sum(big @ w)

    def loss(w):
        w = w.reshape(2, N // 2, N).transpose(1, 0, 2).reshape(N, N)
        w = functools.reduce(lambda w, _: 1.01 * w, range(40), w)
        if around == "scan":
            return lax.scan(lambda c, w: (c + total(w), None), 0.0, w[None])[0]
        if around == "cond":
            return lax.cond(big[0, 0] > 0, total, lambda w: jnp.sum(w @ w), w)
        if around == "loop":
            return lax.fori_loop(0, 1, lambda _, c: c + total(w), 0.0)
        if around == "all_gather":
            return 400 * jnp.sum(gathered(w, big))
        chosen = w[None][jnp.zeros(2, int)]
        return 400 * jnp.sum(big.reshape(2, 256, N) @ chosen)

    got, wanted = (jax.jit(jax.grad(f))(W) for f in (autocast(loss, "float16"), loss))
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.parametrize("backward", ["float16", "bfloat16"])
def test_a_loop_rounds_what_each_step_reads_and_sums_gradients_in_float32(backward):
    xs = jnp.full((3000, 8, N), 1 + 2.0**-10)  # float16 holds it, bfloat16 does not

    def loss(w):
        return lax.scan(lambda c, x: (c + jnp.sum(x @ w), None), 0.0, xs)[0]

    got = jax.grad(autocast(loss, "float16", backward=backward))(W)
    np.testing.assert_array_equal(got, 24000 * float(xs[0, 0, 0].astype(backward)))


@pytest.mark.parametrize(
    ("dtype", "result"),
    [("bfloat16", "bfloat16"), ("float8_e4m3fn", "float32"), ("int8", "float32")],
)
@pytest.mark.filterwarnings("ignore:autocast. no product became")
def test_what_the_user_cast_stays_as_cast(dtype, result):
    def f(w, x):
        x, w = (9 * x).astype(dtype), (9 * w).astype(dtype)
        return jnp.sum(jnp.dot(x, w, preferred_element_type=result).astype("float32"))

    half = autocast(f, "float16")
    assert products(half, W, X) == [(dtype, dtype)]
    assert half(W, X) == f(W, X)


def test_the_inner_autocast_decides():
    def loss(w, x, layer=layer):
        return mean_square(layer(w, x) @ w)

    inner = keep_float32(autocast(layer, "bfloat16"))
    nested = autocast(functools.partial(loss, layer=inner), "float16")
    assert products(nested, W, X) == [BF16, F16]
    got, wanted = (jax.value_and_grad(f)(W, X) for f in (nested, loss))
    assert_close(got, wanted, 0.02)


@pytest.mark.filterwarnings("ignore:autocast. no product became")
def test_a_program_without_products_stays_bit_for_bit():
    def fun(w, x):
        return lax.scan(lambda c, y: (c + jnp.sin(y), c), x[0] * w[0], x)[0].sum()

    half, grad = autocast(fun, "float16"), jax.jit(jax.value_and_grad(fun))
    found, wanted = jax.jit(jax.value_and_grad(half))(W, X), grad(W, X)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_allclose(found[1], wanted[1], 1e-5, 1e-6)


@pytest.mark.filterwarnings("ignore:autocast. no product became")
def test_float64_programs_stay_as_they_are():
    with jax.enable_x64(True):
        w, x = np.float64(W), jnp.asarray(np.float64(X))
        f = lambda x: layer(jnp.asarray(w), x)  # noqa: E731
        np.testing.assert_array_equal(autocast(f, "float16")(x), f(x))


def deep(factors):
    softmax = jax.jit(jax.nn.softmax)  # a call within each layer

    def loss(w, x):
        for i, factor in enumerate(factors):
            with jax.named_scope(f"layer_{i}"):
                x = softmax(x @ w) * factor
        return mean_square(x)

    return loss


def test_equal_layers_are_traced_once():
    def runs(layers):
        """How often a layer's cheap operations are evaluated."""
        spy = mock.Mock(wraps=_jaxpr.evaluate_all)
        with mock.patch.object(_jaxpr, "evaluate_all", spy):
            half = autocast(deep([2.0] * layers), "float16")
            jax.make_jaxpr(jax.grad(half))(W, X)
        return spy.call_count

    runs(1)  # JAX traces the product's gradients once in a process
    # The first run of an island is its own, the repeated ones those of all equal ones.
    # Under JAX_CUSTOM_JVP3 a function with a rule is traced when it is called, too.
    assert runs(9) - runs(3) in (6, 12)


LIKE = {  # what is done to the result of a layer, from one source line
    "power": (lax.integer_pow, [2, 3, 2]),
    "permutation": (lax.transpose, [(0, 1), (1, 0), (0, 1)]),
    "factor": (lambda y, factor: y * factor, [1.0, 2.0, np.float32(1), -1]),
    "constant": (lambda y, k: y * np.full((N, N), k, np.float32), [1, 2, 1]),
    "function": (lambda y, f: f(y), [jax.nn.relu, jnp.tanh, jax.nn.relu6]),
    "outputs": (lambda y, n: y + y[:n].sum(), [1, 2, 1]),
}


@pytest.mark.parametrize("what", one_of(3, LIKE))
def test_steps_that_differ_in_one_thing_are_not_one(what):
    change, values = LIKE[what]

    def loss(w, x):
        total = 0.0
        for i, value in enumerate(values * 2):
            x = change(jnp.tanh(x @ w), value)
            total += x.sum() if i % 2 else 0.0
        return mean_square(x @ w) + total

    assert_close_gradients(loss, W, W.T)


def test_a_product_behind_an_island_keeps_its_own_context():
    def loss(w, x):
        y = x @ w
        with set_xla_metadata(part="island"):
            y = jnp.tanh(y)
        return mean_square(y @ w)

    jaxpr = jax.make_jaxpr(jax.grad(autocast(loss, "float16")))(W, X)
    marked = [e.primitive.name for e in _jaxpr.equations(jaxpr) if e.ctx.xla_metadata]
    assert "tanh" in marked
    assert "dot_general" not in marked


def test_equal_layers_differ_in_what_they_read_twice():
    """The first one reads one array as input and operand, the others read two."""

    def f(w, x):
        first = h = x @ w
        for _ in range(3):
            h = jnp.tanh(h) @ first
        return jnp.sum(jnp.sin(h))

    square = W[:8, :8]
    got, wanted = (
        jax.jit(jax.grad(autocast(f, "float16", recompute=recompute)))(square, square.T)
        for recompute in (True, False)
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_each_layer_keeps_its_scopes_in_both_passes():
    def loss(w, x):
        with jax.named_scope("model"):
            return autocast(deep([2.0] * 4), "float16")(w, x)

    grad = jax.jit(jax.value_and_grad(loss))
    names = re.findall(r'op_name="([^"]*)"', grad.lower(W, X).compile().as_text())
    for i in range(4):
        own = [name for name in names if f"layer_{i}" in name]
        assert all(set(re.findall(r"layer_\d", name)) == {f"layer_{i}"} for name in own)
        exponentials = {name for name in own if name.endswith("/exp")}
        assert exponentials
        assert all("model" in name for name in exponentials)
        for operation in ("dot_general", "mul"):
            passes = ["transpose" in name for name in own if operation in name]
            assert {*passes} == {True, False}


def by_platform(w, x):
    both = {"cpu": layer, "default": lambda w, x: x @ w}
    return mean_square(lax.platform_dependent(w, x, **both))


def loops_that_end_one_after_the_other(w, x):
    def loop(v):
        carry = jnp.float32(0), v
        more = lambda c: c[0] < 9 * jnp.abs(v[0])  # noqa: E731
        return lax.while_loop(more, lambda c: (c[0] + 1, layer(w, c[1])), carry)[1]

    return mean_square(jax.vmap(loop)(x))


@pytest.mark.parametrize(
    ("fun", "call"),
    [
        (PROGRAMS["custom_vjp_with_products"][0], "opaque .custom_vjp_call"),
        (by_platform, "cond"),
        (loops_that_end_one_after_the_other, "while"),
    ],
)
@pytest.mark.filterwarnings("ignore:autocast. no product became")
def test_a_call_that_cannot_be_read_warns_once_and_stays_float32(fun, call):
    half = autocast(lambda w, x: fun(w, x) + fun(w, 2 * x), "float16")
    place = r"\(\S+autocast_programs.py:\d+, (opaque|layer)\)"  # in which a product is
    words = f"{call}. holds matrix products {place} and"
    with pytest.warns(UserWarning, match=words) as caught:
        value = half(W, X)
    assert len([w for w in caught if "holds" in str(w.message)]) == 1
    assert_close(value, fun(W, X) + fun(W, 2 * X), 0.01)
    assert F32 in products(half, W, X)


def late_cast(q, k):
    return jnp.tanh(n32(q) @ n32(k)).astype(q.dtype)


with_rule = jax.custom_vjp(late_cast)
with_rule.defvjp(
    lambda *of: (late_cast(*of), of), lambda of, g: jax.vjp(late_cast, *of)[1](g)
)


@pytest.mark.parametrize(
    ("fun", "names"), [(in_half(with_rule), ()), (with_rule, ("late_cast",))]
)
def test_a_call_that_is_marked_or_named_does_not_warn(fun, names):
    half = autocast(
        lambda w, x: mean_square(fun(x @ w, w)), "bfloat16", keep_float32=names
    )
    assert {*products(jax.grad(half), W, X)} == {BF16, F32}


@pytest.mark.parametrize("name", ["scan_reversed_and_unrolled", "remat"])
def test_loops_and_checkpoints_keep_their_options(name):
    fun, args, *_ = PROGRAMS[name]
    keys = ("reverse", "unroll", "prevent_cse")

    def options(fun):
        found = _jaxpr.equations(jax.make_jaxpr(fun)(*args))
        params = map(_jaxpr.params_of, found)
        return {tuple(each.get(key) for key in keys) for each in params}

    assert len(options(fun)) == 2  # and that of all other equations
    assert options(autocast(fun, "float16")) == options(fun)


def test_nothing_of_a_program_is_kept_after_its_trace():
    references = []

    def loss(w, x):
        factor = np.full((N, N), 2.0)
        references.append(weakref.ref(factor))
        act = jax.custom_jvp(jnp.sin)
        act.defjvp(lambda p, t: (act(*p), t[0] * factor[0, 0]))
        return mean_square(act(x @ w))

    half = autocast(loss, "float16")
    jax.block_until_ready(jax.jit(jax.grad(half))(W, X))
    jax.clear_caches()
    gc.collect()
    assert references
    assert all(reference() is None for reference in references)


@pytest.mark.parametrize(
    ("platform", "barriers"), [("cuda", True), ("tpu", False), ("cpu", False)]
)
def test_the_barrier_is_chosen_when_the_program_is_lowered(platform, barriers):
    grad = jax.jit(jax.grad(autocast(two_layers, "float16")))
    text = export.export(grad, platforms=[platform])(W, X).mlir_module()
    assert ("optimization_barrier" in text) == barriers


@pytest.mark.skipif(
    getattr(jax.config, "jax_remat3", False),
    reason="JAX_REMAT3 transposes no checkpoint: derivatives save what they compute",
)
def test_all_operations_share_the_cast_of_what_a_product_read():
    def stream(w, x):
        y = jax.nn.gelu(x @ w)
        return mean_square(y + layer(w, y) + y[::-1])

    def by_hand(w, x):
        w, x = w.astype("float16"), x.astype("float16")
        y = jax.nn.gelu((x @ w).astype("float32")).astype("float16")
        z = jnp.tanh((y @ w).astype("float32"))
        return mean_square(y.astype("float32") + z + y[::-1].astype("float32"))

    shared, plain = (
        autocast(stream, "float16", share_casts=share) for share in (True, False)
    )
    assert_close(shared(W, X), by_hand(W, X), 1e-6)
    assert shared(W, X) != plain(W, X)
    assert sizes_of(plain, W, X)["float32"] > sizes_of(shared, W, X)["float32"] == 0


@pytest.mark.parametrize(
    "inside",
    [
        lambda f: lambda y: lax.cond(y[0, 0] > 9, jnp.sin, f, y),
        functools.partial(jax.checkpoint, prevent_cse=False),
    ],
)
def test_there_is_no_barrier_in_a_loop(inside):
    def loss(w, x):
        step = inside(lambda y: layer(w, jax.nn.gelu(y @ w)))
        return jnp.sum(lax.scan(lambda y, _: (step(y), None), x, None, length=2)[0])

    grad = jax.jit(jax.grad(autocast(loss, "float16")))
    text = export.export(grad, platforms=["cuda"])(W, X).mlir_module()
    assert "optimization_barrier" not in text


def several(x, count):
    return jnp.stack([x * i for i in range(1, count + 1)])


def on_devices(f):
    """The mean over eight devices, each with an x of its own."""

    def mean(w, x):
        return jax.tree.map(lambda y: lax.pmean(y, "i"), f(w, x[0]))

    run = jax.shard_map(mean, mesh=ONE_AXIS, in_specs=(P(), P("i")), out_specs=P())
    return lambda w, x: run(w, several(x, 8))


AROUND = {
    "checkpoint": lambda f, w, x: jax.value_and_grad(jax.checkpoint(f))(w, x),
    "vmap": lambda f, w, x: jax.vmap(jax.value_and_grad(f), (None, 0))(
        w, several(x, 2)
    ),
    "scan": lambda f, w, x: lax.scan(
        lambda c, y: (c + f(c, y), jax.grad(f)(c, y)), w, several(x, 2)
    ),
    "linearize": lambda f, w, x: jax.linearize(f, w, x)[1](w, x),
    "hessian": lambda f, w, x: jax.hessian(lambda v: f(v[:, None] * w, x))(w[0]),
    "pmap": lambda f, w, x: jax.pmap(jax.grad(f), in_axes=(None, 0))(w, several(x, 8)),
    "shard_map": lambda f, w, x: jax.value_and_grad(on_devices(f))(w, x),
    "in shard_map": lambda f, w, x: on_devices(jax.grad(f))(w, x),
    "gradient": lambda f, w, x: autocast(jax.grad(f), "float16")(w, x),
}


@pytest.mark.parametrize("around", one_of(3, AROUND))
def test_it_composes_with_what_is_around_it(around):
    def loss(w, x):
        y = jax.nn.gelu(layer(w, x)) + x
        return mean_square(layer(w, y) + y)

    run = AROUND[around]
    run = run if around == "pmap" else jax.jit(run, static_argnums=0)
    assert_close(run(autocast(loss, "float16"), W, X), run(loss, W, X), 0.02)


@jax.custom_jvp
def solved(w, x):
    """As of a solver: its solution, and numbers that have no derivative."""
    y = x @ w
    return jnp.max(y), jnp.tanh(y), jnp.argmax(y)


@functools.partial(solved.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    (w, x), (dw, dx) = primals, map(zero_if_symbolic, primals, tangents)
    largest, y, place = solved(w, x)
    zeros = [zero_from_primal(v, symbolic_zeros=True) for v in (largest, place)]
    return (largest, y, place), (zeros[0], (1 - y**2) * (dx @ w + x @ dw), zeros[1])


def zero_if_symbolic(primal, tangent):
    is_zero = isinstance(tangent, SymbolicZero)
    return zero_from_primal(primal) if is_zero else tangent


@pytest.mark.parametrize("recompute", [True, False])
def test_a_rule_may_say_that_a_result_has_no_tangent(recompute):
    """As those of Optimistix, Lineax and Diffrax do."""

    def loss(scale, w, x):
        def step(x, _):
            largest, y, _ = solved(scale * w, x)
            return y / largest, None

        return mean_square(lax.scan(step, x, length=2)[0])

    half = autocast(loss, "float16", recompute=recompute)
    one = jnp.float32(1.0)
    got, wanted = (jax.jit(jax.grad(f))(one, W, X) for f in (half, loss))
    assert_close(got, wanted, 0.02)
    assert {*products(jax.grad(half), one, W, X)} == {F16}


DERIVATIVES = {
    "hessian": jax.hessian,
    "third": lambda f: jax.grad(jax.grad(jax.grad(f))),
}


@pytest.mark.parametrize("recompute", one_of(2, [True, False]))
@pytest.mark.parametrize("order", one_of(2, DERIVATIVES))
@pytest.mark.parametrize(
    "name", one_of(2, ["scan_over_layers", "custom_jvp", "remat", "cond"])
)
def test_higher_derivatives_are_those_of_the_float32_program(name, order, recompute):
    fun, (w, x), *_ = PROGRAMS[name]

    def derivative(fun):
        loss = lambda s: fun(s * w, s * x)  # noqa: E731
        return jax.jit(DERIVATIVES[order](loss))(jnp.float32(1.0))

    half = autocast(fun, "float16", recompute=recompute)
    assert_close(derivative(half), derivative(fun), 0.02)


SPLIT, WHOLE = (NamedSharding(ONE_AXIS, P(*names)) for names in (["i"], []))
split_layer = jax.jit(layer, in_shardings=(WHOLE, SPLIT), out_shardings=SPLIT)
split = jax.jit(lambda x: x * 1, out_shardings=SPLIT)
SHARDED = {
    "layer": lambda w, x: split_layer(w, split_layer(w, x)),
    "operand": lambda w, x: layer(w, split(x)),
    "result": jax.jit(lambda w, x: layer(w, x), out_shardings=SPLIT),
    "scan": lambda w, x: lax.scan(lambda c, _: (split_layer(w, c), 0), x, length=2)[0],
    "vmap": lambda w, x: jax.vmap(split_layer, (0, None))(jnp.stack([w, w]), x)[0],
    "numbers": lambda w, x: split_layer(
        w, x + jax.jit(lambda: 1.0, out_shardings=WHOLE)()
    ),
}


@pytest.mark.parametrize("name", one_of(2, SHARDED))
def test_the_shardings_of_an_inner_jit_are_kept(name):
    """Else each device computes all of it."""
    program = SHARDED[name]
    args = sharded(jnp.ones((64, 64)), ONE_AXIS, P()), jnp.ones((256, 64))

    def compiled(fun):
        return jax.jit(fun).lower(*args).compile()

    def flops(fun):
        cost = compiled(jax.grad(lambda w, x: mean_square(fun(w, x)))).cost_analysis()
        return cost["flops"]

    half = autocast(program, "bfloat16")
    got, wanted = (compiled(f).output_shardings for f in (half, program))
    assert got.is_equivalent_to(wanted, 2)
    assert flops(half) < 1.2 * flops(program)


def test_a_product_over_a_sharded_axis_keeps_the_sharding_of_its_result():
    def loss(w, x):
        y = jnp.einsum("bi,ij->bj", x, w, out_sharding=P("i"))
        return mean_square(jnp.tanh(y))

    with jax.set_mesh(EXPLICIT):
        args = sharded(W, EXPLICIT, P("i")), sharded(X, EXPLICIT, P(None, "i"))
        assert_close_gradients(loss, *args)


def test_auto_axes_among_explicit_ones():
    def loss(w, x):
        y = jax.nn.gelu(layer(w, x))
        inner = jax.sharding.auto_axes(
            lambda w, y: layer(w, layer(w, y)) + y, axes="i", out_sharding=P("i")
        )
        return mean_square(layer(w, inner(w, y) + y))

    with jax.set_mesh(EXPLICIT):
        args = sharded(W, EXPLICIT, P()), sharded(X, EXPLICIT, P("i"))
        assert {*products(autocast(loss, "float16"), *args)} == {F16}
        assert_close_gradients(loss, *args)


def attention(w, x):
    q, k, v = (x @ w for w in (w, w.T, 2 * w))
    return jax.nn.softmax(jnp.einsum("qd,kd->qk", q, k)) @ v


SYMBOLIC = {
    "attention": attention,
    "lookup": lambda w, x: w[jnp.argmax(x, 1)] @ w,
    "norm of a batch": lambda w, x: (x @ w / jnp.std(x @ w, 0, keepdims=True)) @ w,
    "scan": lambda w, x: lax.scan(lambda c, _: (layer(w, c), None), x, length=2)[0],
}


@pytest.mark.parametrize("name", one_of(2, SYMBOLIC))
def test_a_program_of_symbolic_sizes_is_that_of_each_size(name):
    """As `jax.export` traces it."""

    def loss(w, x):
        return mean_square(SYMBOLIC[name](w, x))

    step = jax.jit(jax.value_and_grad(autocast(loss, "float16")))
    (b,) = export.symbolic_shape("b")
    types = W, jax.ShapeDtypeStruct((b, N), jnp.float32)
    assert products(step, *types) == products(step, W, X)
    assert_close(export.export(step)(*types).call(W, X), step(W, X), 1e-3)


@pytest.mark.filterwarnings("ignore:autocast")
def test_a_custom_vjp_that_closes_over_data_is_an_error_that_names_the_cure():
    def loss(w, x):
        solve = jax.custom_vjp(lambda w: jnp.tanh(x @ w))
        solve.defvjp(lambda w: (solve(w), w), lambda w, g: (x.T @ g,))
        return mean_square(solve(w))

    grad = jax.grad(autocast(loss, "bfloat16"))
    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"custom_vjp .* Pass"):
        grad(W, X)
    outside = jax.jit(jax.grad(autocast(lambda w: loss(w, X), "bfloat16")))
    assert_close(outside(W), jax.grad(loss)(W, X), 0.02)


@jax.custom_vjp
def cubed(x):
    return x**3


cubed.defvjp(lambda x: (x**3, x), lambda x, g: (3 * x * x * g,))


def test_jet_raises_what_jax_says_and_blames_no_custom_vjp():
    """It knows no functions with rules of their own, of which autocast makes some."""
    half = autocast(lambda w: mean_square(cubed(X @ w)), "bfloat16")
    # Which error JAX raises depends on its version.
    known = jax.errors.UnexpectedTracerError, KeyError, AttributeError
    with pytest.raises(known) as caught:
        jet.jet(half, (W,), [[W, 0 * W]])
    assert "custom_vjp" not in str(caught.value)


def branching(w, batch, *rest, scale=1.0):
    return jnp.sum(w @ w) * scale if batch["x"].sum() > 0 else rest


def as_numpy(w, batch, *rest, scale=1.0):
    return jnp.sum(w) * np.asarray(rest[0]["y"]).sum()


def as_integer(w, batch, *rest, scale=1.0):
    return jnp.zeros(int(scale))


def as_index(w, batch, *rest, scale=1.0):
    return [w][batch["n"]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fun", [branching, as_numpy, as_integer, as_index])
def test_an_error_while_it_traces_names_function_and_argument_as_jit_does(fun, dtype):
    args = W.astype(dtype), {"n": jnp.int32(0), "x": V}, {"y": X}

    def message(transformed):
        with pytest.raises((TypeError, jax.errors.ConcretizationTypeError)) as caught:
            transformed(*args, scale=jnp.float32(2))
        return str(caught.value)

    wanted = message(jax.jit(fun))
    assert "test_autocast.py" in wanted
    assert message(autocast(fun, "bfloat16")) == wanted


def test_constant_results_are_arrays():
    half = autocast(lambda w: (X @ w, jnp.int32(3), jnp.asarray(1.0)), "float16")
    for x, dtype in zip(half(W)[1:], ("int32", "float32"), strict=True):
        assert x.at[...].add(1).dtype == dtype


def test_whatever_is_no_float_array_passes():
    def f(w, x, key, flags, *, name, nothing=None):
        assert name == "static"
        assert flags["train"] is True
        y = layer(w, x) + 0 * jax.random.uniform(key)
        return {"y": y, "n": 3, "name": name, "nothing": nothing, "key": key}, None

    args = (W, X, jax.random.key(0), {"train": True})
    out, none = autocast(f, "float16")(*args, name="static")
    assert (out["n"], out["name"], out["nothing"], none) == (3, "static", None, None)
    assert out["key"] == args[2]
    assert out["y"].dtype == jnp.float32


def test_numpy_arrays_are_arguments_as_in_jit():
    """Not constants, whose products stay float32."""
    half = autocast(two_layers, "bfloat16")
    assert half(np.float64(W), np.float64(X)) == half(W, X) != two_layers(W, X)


def test_effects_keep_their_order():
    seen = []

    def see(i, x):
        jax.debug.callback(lambda _: seen.append(i), x[0, 0], ordered=True)

    def f(w, x):
        y = layer(w, layer(w, x))
        for i, value in enumerate((x, y, layer(w, y), y, x)):  # also of earlier ones
            see(i, value)
        return y

    jax.block_until_ready(jax.jit(autocast(f, "float16"))(W, X))
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("recompute", [True, False])
def test_a_rule_may_have_an_ordered_effect(recompute):
    seen = []
    fun = jax.custom_jvp(jnp.tanh)

    @fun.defjvp
    def _(primals, tangents):
        y = jnp.tanh(primals[0])
        jax.debug.callback(lambda _: seen.append(1), y[0, 0], ordered=True)
        return y, tangents[0] * (1 - y * y)

    def loss(w):
        return mean_square(fun(X @ w))

    got = jax.jit(jax.grad(autocast(loss, "bfloat16", recompute=recompute)))(W)
    jax.effects_barrier()
    assert seen
    assert_close(got, jax.grad(loss)(W), 0.02)


def bare_nnx_loss(model, x):
    return mean_square(model(x))


def test_nnx_modules_are_refused_and_the_right_function_is_named():
    model = nnx.Linear(N, 4, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"got a Linear.*jmp_scale\.nnx\.autocast"):
        autocast(lambda d: 0.0, "float16")({"models": [model]})


def test_layers_of_linen_with_state_work_in_keep_float32():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            norm = linen.BatchNorm(use_running_average=False)
            x = keep_float32(norm)(linen.Dense(N)(x))
            x = linen.Dropout(0.5, deterministic=False)(linen.relu(x))
            return keep_float32(linen.Dense(3))(x)

    net, rngs = Net(), {"dropout": jax.random.key(1)}
    variables = jax.jit(net.init)({"params": jax.random.key(0), **rngs}, X)

    def loss(variables, x):
        y, new = net.apply(variables, x, mutable=["batch_stats"], rngs=rngs)
        return mean_square(y), new

    half = autocast(loss, "float16")
    assert products(half, variables, X) == [F16, F32]
    got, wanted = (
        jax.jit(jax.value_and_grad(f, has_aux=True))(variables, X) for f in (half, loss)
    )
    assert_close(got, wanted, 0.01)


def test_what_a_forward_pass_writes_to_nnx_modules_is_written():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(N, 32, rngs=rngs)
            self.norm = nnx.BatchNorm(32, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return keep_float32(self.dropout)(keep_float32(self.norm)(self.dense(x)))

    def step(loss):
        model = Net(nnx.Rngs(0))
        result = nnx.jit(nnx.value_and_grad(loss))(model, X)
        written = nnx.state(model, (nnx.BatchStat, nnx.RngCount))
        return jax.tree.leaves((result, written))

    wanted = step(bare_nnx_loss)
    half = functools.partial(jmp_scale.nnx.autocast, bare_nnx_loss, "float16")
    assert_close(step(half()), wanted, 0.02)
    # The counter of the random stream is among them.
    assert any(x.dtype == jnp.uint32 and x == 1 for x in wanted)


@pytest.mark.parametrize("transform", [lambda f: f, nnx.jit])
def test_attributes_that_nnx_modules_write_arrive(transform):
    class Net(nnx.Module):
        def __init__(self):
            self.dense, self.calls = nnx.Linear(N, N, rngs=nnx.Rngs(0)), 0

        def __call__(self, x):
            self.calls += 1
            self.label, self.lazy = "called", nnx.Linear(N, 3, rngs=nnx.Rngs(1))
            return self.lazy(self.dense(x))

    model = Net()
    half = jmp_scale.nnx.autocast(lambda model, x: model(x), "bfloat16")
    transform(half)(model, X)
    assert (model.calls, model.label, model.lazy.out_features) == (1, "called", 3)
