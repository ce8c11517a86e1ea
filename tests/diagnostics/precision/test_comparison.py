"""The gradient of a half-precision program beside float32's, and what is said of it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import by_name
from losses import forgetful

import jmp_scale.nnx
from jmp_scale.diagnostics import compare_gradients, sensitive_products

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


def test_a_float16_gradient_is_judged_as_it_is_trained():
    x, full = jnp.ones(3), lambda w, x: 2.0**-30 * (w * x).sum()
    assert compare_gradients(forgetful, full, x, x).error == 0
    lost = compare_gradients(forgetful, full, x, x, loss_scale=1)
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
