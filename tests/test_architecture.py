"""The structure of the package: floors of CONTRIBUTING.md, and optional packages."""

import ast
import fnmatch
import functools
import graphlib
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest
from helpers import slow

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
    "_autocast.provenance": ("autocast/recompute/test_plan", "a plan reads programs"),
    "_autocast.recompute.units": ("autocast/test_exact", "it is what was computed"),
    "_autocast.derivatives": ("autocast/test_autocast_derivatives", "of all modes"),
    "_autocast.higher_order": ("autocast/test_autocast_loops", "loops run as they did"),
    "_autocast.values": ("autocast/test_types_first", "sums are those of programs"),
    "_cpu": ("test_machine", "the command says what the processor has"),
    "_types": ("test_docs", "programs of pages have the types of functions"),
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


def dotted(path):
    """The name below the package of what a path leads to."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {dotted(path): path for path in PACKAGE.rglob("*.py")}
SOURCES = {name: path.read_text() for name, path in MODULES.items()}
# Rows of the table in CONTRIBUTING.md: name, modules, what for, floors below.
ROW = re.compile(r"^\| ([\w ]+) \| (`.+`) \| .+ \| (.*)\|$", re.MULTILINE)


def floors():
    """By name, the lowest first: patterns of modules, and floors they may import."""
    text, found = (PACKAGE.parent / "CONTRIBUTING.md").read_text(), {}
    for name, patterns, below in ROW.findall(text):
        allowed = {floor.strip() for floor in below.split(",")} - {""}
        allowed = {*found} if allowed == {"all above"} else allowed
        found[name] = re.findall(r"`(.+?)`", patterns), allowed
    return found


FLOORS = floors()


def floor_of(module):
    """The only floor with a pattern that a module fits."""
    fits = functools.partial(fnmatch.fnmatchcase, module)
    names = [name for name, (patterns, _) in FLOORS.items() if any(map(fits, patterns))]
    assert len(names) == 1, f"{module}: floors of CONTRIBUTING.md are {names}"
    return names[0]


@functools.cache
def imports(name):
    """(own modules, other packages) that a module imports, also for types alone."""
    own, external = set(), set()
    package = ".".join(("jmp_scale", *MODULES[name].relative_to(PACKAGE).parent.parts))
    for node in ast.walk(ast.parse(SOURCES[name])):
        if isinstance(node, ast.Import):
            external |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            external.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(relative, package)
            for alias in node.names:
                names = (f"{base}.{alias.name}", base, f"{base}.__init__")
                below = [each.removeprefix("jmp_scale.") for each in names]
                own.add(next(each for each in below if each in MODULES))
    return own, external


def test_imports_have_no_cycles():
    graph = {name: imports(name)[0] for name in MODULES}
    assert sum(map(len, graph.values())) > 20
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_every_floor_has_modules_and_may_import_from_lower_ones_only():
    assert len(FLOORS) > 8
    lower = set()
    for name, (patterns, may_import) in FLOORS.items():
        assert may_import <= lower, name
        assert all(fnmatch.filter(MODULES, pattern) for pattern in patterns), name
        lower.add(name)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_from_its_floor_and_from_those_that_the_map_names(module):
    floor = floor_of(module)
    others = {floor_of(other) for other in imports(module)[0]}
    assert others <= FLOORS[floor][1] | {floor}


def test_only_the_floor_of_programs_asks_for_the_name_of_a_primitive():
    """Because some equations call an object that stands for the primitive."""
    asks = {name for name, text in SOURCES.items() if "primitive.name" in text}
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
FLAX_LAST = f"""{MADE}
optional = {{"flax", "matplotlib", "equinox", "haiku", "sklearn", "tqdm"}}
assert not optional & set(sys.modules), "imported by jmp_scale"
import flax.serialization"""


@pytest.mark.parametrize("imports", [slow(FLAX_FIRST), FLAX_LAST])
def test_flax_serialization_knows_loss_scales_also_without_our_flax_modules(imports):
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
assert (restored["dynamic"].loss_scale, restored["dynamic"].period) == (8, 5)
assert str(restored["static"]) == "StaticLossScale(loss_scale=4.0)"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_test_that_a_comment_names_exists():
    files = list(pathlib.Path(__file__).parent.rglob("test_*.py"))
    text = "".join(path.read_text() for path in files)
    existing = {*re.findall(r"^def (test_\w+)", text, re.M), *(p.stem for p in files)}
    named = re.findall(r"\b(test_\w+)(\.\.\.)?", "".join(SOURCES.values()))
    assert named
    for name, cut in named:
        assert any(e.startswith(name) if cut else e == name for e in existing), name
