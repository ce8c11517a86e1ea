"""The loss of `loss_without_logits.py`, whose gradient the forward pass computes."""

import functools

import jax
import jax.numpy as jnp

import jmp_scale


def losses_of_rows(logits, labels, z_loss=0.0, soft_cap=None):
    """Cross-entropies f32[n] of logits f32[n, V]; 0 where a label is below 0."""
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    log_sums = jax.nn.logsumexp(logits, axis=-1)
    is_label = jnp.arange(logits.shape[-1])[None] == labels[:, None]
    losses = log_sums - jnp.sum(logits, axis=-1, where=is_label)
    return jnp.where(labels < 0, 0.0, losses + z_loss * log_sums**2)


def summed_loss(h, head, labels, weights, losses_of=losses_of_rows, chunks=4):
    """`losses_of(h @ head, labels) @ weights`, without all logits at once.

    Args:
      h: f32[n, d], n a multiple of `chunks`.
      head: f32[d, V].
      labels: i32[n]; those below 0 are ignored.
      weights: f32[n], of each token: 1 / n for a mean.
      losses_of: f32[m] of logits f32[m, V] and m labels, each row on its own.
      chunks: of tokens. More take less memory, and add the head's gradient up more
        often.
    """
    dtype = jmp_scale.in_half(lambda h: h.dtype)(h)  # that of autocast's products
    return _in_chunks((dtype, losses_of, chunks), h, head, labels, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_chunks(how, *args):
    return _forward(how, *args)[0]


def _forward(how, h, head, labels, weights):
    dtype, losses_of, chunks = how
    # Neither the weights, often 1 / n, nor S are in what float16 must represent.
    top = jnp.maximum(jnp.max(jnp.abs(weights)), jnp.finfo(jnp.float32).tiny)
    rows = h.astype(dtype), labels, weights / top
    rows = jax.tree.map(lambda x: x.reshape(chunks, -1, *x.shape[1:]), rows)
    head = head.astype(dtype)

    def chunk(of_head, rows):
        h, labels, share = rows
        logits = (h @ head).astype(jnp.float32)
        losses, pull = jax.vjp(lambda logits: losses_of(logits, labels), logits)
        of_logits = pull(jnp.ones_like(losses))[0].astype(dtype)
        of_h = (of_logits @ head.T).astype(jnp.float32) * share[:, None]
        h = h * share[:, None].astype(dtype)
        of_head += jnp.matmul(h.T, of_logits, preferred_element_type=jnp.float32)
        return of_head, (losses, of_h)

    zeros = jnp.zeros(head.shape, jnp.float32)
    of_head, (losses, of_h) = jax.lax.scan(chunk, zeros, rows)
    losses, of_h = losses.reshape(-1), of_h.reshape(h.shape)
    return losses @ weights, (of_h, of_head, losses, top)


def _backward(how, gradients, g):
    of_h, of_head, losses, top = gradients
    return of_h * (top * g), of_head * (top * g), None, losses * g


_in_chunks.defvjp(_forward, _backward)
