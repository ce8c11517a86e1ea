"""The structure of the package: floors of CONTRIBUTING.md, and optional packages."""

import ast
import fnmatch
import functools
import graphlib
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "jmp_scale"
FLAX = {"_flax", "linen", "nnx"}
OPTIMIZERS = {"_half_storage.storage", "_machine"}
OPTIMIZERS |= {"_state", "_scaling.transform"}
MAY_IMPORT = {"optax": FLAX | OPTIMIZERS, "flax": FLAX, "matplotlib": {"plotting"}}
# Modules that are tested by other files than those of their names, and why.
TESTED_BY = {
    "_jaxpr_*": ("test_jaxpr", "programs are read, rewritten and evaluated in turn"),
    "_autocast.casting": ("autocast/test_autocast_warnings", "a derivative is noted"),
    "_autocast.interpreter": ("autocast/test_autocast", "programs run as planned"),
    "_autocast.recompute.units": ("autocast/test_exact", "it is what was computed"),
    "_autocast.derivatives": ("autocast/test_modes", "derivatives are of all modes"),
    "_autocast.higher_order": ("autocast/test_autocast_loops", "loops run as they did"),
    "_autocast.values": ("autocast/test_types_first", "sums are those of programs"),
    "_cpu": ("test_machine", "the command says what the processor has"),
    "_types": ("test_checkers", "programs of pages have the types of functions"),
    "_pytree": ("scaling/test_loss_scale", "fields are those of loss scales"),
    "_state": ("scaling/test_transform", "a state is what the transformation returns"),
    "__main__": ("test_machine", "a command prints what is measured"),
    "_flax": ("test_linen", "serialization is that of Flax"),
    "diagnostics._backward": ("diagnostics/test_frameworks", "every tool takes a loss"),
    "diagnostics._timing": ("test_machine", "programs are timed by the command too"),
    "diagnostics._source": ("diagnostics/precision/test_report", "lines are findings'"),
    "diagnostics._tables": ("diagnostics/test_findings", "results print a summary"),
    "diagnostics._run.origins": ("diagnostics/run/test_diagnosis", "a cause is named"),
    "diagnostics._run.step_*": ("diagnostics/run/test_check_step", "wrong steps"),
    # A rule is right if the report has its finding, and no other, at the line.
    **dict.fromkeys(
        ["diagnostics._precision.rules", "diagnostics._precision.walk"],
        ("diagnostics/precision/test_precision_faults", "planted faults are found"),
    ),
}


def modules():
    """Path of each module's source, by dotted name below the package."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


class Floor(NamedTuple):
    """A row of the table in CONTRIBUTING.md."""

    name: str
    patterns: list[str]
    may_import: set[str]


def floors():
    """The floors of CONTRIBUTING.md, the lowest first."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| ([\w ]+) \| (`.+`) \| .+ \| (.*)\|$", text, re.MULTILINE)
    found = []
    for name, modules, below in rows:
        allowed = {floor.strip() for floor in below.split(",")} - {""}
        if allowed == {"all above"}:
            allowed = {floor.name for floor in found}
        found.append(Floor(name, re.findall(r"`(.+?)`", modules), allowed))
    return found


FLOORS = floors()


def floor_of(module):
    """The only floor with a pattern that a module fits."""
    fits = functools.partial(fnmatch.fnmatchcase, module)
    matching = [floor for floor in FLOORS if any(map(fits, floor.patterns))]
    names = [floor.name for floor in matching]
    assert len(matching) == 1, f"{module}: floors of CONTRIBUTING.md are {names}"
    return matching[0]


@functools.cache
def imports(name):
    """(own modules, other packages) that a module imports, also for types alone."""
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
                whole = ".".join(base) or "__init__"
                candidates = [".".join([*base, alias.name]), whole]
                own |= {next(c for c in candidates if c in MODULES)}
    return own, external


def test_imports_have_no_cycles():
    graph = {name: imports(name)[0] for name in MODULES}
    assert sum(map(len, graph.values())) > 20
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_every_floor_has_modules_and_may_import_from_lower_ones_only():
    names = [floor.name for floor in FLOORS]
    assert len(names) > 8
    for i, floor in enumerate(FLOORS):
        assert floor.may_import <= {*names[:i]}, floor.name
        for pattern in floor.patterns:
            assert fnmatch.filter(MODULES, pattern), pattern


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_from_its_floor_and_from_those_that_the_map_names(module):
    floor = floor_of(module)
    others = {floor_of(other).name for other in imports(module)[0]}
    assert others <= floor.may_import | {floor.name}


def test_only_the_floor_of_programs_asks_for_the_name_of_a_primitive():
    """Because some equations call an object that stands for the primitive."""
    sources = {name: path.read_text() for name, path in MODULES.items()}
    asks = {name for name, text in sources.items() if "primitive.name" in text}
    assert asks == {"_jaxpr"}


def test_a_module_has_tests_of_its_name_or_is_listed_with_the_reason():
    tests = pathlib.Path(__file__).parent
    for module, path in MODULES.items():
        if path.stem == "__init__":
            continue
        *packages, name = [part.lstrip("_") for part in module.split(".")]
        has_tests = tests.joinpath(*packages, f"test_{name}.py").exists()
        listed = [key for key in TESTED_BY if fnmatch.fnmatchcase(module, key)]
        assert has_tests or listed, f"{module}: no test_{name}.py, not in TESTED_BY"
        assert not (has_tests and module in TESTED_BY), f"{module}: has test_{name}.py"
    assert all((tests / f"{file}.py").exists() for file, _ in TESTED_BY.values())


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_only_the_modules_that_need_it_import(package):
    importers = {name for name in MODULES if package in imports(name)[1]}
    assert importers <= MAY_IMPORT[package]


def test_nothing_else_is_imported():
    allowed = {"jax", "numpy", "tqdm", *MAY_IMPORT, *sys.stdlib_module_names}
    assert set.union(*(imports(name)[1] for name in MODULES)) <= allowed


MADE = "import jmp_scale as jmp; made = jmp.DynamicLossScale(8.0)"
FLAX_FIRST = f"import flax.serialization; {MADE}"
FLAX_LAST = f"{MADE}; print(*sys.modules); import flax.serialization"
ORDERS = [pytest.param(FLAX_FIRST, marks=pytest.mark.slow), FLAX_LAST]


@functools.cache
def lines_of_a_process(imports):
    """What a process prints that saves and restores loss scales with Flax."""
    code = f"""
import sys
{imports}
import jax, optax
from jax import numpy as jnp
data = flax.serialization.to_bytes(jax.device_get(made))
assert flax.serialization.from_bytes(made, data).loss_scale == 8
states = {{"dynamic": made, "static": jmp.StaticLossScale(4.0),
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


def test_every_test_that_a_comment_names_exists():
    files = list(pathlib.Path(__file__).parent.rglob("test_*.py"))
    text = "".join(path.read_text() for path in files)
    existing = {*re.findall(r"^def (test_\w+)", text, re.M), *(p.stem for p in files)}
    sources = "".join(path.read_text() for path in MODULES.values())
    named = re.findall(r"\b(test_\w+)(\.\.\.)?", sources)
    assert named
    for name, cut in named:
        assert any(e.startswith(name) if cut else e == name for e in existing), name
