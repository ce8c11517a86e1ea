"""Several losses, several optimizers: a loss scale for each loss, or one for all.

A small network of handwritten digits learns to reconstruct an image and to name its
digit, twice, in float16:

- One S per loss, as in Apex' `num_losses`. The reconstruction counts 2^-12 in the sum,
  so its gradients are that much smaller. Each S follows its own overflows.
- One S for two optimizers, as with PyTorch's `GradScaler`: an optimizer skips only its
  own overflows, and S is adjusted once a step by what all of them saw.
"""

import functools

import _digits
import _show
import jax
import jax.numpy as jnp
import optax

import jmp_scale

WEIGHTS = {"reconstruction": 2.0**-12, "label": 1.0}
DYNAMIC = jmp_scale.DynamicLossScale(2.0**15, period=50)
GLOROT = jax.nn.initializers.glorot_normal()
SKIP = jmp_scale.with_loss_scale(optax.adam(1e-3))  # skips, without an S of its own
OPTIMIZERS = {"encoder": SKIP, "heads": jmp_scale.with_loss_scale(optax.lion(3e-4))}


def one_s_per_loss(carry, batch):
    """A step is skipped if any of the losses overflowed."""
    params, opt_state, loss_scales = carry
    losses, grads, finite = {}, {}, {}
    for name, s in loss_scales.items():
        loss_fn = functools.partial(weighted_loss, name)
        losses[name], grads[name] = jmp_scale.value_and_grad(loss_fn, s)(params, batch)
        finite[name] = jmp_scale.all_finite(grads[name])
    loss_scales = {name: s.adjust(finite[name]) for name, s in loss_scales.items()}
    total = jax.tree.map(jnp.add, *grads.values())
    updates, opt_state = SKIP.update(total, opt_state, params)
    carry = optax.apply_updates(params, updates), opt_state, loss_scales
    return carry, {"losses": losses, "finite": finite}


def one_s_for_two_optimizers(carry, batch):
    params, opt_states, loss_scale = carry
    value_and_grad = jmp_scale.value_and_grad(total_loss, loss_scale, has_aux=True)
    (_, losses), grads = value_and_grad(params, batch)
    steps = {
        name: tx.update(grads[name], opt_states[name], params[name])
        for name, tx in OPTIMIZERS.items()
    }
    opt_states = {name: state for name, (_, state) in steps.items()}
    updates = {name: update for name, (update, _) in steps.items()}
    finite = {name: state.grads_finite for name, state in opt_states.items()}
    loss_scale = loss_scale.adjust(finite["encoder"] & finite["heads"])
    carry = optax.apply_updates(params, updates), opt_states, loss_scale
    return carry, {"losses": losses, "finite": finite}


def weighted_loss(name, params, batch):
    """The loss `name` ("reconstruction" or "label") with its weight, f32[]."""
    images, labels = batch
    params = jax.tree.map(lambda w: w.astype(jnp.float16), params)
    hidden = jnp.tanh(images.astype(jnp.float16) @ params["encoder"])
    output = (hidden @ params["heads"][name]).astype(jnp.float32)
    if name == "reconstruction":
        return WEIGHTS[name] * jnp.mean((output - images) ** 2)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels(output, labels)
    return WEIGHTS[name] * cross_entropy.mean()


def total_loss(params, batch):
    losses = {name: weighted_loss(name, params, batch) for name in WEIGHTS}
    return sum(losses.values()), losses


def main(argv=None):
    args = _show.parser(__doc__, 3000, seed=True).parse_args(argv)
    data = _digits.load_images(args.seed)[0], _digits.load_labels(args.seed)[0]
    batches = tuple(_digits.Batches(x, args.steps, 64, args.seed) for x in data)
    keys = jax.random.split(jax.random.key(args.seed), 3)
    shapes = {"encoder": (64, 32), "reconstruction": (32, 64), "label": (32, 10)}
    heads = {
        name: GLOROT(k, n) for k, (name, n) in zip(keys, shapes.items(), strict=True)
    }
    params = {"encoder": heads.pop("encoder"), "heads": heads}

    carry = params, SKIP.init(params), dict.fromkeys(WEIGHTS, DYNAMIC)
    (*_, scales), record = _show.scan(one_s_per_loss, carry, batches)
    report("one S per loss", record, scales)
    opt_states = {name: tx.init(params[name]) for name, tx in OPTIMIZERS.items()}
    carry = params, opt_states, DYNAMIC
    (*_, scale), record = _show.scan(one_s_for_two_optimizers, carry, batches)
    report("one S for two optimizers", record, {"shared": scale})


def report(title, record, scales):
    losses = {
        name: x[-100:].mean() / WEIGHTS[name] for name, x in record["losses"].items()
    }
    rows = [[f"{name} loss", f"{loss:.4f}"] for name, loss in losses.items()]
    rows += [[f"{name} overflows", (~x).sum()] for name, x in record["finite"].items()]
    rows += [[f"{name} S", _show.power(s.loss_scale)] for name, s in scales.items()]
    _show.table([title, ""], rows)


if __name__ == "__main__":
    main()
