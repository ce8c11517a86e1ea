"""One loss scale for two optimizers, as with PyTorch's `GradScaler`.

The float16 network of `several_losses.py`: its encoder is trained by Adam, its heads by
Lion. An optimizer skips only its own overflows, and S is adjusted once a step by what
both of them saw.
"""

import _digits
import _show
import optax

import jmp_scale

WEIGHTS = {"reconstruction": 2.0**-12, "label": 1.0}
OPTIMIZERS = {  # which skip, without an S of their own
    "encoder": jmp_scale.with_loss_scale(optax.adam(1e-3)),
    "heads": jmp_scale.with_loss_scale(optax.lion(3e-4)),
}


def loss_fn(params, batch):
    losses = _digits.two_losses(params, *batch)
    return sum(WEIGHTS[name] * loss for name, loss in losses.items()), losses


def train_step(carry, batch):
    params, opt_states, loss_scale = carry
    value_and_grad = jmp_scale.value_and_grad(loss_fn, loss_scale, has_aux=True)
    (_, losses), grads = value_and_grad(params, batch)
    updates, finite, new = {}, {}, {}
    for name, tx in OPTIMIZERS.items():
        args = grads[name], opt_states[name], params[name]
        updates[name], new[name] = tx.update(*args)
        finite[name] = new[name].grads_finite
    loss_scale = loss_scale.adjust(finite["encoder"] & finite["heads"])
    carry = optax.apply_updates(params, updates), new, loss_scale
    return carry, {"losses": losses, "finite": finite}


def main(argv=None):
    args = _show.parser(__doc__, 3000, seed=True).parse_args(argv)
    batches = _digits.labelled_batches(args.steps, 64, args.seed)
    params = _digits.init_two_heads(args.seed)
    opt_states = {name: tx.init(params[name]) for name, tx in OPTIMIZERS.items()}
    carry = params, opt_states, jmp_scale.DynamicLossScale(2.0**15, period=50)
    (*_, loss_scale), record = _show.scan(train_step, carry, batches)

    for name, losses in record["losses"].items():
        print(f"{name} loss {losses[-100:].mean():.4f}")
    rows = [[name, (~finite).sum()] for name, finite in record["finite"].items()]
    _show.table(["optimizer of the", "skipped"], rows)
    print(f"S of both: {_show.power(loss_scale.loss_scale)}")


if __name__ == "__main__":
    main()
