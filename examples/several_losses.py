"""Several losses in one step, with a loss scale each, as in Apex' `num_losses`.

A small float16 network of handwritten digits learns to reconstruct an image and to name
its digit. The reconstruction counts 2^-12 in the sum, so its gradients are that much
smaller, and one S would be wrong for one of the losses. Each S follows its own
overflows. `shared_scale.py` trains the same network with one S.
"""

import _digits
import _show
import jax
import jax.numpy as jnp
import optax

import jmp_scale

DYNAMIC = jmp_scale.DynamicLossScale(2.0**15, period=50)
TX = jmp_scale.with_loss_scale(optax.adam(1e-3))  # skips, without an S of its own
WEIGHTS = {"reconstruction": 2.0**-12, "label": 1.0}


def loss_fn(params, batch, name):
    return WEIGHTS[name] * _digits.two_losses(params, *batch)[name]


def train_step(carry, batch):
    """A step is skipped if any of the losses overflowed."""
    params, opt_state, loss_scales = carry
    losses, grads, finite = {}, {}, {}
    for name, s in loss_scales.items():
        value_and_grad = jmp_scale.value_and_grad(loss_fn, s)
        losses[name], grads[name] = value_and_grad(params, batch, name)
        finite[name] = jmp_scale.all_finite(grads[name])
    loss_scales = {name: s.adjust(finite[name]) for name, s in loss_scales.items()}
    total = jax.tree.map(jnp.add, *grads.values())
    updates, opt_state = TX.update(total, opt_state, params)
    carry = optax.apply_updates(params, updates), opt_state, loss_scales
    return carry, {"losses": losses, "finite": finite}


def main(argv=None):
    args = _show.parser(__doc__, 3000, seed=True).parse_args(argv)
    batches = _digits.labelled_batches(args.steps, 64, args.seed)
    params = _digits.init_two_heads(args.seed)
    carry = params, TX.init(params), dict.fromkeys(WEIGHTS, DYNAMIC)
    (*_, loss_scales), record = _show.scan(train_step, carry, batches)

    rows = []
    for name, s in loss_scales.items():
        loss = record["losses"][name][-100:].mean() / WEIGHTS[name]
        overflows = (~record["finite"][name]).sum()
        rows.append([name, f"{loss:.4f}", _show.power(s.loss_scale), overflows])
    _show.table(["", "loss", "S", "overflows"], rows)


if __name__ == "__main__":
    main()
