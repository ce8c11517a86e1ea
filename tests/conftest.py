"""Eight CPU devices, and JAX's strict modes, for the whole suite."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update(
    "jax_disable_most_optimizations", True
)  # most of the suite's time is LLVM's
jax.config.update("jax_numpy_rank_promotion", "raise")

# Optax's Adam and Flax's layers rely on implicit promotion; what stands below them does not.
STRICT_PROMOTION = {
    "test_validation",
    "test_report",
    "test_gradients",
    "test_loss_scale",
    "test_mesh",
    "test_policy",
    "test_presets",
    "test_parsing",
    "test_tree",
}


@pytest.fixture(autouse=True)
def strict_promotion(request):
    strict = request.module.__name__.split(".")[-1] in STRICT_PROMOTION
    with jax.numpy_dtype_promotion("strict" if strict else "standard"):
        yield
