"""What the user says of a part of the program: `keep_float32`, `in_half` and names."""

import copy
import functools
import inspect
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_checks import BF16, F16, F32, assert_close, assert_norm_close, n32
from autocast_programs import PRODUCTS, W, X, layer, mean_square, products
from helpers import ONE_AXIS, by_name, slow
from jax import lax
from jax.sharding import PartitionSpec as P

from jmp_scale import _jaxpr, autocast, in_half, keep_float32
from jmp_scale._autocast import marks
from jmp_scale._autocast.marks import matched


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


@pytest.mark.parametrize("setting", ["highest", "tensorfloat32", "F32_F32_F32"])
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


def energy(w, x):
    with jax.named_scope("head"), jax.named_scope("dense"):
        return x @ w


LINE = inspect.getsourcelines(energy)[1] + 2


def test_products_of_a_name_stay_float32():
    jitted = jax.jit(layer)  # one jaxpr, called twice

    def loss(w, x):
        with jax.named_scope("first"):
            x = jitted(w, x)
        return mean_square(energy(w, jitted(w, x)))

    for names, dtypes in (
        (("first", "energy"), [F32, F16, F32]),
        (["layer"], [F32, F32, F16]),
        ("dense", [F16, F16, F32]),
    ):
        half = autocast(loss, "float16", keep_float32=names)
        assert products(half, W, X) == dtypes


@pytest.mark.parametrize("option", ["keep_float32", "float32_results"])
def test_a_name_that_matches_nothing_warns_and_lists_what_there_is(option):
    names = {option: ("typo", "energy")}
    half = autocast(lambda w, x: energy(w, x) @ w, "float16", **names)
    words = rf"{option} names nothing .*\['typo'\].*dense.*energy.*head"
    with pytest.warns(UserWarning, match=words):
        half(W, X)


@jax.custom_vjp
def kernel(q, k, n):
    """Like a fused kernel: one dtype, and a derivative of its own."""
    assert q.dtype == k.dtype
    return q @ k * n


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


@pytest.mark.parametrize("recompute", [True, slow(False)])
@pytest.mark.parametrize("within", by_name(["plain", "shard_map"], WITHIN))
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
MASKS = [("bfloat16", LEAST), ("float16", -1e9), slow(("float16", LEAST))]


@pytest.mark.parametrize("numpy", [jnp, slow(np)])
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


def test_the_inner_autocast_decides():
    def loss(w, x, layer=layer):
        return mean_square(layer(w, x) @ w)

    inner = keep_float32(autocast(layer, "bfloat16"))
    nested = autocast(functools.partial(loss, layer=inner), "float16")
    assert products(nested, W, X) == [BF16, F16]
    got, wanted = (jax.value_and_grad(f)(W, X) for f in (nested, loss))
    assert_close(got, wanted, 0.02)


class Model:
    def layer(self, w, x):
        return energy(w, x)


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
        with marks.tracing(half):
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
