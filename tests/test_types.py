"""The train steps of the README pass a type checker in a user's own program."""

import ast
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

import jmp_scale

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
POSITIONS = {"optax": 0, "linen": 2, "nnx": 3}  # of blocks that have no name

IMPORTS = {name: f"import {name}" for name in ("jax", "optax", "jmp_scale")} | {
    "nnx": "from flax import nnx",
    "TrainState": "from jmp_scale.linen import TrainState",
    "Optimizer": "from jmp_scale.nnx import Optimizer",
}
# What a block takes as given where it does not define it, and the types of arguments.
GIVEN = {
    "optax": """
        import jax
        Params = dict[str, jax.Array]
        Batch = dict[str, jax.Array]
        params: Params
        batch: Batch
        def loss_fn(params: Params, batch: Batch) -> jax.Array: ...
        """,
    "linen": """
        from typing import Any
        import jax
        from collections.abc import Callable
        from jmp_scale.linen import TrainState
        Params = Any
        Batch = dict[str, jax.Array]
        class State(TrainState):
            batch_stats: Any
        class Model:  # whose apply() is not fully typed in Flax
            apply: Callable[..., Any]
        model: Model
        params: Params
        batch_stats: Any
        batch: Batch
        state: State
        def loss_fn(params: Params) -> tuple[jax.Array, dict[str, Any]]: ...
        """,
    "nnx": """
        import jax
        from flax import nnx
        Batch = jax.Array
        model: nnx.Linear
        batch: Batch
        def loss_fn(model: nnx.Linear, batch: Batch) -> jax.Array: ...
        """,
}
# How a program goes on after the block.
USES = {
    "optax": """
        opt_state = tx.init(params)
        print(opt_state.loss_scale, opt_state.applied, opt_state.skipped)
        print(optax.chain(tx, optax.identity()))
        """,
    "linen": """
        print(state.loss_scale, state.opt_state.applied, state.step)
        print(state.apply_fn({"params": state.params}, batch))
        """,
    "nnx": "print(optimizer.loss_scale, optimizer.opt_state.applied, optimizer.step)",
}
# The annotations with which a user of strict mode writes the block's functions.
ANNOTATIONS = {
    "params": "Params",
    "batch": "Batch",
    "opt_state": "jmp_scale.LossScaleState",
    "state": "State",
    "model": "nnx.Linear",
    "optimizer": "Optimizer",
}
# JAX, Optax and Flax themselves are not fully typed: what strict mode says of them.
FOREIGN = re.compile(r"(jax|jnp|optax|nnx|nn)\b")


def block(name):
    """The Python block of the README below `<!-- block: name -->`."""
    fence = r"```python\n(.*?)```"
    named = re.search(rf"<!-- block: {name} -->\s*{fence}", README, re.DOTALL)
    if named:
        return named[1]
    return re.findall(fence, README, re.DOTALL)[POSITIONS[name]]


def annotated(code):
    """The code with types for the arguments of its functions."""

    def annotate(match):
        names = [name.strip() for name in match[2].split(",")]
        names = [f"{n}: {ANNOTATIONS[n]}" if n in ANNOTATIONS else n for n in names]
        return f"{match[1]}({', '.join(names)}):"

    return re.sub(r"(def \w+)\(([\w, ]*)\):", annotate, code)


def write_programs(folder, strict):
    """A program around each block, with what it takes as given in a stub beside it."""
    for name in POSITIONS:
        code = f"{block(name)}\n{textwrap.dedent(USES[name])}"
        code = annotated(code) if strict else code
        (folder / f"given_{name}.pyi").write_text(textwrap.dedent(GIVEN[name]))
        (folder / f"given_{name}.py").touch()
        nodes = list(ast.walk(ast.parse(code)))
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        aliases = [node for node in nodes if isinstance(node, ast.alias)]
        used -= {alias.asname or alias.name for alias in aliases}
        imports = [line for symbol, line in IMPORTS.items() if symbol in used]
        imports.append(f"from given_{name} import *")
        (folder / f"step_{name}.py").write_text("\n".join([*imports, code]))


def check(folder, mode):
    """Pyright's diagnostics, as (program, line, rule, message, source)."""
    configuration = {
        "include": [f"step_{name}.py" for name in POSITIONS],
        "extraPaths": [str(pathlib.Path(jmp_scale.__file__).parents[1])],
        "typeCheckingMode": mode,
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(configuration))
    command = [sys.executable, "-m", "pyright", "--outputjson", "-p", str(folder)]
    command += ["--pythonpath", sys.executable]
    env = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    if run.returncode not in (0, 1):
        pytest.skip(f"pyright does not run here: {run.stderr.strip()[-200:]}")
    for found in json.loads(run.stdout)["generalDiagnostics"]:
        path = pathlib.Path(found["file"])
        start, end = found["range"]["start"], found["range"]["end"]
        line = path.read_text().splitlines()[start["line"]]
        last = end["character"] if end["line"] == start["line"] else None
        source = line[start["character"] : last]
        yield path.stem, start["line"] + 1, found["rule"], found["message"], source


@pytest.mark.skipif(not importlib.util.find_spec("pyright"), reason="no pyright")
@pytest.mark.parametrize("mode", ["basic", "strict"])
def test_the_train_steps_of_the_readme_have_no_type_errors(mode, tmp_path):
    write_programs(tmp_path, strict=mode == "strict")
    found = list(check(tmp_path, mode))
    assert not [x for x in found if not FOREIGN.match(x[-1])]
