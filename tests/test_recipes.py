"""A recipe of CONTRIBUTING.md, that of a counter, is followed in a copy of the tree."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
RECIPE = (
    "the last field of `LossScaleState` (`_state`), counted in `_scaling/transform`"
)

COUNTER = """
import jax, jax.numpy as jnp, optax
import flax.serialization
import jmp_scale, jmp_scale.checkpoints
from jmp_scale import diagnostics

tx = jmp_scale.with_loss_scale(optax.adam(0.1), jmp_scale.DynamicLossScale())
params = jnp.ones(2)
state, history = tx.init(params), diagnostics.LossScaleHistory.create(10)
for g in (1.0, jnp.inf, jnp.nan, 1.0):
    _, after = jax.jit(tx.update)(params * g, state, params, value=jnp.float32(1.0))
    history, state = history.push(state, after), after
assert diagnostics.metrics(state)["overflows"] == state.overflows == 2
assert state.overflows.dtype == jnp.int32
assert diagnostics.HealthLog()(state, history)
data = flax.serialization.to_bytes(state)
assert flax.serialization.from_bytes(tx.init(params), data).overflows == 2
guard = jmp_scale.SpikeGuard()
guarded = jmp_scale.with_loss_scale(optax.adam(0.1), state.loss_scale, guard=guard)
restored = jmp_scale.checkpoints.restore(lambda _: state, guarded.init(params))
assert restored.overflows == 2 and restored.guard == guard
"""


def add_after(path, line, new):
    """Adds a line after the only one that matches a regular expression."""
    text, count = re.subn(f"(?m)^({line})$", rf"\1\n{new}", path.read_text())
    assert count == 1
    path.write_text(text)


@pytest.mark.slow
def test_the_recipe_of_a_counter_works_as_written(tmp_path):
    assert RECIPE in (ROOT / "CONTRIBUTING.md").read_text()
    package = shutil.copytree(ROOT / "jmp_scale", tmp_path / "jmp_scale")
    add_after(package / "_state.py", r"    guard: \w+", "    overflows: CountField")
    overflowed = "jnp.int32(loss_finite & ~grads_finite)"
    counts = f"        overflows=state.overflows + {overflowed},"
    add_after(package / "_scaling/transform.py", "        guard=guard,", counts)
    run = subprocess.run(
        [sys.executable, "-c", COUNTER],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
