"""The floors of the package: imports only go down, and the extras stay out."""

import ast
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "jmp_scale"
FLOORS = {
    "_configuration": 0,
    "_mesh": 0,
    "_casts": 1,
    "_tree": 1,
    "_early_select": 2,
    "_history": 2,
    "_loss_scale": 2,
    "_metrics": 2,
    "_policy": 2,
    "_report": 2,
    "_gradients": 3,
    "_health": 3,
    "_histogram": 3,
    "_spec": 3,
    "presets": 3,
    "_probes": 4,
    "_transform": 4,
    "_flax": 5,
    "checkpoints": 5,
    "diagnostics": 5,
    "linen": 6,
    "nnx": 6,
    "plotting": 6,
    "__init__": 6,
}
ALLOWED_EXTERNAL = {name: {"jax", "numpy"} for name in FLOORS} | {
    "_transform": {"jax", "numpy", "optax"},
    "_flax": {"jax", "flax", "optax"},
    "linen": {"jax", "flax", "optax"},
    "nnx": {"jax", "flax", "optax"},
    "plotting": {"jax", "numpy", "matplotlib"},
}


def imports(module):
    """(names of jmp_scale's own modules, names of other packages) that a module's source imports."""
    own, external = set(), set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            external |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            external.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            own |= {node.module.split(".")[0]} if node.module else {a.name for a in node.names}
    return own, external - set(sys.stdlib_module_names)


def test_every_module_has_a_floor():
    assert {path.stem for path in PACKAGE.glob("*.py")} == set(FLOORS)


@pytest.mark.parametrize("module", sorted(FLOORS))
def test_imports_only_go_down_a_floor(module):
    own, _ = imports(module)
    assert all(FLOORS[other] < FLOORS[module] for other in own), own


@pytest.mark.parametrize("module", sorted(FLOORS))
def test_a_module_imports_only_what_its_floor_may(module):
    _, external = imports(module)
    assert external <= ALLOWED_EXTERNAL[module]


def test_importing_the_package_imports_neither_flax_nor_matplotlib():
    code = "import sys, jmp_scale; print(*sorted(m for m in sys.modules if '.' not in m))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    loaded = set(loaded.stdout.split())
    assert "jmp_scale" in loaded
    assert not loaded & {"flax", "matplotlib", "equinox", "haiku", "sklearn", "tqdm"}
