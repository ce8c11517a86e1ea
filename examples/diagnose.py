"""Three float16 runs that go wrong, and what each diagnostic tool says of them.

The digits autoencoder, trained (1) without loss scaling, so that its gradients underflow; (2) on pixels
that nobody normalized, with a hand-written cross entropy that overflows in the forward pass; (3) with one
NaN image among 1,437. Prints what the tools say and a table of the verdicts, and draws the figures.
"""

import argparse
import functools
import pathlib
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import (
    autoencoder,
    init_autoencoder,
    load_digits_split,
    policy_for,
    reconstruction_loss,
)
from tqdm import tqdm

import jmp_scale
from jmp_scale import diagnostics

BATCH_SIZE = 64
HALF = policy_for("float16")
mean_loss = functools.partial(reconstruction_loss, policy=HALF)


def hand_written_loss(params, images):
    """The mistakes of run 2: exp(logits) is infinite in float16 from 11.1 on, and pixels go up to 16."""
    *hidden, last = HALF.cast_to_compute(params)
    logits = autoencoder(hidden, images) @ last["w"] + last["b"]
    entropy = jnp.log1p(jnp.exp(logits)) - images.astype(jnp.float16) * logits
    return jnp.mean(entropy.astype(jnp.float32))


def main(argv=None):
    args = parse_args(argv)
    images, _ = load_digits_split(args.seed)
    params = init_autoencoder(args.seed)
    batches = np.random.RandomState(args.seed).randint(
        len(images), size=(args.steps, BATCH_SIZE)
    )
    runs = {
        "underflow": underflow,
        "overflow in the forward pass": overflow,
        "one NaN image": nan_image,
    }
    verdicts, drawn = {}, {}
    for name, run in tqdm(runs.items(), desc="runs", unit="run"):
        verdicts[name], drawn[name], text = run(params, images, batches)
        tqdm.write(f"\n--- {name} ---\n{text}")
    print_table(verdicts)
    print(f"figure: {draw(drawn, args.out)}")
    return verdicts


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=400,
        help="optimizer steps of each run (400)",
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


def positive_int(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at least 1, got {text!r}"
        )
    return int(text)


def underflow(params, images, batches):
    """All is finite, so nothing looks wrong: only the report and the calibration tell."""
    _, state, history = train(
        mean_loss, jmp_scale.NoOpLossScale(), params, images, batches
    )
    batch = images[:256]
    exact = functools.partial(reconstruction_loss, policy=policy_for("float32"))
    _, grads = jmp_scale.value_and_grad(exact, jmp_scale.NoOpLossScale())(params, batch)
    report = diagnostics.grad_report(grads, 1.0)
    found = diagnostics.calibrate_loss_scale(mean_loss, params, batch)
    said = f"health: {told(state, history)}\n{report.summary(4)}\ncalibration: {found.summary()}"
    return found.summary(), (diagnostics.exponent_histogram(grads), report, found), said


def overflow(params, images, batches):
    """S falls to its floor, since this loop does not tell the optimizer its loss (`value=loss`)."""
    pixels = 16 * images
    loss_scale = jmp_scale.DynamicLossScale()
    params, state, history = train(
        hand_written_loss, loss_scale, params, pixels, batches, tell_loss=False
    )
    batch = pixels[batches[-1]]
    found = diagnostics.diagnose_nonfinite(
        hand_written_loss, state.loss_scale, params, batch
    )
    said = f"health: {told(state, history)}\ndiagnosis: {found.summary()}"
    return found.summary(), history, said


def nan_image(params, images, batches):
    """S is left alone, since the loss is told; the skipped batches are the broken ones."""
    images = images.copy()
    images[batches[len(batches) // 2, 0]] = np.nan
    loss_scale = jmp_scale.DynamicLossScale(2.0**15, period=50)
    _, state, history = train(mean_loss, loss_scale, params, images, batches)
    skipped = np.flatnonzero(~history.to_dict()["grads_finite"])
    found = diagnostics.diagnose_nonfinite(
        mean_loss, 2.0**15, params, images[batches[skipped[0]]]
    )
    said = f"health: {told(state, history)}\ndiagnosis of step {skipped[0]}: {found.summary()}"
    return found.summary(), history, said


def train(loss_fn, loss_scale, params, images, batches, tell_loss=True):
    """Parameters, state and history after all batches."""
    tx = jmp_scale.with_loss_scale(optax.adam(5e-3), loss_scale)

    def train_step(carry, batch):
        params, state, history = carry
        loss, grads = jmp_scale.value_and_grad(loss_fn, state.loss_scale)(params, batch)
        value = {"value": loss} if tell_loss else {}
        updates, new_state = tx.update(grads, state, params, **value)
        history = history.push(
            state.loss_scale,
            new_state.grads_finite,
            loss_finite=jnp.isfinite(loss) if tell_loss else True,
            amax=functools.reduce(
                jnp.maximum, [jnp.abs(g).max() for g in jax.tree.leaves(grads)]
            ),
        )
        return (optax.apply_updates(params, updates), new_state, history), None

    carry = params, tx.init(params), diagnostics.LossScaleHistory.create(len(batches))
    run = jax.jit(functools.partial(jax.lax.scan, train_step))
    return run(carry, images[batches])[0]


def told(state, history):
    return " ".join(diagnostics.health(state, history)) or "nothing to report."


def print_table(verdicts):
    print(f"\n{'run':30}verdict")
    for name, verdict in verdicts.items():
        first, *rest = textwrap.wrap(verdict, 80)
        print(f"{name:30}{first}", *(f"{'':30}{line}" for line in rest), sep="\n")


def draw(drawn, folder):
    """What float16 holds of the gradients, the calibration, and the loss scale of runs 2 and 3."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from jmp_scale import plotting

    histogram, report, found = drawn["underflow"]
    figure, axes = plt.subplots(
        3, 2, figsize=(12, 11), layout="constrained", height_ratios=(1, 1.5, 1)
    )
    plotting.plot_exponent_histogram(histogram, 0, ax=axes[0, 0])
    plotting.plot_exponent_histogram(
        histogram, int(found.recommended_log2_scale), ax=axes[0, 1]
    )
    plotting.plot_calibration(found, ax=axes[1, 0])
    plotting.plot_flushed(report, ax=axes[1, 1])
    for ax, name in zip(
        axes[2], ("overflow in the forward pass", "one NaN image"), strict=True
    ):
        plotting.plot_loss_scale(drawn[name], ax=ax).set_title(f"Loss scale: {name}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "diagnose.png"
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
