"""A language model whose loss never holds all of its logits, with Flax NNX.

Where the losses of the tokens are added with known weights, the gradient of a chunk of
tokens is known as soon as its logits are, so the forward pass computes both, with the
products of a plain head and no more: see `_loss_without_logits.py`. Prints what each
loss learns, and the memory of a step on this machine.
"""

import functools

import _language
import _show
import jax
import jax.numpy as jnp
import optax
from _loss_without_logits import losses_of_rows, summed_loss
from flax import nnx
from tqdm import tqdm

import jmp_scale

# Pairs of characters are the tokens: a vocabulary of 128 * 128.
LETTERS, SPACES = 2, 128 * ord(" ") + ord(" ")
losses_of = functools.partial(losses_of_rows, z_loss=1e-4, soft_cap=30.0)


def plain_loss(h, head, labels, weights):
    return losses_of(h @ head, labels) @ weights


chunked_loss = functools.partial(summed_loss, losses_of=losses_of, chunks=4)
float16 = jmp_scale.DynamicLossScale(2.0**15)
RUNS = {
    "float32": (plain_loss, None, jmp_scale.NoOpLossScale()),
    "bfloat16": (plain_loss, "bfloat16", jmp_scale.NoOpLossScale()),
    "bfloat16, in chunks": (chunked_loss, "bfloat16", jmp_scale.NoOpLossScale()),
    "float16, in chunks": (chunked_loss, "float16", float16),
}


def train_step_of(graph, loss, dtype, tx):
    def loss_fn(params, text):
        h = nnx.merge(graph, params).hidden(text[:, :-1])
        labels = jnp.where(text[:, 1:] == SPACES, -1, text[:, 1:]).reshape(-1)
        weights = (labels >= 0) / jnp.sum(labels >= 0)  # a mean without indentation
        head = params["out"]["kernel"].get_value()
        return loss(h.reshape(len(labels), -1), head, labels, weights)

    half_loss = jmp_scale.autocast(loss_fn, dtype) if dtype else loss_fn

    @jax.jit
    def train_step(params, opt_state, text):
        value_and_grad = jmp_scale.value_and_grad(half_loss, opt_state.loss_scale)
        loss, grads = value_and_grad(params, text)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step


def main(argv=None):
    args = _show.parser(__doc__, 40).parse_args(argv)
    batches, rows = _language.batches(args.steps, 4, LETTERS), []
    for name, (loss, dtype, loss_scale) in RUNS.items():
        model = _language.Transformer(nnx.Rngs(0), 128**LETTERS, use_bias=False)
        graph, params = nnx.split(model)
        tx = jmp_scale.with_loss_scale(optax.adam(3e-3), loss_scale)
        step, opt_state = train_step_of(graph, loss, dtype, tx), tx.init(params)
        compiled = step.lower(params, opt_state, batches[0]).compile()
        memory = compiled.memory_analysis().temp_size_in_bytes
        for text in tqdm(batches, name):
            params, opt_state, loss = compiled(params, opt_state, text)
        s = _show.power(opt_state.loss_scale.loss_scale)
        rows.append([name, f"{loss:.2f}", f"{memory / 1e6:.0f} MB", s])
    _show.table(["loss and its dtype", "loss at the end", "memory", "S"], rows)


if __name__ == "__main__":
    main()
