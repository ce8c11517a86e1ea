"""Eight CPU devices, and JAX's strict modes, for the whole suite."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
# Most of the suite's time is spent in LLVM. JAX's own variable overrides this.
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_numpy_rank_promotion", "raise")

# pytest --hypothesis-profile=long
hypothesis.settings.register_profile("long", max_examples=1000, deadline=None)


@pytest.fixture(autouse=True)
def dtype_promotion(request):
    """Implicit promotion is an error in tests marked `strict_promotion`.

    It is not for every test: Optax's Adam and Flax's layers rely on it.
    """
    strict = request.node.get_closest_marker("strict_promotion")
    with jax.numpy_dtype_promotion("strict" if strict else "standard"):
        yield


@pytest.fixture
def switched(monkeypatch):
    """Replaces parts of the library; no program that JAX traced before is used."""

    def switch(module, name, value):
        monkeypatch.setattr(module, name, value)
        jax.clear_caches()

    yield switch
    monkeypatch.undo()
    jax.clear_caches()
