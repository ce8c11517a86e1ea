"""The main programs of the pages pass a type checker, and the checkers of JAX."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import optax
import pytest

import jmp_scale

ROOT = pathlib.Path(__file__).parents[1]


def program_of(page):
    """The programs of a page."""
    text = (ROOT / page).read_text()
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M))


def promoting(fun):
    standard = jax.numpy_dtype_promotion("standard")(fun)
    return jax.numpy_rank_promotion("allow")(standard)


def relaxed(make):
    """An optimizer that itself may promote, as Adam of Optax alone does."""

    def made(*args, **kwargs):
        tx = optax.with_extra_args_support(make(*args, **kwargs))
        return optax.GradientTransformationExtraArgs(*map(promoting, tx))

    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/flax.md", "docs/devices.md", "docs/half-parameters.md"],
)
def test_the_program_of_a_page_passes_the_checkers_of_jax(page, monkeypatch):
    monkeypatch.setattr(optax, "adamw", relaxed(optax.adamw))
    monkeypatch.setattr(optax, "adam", relaxed(optax.adam))
    program = compile(program_of(page), page, "exec")
    if page == "docs/half-parameters.md":  # bfloat16 weights meet float32 inputs
        half = jmp_scale.autocast
        loss = lambda fun, dtype: half(promoting(fun), dtype)  # noqa: E731
        monkeypatch.setattr(jmp_scale, "autocast", loss)
        monkeypatch.setattr(optax, "apply_updates", promoting(optax.apply_updates))
    with (
        jax.checking_leaks(),
        jax.debug_key_reuse(True),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
    ):
        exec(program, {"__name__": "page"})


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
