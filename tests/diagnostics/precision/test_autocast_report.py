"""`precision_report` of float32 programs that `autocast` cast."""

import jax
import jax.numpy as jnp
import precision_faults as faults
import pytest
from autocast_hostile import HOSTILE, W, X
from autocast_programs import PROGRAMS
from flax import nnx
from helpers import by_name
from losses import of_examples
from precision_checks import line_of, reported
from test_precision_clean import assert_clean
from test_precision_faults import mean

import jmp_scale.nnx
from jmp_scale.diagnostics import precision_report

pytestmark = pytest.mark.usefixtures("ranks_promote")


ALL = PROGRAMS | {name: (fun, (W, X)) for name, fun in HOSTILE.items()}


@pytest.mark.filterwarnings("ignore:autocast")
def test_a_gradient_that_a_loop_around_autocast_adds_up_stands_at_the_users_line():
    half = jmp_scale.autocast(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), "bfloat16")

    def loss(w, xs):
        step = lambda total, x: (total + half(w, x), None)  # noqa: E731
        return jax.lax.scan(step, 0.0, xs)[0]

    args = jnp.ones((8, 8), jnp.bfloat16), jnp.ones((512, 4, 8))
    found = precision_report(loss, *args).findings
    (carry,) = (f for f in found if f.rule == "half-carry")
    lines = [line_of(loss) + 1, line_of(loss) + 2]
    assert carry.where in [f"{__file__}:{line} (backward)" for line in lines]
    assert "jmp_scale" not in carry.text


@pytest.mark.filterwarnings("ignore:autocast")
@pytest.mark.parametrize(
    "name", by_name(["associative_scan", "top_k_by_threshold"], sorted(ALL))
)
def test_every_program_is_read_and_where_autocast_has_changed_it(name):
    fun, args, *_ = ALL[name]
    for program in (fun, jmp_scale.autocast(fun, "float16")):
        assert 0 <= precision_report(program, *args).half_share <= 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:autocast. no product became")
def test_a_float32_program_cast_by_autocast_has_none_of_the_faults(monkeypatch):
    monkeypatch.setattr(faults, "F16", jnp.float32)
    monkeypatch.setattr(faults, "BF16", jnp.float32)
    cast_by_name = {"mask_cast_by_numpy", "epsilon_of_numpy"}
    for name in faults.FAULTS.keys() - cast_by_name:
        function, _ = faults.FAULTS[name]
        in_half = jmp_scale.autocast(lambda x, f=function: mean(f(x)), "float16")
        report = precision_report(in_half, jnp.ones(64))
        assert reported(report) == set(), name
        assert report.not_looked_into == ()


@pytest.mark.slow
def test_the_models_of_the_examples_cast_by_autocast(monkeypatch):
    for loss, args, transform in of_examples(monkeypatch):
        module = jmp_scale.nnx if transform is nnx.value_and_grad else jmp_scale
        assert_clean(module.autocast(loss, "float16"), *args, transform=transform)
