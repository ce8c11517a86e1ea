"""Every tool takes a loss as `value_and_grad` does: models, keys, auxiliary outputs."""

import itertools

import equinox as eqx
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import by_name
from runs import state

import jmp_scale
from jmp_scale import diagnostics

pytestmark = pytest.mark.usefixtures("few_calls")

X = jnp.linspace(0.1, 1.0, 12).reshape(3, 4)


def of_both(tool):
    """A tool that compares two losses, here a loss with itself."""
    return lambda fun, *args, **kwargs: tool(fun, fun, *args, **kwargs)


compare = of_both(diagnostics.compare_gradients)
TOOLS = {
    "compare_gradients": compare,
    "diagnose_nonfinite": lambda fun, *args, **kwargs: diagnostics.diagnose_nonfinite(
        fun, 2.0**15, *args, **kwargs
    ),
    "precision_report": diagnostics.precision_report,
    "sensitive_products": diagnostics.sensitive_products,
    "compare_speed": of_both(diagnostics.compare_speed),
}


class Network(nnx.Module):
    """BatchNorm, random streams, a count and an old key, which are no parameters."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 2, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))
        self.key = nnx.Variable(jax.random.PRNGKey(0))
        self.rngs = rngs

    def __call__(self, x):
        self.calls[...] += 1
        y = self.norm(self.dropout(self.linear(x)).astype(jnp.float32))
        noise = jax.random.normal(self.key[...], y.shape)
        return y + noise + jax.random.normal(self.rngs(), y.shape)


def nnx_loss(model, x):
    return jnp.mean(model(x) ** 2), model.calls[...]


class Scaled(eqx.Module):
    """A function, a Python number and a boolean beside layers."""

    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    factor: float

    def __call__(self, x):
        assert self.factor > 1  # a traced number would raise
        return self.factor * jax.vmap(self.mlp)(self.attention(x, x, x))


def equinox_loss(model, x):
    y = jmp_scale.cast_to_half(model)(jmp_scale.cast_to_half(x))
    return jnp.mean(y.astype(jnp.float32) ** 2), y


def leaves_loss(model, x):
    x = model["activation"](x[:, model["columns"]])
    noise = jax.random.normal(model["key"], (4, 2))
    y = jmp_scale.cast_to_half(x) @ jmp_scale.cast_to_half(model["w"] + noise)
    return jnp.mean(y.astype(jnp.float32) ** 2), y


KEYS = jax.random.split(jax.random.key(0), 2)
# Each makes a loss, a model, and how its library differentiates.
MODELS = {
    "equinox": lambda: (
        equinox_loss,
        Scaled(
            eqx.nn.MultiheadAttention(1, 4, key=KEYS[0]),
            eqx.nn.MLP(4, 1, 4, 1, activation=jax.nn.relu, key=KEYS[1]),
            factor=2.0,
        ),
        eqx.filter_value_and_grad,
    ),
    "NNX": lambda: (nnx_loss, Network(nnx.Rngs(0)), nnx.value_and_grad),
    "leaves": lambda: (
        leaves_loss,
        {
            "w": jnp.full((4, 2), 0.5),
            "columns": jnp.arange(4)[::-1],
            "key": KEYS[0],
            "activation": jnp.tanh,
        },
        eqx.filter_value_and_grad,
    ),
}


def gist(found):
    """What of a result does not depend on the clock."""
    return getattr(found, "error", str(found))


QUICK = [
    ("precision_report", "equinox"),
    ("precision_report", "NNX"),
    ("compare_speed", "leaves"),
]


@pytest.mark.parametrize(
    ("tool", "library"), by_name(QUICK, itertools.product(TOOLS, MODELS))
)
def test_a_tool_takes_a_model_as_its_library_does_and_leaves_it(tool, library):
    fun, model, transform = MODELS[library]()
    before = [np.asarray(x) for x in jax.tree.leaves(model) if is_numbers(x)]
    found = TOOLS[tool](fun, model, X, has_aux=True)
    assert str(found) == found.summary()
    after = [x for x in jax.tree.leaves(model) if is_numbers(x)]
    jax.tree.map(np.testing.assert_array_equal, after, before)
    given = TOOLS[tool](fun, model, X, has_aux=True, transform=transform)
    assert gist(found) == gist(given)


def is_numbers(x):
    return hasattr(x, "dtype") and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def test_a_transform_that_is_given_holds():
    fun, model, _ = MODELS["equinox"]()
    with pytest.raises(TypeError, match="grad requires real"):
        compare(fun, model, X, has_aux=True, transform=jax.value_and_grad)


def test_without_an_array_to_differentiate_the_error_is_that_of_jax():
    for tool in TOOLS.values():
        with pytest.raises(TypeError, match="grad requires real"):
            tool(lambda i, w: (i * w).sum(), jnp.arange(3), jnp.ones(3))


def test_integers_of_a_second_argument_are_fixed_and_a_tuple_comes_back():
    model = {"w": jnp.ones((4, 2)), "i": jnp.arange(2)}
    loss = lambda x, model: jnp.sum(x @ model["w"][:, model["i"]])  # noqa: E731
    found = compare(loss, X, model, argnums=(1, 0))
    assert [leaf.path for leaf in found.leaves] == ["[0]['w']", "[1]"]


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
