"""A small ResNet with BatchNorm in float16 on scikit-learn's digits, with Flax Linen.

The train step is that of Flax's ImageNet example with two lines changed (marked). The loss scale starts
too high on purpose: the first steps overflow and are skipped, and the BatchNorm statistics stay finite.
"""

import argparse
import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from digits import positive_int
from sklearn.datasets import load_digits
from tqdm import tqdm

import jmp_scale
from jmp_scale.linen import TrainState

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BATCH = 128


class Block(nn.Module):
    channels: int
    train: bool

    @nn.compact
    def __call__(self, x):
        y = x
        for _ in range(2):
            y = nn.BatchNorm(
                use_running_average=not self.train, momentum=0.9, dtype=jnp.float16
            )(y)
            y = nn.Conv(self.channels, (3, 3), use_bias=False, dtype=jnp.float16)(
                nn.relu(y)
            )
        return x + y


class ResNet(nn.Module):
    channels: int = 16
    blocks: int = 3

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(self.channels, (3, 3), dtype=jnp.float16)(x)
        for _ in range(self.blocks):
            x = Block(self.channels, train)(x)
        return nn.Dense(10, dtype=jnp.float16)(x.mean((1, 2))).astype(jnp.float32)


class ResNetState(TrainState):
    batch_stats: Any


def load_data():
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(labels))
    images = images[order].reshape(-1, 8, 8, 1).astype(np.float32) / 16
    train, test = slice(0, 1437), slice(1437, None)
    return (images[train], labels[order][train]), (images[test], labels[order][test])


def create_state(loss_scale):
    model = ResNet()
    variables = model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)), train=True)
    return ResNetState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.adam(3e-3),
        loss_scale=loss_scale,
    )


def train_step(state, images, labels):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updates = state.apply_fn(
            variables, images, train=True, mutable=["batch_stats"]
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, updates

    (loss, updates), grads = state.value_and_grad(loss_fn, has_aux=True)(
        state.params
    )  # changed
    state = state.apply_gradients(
        grads=grads, value=loss, batch_stats=updates["batch_stats"]
    )  # changed
    return state, loss


@jax.jit
def accuracy(state, images, labels):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return (state.apply_fn(variables, images, train=False).argmax(-1) == labels).mean()


def plot(history, path):
    losses, scales, skipped = (
        np.array(column) for column in zip(*history, strict=True)
    )
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(7, 5), layout="constrained"
    )
    top.semilogy(losses)
    top.set_ylabel("training loss")
    bottom.step(range(len(scales)), np.log2(scales), where="post")
    steps = np.flatnonzero(np.diff(skipped, prepend=0))
    bottom.plot(steps, np.log2(scales[steps]), "rx", label="skipped")
    bottom.set(xlabel="step", ylabel="log2 of the loss scale")
    bottom.legend()
    figure.savefig(path, dpi=120)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--steps", type=positive_int, default=200, help="training steps (default 200)"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("out"),
        help="folder (default out)",
    )
    args = parser.parse_args(argv)
    (images, labels), test = load_data()
    state = create_state(jmp_scale.DynamicLossScale(2.0**24, period=50))
    step, random, history, rows = (
        jax.jit(train_step, donate_argnums=0),
        np.random.RandomState(0),
        [],
        [],
    )
    every = max(args.steps // 5, 1)
    for i in tqdm(range(1, args.steps + 1), "training"):
        batch = random.randint(0, len(labels), BATCH)
        state, loss = step(state, images[batch], labels[batch])
        s, skipped = float(state.loss_scale.loss_scale), int(state.opt_state.skipped)
        history.append((float(loss), s, skipped))
        if i % every == 0:
            rows.append(
                (i, float(loss), float(accuracy(state, *test)), np.log2(s), skipped)
            )
    print(f"\n{'step':>6}{'loss':>10}{'test accuracy':>15}{'log2 S':>8}{'skipped':>9}")
    for row in rows:
        print("{:>6}{:>10.4f}{:>15.3f}{:>8.0f}{:>9}".format(*row))
    print(
        f"BatchNorm statistics finite: {bool(jmp_scale.all_finite(state.batch_stats))}"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    plot(history, args.out / "linen_resnet.png")
    print(f"figure: {args.out / 'linen_resnet.png'}")
    return rows[-1]


if __name__ == "__main__":
    main()
