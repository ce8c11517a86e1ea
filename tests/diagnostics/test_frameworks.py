"""Every tool takes a loss as `value_and_grad` does: models, keys, auxiliary outputs."""

import equinox as eqx
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow
from runs import state

import jmp_scale
from jmp_scale import diagnostics

X = jnp.linspace(0.1, 1.0, 12).reshape(3, 4)


def diagnose(fun, *args, **kwargs):
    return diagnostics.diagnose_nonfinite(fun, 2.0**15, *args, **kwargs)


def compare(fun, *args, **kwargs):
    return diagnostics.compare_gradients(fun, fun, *args, **kwargs)


TOOLS = {
    "compare_gradients": compare,
    "diagnose_nonfinite": diagnose,
    "precision_report": diagnostics.precision_report,
    "sensitive_products": diagnostics.sensitive_products,
}


class Network(nnx.Module):
    """BatchNorm and a count, which a forward pass writes."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 2, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.norm(self.linear(x).astype(jnp.float32))


def nnx_loss(model, x):
    return jnp.mean(model(x) ** 2), model.calls[...]


def equinox_loss(model, x):
    y = jax.vmap(jmp_scale.cast_to_half(model))(jmp_scale.cast_to_half(x))
    return jnp.mean(y.astype(jnp.float32) ** 2), y


def models():
    linear = eqx.nn.Linear(4, 1, key=jax.random.key(0))
    return {
        "equinox": (equinox_loss, linear, eqx.filter_value_and_grad),
        "NNX": (nnx_loss, Network(nnx.Rngs(0)), nnx.value_and_grad),
    }


@pytest.mark.parametrize("framework", ["NNX", slow("equinox")])
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_takes_a_model_and_leaves_it_as_it_was(tool, framework):
    fun, model, transform = models()[framework]
    before = [np.asarray(x) for x in jax.tree.leaves(model) if hasattr(x, "dtype")]
    found = TOOLS[tool](fun, model, X, has_aux=True, transform=transform)
    assert str(found) == found.summary()
    after = [x for x in jax.tree.leaves(model) if hasattr(x, "dtype")]
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_a_bad_batch_is_found_before_any_model():
    fun, model, transform = models()["equinox"]
    bad = X.at[1, 2].set(jnp.inf)
    found = diagnose(fun, model, bad, has_aux=True, transform=transform)
    assert (found.cause, found.nonfinite_argument) == ("forward", "args[1]")


def half(w):
    return w.astype(jnp.float16).astype(jnp.float32).sum()


W = jnp.ones((16, 8))
MISTAKES = {
    "not a function": ((W,), {}, r"a function, got an array of shape \(16, 8\)"),
    "not a transform": ((half, W), {"transform": "nnx"}, "a function, got a str"),
    "a vector": ((lambda w: w, W), {}, r"shape \(16, 8\)"),
    "aux": ((lambda w: (half(w), w), W), {}, "pass has_aux=True"),
    "no aux": ((half, W), {"has_aux": True}, r"\(loss, aux\) with has_aux"),
    "text": ((lambda w: "loss", W), {}, "scalar loss, got a str"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_mistake_has_one_text_that_names_the_tool_and_the_cure(mistake):
    args, kwargs, words = MISTAKES[mistake]
    texts = set()
    for name, tool in TOOLS.items():
        with pytest.raises(TypeError, match=words) as raised:
            tool(*args, **kwargs)
        texts.add(str(raised.value).removeprefix(f"{name}: expected"))
    (text,) = texts
    assert ";" in text


def test_a_state_in_place_of_its_loss_scale_is_an_error_that_says_where_it_is():
    for given, words in ((state(), r"\.loss_scale of a"), ((state(),), "optax\\.tree")):
        with pytest.raises(TypeError, match=words):
            diagnostics.diagnose_nonfinite(half, given, W)
