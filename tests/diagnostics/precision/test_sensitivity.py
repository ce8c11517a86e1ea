"""Products that must stay float32 are found, and the cure works as pasted."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from autocast_hostile import HOSTILE, W, X
from autocast_programs import PROGRAMS
from helpers import count_traces
from jax import lax
from losses import of_examples, squared_distances

import jmp_scale
from jmp_scale.diagnostics import (
    compare_gradients,
    precision_report,
    sensitive_products,
)

pytestmark = pytest.mark.usefixtures("ranks_promote")
KEYS = jax.random.split(jax.random.key(0), 12)


def normal(key, *shape):
    return jax.random.normal(KEYS[key], shape)


def layer(key, rows, columns):
    return normal(key, rows, columns) / rows**0.5


def test_what_is_recommended_works_as_pasted():
    def loss(params, x):
        z = jnp.tanh(x @ params["w1"]) @ params["w2"] + 5
        nearest = jnp.argmin(squared_distances(z, params["codes"]), 1)
        chosen = params["codes"][nearest]
        return jnp.mean((chosen - lax.stop_gradient(z)) ** 2 + (z - x[:, :8]) ** 2)

    params = {"w1": layer(0, 64, 64), "w2": layer(1, 64, 8)}
    params["codes"] = 5 + normal(2, 64, 8) / 2
    args = params, normal(3, 64, 64)
    found = sensitive_products(loss, *args, dtype="bfloat16")
    assert found.keep == ("squared_distances",)
    assert found.error_before > 0.05
    (finding,) = found.findings
    assert finding[:3] == ("not precise", "error", "squared_distances")
    call = f'jmp_scale.autocast(loss, "bfloat16", keep_float32={found.keep})'
    assert finding.cure == call
    assert found.half_share >= 0.8
    half_loss = jmp_scale.autocast(loss, "bfloat16", keep_float32=found.keep)
    assert found.error_after <= 0.05
    assert compare_gradients(half_loss, loss, *args).is_precise


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["float32", "tensorfloat32"])
def test_products_are_those_of_autocast_whatever_precision_is_set(setting):
    """As `import dynamax` sets it, for what stays float32."""

    def loss(w, x):
        return jnp.mean((x @ w @ w.T + 1) ** 2)

    args = 400 * jnp.eye(16), 400 * jnp.ones((16, 16))
    with jax.default_matmul_precision(setting):
        found = sensitive_products(loss, *args)
        half = jmp_scale.autocast(loss, "float16")
        measured = compare_gradients(half, loss, *args)
        share = precision_report(half, *args).half_share
    assert (found.error_before, measured.error, share) == (jnp.inf, jnp.inf, 1)
    assert not found.ok
    assert len(found.products) == 1


def heat_map(w, x):  # its derivative does not depend on the 100
    positions = jnp.broadcast_to(100 + jnp.arange(16.0)[:, None], (16, 4))
    return jnp.mean(jax.nn.softmax(x @ w) @ positions)


ALL = PROGRAMS | {name: (fun, (W, X)) for name, fun in HOSTILE.items()}
ALL["heat_map"] = heat_map, (W, X)
# The tool counts a product that nothing reads, the report of what is compiled does not.
WITH_DEAD_PRODUCTS = {
    "loss_of_a_gradient",
    "norm_in_a_loss_of_a_gradient",
    "softmax_and_logsumexp",
    "softmax_of_columns",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:autocast. opaque")
@pytest.mark.parametrize("name", ALL)
def test_the_gradient_with_all_products_in_half_precision_is_that_of_autocast(name):
    fun, args, *_ = ALL[name]
    found = sensitive_products(fun, *args, dtype="bfloat16", loss_scale=1)
    half = jmp_scale.autocast(fun, "bfloat16")
    measured = compare_gradients(half, fun, *args, loss_scale=1)
    expected = max(measured.error, measured.scaled_error / 3)
    assert found.error_before == pytest.approx(expected, rel=0.25)
    half_share = precision_report(half, *args).half_share
    if not found.keep and name not in WITH_DEAD_PRODUCTS:
        assert found.half_share == pytest.approx(half_share, abs=0.15)


def one_of_three(params, x):
    h = jnp.tanh(x @ params["a"])
    h = jnp.exp(h @ params["b"] - 8)  # <- it loses digits here
    return jnp.mean((jnp.log(h) + 8 - x @ params["a"]) ** 2)


@pytest.mark.slow
def test_each_line_has_its_share_and_its_errors():
    params = {"a": layer(0, 32, 32), "b": jnp.eye(32)}
    counted, traces = count_traces(one_of_three)
    found = sensitive_products(counted, params, normal(2, 64, 32), dtype="bfloat16")
    assert len(traces) == 1
    lines, first = inspect.getsourcelines(one_of_three)
    marked = [i for i, line in enumerate(lines, first) if "@" in line]
    assert [row.line for row in found.products] == marked
    assert {row.file for row in found.products} == {__file__}
    assert [row.share for row in found.products] == pytest.approx([1 / 3] * 3)
    row = found.products[1]
    name = f"test_sensitivity.py:{row.line}"
    half = jmp_scale.autocast(one_of_three, "bfloat16", keep_float32=name)
    compared = compare_gradients(half, one_of_three, params, normal(2, 64, 32))
    assert row.without == pytest.approx(compared.error, rel=0.3)


class Head(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = 1 + nn.tanh(nn.Dense(64, name="body")(x)) / 100
        return nn.Dense(2, name="phase")(h)


@pytest.mark.slow
def test_a_product_within_a_library_has_its_module_and_the_line_of_the_user():
    model = Head()
    x = normal(0, 64, 16)
    variables = model.init(KEYS[1], x)

    def loss(variables, x):
        return jnp.mean(jnp.sin(100 * model.apply(variables, x)))

    found = sensitive_products(loss, variables, x, dtype="bfloat16")
    assert found.keep == ("phase",)
    body, phase = found.products
    assert (body.scope, phase.scope) == ("Head/body", "Head/phase")
    assert body.library == phase.library != ""
    assert (phase.file, phase.line) == (__file__, body.line + 1)
    assert found.half_share == pytest.approx(16 / 18)
    half_loss = jmp_scale.autocast(loss, "bfloat16", keep_float32=found.keep)
    assert compare_gradients(half_loss, loss, variables, x).error <= 0.05


@pytest.mark.slow
def test_a_loss_scale_at_fault_is_told_from_products():
    def tiny(w, x):
        return 2.0**-28 * jnp.mean(jnp.tanh(x @ w))

    args = layer(0, 16, 16), normal(1, 8, 16)
    found = sensitive_products(tiny, *args, loss_scale=1)
    assert found.error_before > 0.5
    assert found.keep == ()
    (finding,) = found.findings
    assert finding.rule == "loss scale at fault"
    assert "at loss scale 2^0. At 2^15 the gradient is off by" in finding.text
    wide = {"loss_scale": 1, "backward": "bfloat16"}
    assert sensitive_products(tiny, *args, **wide).error_before < 0.05


@pytest.mark.slow
def test_a_name_that_keeps_more_than_is_required_counts_all_that_it_keeps():
    def loss(w, x):
        h = jnp.tanh(x @ w)
        with jax.named_scope("centered"):
            near = squared_distances(h, x)
        far = squared_distances(10 + h, 10 + x)
        return jnp.mean(jnp.exp(-far) + jnp.exp(-near))

    args = layer(0, 8, 8), normal(1, 32, 8)
    found = sensitive_products(loss, *args, dtype="bfloat16")
    first, *_ = found.products
    assert found.keep == ("squared_distances",)
    assert found.half_share == first.share
    assert found.error_after == first.alone  # by one program, with the same roundings


def test_gradients_of_weights_are_summed_in_float32():
    big = jnp.full((512, 16), 300.0)  # whose sums of 512 float16 cannot hold
    found = sensitive_products(lambda w: 400 * jnp.sum(big @ w), W, loss_scale=1)
    assert found.error_before < 0.01


def test_an_overflow_of_the_forward_pass_names_its_line_and_the_cure():
    def large(w, x):
        h = 1e4 * x @ w
        return jnp.mean(jnp.log(1 + (h @ w) ** 2))

    args = jnp.eye(16), 10 + normal(1, 8, 16)
    found = sensitive_products(large, *args)
    assert found.error_before == jnp.inf
    assert found.half_share == 0
    assert [f.rule for f in found.findings] == ["not precise", "loss not finite"]
    assert found.findings[1].cure == "Try bfloat16."


def test_it_leaks_no_tracer():
    with jax.checking_leaks():
        found = sensitive_products(lambda w: jnp.mean(jnp.tanh(w @ w)), W)
    assert found.ok


def test_a_program_that_is_not_finite_says_so():
    broken = sensitive_products(lambda w: jnp.log(w @ w - 1e9).sum(), jnp.ones((2, 2)))
    assert [finding.rule for finding in broken.findings] == ["float32 not finite"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_it_is_silent_about_ordinary_models(monkeypatch, dtype):
    for loss, args, transform in of_examples(monkeypatch):
        found = sensitive_products(loss, *args, dtype=dtype, transform=transform)
        assert (found.ok, found.keep, found.half_share) == (True, (), 1), found
