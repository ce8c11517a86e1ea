"""The gradient of a half-precision program beside float32's, and what is said of it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import by_name, count_traces
from losses import forgetful

import jmp_scale.nnx
from jmp_scale.diagnostics import compare_gradients, sensitive_products
from jmp_scale.diagnostics._precision.comparison import window_of

X = jnp.linspace(-1, 1, 128).reshape(32, 4)
DYNAMIC = jmp_scale.DynamicLossScale(2.0**10)
PARAMS = {"w": jnp.linspace(0.1, 0.9, 16).reshape(4, 4), "unused": jnp.ones(3)}


def loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)


def rules(found):
    return [finding.rule for finding in found.findings]


def test_the_error_is_that_of_the_gradients_themselves():
    half_loss = jmp_scale.autocast(loss, "bfloat16")
    found = compare_gradients(half_loss, loss, PARAMS, X)
    compiled = functools.partial(
        jax.jit, compiler_options={"xla_allow_excess_precision": False}
    )
    half, full = (compiled(jax.grad(f))(PARAMS, X)["w"] for f in (half_loss, loss))
    half, full = (np.asarray(g, np.float64) for g in (half, full))
    norm = np.linalg.norm(full)
    # Each program is compiled on its own, and may round elsewhere.
    assert found.error == pytest.approx(np.linalg.norm(half - full) / norm, rel=0.05)
    assert 1e-4 < found.error < 0.05
    assert found.is_precise
    assert found.float32_error < 1e-5
    of_unused, of_w = found.leaves
    assert (of_w.path, of_w.lost, of_w.finite) == ("['w']", 0, True)
    assert of_w.norm == pytest.approx(norm, rel=1e-5)
    assert of_unused[1:] == (0, 0, 0, True, 0)
    losses = float(loss(PARAMS, X)), float(half_loss(PARAMS, X))
    assert (found.loss, found.half_loss) == pytest.approx(losses, rel=1e-3)
    text = found.summary()
    number = f"{100 * found.error:.2g} %"
    verdict = f"The gradient is off by {number}, which is precise enough (10 % is b"
    assert text.startswith(verdict)
    assert (found.ok, found.findings) == (True, ())
    assert text.index("['w']") < text.index("['unused']")


@pytest.mark.filterwarnings("ignore:autocast. no product became")
def test_a_comparison_of_two_float32_programs_says_so():
    same = jmp_scale.autocast(loss, "bfloat16", keep_float32="loss")
    found = compare_gradients(same, loss, PARAMS, X)
    assert not found.is_precise
    assert not found.ok
    assert rules(found) == ["nothing in half precision"]


def in_bfloat16(tree):
    return jax.tree.map(lambda x: x.astype("bfloat16"), tree)


HALF = jmp_scale.autocast(loss, "bfloat16")
UNDER_AUTOCAST = {
    "itself": HALF,
    "jitted": jax.jit(HALF),
    "a partial": functools.partial(HALF, PARAMS),
    "a closure": lambda *args: HALF(*args) + loss(*args),
    "in a loop": lambda p, x: jax.lax.scan(lambda c, x: (c, HALF(p, x)), 0, x[None])[1],
    "differentiated": lambda *args: jax.value_and_grad(HALF)(*args)[0],
    "not recomputed": jmp_scale.autocast(loss, "float16", recompute=False),
    "beside casts by hand": lambda p, x: loss(p, x.astype("bfloat16")) + HALF(p, x),
    "of stored weights": lambda p, x: HALF(in_bfloat16(p), x),
    "a layer of NNX": lambda m, x: jmp_scale.nnx.autocast(nnx_loss, "float16")(m, x),
}


def nnx_loss(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.mark.parametrize("name", UNDER_AUTOCAST)
def test_a_float32_loss_under_autocast_is_refused_wherever_it_is(name):
    args = {
        "a partial": (X,),
        "a layer of NNX": (nnx.Linear(4, 4, rngs=nnx.Rngs(0)), X),
    }
    fun, args = UNDER_AUTOCAST[name], args.get(name, (PARAMS, X))
    scalar = lambda *args: jnp.sum(fun(*args))  # noqa: E731
    for compare in (sensitive_products, functools.partial(compare_gradients, scalar)):
        with pytest.raises(TypeError, match="pass the float32 loss, without autocast"):
            compare(scalar, *args)


def autocast_products(params, x):  # a name that autocast's own functions have
    return jnp.mean(x.astype("bfloat16") @ params["w"].astype("bfloat16")) * 1.0


@pytest.mark.parametrize("fun", [autocast_products, jmp_scale.in_half(loss), loss])
def test_a_loss_that_is_not_under_autocast_is_taken_whatever_its_names(fun):
    scalar = jax.jit(lambda p, x: jax.jit(fun)(p, x).astype("float32"))
    assert sensitive_products(scalar, PARAMS, X, dtype="bfloat16").error_before < 1
    assert compare_gradients(HALF, scalar, PARAMS, X).holds_half


def test_leaves_are_scaled_to_one_size_and_count_by_their_entries():
    change = 1e-9

    def total(p, factor=1.0):
        return 1e3 * p["a"].sum() + factor * p["b"].sum()

    with jax.enable_x64(True):  # where less than float32's rounding is seen too
        params = {"a": jnp.ones(3), "b": jnp.ones(1)}
        changed = functools.partial(total, factor=1 + change)
        found = compare_gradients(changed, total, params)
    assert found.scaled_error == pytest.approx(change / 2, rel=1e-3)
    assert found.error == pytest.approx(change / np.sqrt(3e6 + 1), rel=1e-3)


def test_no_rounding_of_the_program_is_left_out():
    w = jnp.arange(64.0).reshape(8, 8)  # entries and products are whole numbers

    def product(w, dtype=jnp.bfloat16):
        w = w.astype(dtype)
        return (w @ w).astype(jnp.float32).sum()

    exact = np.asarray(w, np.float64) @ np.asarray(w, np.float64)
    rounded = exact.astype(jnp.bfloat16).astype(np.float64).sum()
    found = compare_gradients(product, lambda w: product(w, jnp.float32), w)
    assert (found.loss, found.half_loss) == (exact.sum(), rounded)
    assert rounded != exact.sum()


ONES = jnp.ones(3)


def in_full(w, x):  # what `forgetful` computes
    return 2.0**-30 * (w * x).sum()


def test_a_float16_gradient_is_judged_as_it_is_trained():
    assert compare_gradients(forgetful, in_full, ONES, ONES).error == 0
    lost = compare_gradients(forgetful, in_full, ONES, ONES, loss_scale=1)
    assert (lost.error, lost.leaves[0].lost, lost.leaves[0].finite) == (1, 1, True)
    assert not lost.is_precise
    (finding,) = lost.findings
    assert finding[:3] == ("gradient lost", "error", "(the whole tree)")
    assert finding.text == "100 % of its gradient becomes zero at loss scale 2^0."
    assert "start from 2^" in finding.cure


def test_the_loss_scale_is_lowered_as_a_dynamic_one_would_be():
    def large(w, dtype=jnp.float16):
        return (w.astype(dtype) * dtype(100)).astype(jnp.float32).sum() * 100

    full = lambda w: large(w, jnp.float32)  # noqa: E731
    found = compare_gradients(large, full, jnp.ones(3), loss_scale=DYNAMIC)
    assert (found.loss_scale, found.error, found.is_precise) == (2, 0, True)
    fixed = jmp_scale.StaticLossScale(2.0**10)
    found = compare_gradients(large, full, jnp.ones(3), loss_scale=fixed)
    assert (found.loss_scale, found.error) == (2**10, np.inf)
    assert "error [gradient not finite] The gradient is not finite at" in str(found)


def test_a_forward_pass_that_is_not_finite_is_told_apart():
    def huber(w, x):
        return jnp.sum(jnp.abs(x @ w - 1))

    w, x = 1e4 * jnp.ones((8, 2)), jnp.ones((4, 8))
    found = compare_gradients(jmp_scale.autocast(huber, "float16"), huber, w, x)
    assert (found.half_loss, found.error) == (np.inf, 0)
    assert not found.is_precise
    assert rules(found) == ["loss not finite", "no loss scale works"]
    assert "The loss is not finite at loss scale 2^15." in found.summary()
    root = lambda w: jnp.sqrt(w - 1).sum()  # noqa: E731
    broken = compare_gradients(root, root, jnp.zeros(2))
    assert not broken.is_precise
    assert rules(broken) == ["float32 not finite"]


def test_a_gradient_that_is_rounding_alone_is_not_the_worst():
    def shifted(params, x):  # softmax does not depend on a common offset
        scores = x @ params["w"] + params["offset"]
        return -jnp.mean(jax.nn.log_softmax(scores)[:, 0])

    params = PARAMS | {"offset": jnp.float32(0.3)}
    half = jmp_scale.autocast(shifted, "bfloat16")
    found = compare_gradients(half, shifted, params, X)
    text = found.summary()
    assert found.is_precise
    assert text.index("['w']") < text.index("['offset']")


def test_the_reference_adds_up_the_gradients_of_half_stored_weights_in_float32():
    ids = jnp.where(jnp.arange(4096) % 4, jnp.arange(4096) % 13, 3)

    def rows(table):
        return jnp.mean((table[ids].astype(jnp.float32) - 1) ** 2)

    table = jnp.linspace(0, 1, 64).reshape(16, 4).astype(jnp.bfloat16)
    by_hand = compare_gradients(rows, rows, table)
    assert by_hand.error > 0.3
    assert not by_hand.is_precise
    half = jmp_scale.autocast(lambda t: rows(t) + (t @ t.T)[0, 0], "bfloat16")
    full = lambda t: rows(t) + jnp.dot(t, t.T)[0, 0]  # noqa: E731
    assert compare_gradients(half, full, table).error < 0.005


def rule(backward):
    """The identity, with this function of the cotangent as its backward pass."""

    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, g: (backward(g),))
    return identity


NOISE = jax.random.normal(jax.random.key(3), (16, 16))
RULES = {
    "clip": lambda g: jnp.clip(g, -1e-3, 1e-3),
    "normalize": lambda g: g / (1e-2 + jnp.linalg.norm(g)),
    "noise": lambda g: g + 1e-2 * NOISE,
    "threshold": lambda g: jnp.where(jnp.abs(g) > 6e-3, g, 0),
    "reversal": lambda g: -3 * g,
    "a bound that is not reached": lambda g: jnp.clip(g, -1e9, 1e9),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    by_name([("noise", "bfloat16")], itertools.product(RULES, ["float16", "bfloat16"])),
)
def test_a_backward_rule_that_depends_on_the_loss_scale_is_told(name, dtype):
    mark = rule(RULES[name])

    def loss(w, x):
        return jnp.mean((mark(x @ w) - 1) ** 2)

    w, x = jax.random.normal(jax.random.key(4), (2, 16, 16)) / 4
    half_loss = jmp_scale.autocast(loss, dtype)
    found = compare_gradients(half_loss, loss, w, x, loss_scale=2.0**15)
    plain, scaled = (jax.grad(lambda w, s=s: s * loss(w, x))(w) / s for s in (1, 2**15))
    error = jnp.linalg.norm(scaled - plain) / jnp.linalg.norm(plain)
    assert found.scaled_float32_error == pytest.approx(float(error), abs=1e-4)
    rule_sees_s = "backward rule sees S"
    is_told = bool(error > 0.1)
    assert is_told == (name in ("clip", "normalize", "noise", "threshold"))
    assert (rule_sees_s in rules(found)) is is_told
    assert (rule_sees_s in rules(sensitive_products(loss, w, x))) is is_told
    assert found.is_precise is not is_told
    assert "not needed" not in f"{found} {found.window}" or not is_told
    # bfloat16 trains without a loss scale, and is judged so.
    by_default = compare_gradients(half_loss, loss, w, x)
    assert by_default.is_precise is (dtype == "bfloat16" or not is_told)


# The window of loss scales that work, on backward passes whose window is known.


def test_the_window_is_that_of_the_backward_pass():
    scales = [2.0**k for k in range(42)]
    counted, traces = count_traces(forgetful)
    found = compare_gradients(counted, in_full, ONES, ONES, loss_scales=scales)
    # Zero up to 2^-25 = 2^(5-30); the cotangent S 2^-20 is infinite from 2^36 on.
    assert found.window == (2.0**6, 2.0**35, 2.0**24)
    assert found.loss_scales == tuple(scales)
    assert len(traces) <= 2  # of the program, and of its dtypes; none for another S
    text = "Loss scales from 2^6 to 2^35 work: start from 2^24."
    assert text in found.summary().splitlines()


def test_subnormal_gradients_at_one_are_a_reason_for_a_loss_scale():
    v = jnp.float32(np.random.RandomState(0).uniform(0.4e-7, 1.2e-7, 512))
    full = lambda w: jnp.sum(w * v)  # noqa: E731
    half = lambda w: jnp.sum(w.astype(jnp.float16).astype(jnp.float32) * v)  # noqa: E731
    found = compare_gradients(half, full, jnp.ones(512), loss_scale=1)
    grads = np.asarray(jax.grad(half)(jnp.ones(512)), np.float64)
    v = np.asarray(v, np.float64)
    error = np.linalg.norm(grads - v) / np.linalg.norm(v)
    assert error > 0.15
    assert found.error == pytest.approx(error, rel=1e-3)
    assert (found.leaves[0].lost, found.is_precise) == (0, False)
    assert found.window.lowest > 1
    assert "start from 2^" in found.summary()


def test_a_leaf_that_is_lost_is_named_and_not_precise_however_small_it_is():
    def loss(p, x, dtype=jnp.float32):
        h = jnp.tanh(x.astype(dtype) @ p["w"].astype(dtype)).astype(jnp.float32)
        temperature = (p["t"].astype(dtype) * dtype(3.0)).astype(jnp.float32)
        return jnp.mean((h - 1) ** 2) + 7e-9 * temperature

    half = lambda p, x: loss(p, x, jnp.float16)  # noqa: E731
    p, x = {"w": jnp.eye(8), "t": jnp.float32(0.5)}, jnp.ones((16, 8))
    found = compare_gradients(half, loss, p, x, loss_scale=1)
    assert found.error < 0.01
    assert not found.is_precise
    assert [leaf.path for leaf in found.leaves if leaf.is_lost] == ["['t']"]
    (finding,) = found.findings
    assert (finding.rule, finding.where) == ("gradient lost", "['t']")
    assert found.window.lowest > 1


def test_bfloat16_has_no_window_and_a_float16_program_without_one_says_so():
    def loss(w, dtype=jnp.float32):
        return (w.astype(dtype) * dtype(2)).astype(jnp.float32).sum()

    bfloat16 = lambda w: loss(w, jnp.bfloat16)  # noqa: E731
    assert compare_gradients(bfloat16, loss, ONES).window is None
    given = compare_gradients(bfloat16, loss, ONES, loss_scales=(1.0, 4.0))
    assert given.window == (1, 4, 1)
    wrong = lambda w: 2 * loss(w, jnp.float16)  # noqa: E731
    found = compare_gradients(wrong, loss, ONES)
    assert found.window is None
    assert "works] No loss scale from 2^-4 to 2^24 works." in found.summary()


EXACT = [0.0]  # the errors of one leaf
WINDOWS = {
    "the longest run": ([1, 1, 0, 1, 1, 1], [EXACT] * 6, (3, 5)),
    "the lower of two": ([1, 1, 0, 1, 1, 0], [EXACT] * 6, (0, 1)),
    "one is as exact as the best": ([1] * 6, [[0.01], [0.003], *[EXACT] * 4], (0, 5)),
    "one is not": ([1] * 6, [[0.01], [0.005], *[EXACT] * 4], (2, 5)),
    "one of two is not": ([1] * 6, [[0, 0], [0, 0.1], *[EXACT * 2] * 4], (2, 5)),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_the_window_is_a_run_of_loss_scales_that_work(case):
    works, errors, expected = WINDOWS[case]
    scales = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    found = window_of(scales, works, errors)
    assert found[:2] == tuple(scales[i] for i in expected)


@pytest.mark.parametrize(
    ("ends", "words", "start"),
    [
        ((2.0**6, 2.0**22), "from 2^6 to 2^22 work: start from 2^20.", 2.0**20),
        ((2.0**-10, 2.0), "including 1: loss scaling is not needed here.", 1.0),
    ],
)
def test_a_dynamic_loss_scale_takes_what_is_advised(ends, words, start):
    window = window_of(ends, [True] * 2, [EXACT] * 2)
    assert window.start == start
    assert words in str(window)
    jmp_scale.DynamicLossScale(window.start)
