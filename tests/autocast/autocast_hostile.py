"""Float32 programs whose gradients break if anything is rounded for them alone.

Values outside of float16's range, small differences of large numbers, comparisons whose
branch a rounding turns, carries: in each the backward pass must read what the
forward pass read.
"""

import jax
import jax.numpy as jnp
from autocast_programs import N, arrays, mean_square
from jax import lax

HOSTILE = {}
W, X, A, B = arrays((N, N), (8, N), (N, N), (N, N), seed=1, scale=1 / 3)


def hostile(fun):
    HOSTILE[fun.__name__] = fun
    return fun


def rms(h):
    return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)


def scaled(name, scale, tail):
    """A residual stream of some size, and the mean of what reads it."""

    def program(w, x):
        h = scale * (1 + x)
        for _ in range(2):
            h = h + scale * jnp.tanh(rms(h) @ w)
        return jnp.mean(tail(h, w))

    HOSTILE[name] = program


scaled("stream_of_1e6_rms_norm", 1e6, lambda h, w: jnp.square(rms(h) @ w))
scaled("log_of_1e6", 1e6, lambda h, w: jnp.log(jnp.abs(h) + 1))
scaled("cosine", 1e5, lambda h, w: h / jnp.linalg.norm(h, axis=1)[:, None] @ w)
scaled("logsumexp", 100.0, lambda h, w: jax.nn.logsumexp(h, -1))
scaled("rounded", 4.0, lambda h, w: (h + lax.stop_gradient(jnp.round(h) - h)) ** 2)


@hostile
def carry_of_7e6(w, x):
    def step(c, _):
        return c + 1e6 * jnp.tanh(rms(c) @ w), jnp.mean(c)

    c, ys = lax.scan(step, 7e6 * (1 + x), None, length=4)
    return jnp.log(jnp.linalg.norm(c)) + 1e-7 * jnp.mean(ys)


@hostile
def forty_operations_on_an_argument(w, x):
    y = 1e6 * x
    for i in range(40):
        y = y + 1e3 * jnp.sin(x * i)
    return jnp.mean(((1e6 * jnp.tanh(x @ w) - y) / 1e6) ** 2)


def masked(name, mask):
    def program(w, x):
        h = x + jnp.tanh(x @ w)
        return jnp.mean(mask(h).astype(jnp.float32) * jnp.tanh(h @ w))

    HOSTILE[name] = program


masked("mask_of_the_maximum", lambda h: h == h.max(-1, keepdims=True))
masked("mask_of_the_maximum_of_columns", lambda h: h == h.max(0, keepdims=True))
masked("top_k_by_threshold", lambda h: h >= jnp.sort(h)[:, -4:-3])
masked("nearest_code", lambda h: jax.nn.one_hot(jnp.argmin(h, -1), N))
masked("running_maximum", lambda h: h == lax.cummax(h, axis=1))


@hostile
def attention_that_keeps_its_scores(w, x):
    scores = (x @ w) @ (x @ A).T
    return mean_square(jax.nn.softmax(scores) @ (x @ B)) + jnp.mean(jnp.exp(scores))


@hostile
def softmax_by_hand(w, x):
    scores = (x @ w) @ x.T
    e = jnp.exp(scores - scores.max(-1, keepdims=True))
    return mean_square((e / e.sum(-1, keepdims=True)) @ x)


def offset_cost(p):
    """A mean whose cotangent has an offset: no softmax changes with it."""
    return jnp.mean(p @ (200 + 30 * A))


def softmax(name, tail, scale=0.1):
    """What reads a softmax, behind a product that reads it too."""

    def program(w, x):
        h = scale * x @ w
        return offset_cost(jax.nn.softmax(h)) + tail(h, scale * x[::-1] @ w)

    HOSTILE[name] = program


@jax.custom_vjp
def cost_of_a_rule(p, offsets):
    return jnp.sum(p * p)


cost_of_a_rule.defvjp(
    lambda p, offsets: (cost_of_a_rule(p, offsets), (p, offsets)),
    lambda saved, g: (g * (2 * saved[0] + saved[1][jnp.argmax(saved[1])]), None),
)
softmax("softmax_of_two_axes", lambda h, _: offset_cost(jax.nn.softmax(h, (0, 1))))
softmax("softmax_of_columns", lambda h, _: offset_cost(jax.nn.softmax(h, 0).T @ X))
softmax("softmax_with_a_peak", lambda h, _: 0.0, scale=10.0)
softmax("softmax_twice", lambda h, _: offset_cost(jax.nn.softmax(jax.nn.softmax(h))))
softmax("softmax_and_logsumexp", lambda h, _: jnp.mean(jax.nn.logsumexp(h, -1) ** 2))
softmax(
    "softmax_and_a_rule",
    lambda h, _: cost_of_a_rule(jax.nn.softmax(h), jnp.array([50.0])),
)
softmax(
    "softmax_and_its_cumulative_sum",
    lambda h, _: -jnp.mean(jnp.log(jnp.cumsum(jax.nn.softmax(h), -1))),
)


def sines(h, k):
    other = jax.nn.softmax(k)
    return offset_cost(other) + 30 * jnp.mean(jnp.sin(3000 * other))


def router(h, k):
    gates = jax.nn.softmax(k)
    chosen = jnp.where(gates == gates.max(-1, keepdims=True), gates, 0)
    return offset_cost(gates) + offset_cost(chosen) + jnp.sum(gates.mean(0) ** 2)


softmax("softmax_beside_one_that_a_sine_reads", sines)
softmax("softmax_beside_that_of_a_router", router)


@hostile
def rematerialized(w, x):
    block = jax.checkpoint(lambda h: h + 1e6 * jnp.tanh(rms(h) @ w))
    return jnp.log(mean_square(block(block(1e6 * (1 + x)))))


@hostile
def loss_of_a_gradient(w, x):
    return mean_square(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w) @ w))(x))


@hostile
def norm_in_a_loss_of_a_gradient(w, x):
    energy = lambda x: jnp.sum(jax.nn.standardize(x @ w, 0) ** 3 @ w)  # noqa: E731
    return mean_square(jax.grad(energy)(x))
