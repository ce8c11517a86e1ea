"""The README's step, and steps of Linen and NNX, pass a type checker as users write."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
from test_readme import PROGRAM, step_of

import jmp_scale

# How each program goes on.
LOSS = """\
import jax, jax.numpy as jnp, jmp_scale, optax

def loss_fn(params, x):
    return jnp.mean((x @ params[0]) ** 2)

"""
HALF = 'half_loss = jmp_scale.autocast(loss_fn, "float16")\n'
USES = {
    "float16": """
        params = [jnp.ones((2, 2))]
        opt_state = tx.init(params)
        params, opt_state, loss = train_step(params, opt_state, jnp.ones((1, 2)))
        print(opt_state.loss_scale, opt_state.applied, opt_state.skipped)
        print(optax.chain(tx, optax.identity()))
        """,
    "linen": "print(state.loss_scale, state.opt_state.applied, state.step)",
    "nnx": "print(optimizer.loss_scale, optimizer.opt_state.applied, optimizer.step)",
}
PROGRAMS = {
    "float16": LOSS + HALF + step_of(PROGRAM),
    "linen": """\
from typing import Any
import flax.linen as nn, jax, jax.numpy as jnp, jmp_scale, optax
from jmp_scale.linen import TrainState

class BatchNormState(TrainState):
    batch_stats: Any

model = nn.Sequential([nn.Dense(8), nn.BatchNorm(use_running_average=False)])
x = jnp.ones((8, 4))
state = BatchNormState.create(
    apply_fn=model.apply, tx=optax.adamw(3e-4), loss_scale=jmp_scale.DynamicLossScale(),
    **model.init(jax.random.key(0), x),
)
def loss_fn(params, batch_stats):
    variables = {"params": params, "batch_stats": batch_stats}
    y, new = state.apply_fn(variables, x, mutable=["batch_stats"])
    return jnp.mean((y - 1) ** 2), new

grad_fn = state.value_and_grad(jmp_scale.autocast(loss_fn, "float16"), has_aux=True)
(loss, new), grads = grad_fn(state.params, state.batch_stats)
state = state.apply_gradients(grads=grads, value=loss, batch_stats=new["batch_stats"])
""",
    "nnx": """\
import jax.numpy as jnp, jmp_scale, jmp_scale.nnx, optax
from flax import nnx
model, x = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), jnp.ones((8, 4))
loss_scale = jmp_scale.DynamicLossScale()
optimizer = jmp_scale.nnx.Optimizer(model, optax.adamw(3e-4), loss_scale=loss_scale)
half_loss = jmp_scale.nnx.autocast(lambda model, x: jnp.mean(model(x) ** 2), "float16")
loss, grads = optimizer.value_and_grad(half_loss)(model, x)
optimizer.update(model, grads, value=loss)
""",
}


def check(folder):
    """Pyright's errors, as (program, line, rule, message)."""
    paths = [str(pathlib.Path(jmp_scale.__file__).parents[1])]
    configuration = {"extraPaths": paths, "typeCheckingMode": "basic"}
    (folder / "pyrightconfig.json").write_text(json.dumps(configuration))
    command = [sys.executable, "-m", "pyright", "--outputjson", "-p", str(folder)]
    command += ["--pythonpath", sys.executable]
    env = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    if run.returncode not in (0, 1):
        pytest.skip(f"pyright does not run here: {run.stderr.strip()[-200:]}")
    for found in json.loads(run.stdout)["generalDiagnostics"]:
        line = found["range"]["start"]["line"] + 1
        yield pathlib.Path(found["file"]).stem, line, found["rule"], found["message"]


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("pyright"), reason="no pyright")
def test_the_train_steps_of_the_readme_have_no_type_errors(tmp_path):
    for name, uses in USES.items():
        code = f"{PROGRAMS[name]}\n{textwrap.dedent(uses)}"
        (tmp_path / f"{name}.py").write_text(code)
    assert list(check(tmp_path)) == []
