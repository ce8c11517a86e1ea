"""The scalars of a float16 run in a CSV file: loss, loss scale, skipped steps, norm of the true gradients.

They stay on the device while a chunk of steps runs, and come to the host all at once. Any other logger takes
the same dictionary: `writer.add_scalar(name, value, step)` for TensorBoard, `wandb.log(scalars, step)`.
"""

import argparse
import csv
import functools
import pathlib

import jax
import numpy as np
import optax
from digits import init_autoencoder, load_digits_split, policy_for, reconstruction_loss
from tqdm import tqdm

import jmp_scale
from jmp_scale import diagnostics

CHUNK = 50  # steps in one compiled scan, between two transfers to the host
BATCH_SIZE = 256


def main(argv=None):
    args = parse_args(argv)
    images, _ = load_digits_split(args.seed)
    batches = np.random.RandomState(args.seed).randint(
        len(images), size=(args.steps, BATCH_SIZE)
    )
    tx = jmp_scale.with_loss_scale(
        optax.adam(5e-3), jmp_scale.DynamicLossScale(2.0**22, period=100)
    )
    params = init_autoencoder(args.seed)
    carry = params, tx.init(params)
    run_chunk = jax.jit(
        functools.partial(jax.lax.scan, functools.partial(train_step, tx)),
        donate_argnums=0,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    path, log, rows = args.out / "metrics.csv", diagnostics.HealthLog(), []
    with tqdm(total=args.steps, unit="step") as progress:
        for chunk in np.split(batches, range(CHUNK, args.steps, CHUNK)):
            carry, scalars = run_chunk(carry, images[chunk])
            scalars = {
                name: values.tolist()
                for name, values in jax.device_get(scalars).items()
            }
            rows += [
                dict(zip(scalars, row, strict=True))
                for row in zip(*scalars.values(), strict=True)
            ]
            for sentence in log(carry[1]):
                tqdm.write(f"step {len(rows)}: {sentence}")
            progress.update(len(chunk))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", *rows[0]])
        writer.writeheader()
        writer.writerows({"step": step, **row} for step, row in enumerate(rows))
    print_table(rows)
    print(f"metrics: {path}")
    return rows


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=positive_int, default=600, help="optimizer steps (600)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the split, the start and the batches (0)",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default="out", help="folder of the CSV file (out)"
    )
    return parser.parse_args(argv)


def positive_int(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at least 1, got {text!r}"
        )
    return int(text)


def train_step(tx, carry, images):
    """One step, with its scalars as arrays of the device."""
    params, opt_state = carry
    loss_fn = functools.partial(reconstruction_loss, policy=policy_for("float16"))
    loss, grads = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)(
        params, images
    )
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    params = optax.apply_updates(params, updates)
    return (params, opt_state), {"loss": loss, **diagnostics.metrics(opt_state, grads)}


def print_table(rows):
    """The first steps, and ten over the rest of the run."""
    steps = sorted(
        {0, 1, 2, *np.linspace(0, len(rows) - 1, 10).astype(int).tolist()}
        & set(range(len(rows)))
    )
    print("\n" + f"{'step':>6}" + "".join(f"{name:>18}" for name in rows[0]))
    for step in steps:
        print(f"{step:6}" + "".join(f"{value:18.6g}" for value in rows[step].values()))


if __name__ == "__main__":
    main()
