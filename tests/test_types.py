"""The programs of the README and of the page of Flax pass a type checker."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
from test_checkers import program_of

import jmp_scale

USES = {  # how each page's programs go on
    "README.md": """
print(opt_state.loss_scale, opt_state.applied, opt_state.skipped)
print(optax.chain(tx, optax.identity()))
""",
    "docs/flax.md": """
print(state.loss_scale, state.opt_state.applied, state.step)
print(scaled_optimizer.loss_scale, scaled_optimizer.step)
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
def test_the_programs_of_pages_have_no_type_errors(tmp_path):
    for i, (page, uses) in enumerate(USES.items()):
        (tmp_path / f"page{i}.py").write_text(program_of(page) + uses)
    assert list(check(tmp_path)) == []
