"""Each threshold of the planner buys memory or bytes, as an H100's compiler sees it."""

import functools

import compilers
import jax
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


STAGE_3 = catalog.STAGE_3[:2]
MODELS = {
    "transformer": models.transformer(models.Transformer(layers=1, batch=2)),
    "mixer": catalog.mixer(1, 64, 256, 768),
    "ResNet": catalog.resnet((32, 28, 28, 512), None, STAGE_3, 1000),
}


def figures(name):
    """Of the gradient of a model at the size that people train."""
    model, target = MODELS[name], targets.Target("h100")
    args = target.replicated(jax.eval_shape(model.init, jax.random.key(0)))

    def loss(params, batch):
        return model.loss(params, batch, None, False)

    half = jmp_scale.autocast(loss, "bfloat16")
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
        # A small sum is saved in float32, in place of what is added up.
        (_islands, "_SMALL_SUM", 0, "ResNet", "bytes_accessed", 1.04),
    ],
)
def test_a_threshold_saves_memory_or_bytes(
    switched, module, threshold, other, name, figure, more
):
    usual = getattr(usual_figures(name), figure)
    switched(module, threshold, other)
    assert getattr(figures(name), figure) > more * usual
