"""The cause of a step that is not finite, for losses whose cause is known."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from helpers import count_traces, one_of
from losses import forgetful, squared_distances

import jmp_scale
from jmp_scale.diagnostics import Diagnosis
from jmp_scale.diagnostics import diagnose_nonfinite as diagnose

pytestmark = pytest.mark.strict_promotion


def test_a_finite_step_is_diagnosed_as_such():
    diagnosis = diagnose(forgetful, 2.0**15, jnp.ones(3), jnp.ones(3))
    assert diagnosis == Diagnosis("none")


@pytest.mark.parametrize("start", [2.0**36, 1e12])
def test_an_overflow_is_finite_from_the_largest_smaller_scale_on(start):
    diagnosis = diagnose(forgetful, start, jnp.ones(3), jnp.ones(3))
    assert (diagnosis.cause, diagnosis.finite_at_log2) == ("overflow", 35)
    assert "2^35" in diagnosis.summary()


def out_of_range(w):
    """At S = 1 the gradient is 240000, beyond float16: finite from S = 2^-2 on."""
    return (w.astype(jnp.float16) * jnp.float16(60000)).astype(jnp.float32) * 4


def test_an_overflow_that_persists_at_one_is_searched_further_down():
    counted, traces = count_traces(out_of_range)
    diagnosis = diagnose(counted, 8, jnp.float32(1))
    assert diagnosis.finite_at_log2 == -2
    assert len(traces) == 1  # however many scales it tries
    for factor, cause in ((2.0**12, "overflow"), (2.0**13, "nan")):
        loss = lambda w, factor=factor: factor * out_of_range(w)  # noqa: E731
        assert diagnose(loss, 8, jnp.float32(1)).cause == cause


def test_the_leaf_that_overflows_first_as_the_scale_grows_is_named():
    x = jnp.ones(3)

    def loss(params):
        return forgetful(params["a"], x) + 2.0**4 * forgetful(params["b"], x)

    diagnosis = diagnose(loss, 2.0**60, {"a": x, "b": x})
    assert (diagnosis.path, diagnosis.finite_at_log2) == ("['b']", 31)
    assert diagnosis.nonfinite_paths == ("['b']",)


def test_a_loss_that_is_not_finite_is_a_matter_of_the_forward_pass():
    def loss(params, batch):
        return (params["w"] * batch["x"]).sum(), None

    batch = {"y": jnp.ones(2), "x": jnp.array([1.0, jnp.nan])}
    diagnosis = diagnose(loss, 2.0**15, {"w": jnp.ones(2)}, batch, has_aux=True)
    assert (diagnosis.cause, diagnosis.path) == ("forward", "['w']")
    assert diagnosis.nonfinite_argument == "args[1]['x']"
    assert "args[1]['x']" in diagnosis.summary()
    exploded = diagnose(lambda w: jnp.exp(w).sum(), 2.0**15, jnp.full(2, 1e3))
    assert (exploded.cause, exploded.nonfinite_argument) == ("forward", None)


def gaussian_process(x):
    kernel = jnp.exp(-squared_distances(x, x) / 2) + 1e-2 * jnp.eye(len(x))
    factor = jnp.linalg.cholesky(kernel)  # !NaN
    return jnp.sum(jnp.log(jnp.diag(factor)))


def overflow(x):
    products = jnp.dot(x * 1e3, x.T)  # !infinity
    return jnp.sum(products - products.T)


def in_a_scan(x):
    def body(total, row):
        total += jnp.sum(jnp.log(row - 9.05))  # !NaN
        return total + jnp.sum(jnp.sqrt(9.08 - row)), row

    return jax.lax.scan(body, jnp.float32(0), x)[0]


def in_a_reversed_scan(x):
    def body(total, row):
        total += jnp.sum(jnp.log(row - 9.05))
        return total + jnp.sum(jnp.sqrt(9.08 - row)), row  # !NaN

    return jax.lax.scan(body, jnp.float32(0), x, reverse=True)[0]


def in_a_branch(x):
    return jax.lax.cond(
        x[0, 0] < 0,
        jnp.sum,
        lambda x: jnp.sum(jnp.exp(jnp.where(x > 8, 100, -jnp.inf))),  # !infinity
        x,
    )


def masked_everywhere(x):
    scores = jnp.where(x > 99, x, -jnp.inf)
    shifted = scores - jnp.max(scores, axis=1, keepdims=True)  # !NaN
    return jnp.sum(jnp.exp(shifted))


def mel_spectrogram(x):
    power = jnp.abs(jnp.fft.rfft(x * 1e2, axis=0)) ** 2
    return jnp.sum(jnp.log(1 + power @ jnp.ones((2, 3))))  # !infinity


@pytest.mark.parametrize(
    ("fun", "operation", "half"),
    one_of(
        2,
        [
            (overflow, "a matrix product", "float16"),
            (gaussian_process, "a Cholesky factorization", "float16"),
            (in_a_reversed_scan, "sqrt", None),
            (in_a_scan, "log", None),
            (in_a_branch, "exp", None),
            (mel_spectrogram, "a cast to float16", "float16"),
            (masked_everywhere, "sub", None),
        ],
    ),
)
def test_the_operation_that_gave_infinity_or_nan_is_named(fun, operation, half):
    x = jnp.full((32, 2), 9.0) + jnp.linspace(0, 0.1, 32)[:, None]
    half_loss = jax.jit(jmp_scale.autocast(fun, half)) if half else fun
    diagnosis = diagnose(half_loss, 2.0**15, x)
    lines, first = inspect.getsourcelines(fun)
    (line,) = (i for i, text in enumerate(lines, first) if "# !" in text)
    kind = lines[line - first].partition("# !")[2].strip()
    assert diagnosis.operation == f"{operation} gave {kind} at {__file__}:{line}"
    assert (diagnosis.float32_loss is not None) == bool(half)
    assert diagnosis.operation in diagnosis.summary()
    assert ("float32 gives a loss of" in diagnosis.summary()) == bool(half)


@pytest.mark.parametrize("half", [None, "float16"])
def test_a_constant_that_is_nan_is_named_and_no_operation(half):
    batch = jnp.array([[1.0, jnp.nan], [1.0, 2.0]])
    loss = lambda w: jnp.sum((batch @ w) ** 2)  # noqa: E731
    found = diagnose(jmp_scale.autocast(loss, half) if half else loss, 1, jnp.eye(2))
    text = found.summary()
    assert text.startswith("a constant float32[2,2]")
    assert "is not finite itself" in text
    assert ("in float32" in text, found.operation) == (False, None)


def test_a_nan_that_no_scale_cures_is_found():
    params = {"a": jnp.ones(2), "b": jnp.zeros(2)}
    loss = lambda p: (p["a"] + jnp.where(p["b"] > 0, jnp.sqrt(p["b"]), 0)).sum()  # noqa: E731
    diagnosis = diagnose(loss, jmp_scale.DynamicLossScale(), params)
    assert diagnosis[:3] == ("nan", "['b']", None)
    assert "debug_nans" in diagnosis.summary()


@pytest.mark.parametrize("s", [jnp.nan, jnp.inf, 0.0, -8.0])
def test_a_diagnosis_refuses_a_bad_loss_scale(s):
    broken = jmp_scale.StaticLossScale(8)
    object.__setattr__(broken, "loss_scale", jnp.float32(s))
    with pytest.raises(ValueError, match="expected a positive finite loss scale"):
        diagnose(out_of_range, broken, jnp.float32(1))
