"""Half-precision products whose rounding the next operation makes larger."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import one_of
from precision_checks import assert_finds, reported

from jmp_scale import autocast, keep_float32
from jmp_scale.diagnostics import precision_report

pytestmark = pytest.mark.usefixtures("ranks_promote")

X, W = jax.ShapeDtypeStruct((16, 8), "float32"), jax.ShapeDtypeStruct((8, 8), "float32")


def squares(x, w):
    return jnp.sum(x**2, 1)[:, None] + jnp.einsum("id,id->i", w, w)


def distances(w, x):
    return squares(x, w) - 2 * x @ w.T  # !half-cancellation


def nearest_code(w, x):
    codes = w / 2
    products = jax.jit(jnp.dot)(x, codes.T)
    return jnp.min(jnp.sum(codes**2, -1) - 2 * products, 1)  # !half-cancellation


def cost_of_pairs(w, x):
    def cost(x, y):
        return jnp.vdot(x, x) + jnp.vdot(y, y) - 2 * x @ y  # !half-cancellation

    return jax.vmap(lambda x: jax.vmap(lambda y: cost(x, y))(w))(x)


def distances_in_a_scan(w, x):
    def body(total, row):
        near = squares(row, w) - 2 * row @ w.T  # !half-cancellation
        return total + near.sum(), None

    return jax.lax.scan(body, 0.0, x.reshape(2, 8, 8))[0]


def fourier_features(w, x):
    angles = 2 * jnp.pi * x @ w
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)  # !half-angle


def cholesky(w, x):
    kernel = jnp.exp(x[:8] @ w) + jnp.eye(8)
    return jnp.log(jnp.diag(jnp.linalg.cholesky(kernel)))  # !half-solve


def solve(w, x):
    return jnp.linalg.solve(x.T @ x + w, w)  # !half-solve


FAULTS = [distances, nearest_code, cost_of_pairs, distances_in_a_scan]
FAULTS += [fourier_features, cholesky, solve]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint])
def test_a_product_that_is_amplified_is_found_at_the_line_that_does_it(fault, wrap):
    loss = autocast(lambda *args: jnp.sum(wrap(fault)(*args)), "float16")
    assert_finds([fault], loss, W, X)


def by_hand(w, x):
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    positions = x[:, 0][:, None] * w[0]
    tables = jnp.cos(positions.astype(jnp.float32))  # !half-angle
    products = jnp.dot(x, w.T, preferred_element_type=jnp.float32)
    return tables + squares(x, w) - products  # !half-cancellation


def test_casts_by_hand_are_read_too():
    assert_finds([by_hand], lambda w, x: jnp.sum(by_hand(w, x)), W, X)


def cosine_similarity(w, x):
    return x @ w.T / (jnp.linalg.norm(x, axis=1)[:, None] * jnp.linalg.norm(w, axis=1))


def norms_and_weight_decay(w, x):
    h = x @ w
    h = h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)
    return jnp.mean(jnp.linalg.norm(h, axis=1)) + jnp.sum(w**2) + jnp.mean(x @ w)


def rotary_attention(w, x):
    angles = jnp.einsum("i,j->ij", jnp.arange(16.0), 100 ** -jnp.linspace(0, 1, 4))

    def rotated(x):
        a, b, sin, cos = x[:, :4], x[:, 4:], jnp.sin(angles), jnp.cos(angles)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], 1)

    probabilities = jax.nn.softmax(rotated(x @ w) @ rotated(x @ w).T)
    return x + jax.nn.gelu(probabilities @ x @ w)


def kernel_of_features(w, x):
    h = jnp.tanh(x @ w)
    squared = jnp.sum((h[:, None] - h) ** 2, -1)
    return jnp.linalg.cholesky(jnp.exp(-squared) + jnp.eye(16))


def variational(w, x):
    mean, log_variance = jnp.split(x @ w, 2, axis=1)
    kl = jnp.exp(log_variance) + mean**2 - 1 - log_variance
    return jnp.mean(kl) + jnp.sin(jnp.tanh(mean) * 3) + (mean - x[:, :4]) ** 2


CLEAN = [cosine_similarity, norms_and_weight_decay, rotary_attention]
CLEAN += [kernel_of_features, variational]
CLEAN += map(keep_float32, [distances, fourier_features, solve])


@pytest.mark.parametrize("fun", CLEAN)
@pytest.mark.parametrize("dtype", one_of(2, ["float16", "bfloat16"]))
def test_programs_that_amplify_no_product_are_clean(fun, dtype):
    loss = autocast(lambda w, x: jnp.sum(fun(w, x)) + jnp.sum(x @ w), dtype)
    assert precision_report(loss, W, X).findings == ()


def cost(x, w):
    return jnp.tanh(x) @ w  # !two-dtypes


@jax.custom_vjp
def with_own_rule(x, w):
    return cost(x, w)


def forward(x, w):
    return cost(x, w), (x, w)


with_own_rule.defvjp(forward, lambda saved, g: jax.vjp(cost, *saved)[1](g))


@pytest.mark.filterwarnings("ignore:autocast. with_own_rule")
def test_a_product_in_two_dtypes_is_found_unless_one_serves_both():
    def loss(fun, w, x):
        return jnp.sum(with_own_rule(x, w) - fun(x, w)) + jnp.sum(x @ w)

    half = autocast(functools.partial(loss, cost), "bfloat16")
    assert_finds([cost], half, W, X)
    for same in (keep_float32(cost), with_own_rule, lambda x, w: jnp.tanh(x @ w)):
        half = autocast(functools.partial(loss, same), "bfloat16")
        assert reported(precision_report(half, W, X)) == set()


def solves_integers_and_outer_products(w, x):
    table = jnp.einsum("ij,kj->ik", jnp.arange(8).reshape(4, 2), x[:, :2])
    outer = jnp.einsum("i,j->ij", x[0], w[0])
    return jnp.sum(jnp.linalg.inv(w)) + jnp.sum(table) + jnp.sum(outer)


@pytest.mark.parametrize("cast", [autocast, None])
def test_no_advice_to_cast_what_needs_its_digits(cast):
    def loss(w, x):
        h = x @ w if cast else x.astype("float16") @ w.astype("float16")
        return solves_integers_and_outer_products(w, x) + jnp.mean(h.astype("float32"))

    fun = cast(loss, "float16") if cast else loss
    assert precision_report(fun, W, X).findings == ()
