"""A character language model on Python's standard library in float16, with Flax NNX.

Gradients are accumulated with `optax.MultiSteps`, inside the loss scale. Prints which
share of the gradient entries float16 loses without a loss scale when the mean runs over
more tokens: the loss of a batch is divided as if it were one of many.
"""

import _language
import _show
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import jmp_scale.nnx

TOKENS = 2 ** np.array([10, 14, 17, 19, 21])  # in a mean; a batch has 2^10


def loss_fn(model, text):
    logits = model(text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


@nnx.jit
def train_step(model, optimizer, text):
    half_loss = jmp_scale.nnx.autocast(loss_fn, "float16")  # changed
    loss, grads = optimizer.value_and_grad(half_loss)(model, text)  # changed
    optimizer.update(model, grads, value=loss)  # changed
    return loss


@nnx.jit
def vanished(model, text):
    """Percentages of the gradient entries of float32 that are zero in float16."""
    half_loss = jmp_scale.nnx.autocast(loss_fn, "float16")

    def entries(loss_fn, share):
        grads = nnx.grad(lambda model: loss_fn(model, text) * share)(model)
        return jnp.concatenate([g.ravel() for g in jax.tree.leaves(grads)])

    exist = entries(loss_fn, 1.0) != 0
    lost = [(entries(half_loss, TOKENS[0] / n) == 0) & exist for n in TOKENS]
    return 100 * jnp.stack([x.sum() / exist.sum() for x in lost])


def main(argv=None):
    parser = _show.parser(__doc__, 100, out=True)
    _show.add_number(parser, "--accumulate", "batches a step", 2)
    args = parser.parse_args(argv)
    held_out, *batches = _language.batches(args.steps + 1)
    model = _language.Transformer(nnx.Rngs(0))
    tx = optax.MultiSteps(optax.adam(3e-3), args.accumulate).gradient_transformation()
    dynamic = jmp_scale.DynamicLossScale(2.0**20, period=100)
    optimizer = jmp_scale.nnx.Optimizer(model, tx, loss_scale=dynamic)

    percent, losses = {"start": vanished(model, held_out)}, []
    for text in tqdm(batches, "training"):
        losses.append(float(train_step(model, optimizer, text)))
    percent["end"] = vanished(model, held_out)
    s = _show.power(optimizer.loss_scale.loss_scale)
    skipped = int(optimizer.opt_state.skipped[...])
    print(f"\nloss {losses[0]:.2f} -> {losses[-1]:.2f}, {skipped} skipped, S {s}")
    print("Gradient entries that vanish in float16 without a loss scale:")
    columns = [[f"{x:.1f}%" for x in column] for column in percent.values()]
    rows = zip([f"{n:,}" for n in TOKENS], *columns, strict=True)
    _show.table(["tokens in the mean", *percent], rows)
    lines = {name: (TOKENS, y) for name, y in percent.items()}
    axes = {"xlabel": "tokens in the mean", "xscale": "log"}
    panels = [
        _show.curves("The model learns", "loss (nats per character)", {"": losses}),
        _show.curves("A longer mean loses more", "vanished (%)", lines, **axes),
    ]
    _show.figure(args.out / "nnx_transformer.png", panels)


if __name__ == "__main__":
    main()
