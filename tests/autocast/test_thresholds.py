"""Each threshold of the planner buys memory or bytes, as an H100's compiler sees it."""

import functools

import compilers
import jax
import jax.numpy as jnp
import models
import pytest
from compilers import targets
from models import catalog

import jmp_scale
from jmp_scale._autocast.recompute import islands as _islands
from jmp_scale._autocast.recompute import plan as _plan

MISSING = targets.missing("h100")
pytestmark = [
    pytest.mark.targets,
    pytest.mark.skipif(MISSING is not None, reason=f"h100: {MISSING}"),
]


def rms_norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def init(key):
    """Two layers, each with two experts, and with what makes four parts of a row."""
    shapes = {"gate": (768, 2), "up": (2, 768, 3072), "down": (2, 3072, 768)}
    shapes |= {"parts": (768, 3072), "out": (768, 768)}
    layer = {name: jnp.ones(shape) for name, shape in shapes.items()}
    return [layer] * 2, jnp.ones((8192, 768))


def experts(layers, x, *_):
    for layer in layers:
        y = rms_norm(x)
        gates = jax.nn.softmax(y @ layer["gate"])
        y = jax.nn.gelu(jnp.einsum("td,kdf->tkf", y, layer["up"]))
        y = jnp.einsum("tkf,kfd->tkd", y, layer["down"])
        x = x + jnp.sum(y * gates[..., None], axis=1)
    return jnp.mean(x**2)


def parts(layers, x, *_):
    for layer in layers:
        y = (rms_norm(x) @ layer["parts"]).reshape(len(x), 4, -1)
        x = x + jnp.sum(jax.nn.gelu(y), axis=1) @ layer["out"]
    return jnp.mean(x**2)


STAGE_3 = catalog.STAGE_3[:2]
RESNET = catalog.resnet((32, 28, 28, 512), None, STAGE_3, 1000)
MODELS = {
    "transformer": models.transformer(models.Transformer(layers=1, batch=2)),
    "mixer": catalog.mixer(1, 64, 256, 768),
    "ResNet": RESNET._replace(options={"share_casts": True}),
    "experts": models.Model(init, experts),
    "parts": models.Model(init, parts),
}


def figures(name):
    """Of the gradient of a model at the size that people train."""
    model, target = MODELS[name], targets.Target("h100")
    args = target.replicated(jax.eval_shape(model.init, jax.random.key(0)))

    def loss(params, batch):
        return model.loss(params, batch, None, False)

    half = jmp_scale.autocast(loss, "bfloat16", **model.options)
    lowered = jax.jit(jax.value_and_grad(half)).lower(*args)
    compiled = lowered.compile(compiler_options=compilers.AS_WRITTEN)
    return compilers.figures(compiled, target)


usual_figures = functools.cache(figures)


@pytest.mark.parametrize(
    ("module", "threshold", "other", "name", "figure", "more"),
    [
        # What only arguments make, as a causal mask, is made again in each island.
        (_plan, "_MOST_REPEATED", 0, "transformer", "bytes_accessed", 1.01),
        # A cast or a bias waits for the island that reads it.
        (_plan, "_ONE_ARRAY", 1, "ResNet", "temporaries", 1.1),
        # A kernel has the sum of a short row, but not that of a vocabulary.
        (_islands, "_LONGEST_ROW", 0, "mixer", "bytes_accessed", 1.02),
        (_islands, "_LONGEST_ROW", 2**20, "transformer", "bytes_accessed", 1.05),
        # A float32 sum of four parts is smaller than the parts in half precision, but
        # not a sum of two.
        (_islands, "_SMALL_SUM", 0, "ResNet", "bytes_accessed", 1.04),
        (_islands, "_SMALL_SUM", 1 / 8, "parts", "temporaries", 1.5),
        (_islands, "_SMALL_SUM", 1, "experts", "temporaries", 1.03),
    ],
)
def test_a_threshold_saves_memory_or_bytes(
    switched, module, threshold, other, name, figure, more
):
    usual = getattr(usual_figures(name), figure)
    switched(module, threshold, other)
    assert getattr(figures(name), figure) > more * usual
