"""Why an overflow needs a cause: one NaN image among 1,437, and three rules for S.

No loss scale S changes the forward pass. When the unscaled loss itself is NaN, the step
must be skipped, but S is not to blame. Rules that look at the gradients alone back off
every time the image is drawn, until S is 1 and float16 loses small gradients again.
Given the loss (`value=`), `with_loss_scale` leaves S as it is. A model that is NaN for
good is noticed all the same: `skipped_in_a_row` grows. Prints a table, draws a figure.
"""

import _digits
import _show
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_scale


def trainer(loss_scale, pass_loss):
    """An optimizer with this loss scale, and its train step."""
    tx = jmp_scale.with_loss_scale(optax.adam(5e-3), loss_scale)

    def train_step(carry, images):
        params, opt_state = carry
        s = opt_state.loss_scale
        loss_and_grad = jmp_scale.value_and_grad(_digits.half_loss, s)
        loss, grads = loss_and_grad(params, images)
        value = {"value": loss} if pass_loss else {}
        updates, opt_state = tx.update(grads, opt_state, params, **value)
        s = opt_state.loss_scale.loss_scale
        record = {"loss": loss, "S": s, "zeros": _digits.zero_share(grads)}
        return (optax.apply_updates(params, updates), opt_state), record

    return tx, train_step


def main(argv=None):
    args = _show.parser(__doc__, 2000, seed=True, out=True).parse_args(argv)
    batches = _digits.image_batches(args.steps, 64, args.seed)
    batches.data[args.seed % len(batches.data), 0] = np.nan
    start = _digits.init_autoencoder(args.seed)
    nan_model = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), start)
    dynamic = jmp_scale.DynamicLossScale(period=200)
    megatron = jmp_scale.presets.megatron(growth_interval=200)
    with_the_loss = trainer(dynamic, pass_loss=True)
    plans = {
        "gradients alone": (start, *trainer(dynamic, pass_loss=False)),
        "Megatron's rule": (start, *trainer(megatron, pass_loss=False)),
        "with the loss": (start, *with_the_loss),
        "with the loss, NaN model": (nan_model, *with_the_loss),
    }
    rows, scales, zeros = [], {}, {}
    for name, (params, tx, train_step) in plans.items():
        carry = params, tx.init(params)
        (_, state), record = _show.scan(train_step, carry, batches, name)
        finite = np.isfinite(record["loss"])
        scales[name] = record["S"]
        zeros[name] = np.flatnonzero(finite), 100 * record["zeros"][finite]
        late = finite & (np.arange(args.steps) >= args.steps - 100)
        loss = f"{_show.mean(record['loss'][late]):.4f}"
        vanished = f"{_show.mean(record['zeros'][late]):.1%}"
        s = [_show.power(s) for s in (scales[name][-1], scales[name].min())]
        rows.append([name, *s, state.skipped, state.skipped_in_a_row, loss, vanished])
    header = ["", "last S", "least S", "skipped", "in a row", "loss", "zero grads"]
    _show.table(header, rows)
    panels = [
        _show.scales("A NaN image drives S down", scales),
        _show.curves(
            "... and more gradients are 0", "zero gradient entries (%)", zeros
        ),
    ]
    _show.figure(args.out / "nan_image.png", panels)


if __name__ == "__main__":
    main()
