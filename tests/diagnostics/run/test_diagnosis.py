"""The cause of a step that is not finite, for losses whose cause is known."""

import functools
import inspect
import itertools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import by_name, count_traces, slow
from losses import forgetful, squared_distances

import jmp_scale
from jmp_scale.diagnostics import Diagnosis
from jmp_scale.diagnostics import diagnose_nonfinite as diagnose

pytestmark = pytest.mark.strict_promotion


def test_a_finite_step_is_diagnosed_as_such():
    diagnosis = diagnose(forgetful, 2.0**15, jnp.ones(3), jnp.ones(3))
    assert diagnosis == Diagnosis((), "none")
    assert (diagnosis.ok, str(diagnosis)) == (True, "Loss and gradients are finite.")


def test_an_overflow_is_finite_from_the_largest_smaller_scale_on():
    diagnosis = diagnose(forgetful, 1e12, jnp.ones(3), jnp.ones(3))
    assert (diagnosis.cause, diagnosis.finite_at_log2) == ("overflow", 35)
    (finding,) = diagnosis.findings
    assert finding.rule == "gradient overflows"
    assert finding.where.endswith("losses.py:15 (backward)")
    assert "2^35: a cast to float16 gave infinity" in finding.text


@pytest.mark.parametrize("x", [jnp.nan, -4.0])
def test_debug_nans_does_not_stop_a_diagnosis(x):
    given = lambda w, x: jnp.log(w * x).sum(), 1, jnp.ones(2), jnp.full(2, x)
    found = diagnose(*given)
    assert not found.ok
    with jax.debug_nans(True):
        assert diagnose(*given) == found


def out_of_range(w):
    """At S = 1 the gradient is 240000, beyond float16: finite from S = 2^-2 on."""
    return (w.astype(jnp.float16) * jnp.float16(60000)).astype(jnp.float32) * 4


def test_an_overflow_that_persists_at_one_is_searched_further_down():
    counted, traces = count_traces(out_of_range)
    diagnosis = diagnose(counted, 8, jnp.float32(1))
    assert diagnosis.finite_at_log2 == -2
    assert len(traces) == 2  # however many scales it tries
    for factor, cause in ((2.0**12, "overflow"), (2.0**13, "nan")):
        loss = lambda w, factor=factor: factor * out_of_range(w)  # noqa: E731
        assert diagnose(loss, 8, jnp.float32(1)).cause == cause


def test_the_leaf_that_overflows_first_as_the_scale_grows_is_named():
    x = jnp.ones(3)

    def loss(params):
        return forgetful(params["a"], x) + 2.0**4 * forgetful(params["b"], x)

    diagnosis = diagnose(loss, 2.0**60, {"a": x, "b": x})
    assert (diagnosis.path, diagnosis.finite_at_log2) == ("['b']", 31)


X = jnp.float32(np.full((4, 6), 0.5) + np.arange(4.0)[:, None] / 10)
W = jnp.float32(np.eye(6) * 0.3)
MASK = jnp.float32(np.where(np.tri(4), 0.0, -np.inf))
EMPTY_ROW = jnp.float32([[-np.inf] * 4, *np.asarray(MASK)[1:]])


# Losses of parameters and a batch. A comment stands at the line that is at fault, and
# says what happens there.
def zero_by_zero(w, x):
    h = x @ w
    return jnp.sum((h - h) / jnp.sum(h - h))  # !div gave NaN


class Model(nnx.Module):
    """A parameter, and a statistic that no optimizer updates."""

    def __init__(self, w, mean):
        self.w, self.mean = nnx.Param(w), nnx.BatchStat(mean)


BAD = jnp.ones((4, 4)).at[0, 0].set(jnp.nan)
GOOD = jnp.ones((4, 4))
MASKED = jnp.zeros((4, 4)).at[0].set(-jnp.inf)
UPDATED, GIVEN = "parameters not finite", "argument not finite"
CONSTANT = "a constant float32[4,4]"


def of_batch(p, batch):
    return (batch["x"] @ p["w"]).sum()


def of_model(m):
    return (m.mean * m.w).sum()


def of_constant(w):
    return jnp.sum((BAD @ w) ** 2)


def of_masked(m, x):
    return jax.nn.softmax(x + m["mask"]).sum() + m["w"].sum()


half = functools.partial(jmp_scale.autocast, dtype="float16")
# A loss, its arguments, the rule, and what is at fault.
NOT_FINITE = {
    "a leaf": (of_batch, ({"w": BAD}, {"x": GOOD}), UPDATED, "args[0]['w']"),
    "of two": (lambda x, w: (x @ w).sum(), (GOOD, BAD), UPDATED, "args[1]"),
    "inf": (jnp.sum, (GOOD * jnp.inf,), UPDATED, "args[0]"),
    "NNX": (of_model, (Model(BAD, GOOD),), UPDATED, "args[0].w"),
    "a batch": (of_batch, ({"w": GOOD}, {"x": BAD}), GIVEN, "args[1]['x']"),
    "inf in it": (of_batch, ({"w": GOOD}, {"x": 1 / MASKED}), GIVEN, "args[1]['x']"),
    "a statistic": (of_model, (Model(GOOD, BAD),), GIVEN, "args[0].mean"),
    "a constant": (of_constant, (GOOD,), GIVEN, CONSTANT),
    "a constant in half": (half(of_constant), (GOOD,), GIVEN, CONSTANT),
    "a mask": (of_masked, ({"mask": MASKED, "w": GOOD}, GOOD), "masked row", "args[0]"),
}


@pytest.mark.parametrize("case", NOT_FINITE)
def test_what_was_not_finite_is_named_and_a_parameter_is_told_from_the_rest(case):
    loss, args, rule, leaf = NOT_FINITE[case]
    diagnosis = diagnose(loss, 8, *args, argnums=(1, 0) if case == "of two" else 0)
    (finding,) = diagnosis.findings
    assert (finding.rule, diagnosis.in_parameters) == (rule, rule == UPDATED)
    assert diagnosis.nonfinite_argument.startswith(leaf)
    if rule != "masked row":
        assert diagnosis.operation is None
        assert finding.where == diagnosis.nonfinite_argument


def test_a_backward_pass_that_raises_is_diagnosed_by_the_scale_where_it_does_not():
    @jax.custom_vjp
    def solve(x):
        return x

    def backward(_, g):
        return (eqx.error_if(g, jnp.max(jnp.abs(g)) > 1000, "did not converge"),)

    solve.defvjp(lambda x: (x, None), backward)
    diagnosis = diagnose(lambda w: solve(w).sum(), 2.0**15, jnp.ones(3))
    assert (diagnosis.cause, diagnosis.finite_at_log2) == ("overflow", 9)
    (finding,) = diagnosis.findings
    assert finding.rule == "backward pass raises"
    assert "raises an error at this loss scale, and none at 2^9" in finding.text
    assert finding.text.endswith("Error: did not converge.")


def test_a_backward_pass_that_raises_at_every_scale_raises():
    def loss(w):
        return eqx.error_if(w, w.sum() > 0, "no model").sum()

    with pytest.raises(RuntimeError, match="no model"):
        diagnose(loss, 8, jnp.ones(3))


def cast_beside_a_mask(w, x):
    scores = jnp.where(MASK < 0, MASK, 1e6 * (x @ w @ x.T))
    half = scores.astype(jnp.float16)  # !a cast to float16 gave infinity
    return jnp.sum(half[-1].astype(jnp.float32))


def masked_row(w, batch):
    scores = batch["x"] @ w
    weights = jax.nn.softmax(scores @ scores.T + batch["bias"])  # !sub gave NaN
    return jnp.sum(weights @ batch["x"])


def row_of_a_constant(w, x):
    return masked_row(w, {"x": x, "bias": EMPTY_ROW})


def in_a_scan(w, x, reverse=False):
    def body(total, row):
        total += jnp.sum(jnp.log(row @ w - 0.19))  # !log gave NaN
        return total + jnp.sum(jnp.sqrt(0.22 - row @ w)), row  # !sqrt gave NaN

    return jax.lax.scan(body, jnp.float32(0), x, reverse=reverse)[0]


def in_a_reversed_scan(w, x):
    return in_a_scan(w, x, reverse=True)


def in_a_branch(w, x):
    def masked(h):
        h = jnp.where(h > 0.1, 100, -jnp.inf)
        return jnp.sum(jnp.exp(h))  # !exp gave infinity

    return jax.lax.cond(x[0, 0] < 0, jnp.sum, masked, x @ w)


# The loss of these is finite, and their gradient is not.
def norm_at_zero(w, x):
    h = jnp.maximum(x @ w - 1, 0)
    return jnp.sum(jnp.linalg.norm(h, axis=1))  # !div gave infinity


def sqrt_in_a_scan(w, x):
    def body(total, row):
        h = jnp.maximum(row @ w - 0.2, 0)
        return total + jnp.sum(jnp.sqrt(h)), row  # !div gave infinity

    return jax.lax.scan(body, jnp.float32(0), x)[0]


def sqrt_in_a_checkpoint(w, x):
    @jax.checkpoint
    def layer(x):
        return jnp.sum(jnp.sqrt(jnp.tanh(x @ w) * 0))  # !div gave infinity

    return layer(x)


@jax.custom_jvp
def wrong_rule(x):
    return 2 * x


def divided_by_zero(primals, tangents):
    return 2 * primals[0], tangents[0] / (primals[0] * 0)  # !div gave infinity


wrong_rule.defjvp(divided_by_zero)


def rule_of_a_custom_jvp(w, x):
    return jnp.sum(wrong_rule(x @ w))  # !div gave infinity


FORWARD = [zero_by_zero, cast_beside_a_mask, masked_row, row_of_a_constant]
FORWARD += [in_a_scan, in_a_reversed_scan, in_a_branch]
BACKWARD = [norm_at_zero, sqrt_in_a_scan, sqrt_in_a_checkpoint, rule_of_a_custom_jvp]
CALLED = masked_row, in_a_scan, divided_by_zero
# Arguments and constants whose infinities are the cause. MASK never is.
BLAMED = {masked_row: "args[1]['bias']", row_of_a_constant: CONSTANT}
RULE_OF = dict.fromkeys(FORWARD, "loss not finite")
RULE_OF |= dict.fromkeys(BLAMED, "masked row")
RULE_OF |= dict.fromkeys(BACKWARD, "gradient not finite")
FORMS = {
    "float32": lambda fun: fun,
    "autocast": half,
    "not recomputed": lambda fun: half(jax.jit(fun), recompute=False),
}
LOSSES = FORWARD + BACKWARD
QUICK = [*zip(LOSSES, itertools.cycle(FORMS), strict=False)]  # each loss in one form
EACH_IN_EACH_FORM = by_name(QUICK, itertools.product(LOSSES, FORMS))


def marked(*functions):
    """The operations that comments name, with their lines."""
    for function in functions:
        lines, first = inspect.getsourcelines(function)
        for number, line in enumerate(lines, first):
            if mark := re.search("# !(.*)", line):
                yield f"{mark[1]} at {__file__}:{number}"


@pytest.mark.parametrize(("fun", "form"), EACH_IN_EACH_FORM)
def test_the_operation_of_the_forward_or_backward_pass_is_named(fun, form):
    batch = {"x": X, "bias": EMPTY_ROW} if fun is masked_row else X
    diagnosis = diagnose(FORMS[form](fun), 8, W, batch)
    assert diagnosis.operation in marked(fun, *CALLED)
    assert ("sqrt" in diagnosis.operation) == (fun is in_a_reversed_scan)
    assert diagnosis.cause == ("forward" if fun in FORWARD else "nan")
    (finding,) = diagnosis.findings
    operation, _, line = diagnosis.operation.partition(" at ")
    assert finding.where == line + " (backward)" * (fun in BACKWARD)
    assert operation in finding.text
    assert finding.rule == RULE_OF[fun]
    blamed = diagnosis.nonfinite_argument or ""
    assert blamed.partition(" at ")[0] == BLAMED.get(fun, "")
    assert ("of the infinities in" in finding.text) == (fun in BLAMED)


def product_out_of_range(w, x):
    h = (x * 1e3) @ (w * 1e3)  # !a matrix product gave infinity
    return jnp.mean(h - jnp.mean(h))


def input_out_of_range(w, x):
    return jnp.mean((x @ w - 1) ** 2)  # !a cast to float16 gave infinity


def input_beside_an_island(w, x):
    h = jnp.tanh(w @ w)
    return jnp.mean(x @ h)  # !a cast to float16 gave infinity


def root_of_a_distance(w, x):
    y = 3.105 + x @ w / 1000  # rounded up in bfloat16
    return jnp.sum(jnp.sqrt(squared_distances(y, y) + 1e-3))  # !sqrt gave NaN


def factor_of_a_gram_matrix(w, x):
    gram = (x @ w) @ (x @ w).T + 1e-3 * jnp.eye(4)
    return jnp.sum(jnp.linalg.cholesky(gram))  # !cholesky gave NaN


def power_of_a_difference(w, x):
    h = x @ w @ w - x @ (w @ w) + 1e-4
    return jnp.sum(jnp.where(h > 0, h, 1)) + jnp.sum(h**0.5)  # !pow gave NaN


ROUNDED = [root_of_a_distance, factor_of_a_gram_matrix, power_of_a_difference]
RANGE = [product_out_of_range, input_out_of_range, input_beside_an_island]


@pytest.mark.parametrize("recompute", [True, slow(False)])
@pytest.mark.parametrize("fun", [*ROUNDED, *RANGE])
def test_what_is_finite_in_float32_is_said_to_be(fun, recompute):
    x = jnp.linspace(0.1, 0.9, 24).reshape(4, 6) ** 2
    x = x.at[0, 0].set(1e5) if fun in RANGE[1:] else x
    w = W + jnp.linspace(0.1, 0.2, 36).reshape(6, 6)
    dtype = "float16" if fun in RANGE else "bfloat16"
    cast = jmp_scale.autocast(fun, dtype, recompute=recompute)
    assert jnp.isfinite(fun(w, x))

    def in_a_loss(w, x):
        return 2 * cast(w, x)

    for form in (cast, jax.jit(cast), in_a_loss):
        diagnosis = diagnose(form, 1, w, x)
        (finding,) = diagnosis.findings
        assert finding.rule == "not finite in half precision"
        assert "and is in float32" in finding.text
        assert "sensitive_products" in finding.cure
        assert form is in_a_loss or diagnosis.operation in marked(fun)
    (finding,) = diagnose(lambda w, x: fun(w, x) * jnp.nan, 1, w, x).findings
    assert finding.rule != "not finite in half precision"
