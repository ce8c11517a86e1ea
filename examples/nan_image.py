"""Why an overflow needs a cause: one NaN image among 1,437, and three rules for the loss scale.

No loss scale S changes the forward pass. When the unscaled loss itself is NaN, the step must be skipped, but
S is not to blame. Rules that look at the gradients alone back off every time the image is drawn, until S is
1 and small gradients are lost to float16 again. Given the loss (`value=`), `with_loss_scale` leaves S as it
is. A model that is NaN for good is noticed all the same: `skipped_in_a_row` grows. Prints a table, and draws
S and the share of gradient entries that are zero over steps.
"""

import argparse
import functools
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import (
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
BATCH_SIZE = 64
PERIOD = 200


class Run(NamedTuple):
    """What one training leaves, per step where it is an array."""

    name: str
    losses: np.ndarray
    loss_scales: np.ndarray
    zero_shares: np.ndarray
    skipped: int
    skipped_in_a_row: int


def main(argv=None):
    args = parse_args(argv)
    train, _ = load_digits_split(args.seed)
    train[args.seed % len(train), 0] = np.nan
    params = init_autoencoder(args.seed)
    nan_params = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    dynamic = jmp_scale.DynamicLossScale(2.0**15, period=PERIOD)
    megatron = jmp_scale.presets.megatron(growth_interval=PERIOD)
    cause_aware = trainer(dynamic, cause_aware=True)
    plans = {
        "gradients alone": (params, *trainer(dynamic)),
        "Megatron's rule": (params, *trainer(megatron)),
        "cause-aware": (params, *cause_aware),
        "cause-aware, NaN model": (nan_params, *cause_aware),
    }
    runs = [
        fit(name, *plan, train, args.steps, args.seed) for name, plan in plans.items()
    ]
    print_table(runs)
    print(f"figure: {draw(runs, args.out)}")
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
        "--out", type=pathlib.Path, default="out", help="folder of the figure (out)"
    )
    return parser.parse_args(argv)


def trainer(loss_scale, cause_aware=False):
    """The optimizer, and a compiled function that takes several steps with it."""
    tx = jmp_scale.with_loss_scale(optax.adam(5e-3), loss_scale)
    loss_fn = functools.partial(reconstruction_loss, policy=policy_for("float16"))

    def train_step(carry, images):
        params, opt_state = carry
        loss, grads = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)(
            params, images
        )
        value = {"value": loss} if cause_aware else {}
        updates, opt_state = tx.update(grads, opt_state, params, **value)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), (
            loss,
            opt_state.loss_scale.loss_scale,
            zero_share(grads),
        )

    return tx, jax.jit(lambda carry, batches: jax.lax.scan(train_step, carry, batches))


def fit(name, params, tx, train_chunk, train, steps, seed):
    """Trains one autoencoder in float16, with a progress bar."""
    carry = params, tx.init(params)
    batches = np.random.RandomState(seed).randint(len(train), size=(steps, BATCH_SIZE))
    records = []
    with tqdm(total=steps, desc=f"{name:22}", unit="step") as progress:
        for chunk in np.split(batches, range(CHUNK, steps, CHUNK)):
            carry, record = train_chunk(carry, train[chunk])
            records.append(jax.device_get(record))
            progress.set_postfix(
                S=power(records[-1][1][-1]), skipped=int(carry[1].skipped)
            )
            progress.update(len(chunk))
    per_step = (np.concatenate(parts) for parts in zip(*records, strict=True))
    return Run(name, *per_step, int(carry[1].skipped), int(carry[1].skipped_in_a_row))


def power(s):
    return f"2^{np.log2(s):.0f}"


def print_table(runs):
    """One row a run; the loss and the zero gradients are means over the finite of the last 100 steps."""
    print(
        f"\n{'':22}{'last S':>8}{'least S':>9}{'skipped':>9}{'in a row':>10}{'loss':>9}{'zero grads':>12}"
    )
    for run in runs:
        finite = np.isfinite(run.losses[-100:])
        loss, zeros = (
            x[-100:][finite].mean() if finite.any() else np.nan
            for x in (run.losses, run.zero_shares)
        )
        print(
            f"{run.name:22}{power(run.loss_scales[-1]):>8}{power(run.loss_scales.min()):>9}{run.skipped:9}"
            f"{run.skipped_in_a_row:10}{loss:9.4f}{zeros:12.1%}"
        )


def draw(runs, folder):
    """The loss scale and the zero gradient entries over steps, without the skipped ones."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (scales, zeros) = plt.subplots(
        1, 2, figsize=(10, 3.8), layout="constrained"
    )
    for run, color in zip(runs, ["#d55e00", "#cc79a7", "#0072b2", "0.6"], strict=True):
        scales.step(
            np.arange(len(run.loss_scales)),
            np.log2(run.loss_scales),
            color=color,
            label=run.name,
        )
        finite = np.isfinite(run.losses)
        zeros.plot(
            np.flatnonzero(finite),
            100 * run.zero_shares[finite],
            color=color,
            linewidth=1,
        )
    scales.set(xlabel="step", ylabel="log2 S", title="loss scale")
    scales.legend(frameon=False)
    zeros.set(
        xlabel="step",
        ylabel="%",
        title="gradient entries that are zero",
        ylim=(0, None),
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nan_image.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
