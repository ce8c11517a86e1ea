"""Why loss scaling: one autoencoder in float32, in float16, and in float16 with a dynamic loss scale.

Trains a deep sigmoid autoencoder on scikit-learn's handwritten digits three times, from the same start
and on the same batches. Without scaling, float16 loses the first layers' gradients and the network learns
nothing but the mean digit. Prints a table, and draws the losses, the loss scale and reconstructions.
"""

import argparse
import functools
import pathlib
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import (
    autoencoder,
    init_autoencoder,
    load_digits_split,
    policy_for,
    positive_int,
    reconstruction_loss,
    zero_share,
)
from tqdm import tqdm

import jmp_scale

CHUNK = 50  # steps in one compiled scan, between two updates of the progress bar
BATCH_SIZE = 256


class Run(NamedTuple):
    """What one training leaves: its parameters, and per step loss, S and share of zero gradient entries."""

    name: str
    params: list
    policy: jmp_scale.Policy
    losses: np.ndarray
    loss_scales: np.ndarray
    zero_shares: np.ndarray
    skipped: int
    seconds: float


def main(argv=None):
    args = parse_args(argv)
    train, test = load_digits_split(args.seed)
    dynamic = jmp_scale.DynamicLossScale(2.0**15, period=200)
    plans = {
        "float32": ("float32", jmp_scale.NoOpLossScale()),
        f"{args.dtype}, no scaling": (args.dtype, jmp_scale.NoOpLossScale()),
        f"{args.dtype}, dynamic": (args.dtype, dynamic),
    }
    runs = [
        fit(name, *plan, train, args.steps, args.seed) for name, plan in plans.items()
    ]
    print_table(runs, test)
    path = draw(runs, test[:10], args.out)
    print(f"figure: {path}")
    return runs


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=2000,
        help="optimizer steps of each run (2000)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the split, the start and the batches (0)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16"),
        default="float16",
        help="beside float32 (float16)",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default="out", help="folder of the figure (out)"
    )
    return parser.parse_args(argv)


def fit(name, dtype, loss_scale, train, steps, seed):
    """Trains one autoencoder, with a progress bar."""
    policy = policy_for(dtype)
    tx = jmp_scale.with_loss_scale(optax.adam(5e-3), loss_scale)
    params = init_autoencoder(seed)
    opt_state = tx.init(params)
    batches = np.random.RandomState(seed).randint(len(train), size=(steps, BATCH_SIZE))
    run_chunk = jax.jit(
        functools.partial(train_chunk, tx, policy), donate_argnums=(0, 1)
    )
    records, begin = [], time.perf_counter()
    with tqdm(total=steps, desc=f"{name:20}", unit="step") as progress:
        for chunk in np.split(batches, range(CHUNK, steps, CHUNK)):
            params, opt_state, record = run_chunk(params, opt_state, train[chunk])
            records.append(jax.device_get(record))
            loss, s, _ = records[-1]
            progress.set_postfix(loss=f"{loss[-1]:.4f}", S=f"2^{np.log2(s[-1]):.0f}")
            progress.update(len(chunk))
    losses, loss_scales, zero_shares = (
        np.concatenate(parts) for parts in zip(*records, strict=True)
    )
    seconds = time.perf_counter() - begin
    return Run(
        name,
        params,
        policy,
        losses,
        loss_scales,
        zero_shares,
        int(opt_state.skipped),
        seconds,
    )


def train_chunk(tx, policy, params, opt_state, batches):
    """Several steps in one scan; returns also their losses, loss scales and shares of zero entries."""
    loss_fn = functools.partial(reconstruction_loss, policy=policy)

    def train_step(carry, images):
        params, opt_state = carry
        loss, grads = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)(
            params, images
        )
        s = jnp.float32(opt_state.loss_scale.loss_scale)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), (loss, s, zero_share(grads))

    (params, opt_state), record = jax.lax.scan(train_step, (params, opt_state), batches)
    return params, opt_state, record


def reconstruct(run, images):
    return autoencoder(run.policy.cast_to_compute(run.params), images).astype(
        jnp.float32
    )


def print_table(runs, test):
    """One row a run; the train loss is the mean of the last 50 steps."""
    print(
        f"\n{'':20}{'train loss':>11}{'test loss':>11}{'zero grads':>12}{'S':>7}{'skipped':>9}{'seconds':>9}"
    )
    for run in runs:
        test_loss = jnp.mean((reconstruct(run, test) - test) ** 2)
        print(
            f"{run.name:20}{run.losses[-50:].mean():11.4f}{test_loss:11.4f}{run.zero_shares.mean():12.1%}"
            f"{f'2^{np.log2(run.loss_scales[-1]):.0f}':>7}{run.skipped:9}{run.seconds:9.1f}"
        )


def draw(runs, images, folder):
    """Losses and loss scale over steps, and what each network makes of ten digits that it never saw."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(10, 7), layout="constrained")
    curves, digits = figure.subfigures(2, 1, height_ratios=(1.1, 1))
    losses, scales = curves.subplots(1, 2)
    for run, (color, style) in zip(
        runs, [("0.2", "-"), ("#d55e00", "-"), ("#0072b2", "--")], strict=True
    ):
        losses.plot(run.losses, style, color=color, label=run.name, linewidth=1.4)
        if "dynamic" in run.name:
            scales.step(
                np.arange(len(run.loss_scales)), np.log2(run.loss_scales), color=color
            )
    losses.set(
        xlabel="step",
        ylabel="mean squared error",
        title="training loss",
        ylim=(0, 0.12),
    )
    losses.legend(frameon=False)
    scales.set(xlabel="step", ylabel="log2 S", title="loss scale (dynamic)")
    rows = [("original", images)] + [
        (run.name, reconstruct(run, images)) for run in runs
    ]
    for axes, (name, row) in zip(digits.subplots(len(rows), 1), rows, strict=True):
        strip = np.concatenate(np.asarray(row).reshape(-1, 8, 8), axis=1)
        axes.imshow(strip, cmap="gray_r", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        axes.set_ylabel(name.replace(", ", ",\n"), rotation=0, ha="right", va="center")
        axes.spines[:].set_visible(False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train_digits.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
