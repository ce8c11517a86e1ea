"""Why loss scaling: one autoencoder in float32, float16, and float16 with a loss scale.

Trains a deep sigmoid autoencoder of handwritten digits three times, from the same start
and on the same batches. Without scaling, float16 loses the first layers' gradients, and
the network learns only the mean digit. Prints a table and draws a figure.
"""

import _digits
import _show
import jax.numpy as jnp
import optax

import jmp_scale


def loss_in(dtype):
    """The autoencoder's loss: as it is in float32, in half precision by `autocast`."""
    loss_fn = _digits.reconstruction_loss
    return loss_fn if dtype == "float32" else jmp_scale.autocast(loss_fn, dtype)


def fit(name, dtype, loss_scale, images, args):
    """Parameters and optimizer state after training, and a record of each step."""
    tx = jmp_scale.with_loss_scale(optax.adam(5e-3), loss_scale)
    loss_fn = loss_in(dtype)

    def train_step(carry, images):
        params, opt_state = carry
        s = opt_state.loss_scale
        loss, grads = jmp_scale.value_and_grad(loss_fn, s)(params, images)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        zeros = _digits.zero_share(grads)
        record = {"loss": loss, "S": s.scale(jnp.float32(1)), "zeros": zeros}
        return (optax.apply_updates(params, updates), opt_state), record

    params = _digits.init_autoencoder(args.seed)
    batches = _digits.Batches(images, args.steps, 256, args.seed)
    return _show.scan(train_step, (params, tx.init(params)), batches, name)


def main(argv=None):
    parser = _show.parser(__doc__, 2000, seed=True, out=True)
    dtypes = ("float16", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, default="float16", help="(float16)")
    args = parser.parse_args(argv)
    train, test = _digits.load_images(args.seed)
    none, dynamic = jmp_scale.NoOpLossScale(), jmp_scale.DynamicLossScale(period=200)
    plans = {
        "float32": ("float32", none),
        f"{args.dtype}, no scaling": (args.dtype, none),
        f"{args.dtype}, dynamic": (args.dtype, dynamic),
    }
    rows, losses, pictures = [], {}, {"original": test[:10]}
    for name, (dtype, loss_scale) in plans.items():
        (params, opt_state), record = fit(name, dtype, loss_scale, train, args)
        losses[name] = record["loss"]
        pictures[name] = _digits.autoencoder(params, test[:10])
        rows.append([
            name,
            f"{losses[name][-50:].mean():.4f}",
            f"{loss_in(dtype)(params, test):.4f}",
            f"{record['zeros'].mean():.1%}",
            _show.power(record["S"][-1]),
            int(opt_state.skipped),
        ])  # fmt: skip
    _show.table(["", "train loss", "test loss", "zero grads", "S", "skipped"], rows)
    panels = [
        _show.curves("float16 learns only with a loss scale", "loss", losses),
        _show.images("Digits of the test set, and their reconstructions", pictures),
    ]
    path = args.out / "train_digits.png"
    _show.figure(path, panels, columns=1, heights=[3.6, 2.4])


if __name__ == "__main__":
    main()
