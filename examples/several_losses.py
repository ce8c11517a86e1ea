"""Several losses, several optimizers: a loss scale for each loss, or one for all.

A small network of handwritten digits learns to reconstruct an image and to name its digit, twice:

- One S per loss, as in Apex' `num_losses`. The reconstruction counts 2^-12 in the sum, so its gradients are
  that much smaller. In a dictionary of loss scales each follows its own overflows.
- One S for two optimizers, as with PyTorch's `GradScaler`: an optimizer skips its own overflows only, and S
  is adjusted once a step by what all of them saw.

Computes in float16, and prints a table.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import load_digits_split, policy_for, positive_int
from sklearn.datasets import load_digits
from tqdm import tqdm

import jmp_scale

CHUNK = 100  # steps in one compiled scan, between two updates of the progress bar
BATCH_SIZE = 64
WEIGHTS = {"reconstruction": 2.0**-12, "label": 1.0}
POLICY = policy_for("float16")


def main(argv=None):
    args = parse_args(argv)
    data = load_labelled_digits(args.seed)
    print_table(
        "one S per loss", fit("one S per loss", per_loss_trainer(args.seed), data, args)
    )
    print_table(
        "one S for two optimizers",
        fit("one S for both", shared_trainer(args.seed), data, args),
    )


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=3000,
        help="optimizer steps of each run (3000)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the split, the start and the batches (0)",
    )
    return parser.parse_args(argv)


def load_labelled_digits(seed):
    """Training images f32[1437, 64] and their labels i32[1437]."""
    images, _ = load_digits_split(seed)
    labels = load_digits().target.astype(np.int32)
    return images, labels[np.random.RandomState(seed).permutation(len(labels))][
        : len(images)
    ]


def init_params(seed):
    shapes = {"encoder": (64, 32), "reconstruction": (32, 64), "label": (32, 10)}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    glorot_normal = jax.nn.initializers.glorot_normal()
    return {
        name: glorot_normal(k, shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss_of(name, params, batch):
    """The loss `name` ("reconstruction" or "label") with its weight, f32[]."""
    images, labels = batch
    params = POLICY.cast_to_compute(params)
    hidden = jnp.tanh(POLICY.cast_to_compute(images) @ params["encoder"])
    output = POLICY.cast_to_output(hidden @ params[name])
    if name == "reconstruction":
        return WEIGHTS[name] * jnp.mean((output - images) ** 2)
    return (
        WEIGHTS[name]
        * optax.softmax_cross_entropy_with_integer_labels(output, labels).mean()
    )


def per_loss_trainer(seed):
    """(start, step) with a dictionary of loss scales; a step is skipped if any loss overflowed."""
    params, tx = init_params(seed), jmp_scale.with_loss_scale(optax.adam(1e-3))
    loss_scales = {
        name: jmp_scale.DynamicLossScale(2.0**15, period=50) for name in WEIGHTS
    }

    def train_step(carry, batch):
        params, opt_state, loss_scales = carry
        losses, grads = {}, {}
        for name, loss_scale in loss_scales.items():
            loss_fn = functools.partial(loss_of, name)
            losses[name], grads[name] = jmp_scale.value_and_grad(loss_fn, loss_scale)(
                params, batch
            )
        finite = {name: jmp_scale.all_finite(g) for name, g in grads.items()}
        loss_scales = jax.tree.map(
            jmp_scale.adjust, loss_scales, finite, is_leaf=is_loss_scale
        )
        updates, opt_state = tx.update(
            jax.tree.map(jnp.add, *grads.values()), opt_state, params
        )
        return (optax.apply_updates(params, updates), opt_state, loss_scales), (
            losses,
            finite,
        )

    return (params, tx.init(params), loss_scales), train_step


def shared_trainer(seed):
    """(start, step) with two optimizers and one loss scale, which sums up what both saw."""
    params = init_params(seed)
    optimizers = {"encoder": optax.adam(1e-3), "heads": optax.lion(3e-4)}
    optimizers = {
        name: jmp_scale.with_loss_scale(tx) for name, tx in optimizers.items()
    }  # plain skips
    params = {"encoder": params.pop("encoder"), "heads": params}
    opt_states = {name: tx.init(params[name]) for name, tx in optimizers.items()}

    def loss_fn(params, batch):
        flat = {"encoder": params["encoder"], **params["heads"]}
        losses = {name: loss_of(name, flat, batch) for name in WEIGHTS}
        return sum(losses.values()), losses

    def train_step(carry, batch):
        params, opt_states, loss_scale = carry
        (_, losses), grads = jmp_scale.value_and_grad(
            loss_fn, loss_scale, has_aux=True
        )(params, batch)
        params, opt_states = dict(params), dict(opt_states)
        for name, tx in optimizers.items():
            updates, opt_states[name] = tx.update(
                grads[name], opt_states[name], params[name]
            )
            params[name] = optax.apply_updates(params[name], updates)
        finite = {name: state.grads_finite for name, state in opt_states.items()}
        loss_scale = loss_scale.adjust(jnp.stack(list(finite.values())).all())
        return (params, opt_states, loss_scale), (losses, finite)

    return (
        params,
        opt_states,
        jmp_scale.DynamicLossScale(2.0**15, period=50),
    ), train_step


def is_loss_scale(x):
    return isinstance(x, jmp_scale.LossScale)


def fit(name, trainer, data, args):
    """Trains with a progress bar; returns (loss scales, losses and finite flags over steps)."""
    carry, train_step = trainer
    run_chunk = jax.jit(lambda carry, batches: jax.lax.scan(train_step, carry, batches))
    order = np.random.RandomState(args.seed).randint(
        len(data[0]), size=(args.steps, BATCH_SIZE)
    )
    records = []
    with tqdm(total=args.steps, desc=name, unit="step") as progress:
        for chunk in np.split(order, range(CHUNK, args.steps, CHUNK)):
            carry, record = run_chunk(carry, tuple(x[chunk] for x in data))
            records.append(jax.device_get(record))
            progress.update(len(chunk))
    losses, finite = jax.tree.map(lambda *parts: np.concatenate(parts), *records)
    return carry[2], losses, finite


def print_table(title, result):
    """A row for each loss (without its weight, mean of the last 100 steps) and for each skip flag."""
    loss_scales, losses, finite = result
    print(f"\n{title}")
    for name, loss in losses.items():
        print(f"  {name + ' loss':24}{loss[-100:].mean() / WEIGHTS[name]:10.4f}")
    for name, flags in finite.items():
        print(f"  {name + ' overflows':24}{(~flags).sum():10}")
    for name, loss_scale in (
        loss_scales if isinstance(loss_scales, dict) else {"shared": loss_scales}
    ).items():
        print(
            f"  {name + ' S':24}{f'2^{np.log2(float(loss_scale.loss_scale)):.0f}':>10}"
        )


if __name__ == "__main__":
    main()
