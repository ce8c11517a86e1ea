"""What `autocast` warns of, once, and what is an error."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_checks import BF16, F16, F32, assert_close, n32, two_layers
from autocast_programs import PROGRAMS, W, X, layer, mean_square, products
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from jax import lax
from jax.experimental import jet

import jmp_scale.nnx
from jmp_scale import autocast, in_half


@pytest.mark.parametrize("dtype", ["float32", "half", int])
def test_a_dtype_that_is_not_half_precision_is_an_error(dtype):
    names = 'float16 or bfloat16, got .*"f16" and "bf16"'
    with pytest.raises(ValueError, match=f"expected dtype {names}"):
        autocast(layer, dtype)
    with pytest.raises(ValueError, match=f"expected backward {names}"):
        autocast(layer, "float16", backward=dtype)


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: jnp.sin(x),
        lambda w, x: jnp.dot(x, w, precision="highest"),
        lambda w, x: x[0] @ jnp.sin(x.T),
        lambda w, x: jnp.dot(X, W),
        lambda w, x: jnp.dot(n32(jnp.int32(9 * x)), n32(jnp.int32(9 * w))),
    ],
)
def test_a_function_in_which_nothing_becomes_half_warns_once(fun):
    half = autocast(fun, "float16")
    with pytest.warns(
        UserWarning, match=r"no product became half.*\n.*: pass parameters"
    ):
        half(W, X)
    assert F16 not in products(half, W, X)  # filters make a warning an error


NO_SCALE = "float16 gradients without a loss scale"
SCALE, NONE = jmp_scale.StaticLossScale(8.0), jmp_scale.NoOpLossScale()


def traced(fun, *args):
    """Traces anew, as `jax.jit` does, and compiles nothing."""
    return jax.eval_shape(lambda *args: fun(*args), *args)


def scaled(w, x):
    return SCALE.scale(two_layers(w, x))


FORGOTTEN = {
    "grad": jax.grad,
    "value_and_grad": lambda f: jmp_scale.grad(lambda *args: f(*args), NONE),
    "of a jit": lambda f: jax.grad(jax.jit(f)),
    "a vmap": lambda f: lambda w, x: jax.vmap(jax.grad(f), (None, 0))(w, x[None]),
    "Equinox": lambda f: eqx.filter_jit(eqx.filter_grad(f)),
    "NNX": nnx.value_and_grad,
}
SCALED = {
    "after it": lambda half: jax.grad(lambda w, x: SCALE.scale(half(w, x))),
    "within it": lambda half: jax.grad(autocast(scaled, "float16")),
    **{
        name: lambda half, f=f: jax.grad(autocast(f, "float16"))
        for name, f in {
            "within a jit": jax.jit(scaled),
            "within a checkpoint": jax.checkpoint(scaled),
            "within a mean": lambda w, x: jnp.mean(2.0**9 * (x @ w) ** 2),
            "by a division": lambda w, x: two_layers(w, x) / 2.0**-9,
            "by an argument": lambda w, x: jnp.sum(jnp.mean((x @ w) ** 2 * x[0, 0], 0)),
        }.items()
    },
    "by a cotangent": lambda half: lambda w, x: jax.vjp(half, w, x)[1](jnp.float32(8)),
    "by Flax": lambda half: lambda w, x: DynamicScale().value_and_grad(half)(w, x)[2],
    "by value_and_grad": lambda half: jmp_scale.grad(half, SCALE),
    "within value_and_grad": lambda half: jmp_scale.grad(
        lambda w, x: jmp_scale.grad(half, SCALE)(w, x).sum(), NONE
    ),
    "bfloat16": lambda _: jmp_scale.grad(autocast(two_layers, "bf16"), NONE),
    "backward": lambda _: jmp_scale.grad(
        autocast(two_layers, "float16", backward="bf16"), NONE
    ),
    "no derivative": lambda half: half,
}


@pytest.mark.filterwarnings("error:autocast")
@pytest.mark.parametrize("how", FORGOTTEN)
def test_a_forgotten_loss_scale_warns_once(how):
    gradient = FORGOTTEN[how](autocast(two_layers, "float16"))
    with pytest.warns(UserWarning, match=NO_SCALE) as record:
        traced(gradient, W, X)
    assert [warning.filename for warning in record] == [__file__]
    traced(gradient, W, X[1:])  # filters make a warning an error


@pytest.mark.filterwarnings("error:autocast")
@pytest.mark.parametrize("how", SCALED)
def test_a_loss_that_is_scaled_does_not_warn(how):
    traced(SCALED[how](autocast(two_layers, "float16")), W, X)


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


def test_jet_raises_what_jax_says_and_blames_no_custom_vjp():
    """It knows no functions with rules of their own, of which autocast makes some."""
    cubed = jax.custom_vjp(lambda x: x**3)
    cubed.defvjp(lambda x: (x**3, x), lambda x, g: (3 * x * x * g,))
    half = autocast(lambda w: mean_square(cubed(X @ w)), "bfloat16")
    # Which error JAX raises depends on its version.
    known = jax.errors.UnexpectedTracerError, KeyError, AttributeError
    with pytest.raises(known) as caught:
        jet.jet(half, (W,), [[W, 0 * W]])
    assert "custom_vjp" not in str(caught.value)


ERRORS = {
    "a branch": lambda w, batch, *_, scale=1.0: w * scale if batch["x"][0, 0] else w,
    "NumPy": lambda w, batch, *rest, scale=1.0: np.asarray(rest[0]["y"]).sum(),
    "an index": lambda w, batch, *_, scale=1.0: [w][batch["n"]],
}
ERRORS["partials"] = functools.partial(functools.partial(ERRORS["a branch"]), scale=3.0)
ERRORS["a configuration"] = functools.partial(
    lambda name, w, batch, *_, scale=1.0: float(batch["n"]), "relu"
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_while_it_traces_names_function_and_argument_as_jit_does(name, dtype):
    fun, w = ERRORS[name], W.astype(dtype)
    args = w, {"n": jnp.int32(0), "x": X}, {"y": w}

    def message(transformed):
        with pytest.raises((TypeError, jax.errors.ConcretizationTypeError)) as caught:
            transformed(*args, scale=jnp.float32(2))
        return str(caught.value)

    wanted = message(jax.jit(fun))
    assert "test_autocast_warnings.py" in wanted
    assert message(autocast(fun, "bfloat16")) == wanted
