"""Two losses, two loss scales: a generative adversarial network of handwritten digits in float16.

Generator and discriminator have an optimizer and a loss scale of their own, so that an overflow in one skips
and backs off only that one. `--overflow-at STEP` causes one: the loss of that step is multiplied by 2^60,
which stays finite in float32 but whose gradient is infinite in float16. Prints a table, and draws samples and
both loss scales.
"""

import argparse
import functools
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import load_digits_split, policy_for, positive_int
from tqdm import tqdm

import jmp_scale

CHUNK = 100  # steps in one compiled scan, between two updates of the progress bar
BATCH_SIZE = 64
NOISE = 16
PLAYERS = ("generator", "discriminator")
POLICY = policy_for("float16")


class Player(NamedTuple):
    """What one of the two networks keeps: float32 master parameters and its optimizer's state."""

    params: list
    opt_state: Any


class Record(NamedTuple):
    """What a step leaves of one player: its true loss, S after the step, and whether it was skipped."""

    loss: jax.Array
    loss_scale: jax.Array
    skipped: jax.Array


def main(argv=None):
    args = parse_args(argv)
    images, _ = load_digits_split(args.seed)
    players, records = train(images, args)
    print_table(records)
    print(f"figure: {draw(players['generator'].params, records, args.out)}")
    return records


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=positive_int, default=6000, help="steps of both players (6000)"
    )
    parser.add_argument(
        "--overflow-at",
        type=positive_int,
        metavar="STEP",
        help="step that overflows (none)",
    )
    parser.add_argument(
        "--overflow-in", choices=PLAYERS, default=PLAYERS[1], help=f"({PLAYERS[1]})"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the split, the start and the noise (0)"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default="out", help="folder of the figure (out)"
    )
    return parser.parse_args(argv)


def init_network(key, widths):
    keys = jax.random.split(key, len(widths) - 1)
    he_normal = jax.nn.initializers.he_normal()
    shapes = zip(keys, widths[:-1], widths[1:], strict=True)
    return [{"w": he_normal(k, (i, o)), "b": jnp.zeros(o)} for k, i, o in shapes]


def network(params, x):
    """Outputs [batch, widths[-1]] in float32 of a leaky network that computes in float16."""
    *hidden, last = POLICY.cast_to_compute(params)
    x = POLICY.cast_to_compute(x)
    for layer in hidden:
        x = jax.nn.leaky_relu(x @ layer["w"] + layer["b"], 0.2)
    return POLICY.cast_to_output(x @ last["w"] + last["b"])


def generate(params, noise):
    return jax.nn.sigmoid(network(params, noise))


def generator_loss(params, discriminator, noise, spike):
    logits = network(discriminator, generate(params, noise))
    loss = jnp.mean(optax.sigmoid_binary_cross_entropy(logits, jnp.ones_like(logits)))
    return loss * spike, loss


def discriminator_loss(params, generator, images, noise, spike):
    real, fake = network(params, images), network(params, generate(generator, noise))
    loss = optax.sigmoid_binary_cross_entropy(real, jnp.full_like(real, 0.9))
    loss = jnp.mean(
        loss + optax.sigmoid_binary_cross_entropy(fake, jnp.zeros_like(fake))
    )
    return loss * spike, loss


def update(tx, player, loss_fn, *args):
    """One step of one player, which never looks at the other's loss scale."""
    grad_fn = jmp_scale.value_and_grad(
        loss_fn, player.opt_state.loss_scale, has_aux=True
    )
    (_, loss), grads = grad_fn(player.params, *args)
    updates, opt_state = tx.update(grads, player.opt_state, player.params, value=loss)
    record = Record(loss, opt_state.loss_scale.loss_scale, ~opt_state.grads_finite)
    return Player(optax.apply_updates(player.params, updates), opt_state), record


def train_chunk(tx, players, batches):
    """Several steps in one scan; each takes (images, a key, how much to multiply either loss by)."""

    def train_step(players, batch):
        images, key, spike = batch
        noise = jax.random.normal(key, (2, len(images), NOISE))
        generator, discriminator = (players[name] for name in PLAYERS)
        fakes = generator.params
        generator, g_record = update(
            tx,
            generator,
            generator_loss,
            discriminator.params,
            noise[0],
            spike["generator"],
        )
        discriminator, d_record = update(
            tx,
            discriminator,
            discriminator_loss,
            fakes,
            images,
            noise[1],
            spike["discriminator"],
        )
        new, records = (generator, discriminator), (g_record, d_record)
        return dict(zip(PLAYERS, new, strict=True)), dict(
            zip(PLAYERS, records, strict=True)
        )

    return jax.lax.scan(train_step, players, batches)


def train(images, args):
    """Trains both players, with a progress bar; their records are arrays over steps."""
    tx = jmp_scale.with_loss_scale(
        optax.adam(5e-4, b1=0.5), jmp_scale.DynamicLossScale(2.0**15, period=200)
    )
    keys = jax.random.split(jax.random.key(args.seed), 3)
    widths = {"generator": (NOISE, 128, 128, 64), "discriminator": (64, 128, 64, 1)}
    params = {
        name: init_network(k, widths[name])
        for name, k in zip(PLAYERS, keys, strict=False)
    }
    players = {name: Player(p, tx.init(p)) for name, p in params.items()}
    spikes = {name: np.ones(args.steps, np.float32) for name in PLAYERS}
    if args.overflow_at is not None and args.overflow_at <= args.steps:
        spikes[args.overflow_in][args.overflow_at - 1] = 2.0**60
    order = np.random.RandomState(args.seed).randint(
        len(images), size=(args.steps, BATCH_SIZE)
    )
    noise_keys = jax.random.split(keys[2], args.steps)
    run_chunk, records = jax.jit(functools.partial(train_chunk, tx)), []
    with tqdm(total=args.steps, unit="step") as progress:
        for start in range(0, args.steps, CHUNK):
            part = slice(start, start + CHUNK)
            spike = {name: x[part] for name, x in spikes.items()}
            players, record = run_chunk(
                players, (images[order[part]], noise_keys[part], spike)
            )
            records.append(jax.device_get(record))
            progress.set_postfix(
                {name: f"{records[-1][name].loss[-1]:.2f}" for name in PLAYERS}
            )
            progress.update(len(order[part]))
    return players, jax.tree.map(lambda *parts: np.concatenate(parts), *records)


def print_table(records):
    """One row a player; the loss is the mean of the last 100 steps, and steps count from 1."""
    print(f"\n{'':14}{'loss':>8}{'last S':>8}{'skipped':>9}  first skipped steps")
    for name, record in records.items():
        steps = np.flatnonzero(record.skipped) + 1
        first = " ".join(map(str, steps[:8])) or "-"
        power = f"2^{np.log2(record.loss_scale[-1]):.0f}"
        print(
            f"{name:14}{record.loss[-100:].mean():8.3f}{power:>8}{len(steps):9}  {first}"
        )


def draw(generator_params, records, folder):
    """Forty samples of the trained generator, and both loss scales over steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    samples = generate(
        generator_params, jax.random.normal(jax.random.key(1), (40, NOISE))
    )
    tiles = np.pad(np.asarray(samples).reshape(40, 8, 8), ((0, 0), (1, 1), (1, 1)))
    grid = tiles.reshape(5, 8, 10, 10).transpose(0, 2, 1, 3).reshape(50, 80)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    left.imshow(grid, cmap="gray_r", vmin=0, vmax=1)
    left.set(xticks=[], yticks=[], title="samples")
    for (name, record), color in zip(
        records.items(), ["#0072b2", "#d55e00"], strict=True
    ):
        right.step(
            np.arange(len(record.loss_scale)) + 1,
            np.log2(record.loss_scale),
            color=color,
            label=name,
        )
    right.set(xlabel="step", ylabel="log2 S", title="loss scales")
    right.legend(frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gan.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
