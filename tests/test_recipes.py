"""The recipes of CONTRIBUTING.md are right: they are followed in a copy of the tree."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]

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
assert "overflow" in history.summary() and diagnostics.health(state, history)
data = flax.serialization.to_bytes(state)
assert flax.serialization.from_bytes(tx.init(params), data).overflows == 2
guard = jmp_scale.SpikeGuard()
guarded = jmp_scale.with_loss_scale(optax.adam(0.1), state.loss_scale, guard=guard)
restored = jmp_scale.checkpoints.restore_older(lambda _: state, guarded.init(params))
assert restored.overflows == 2 and restored.guard == guard
"""


def add_after(path, line, new):
    """Adds a line after the only one that matches a regular expression."""
    text, count = re.subn(f"(?m)^({line})$", rf"\1\n{new}", path.read_text())
    assert count == 1
    path.write_text(text)


def test_a_counter_is_the_last_field_of_the_state_and_a_line_that_counts(tmp_path):
    recipe = (ROOT / "CONTRIBUTING.md").read_text()
    assert "the last field of `LossScaleState` (`_state`), counted in" in recipe
    shutil.copytree(ROOT / "jmp_scale", tmp_path / "jmp_scale")
    state, step = (tmp_path / "jmp_scale" / name for name in (
        "_state.py", "_scaling/transform.py"
    ))  # fmt: skip
    add_after(state, r"    guard: \w+", "    overflows: Count")
    overflowed = "jnp.int32(loss_finite & ~only_grads_finite)"
    counts = f"        overflows=state.overflows + {overflowed},"
    add_after(step, "        guard=guard,", counts)
    run = subprocess.run(
        [sys.executable, "-c", COUNTER],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
