"""The transformer of `policy_gradient.py`, which reads at once or with a cache."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TOKENS, LENGTH, WIDTH, HEADS, LAYERS = 16, 8, 32, 4, 2


def init_params(seed):
    """Float32 parameters."""

    def normal(*shape):
        return jax.random.normal(next(keys), shape) / np.sqrt(shape[0])

    def layer():
        return {
            "qkv": normal(WIDTH, 3 * WIDTH),
            "out": normal(WIDTH, WIDTH),
            "up": normal(WIDTH, 4 * WIDTH),
            "down": normal(4 * WIDTH, WIDTH),
        }

    keys = iter(jax.random.split(jax.random.key(seed), 3 + 4 * LAYERS))
    embeddings = {"token": normal(TOKENS, WIDTH), "position": normal(LENGTH, WIDTH)}
    layers = [layer() for _ in range(LAYERS)]
    return {**embeddings, "layers": layers, "out": normal(WIDTH, TOKENS)}


def sample(params, key, dtype):
    """Tokens i32[LENGTH + 1], and the log-probabilities with which they were drawn."""

    def write(carry, at):
        token, cache = carry
        log_probs, cache = run(params, token[None], cache, at, dtype)
        drawn = jax.random.categorical(jax.random.fold_in(key, at), log_probs[0])
        return (drawn, cache), (drawn, log_probs[0, drawn])

    first, cache = jax.random.randint(key, (), 0, TOKENS), empty_cache(dtype)
    _, (rest, log_probs) = lax.scan(write, (first, cache), jnp.arange(LENGTH))
    return jnp.append(first, rest), log_probs


def read(params, tokens, dtype):
    """The same log-probabilities, f32[LENGTH], of a whole sequence at once."""
    log_probs, _ = run(params, tokens[:-1], empty_cache(dtype), 0, dtype)
    return jnp.take_along_axis(log_probs, tokens[1:, None], axis=1)[:, 0]


def empty_cache(dtype):
    """Keys and values of no token, for each layer."""
    return [jnp.zeros((LENGTH, 2, HEADS, WIDTH // HEADS), dtype)] * LAYERS


def run(params, tokens, cache, start, dtype):
    """Log-probabilities f32[n, TOKENS] of what follows n tokens, and the new cache."""
    params = jax.tree.map(lambda w: w.astype(dtype), params)
    at, caches = start + jnp.arange(len(tokens)), []
    x = params["token"][tokens] + params["position"][at]
    for layer, old in zip(params["layers"], cache, strict=True):
        qkv = (norm(x) @ layer["qkv"]).reshape(len(x), 3, HEADS, -1)
        new = lax.dynamic_update_slice(old, qkv[:, 1:], (start, 0, 0, 0))
        seen = jnp.arange(LENGTH) <= at[:, None]
        mixed = attend(qkv[:, 0], new[:, 0], new[:, 1], seen)
        x = x + mixed.reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]
        caches.append(new)
    logits = (norm(x) @ params["out"]).astype(jnp.float32)
    return jax.nn.log_softmax(logits), caches


def norm(x):
    """Root mean square norm, computed in float32."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def attend(q, k, v, seen):
    """Attention of [n, heads, size], with a softmax in float32."""
    scores = jnp.einsum("qhd,khd->hqk", q, k).astype(jnp.float32)
    scores = jnp.where(seen, scores / np.sqrt(q.shape[-1]), -jnp.inf)
    if len(q) > 1:
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores).astype(v.dtype), v)
    # As fast kernels for one token do: first the sum of the values, then the quotient.
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    total = jnp.einsum("hqk,khd->qhd", weights.astype(v.dtype), v)
    return (total / weights.sum(-1).T[..., None]).astype(v.dtype)
