"""Mistakes of newcomers: each error says what was expected, got, and what to write."""

import equinox
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

import jmp_scale
import jmp_scale.nnx
from jmp_scale import autocast, diagnostics


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


def in_a_with(context):
    with context:
        pass


X = jnp.ones((4, 4))
HALF = autocast(loss, "bfloat16")
SCALE = jmp_scale.DynamicLossScale()
MODEL = equinox.nn.MLP(4, 4, 4, 1, key=jax.random.key(0))
NETWORK = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
WRAPPERS = {
    jmp_scale.with_loss_scale: {},
    jmp_scale.with_half_storage: {},
}
# The call, and words of its TypeError: expected, got, what to write.
MISTAKES = {
    "a flag for names": (
        lambda: autocast(loss, "bfloat16", keep_float32=True),
        r"keep_float32 to be a name or .*, got a bool True; .*keep_float32\(fun\)",
    ),
    "a function for a name": (
        lambda: autocast(loss, "bfloat16", keep_float32=loss),
        r"got a function 'loss'; mark .*keep_float32\(fun\)",
    ),
    "a layer among names": (
        lambda: autocast(loss, "bfloat16", keep_float32=["a", linen.Dense(3)]),
        r"tuple of names, got a Dense .*keep_float32\(fun\)",
    ),
    "a dtype as a context": (
        lambda: in_a_with(autocast("bfloat16")),
        r"got a str; write autocast\(loss_fn.* not a context manager",
    ),
    "autocast of a Linen module": (
        lambda: autocast(linen.Dense(3), "bfloat16"),
        r"expected a function, got a Dense; .*lambda params, x: .*model\.apply",
    ),
    "autocast of a class": (
        lambda: autocast(nnx.Linear, "bfloat16"),
        r"got the class Linear; .*lambda model, x: loss\(model\(x\)\)",
    ),
    "a text for a flag": (
        lambda: autocast(loss, "bfloat16", recompute="False"),
        "expected recompute to be True or False, got 'False'",
    ),
    "an array for a flag": (
        lambda: autocast(loss, "bfloat16", share_casts=X),
        "expected share_casts to be True or False, got Array",
    ),
    "one function to compare": (
        lambda: diagnostics.compare_gradients(HALF, {"w": X}, X),
        r"expected two functions .*got one and a dict; write .*half_loss, loss, params",
    ),
    "a comparison in jit": (
        lambda: jax.jit(lambda w: diagnostics.compare_gradients(HALF, loss, w, X))(X),
        "compare_gradients: expected arrays with values, got traced .*outside of jax",
    ),
    "a search in jit": (
        lambda: jax.jit(lambda w: diagnostics.sensitive_products(loss, w, X))(X),
        "sensitive_products: expected arrays with values, got traced .*outside",
    ),
    "a diagnosis in jit": (
        lambda: jax.jit(lambda w: diagnostics.diagnose_nonfinite(loss, 1.0, w, X))(X),
        "diagnose_nonfinite: expected arrays with values, got traced .*outside",
    ),
    "all_finite of a function": (
        lambda: jmp_scale.all_finite(loss),
        "all_finite: expected arrays, got a function; pass what it returns",
    ),
    "all_finite of a name": (
        lambda: jmp_scale.all_finite("grads"),
        "all_finite: expected arrays, got a str",
    ),
    "a model for an optimizer": (
        lambda: jmp_scale.nnx.Optimizer(optax.adam(0.1), NETWORK),
        "inner to be an optax.GradientTransformation, got a Linear; pass the optimizer",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_that_says_what_to_write(name):
    call, words = MISTAKES[name]
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: autocast(loss), 'got None; write autocast.*partial.*dtype="bfloat16"'),
        (lambda: jmp_scale.get_loss_scale({"fp16": {"enabled": True}}), "presets"),
        (lambda: jmp_scale.get_loss_scale([{"fp16": 1}]), r"known are .*presets"),
    ],
)
def test_a_wrong_value_is_an_error_that_lists_the_right_ones(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_the_name_of_pytorch_leads_to_ours():
    words = r"write jmp_scale.with_loss_scale\(tx, jmp_scale.Dynamic"
    with pytest.raises(AttributeError, match=words):
        _ = jmp_scale.GradScaler
    with pytest.raises(ImportError, match=words):
        from jmp_scale import GradScaler  # noqa: F401
    assert not hasattr(jmp_scale, "GradScaler")


def test_leaves_of_a_model_that_are_no_arrays_pass():
    assert jmp_scale.all_finite({"activation": jnp.tanh, "name": "a", "w": X})
    integers = jnp.arange(4)
    grads = jmp_scale.grad(loss, SCALE, allow_int=True, argnums=(0, 1))
    assert grads(X, integers[None])[1].dtype == jax.dtypes.float0
