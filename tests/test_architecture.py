"""The structure of the package: no import cycles, and optional packages stay so."""

import ast
import functools
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest

import jmp_scale

PACKAGE = pathlib.Path(__file__).parents[1] / "jmp_scale"
MAY_IMPORT = {
    "optax": {"_extra_args", "_half_parameters", "_transform", "_flax", "linen", "nnx"},
    "flax": {"_flax", "linen", "nnx"},
    "matplotlib": {"plotting"},
}


def modules():
    """Path of each module's source, by dotted name below the package."""
    paths = {
        path.relative_to(PACKAGE).with_suffix(""): path
        for path in PACKAGE.rglob("*.py")
    }
    return {
        ".".join(name.parts).removesuffix(".__init__"): path
        for name, path in paths.items()
    }


MODULES = modules()


def imports(name):
    """(own modules, other packages) that the source of a module imports."""
    own, external = set(), set()
    path = MODULES[name]
    package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    package = [] if name == "__init__" else package
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            external |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            external.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - (node.level - 1)]
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                candidates = [".".join([*base, alias.name]), ".".join(base)]
                own |= {next(c for c in candidates if c in MODULES)}
    return own, external


def test_imports_have_no_cycles():
    graph = {name: imports(name)[0] for name in MODULES}
    assert sum(map(len, graph.values())) > 20
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_only_the_modules_that_need_it_import(package):
    importers = {name for name in MODULES if package in imports(name)[1]}
    assert importers <= MAY_IMPORT[package]


def test_nothing_else_is_imported():
    allowed = {"jax", "numpy", *MAY_IMPORT, *sys.stdlib_module_names}
    assert set.union(*(imports(name)[1] for name in MODULES)) <= allowed


FLAX_FIRST = "import flax.serialization; import jmp_scale as jmp"
FLAX_LAST = "import jmp_scale as jmp; print(*sys.modules); import flax.serialization"
ORDERS = [pytest.param(FLAX_FIRST, marks=pytest.mark.slow), FLAX_LAST]


@functools.cache
def lines_of_a_process(imports):
    """What a process prints that saves and restores loss scales with Flax."""
    code = f"""
import sys
{imports}
import optax
from jax import numpy as jnp
states = {{"dynamic": jmp.DynamicLossScale(8.0), "static": jmp.StaticLossScale(4.0),
          "wrapped": jmp.with_loss_scale(optax.adam(0.1)).init(jnp.ones(2))}}
data = flax.serialization.to_bytes(states)
states["dynamic"] = jmp.DynamicLossScale(2.0, period=5)
restored = flax.serialization.from_bytes(states, data)
assert not {{"jmp_scale.linen", "jmp_scale.nnx", "jmp_scale._flax"}} & set(sys.modules)
print(restored["dynamic"].loss_scale, restored["dynamic"].period, restored["static"])
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    return [line.split() for line in run.stdout.splitlines()]


@pytest.mark.parametrize("imports", ORDERS)
def test_flax_serialization_knows_loss_scales_also_without_our_flax_modules(imports):
    *_, restored = lines_of_a_process(imports)
    assert restored == ["8.0", "5", "StaticLossScale(loss_scale=4.0)"]


def test_importing_the_package_imports_neither_flax_nor_matplotlib():
    loaded = set(lines_of_a_process(FLAX_LAST)[0])
    assert "jmp_scale" in loaded
    assert not loaded & {"flax", "matplotlib", "equinox", "haiku", "sklearn", "tqdm"}


@pytest.mark.parametrize("name", ["checkpoints", "linen", "nnx", "plotting", "other"])
def test_a_module_that_is_imported_by_name_is_an_error_that_says_so(name, monkeypatch):
    monkeypatch.delattr(jmp_scale, name, raising=False)
    hint = "" if name == "other" else f"; write import jmp_scale.{name}"
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'{hint}$"):
        getattr(jmp_scale, name)


def test_every_test_that_a_comment_names_exists():
    files = list(pathlib.Path(__file__).parent.rglob("test_*.py"))
    text = "".join(path.read_text() for path in files)
    existing = {*re.findall(r"^def (test_\w+)", text, re.M), *(p.stem for p in files)}
    sources = "".join(path.read_text() for path in MODULES.values())
    named = re.findall(r"\b(test_\w+)(\.\.\.)?", sources)
    assert named
    for name, cut in named:
        assert any(e.startswith(name) if cut else e == name for e in existing), name
