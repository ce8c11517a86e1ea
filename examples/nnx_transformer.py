"""A character language model on Python's standard library in float16, with Flax NNX.

Gradients are accumulated with optax.MultiSteps, inside the loss scale. At the end it prints which share
of the gradient entries vanishes in float16 without a loss scale when the mean runs over more tokens: the
loss of one batch is divided as if it were one of many.
"""

import argparse
import pathlib
import sysconfig

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from digits import positive_int
from flax import nnx
from tqdm import tqdm

import jmp_scale
from jmp_scale.nnx import Optimizer

matplotlib.use("Agg")
import matplotlib.pyplot as plt

VOCABULARY, CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 128, 64, 16, 64, 4, 2
TOKENS = BATCH * CONTEXT
MEANS = (2**10, 2**14, 2**17, 2**19, 2**21)


class Layer(nnx.Module):
    def __init__(self, dtype, rngs):
        self.attention_norm = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)
        self.queries_keys_values = nnx.Linear(WIDTH, 3 * WIDTH, dtype=dtype, rngs=rngs)
        self.attended = nnx.Linear(WIDTH, WIDTH, dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = x + self.attended(self.attend(self.attention_norm(x)))
        return x + self.down(nnx.gelu(self.up(self.norm(x))))

    def attend(self, x):
        shape = (*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = jnp.moveaxis(self.queries_keys_values(x).reshape(shape), 2, 0)
        scores = (
            jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
            * q.shape[-1] ** -0.5
        )
        weights = jax.nn.softmax(
            jnp.where(jnp.tri(CONTEXT, dtype=bool), scores, -jnp.inf)
        )
        return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v).reshape(
            x.shape
        )


class Transformer(nnx.Module):
    def __init__(self, dtype, rngs):
        self.characters = nnx.Embed(VOCABULARY, WIDTH, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, WIDTH, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(dtype, rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(WIDTH, VOCABULARY, dtype=dtype, rngs=rngs)

    def __call__(self, text):
        x = self.characters(text) + self.positions(jnp.arange(CONTEXT))[None]
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x)).astype(jnp.float32)


def load_text():
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(path.read_text(errors="ignore") for path in files).encode(
        "ascii", "ignore"
    )
    return np.frombuffer(text, np.uint8).astype(np.int32)


def sample(text, random):
    starts = random.randint(0, len(text) - CONTEXT - 1, BATCH)
    return text[starts[:, None] + np.arange(CONTEXT + 1)]


def loss_fn(model, text):
    logits = model(text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


@nnx.jit
def train_step(model, optimizer, text):
    loss, grads = optimizer.value_and_grad(loss_fn)(model, text)  # changed
    optimizer.update(model, grads, value=loss)  # changed
    return loss


@nnx.jit
def vanished(model, reference, text):
    """Shares of the gradient entries, not zero in float32, that are zero in float16; one for each mean."""
    nnx.update(reference, nnx.state(model, nnx.Param))

    def grads_of_mean(model, tokens):
        grads = nnx.grad(lambda model: loss_fn(model, text) * (TOKENS / tokens))(model)
        return jnp.concatenate([x.ravel() for x in jax.tree.leaves(grads)])

    expected = grads_of_mean(reference, TOKENS) != 0
    return jnp.stack(
        [
            jnp.sum((grads_of_mean(model, n) == 0) & expected) / expected.sum()
            for n in MEANS
        ]
    )


def plot(losses, shares, path):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.plot(losses)
    left.set(xlabel="micro-batch", ylabel="training loss (nats per character)")
    for name, share in shares.items():
        right.semilogx(MEANS, 100 * share, "o-", base=2, label=name)
    right.set(xlabel="tokens in the mean", ylabel="vanished gradient entries (%)")
    right.legend()
    figure.savefig(path, dpi=120)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--steps", type=positive_int, default=100, help="micro-batches (default 100)"
    )
    parser.add_argument(
        "--accumulate", type=int, default=2, help="micro-batches a step (default 2)"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("out"),
        help="folder (default out)",
    )
    args = parser.parse_args(argv)
    text, random = load_text(), np.random.RandomState(0)
    model, reference = (
        Transformer(dtype, nnx.Rngs(0)) for dtype in (jnp.float16, jnp.float32)
    )
    tx = optax.MultiSteps(optax.adam(3e-3), args.accumulate).gradient_transformation()
    optimizer = Optimizer(
        model, tx, loss_scale=jmp_scale.DynamicLossScale(2.0**20, period=100)
    )
    held_out = sample(text, random)

    shares, losses = (
        {"at initialization": np.asarray(vanished(model, reference, held_out))},
        [],
    )
    for _ in (progress := tqdm(range(args.steps), "training")):
        losses.append(float(train_step(model, optimizer, sample(text, random))))
        progress.set_postfix(
            loss=f"{losses[-1]:.2f}", S=f"{float(optimizer.loss_scale.loss_scale):g}"
        )
    shares["after training"] = np.asarray(vanished(model, reference, held_out))

    log2_s, skipped = (
        np.log2(float(optimizer.loss_scale.loss_scale)),
        int(optimizer.opt_state.skipped[...]),
    )
    print(
        f"\nloss {losses[0]:.2f} -> {losses[-1]:.2f}, log2 S {log2_s:.0f}, {skipped} skipped"
    )
    print("Vanished gradient entries in float16 without a loss scale")
    print(f"{'tokens in the mean':>20}" + "".join(f"{name:>20}" for name in shares))
    for i, tokens in enumerate(MEANS):
        print(
            f"{tokens:>20,}"
            + "".join(f"{share[i]:>20.1%}" for share in shares.values())
        )
    args.out.mkdir(parents=True, exist_ok=True)
    plot(losses, shares, args.out / "nnx_transformer.png")
    print(f"figure: {args.out / 'nnx_transformer.png'}")
    return losses, shares


if __name__ == "__main__":
    main()
