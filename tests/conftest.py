"""Eight CPU devices, and JAX's strict modes, for the whole suite."""

import gc
import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Looking for garbage takes time, and most of what JAX has traced is still in use.
gc.set_threshold(100_000, 50, 1000)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    # The process that hands out tests to others runs none: it needs no JAX.
    option = config.getoption
    hands_out = option("-n", 0) and not hasattr(config, "workerinput")
    if hands_out and not option("--hypothesis-profile", None):
        return
    global jax
    import hypothesis
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    # Most of the suite's time is spent in LLVM. JAX's own variable overrides this.
    if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
        jax.config.update("jax_disable_most_optimizations", True)
        # Only where they are known: XLA ends at others. JAX reads them for devices.
        flags = [os.environ.get("XLA_FLAGS", "")]
        if jax.__version_info__ < (0, 13):
            flags.append("--xla_cpu_parallel_codegen_split_count=1")
        if jax.__version_info__ < (0, 11):
            # The older emitters compile twice as fast. Newer versions have no others.
            flags.append("--xla_cpu_use_fusion_emitters=false")
        os.environ["XLA_FLAGS"] = " ".join(flags)
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
def ranks_promote():
    """As in a user's program."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def few_calls(monkeypatch):
    """Programs are timed by three calls each."""
    timing = "jmp_scale.diagnostics._timing"
    monkeypatch.setattr(f"{timing}._SAMPLE", 0.0)
    monkeypatch.setattr(f"{timing}._ROUNDS", range(2, 3))


@pytest.fixture
def switched(monkeypatch):
    """Replaces parts of the library; no program that JAX traced before is used."""

    def switch(module, name, value):
        monkeypatch.setattr(module, name, value)
        jax.clear_caches()

    yield switch
    monkeypatch.undo()
    jax.clear_caches()
