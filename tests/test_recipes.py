"""The recipes of CONTRIBUTING.md are right: they are followed in a copy of the tree."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
RECIPES = (
    "the last field of `LossScaleState` (`_state`), counted in",
    "A function in `diagnostics/_precision/rules.py` that yields",
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

RULE = """
import jax, jax.numpy as jnp
import precision_faults
from precision_checks import assert_finds, planted

fault, dtype = precision_faults.FAULTS["sorted"]
assert [rule for _, _, rule, _ in planted(fault)] == ["half-order"]
loss = lambda x: jnp.mean(fault(x.astype(dtype)).astype(jnp.float32))
report = assert_finds([fault], loss, jnp.ones(64))
assert "neighbors become equal" in report.summary()
"""

QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # to compile
# Tracebacks name the recipe.
RUN = """
import json, sys
for name, code in json.load(sys.stdin).items():
    exec(compile(code, name, "exec"), {})
"""

HALF_ORDER = """
def _half_order(equation: Equation) -> Iterator[Fault]:
    if equation.name == "sort" and is_half(equation.result):
        yield "warning", f"a sort in {equation.result}, in which neighbors become equal"


_BACKWARD"""


def add_after(path, line, new):
    """Adds a line after the only one that matches a regular expression."""
    text, count = re.subn(f"(?m)^({line})$", rf"\1\n{new}", path.read_text())
    assert count == 1
    path.write_text(text)


def add_a_counter(package):
    add_after(package / "_state.py", r"    guard: \w+", "    overflows: CountField")
    overflowed = "jnp.int32(loss_finite & ~grads_finite)"
    counts = f"        overflows=state.overflows + {overflowed},"
    add_after(package / "_scaling/transform.py", "        guard=guard,", counts)


def add_a_rule(package, faults):
    rules = package / "diagnostics/_precision/rules.py"
    add_after(rules, "_FORWARD = .*", '    "half-order": _half_order,')
    rules.write_text(rules.read_text().replace("\n_BACKWARD", HALF_ORDER, 1))
    fault = '    "sorted": lambda h: jnp.sort(h),  # !half-order'
    add_after(faults, "OF_FLOAT16 = {", fault)


@pytest.mark.slow
def test_recipes_work_as_written(tmp_path):
    """They are followed in one copy and run by one process."""
    for recipe in RECIPES:
        assert recipe in (ROOT / "CONTRIBUTING.md").read_text()
    package = shutil.copytree(ROOT / "jmp_scale", tmp_path / "jmp_scale")
    for name in ("precision_faults", "precision_checks"):
        shutil.copy(ROOT / f"tests/diagnostics/{name}.py", tmp_path)
    add_a_counter(package)
    add_a_rule(package, tmp_path / "precision_faults.py")
    run = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=tmp_path,
        env={**os.environ, **QUICK, "PYTHONPATH": str(tmp_path)},
        input=json.dumps({"counter": COUNTER, "rule": RULE}),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
