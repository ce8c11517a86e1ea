"""docs/precision.md: each rule's program has the fault, and the mended one has not."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from jmp_scale.diagnostics import precision_report

pytestmark = pytest.mark.usefixtures("ranks_promote")

PAGE = (pathlib.Path(__file__).parents[1] / "docs/precision.md").read_text()
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


def test_the_table_has_every_rule_and_its_section():
    assert list(ROWS) == list(PROGRAMS)
    assert len(ROWS) == 16


@pytest.mark.parametrize("rule", PROGRAMS)
def test_the_program_of_a_rule_has_its_fault_and_the_mended_one_does_not(rule):
    findings = report(rule, "loss").findings
    serious = [f for f in findings if f.severity != "note" or rule == "full-matmul"]
    assert {f.rule for f in serious} == {rule}
    assert ROWS[rule] in {f.severity for f in serious}
    assert report(rule, "mended").findings == ()


def test_the_figures_of_the_page():
    f16, bf16 = jnp.float16, jnp.bfloat16
    assert jnp.isinf(jnp.sum(jnp.ones(70_000, f16)))
    assert jnp.isinf(f16(256) ** 2)
    assert f16(1e-4) ** 2 == 0
    assert jnp.isinf(jnp.exp(f16(11.1)))
    assert jnp.nextafter(f16(10), f16(11)) - f16(10) == 2**-7
    assert jnp.nextafter(bf16(10), bf16(11)) - bf16(10) == 2**-4
    assert f16(2049) == f16(2048) != f16(2047)
    assert bf16(257) == bf16(256) != bf16(255)
