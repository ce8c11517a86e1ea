"""What the pages on precision say of their recipes and programs is what is found."""

import importlib
import pathlib
import re
import textwrap

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import by_name, slow

import jmp_scale
from jmp_scale.diagnostics import precision_report, sensitive_products

pytestmark = pytest.mark.usefixtures("ranks_promote")

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "precision.md").read_text()
RECIPE = re.compile(  # some are folded, and so indented
    r"^## ([\w ]+)\n\n(?:\?{3} [^\n]*\n\n)?( *)```python\n(.*?)^\2```",
    re.DOTALL | re.MULTILINE,
)
RECIPES = {
    name: textwrap.dedent(code)
    for name, _, code in RECIPE.findall((DOCS / "by-hand.md").read_text())
}
TRANSFORMS = {"Flax NNX": nnx.value_and_grad, "Equinox": eqx.filter_value_and_grad}
SHARED = {"jax": jax, "jmp_scale": jmp_scale, "jnp": jnp, "optax": optax}
SHARED["precision_report"] = precision_report


@pytest.mark.parametrize("dtype", ["float16", slow("bfloat16")])
@pytest.mark.parametrize("library", by_name(["Plain JAX"], RECIPES))
def test_a_recipe_is_clean_and_wholly_in_half_precision(library, dtype):
    batch = {"x": jnp.ones((32, 8)), "y": jnp.zeros(32, jnp.int32)}
    shapes = {"w1": (8, 64), "b1": (64,), "w2": (64, 10), "b2": (10,)}
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    recipe = {**SHARED, "batch": batch, "params": params}
    exec(RECIPES[library].replace("float16", dtype), recipe)
    transform = TRANSFORMS.get(library, jax.value_and_grad)
    loss_fn, params = recipe["loss_fn"], recipe["params"]
    report = precision_report(loss_fn, params, batch, transform=transform)
    assert report.findings == ()
    assert report.half_share == 1.0
    products = [row for row in report.operations if row.flops]
    assert {row.dtype for row in products} == {dtype}


PROGRAM = r"^## ([\w-]+)\n\n```python\n(.*?)```"
PROGRAMS = dict(re.findall(PROGRAM, PAGE, re.DOTALL | re.MULTILINE))
ROWS = dict(re.findall(r"^\| \[([\w-]+)\]\(#\1\) \| (\w+)", PAGE, re.MULTILINE))


def report(rule, name):
    namespace = {"jax": jax, "jnp": jnp, "f16": jnp.float16, "f32": jnp.float32}
    exec(PROGRAMS[rule], namespace)
    half = rule == "half-parameters" and name == "loss"
    w = jax.ShapeDtypeStruct((8,), jnp.float16 if half else jnp.float32)
    rows = 70_000 if rule == "half-sum" else 16
    x, fun = jax.ShapeDtypeStruct((rows, 8), jnp.float32), namespace[name]
    if rule == "half-collective":
        over_axis = jax.vmap(fun, axis_name="i", in_axes=(None, 0))
        fun = lambda w, x: over_axis(w, x[None]).mean()  # noqa: E731
    return precision_report(fun, w, x)


@pytest.mark.parametrize("rule", PROGRAMS)
def test_the_program_of_a_rule_has_its_fault_and_the_fixed_one_does_not(rule):
    findings = report(rule, "loss").findings
    serious = [f for f in findings if f.level != "note" or rule == "full-matmul"]
    assert {f.rule for f in serious} == {rule}
    assert ROWS[rule] in {f.level for f in serious}
    assert report(rule, "fixed").findings == ()


# Of precise-enough.md: each program needs its line, which is enough and is found.
ROW = r"^\| \[([\w ]+)\]\(#[\w-]+\) \|.*\| `(\w+)` \|"
LINES = re.findall(ROW, (DOCS / "precise-enough.md").read_text(), re.MULTILINE)


def test_the_page_has_a_row_and_a_section_for_each_program():
    source = (DOCS / "precise_enough.py").read_text()
    programs = re.findall(r'^    "([\w ]+)": \(.*"(\w+)"\),$', source, re.MULTILINE)
    assert programs == LINES


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in LINES])
def test_a_line_kept_in_float32_makes_the_gradient_precise_and_is_found(
    name, monkeypatch
):
    monkeypatch.syspath_prepend(DOCS)
    programs = importlib.import_module("precise_enough")
    # In bfloat16 the rest of a molecule's network has too few digits too.
    dtype = "float16" if "forces" in name else "bfloat16"
    before, after, share = programs.errors(name, dtype)
    assert before > 0.2
    assert after < 0.05
    assert share > 0.1
    loss, args, kept = programs.PROGRAMS[name]
    found = sensitive_products(loss, *args, dtype=dtype)
    assert found.keep == (kept,)
    assert f"keep_float32={found.keep}" in found.summary()
    assert found.error_before > 0.2
    assert found.error_after <= 0.05
    assert found.half_share > 0.1
