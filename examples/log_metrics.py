"""The scalars of a float16 run in a CSV file: loss, loss scale, skips, gradient norm.

They stay on the device while a chunk of steps runs, and reach the host together. Any
other logger takes the same dictionary: `writer.add_scalar(name, value, step)` for
TensorBoard, `wandb.log(scalars, step)`.
"""

import csv
import functools

import _show
import jax
import optax
from _digits import Batches, half_loss, init_autoencoder, load_images

import jmp_scale
from jmp_scale import diagnostics

PRINTED = "loss", "grad_norm", "loss_scale", "applied", "skipped", "spikes"
CHUNK = 50  # steps in one compiled scan, between two transfers to the host
TX = jmp_scale.with_loss_scale(
    optax.adam(5e-3), jmp_scale.DynamicLossScale(2.0**22, period=100)
)


def train_step(carry, images):
    """One step, and its scalars as arrays on the device."""
    params, opt_state = carry
    loss_scale = opt_state.loss_scale
    loss, grads = jmp_scale.value_and_grad(half_loss, loss_scale)(params, images)
    updates, opt_state = TX.update(grads, opt_state, params, value=loss)
    scalars = {"loss": loss, **diagnostics.metrics(opt_state, grads)}
    return (optax.apply_updates(params, updates), opt_state), scalars


def main(argv=None):
    args = _show.parser(__doc__, 600, seed=True, out=True).parse_args(argv)
    images, _ = load_images(args.seed)
    batches = Batches(images, args.steps, 256, args.seed)
    params = init_autoencoder(args.seed)
    carry, rows, log = (params, TX.init(params)), [], diagnostics.HealthLog()
    run_chunk = jax.jit(functools.partial(jax.lax.scan, train_step), donate_argnums=0)
    for start in range(0, args.steps, CHUNK):
        carry, scalars = run_chunk(carry, batches[start : start + CHUNK])
        names, columns = scalars.keys(), jax.device_get(list(scalars.values()))
        rows += [
            dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)
        ]
        for finding in log(carry[1]):  # each change of the run's health, once
            print(f"step {len(rows)}: {finding}")

    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", *rows[0]])
        writer.writeheader()
        writer.writerows({"step": step, **row} for step, row in enumerate(rows))
    _show.history({name: [row[name] for row in rows] for name in PRINTED})
    print(f"metrics: {args.out / 'metrics.csv'}")


if __name__ == "__main__":
    main()
