"""bfloat16 in one line, with Equinox: what it computes, what it saves, how it learns.

The model and its loss are a float32 program. One line puts `autocast` around the loss;
the table says how much of the matrix work then runs in bfloat16, and how many bytes the
forward pass saves for the backward pass, parameters included.
"""

import _digits
import _show
import equinox as eqx
import jax
import numpy as np
import optax

import jmp_scale
from jmp_scale import diagnostics

TX = optax.adamw(1e-3)


def loss_fn(model, images, labels):
    return _digits.classification_loss(jax.vmap(model)(images), labels)


LOSSES = {
    "float32": loss_fn,
    "bfloat16": jmp_scale.autocast(loss_fn, "bfloat16"),  # the line
}


def step_of(loss_fn):
    @eqx.filter_jit
    def train_step(model, opt_state, images, labels):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, images, labels)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = TX.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state, loss

    return train_step


def saved_bytes(loss_fn, model, batch):
    """What the forward pass saves for the backward pass; nothing is computed."""
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def backward(arrays):
        return jax.vjp(lambda a: loss_fn(eqx.combine(a, static), *batch), arrays)[1]

    saved = jax.tree.leaves(jax.eval_shape(backward, arrays))
    return sum(x.size * x.dtype.itemsize for x in saved)


def main(argv=None):
    args = _show.parser(__doc__, 300, seed=True).parse_args(argv)
    batches = _digits.labelled_batches(args.steps, 512, args.seed)
    _, images = _digits.load_images(args.seed)
    _, labels = _digits.load_labels(args.seed)
    rows = []
    for name, loss_fn in LOSSES.items():
        model = eqx.nn.MLP(64, 10, 512, 3, jax.nn.gelu, key=jax.random.key(args.seed))
        opt_state = TX.init(eqx.filter(model, eqx.is_inexact_array))
        batch = [x[0] for x in batches]
        keywords = {"transform": eqx.filter_value_and_grad}
        report = diagnostics.precision_report(loss_fn, model, *batch, **keywords)
        saved = saved_bytes(loss_fn, model, batch) / 2**20
        train_step = step_of(loss_fn)
        for step in range(args.steps):
            batch = [x[step] for x in batches]
            model, opt_state, loss = train_step(model, opt_state, *batch)
        right = np.mean(jax.vmap(model)(images).argmax(1) == labels)
        share = f"{report.half_share:.0%}"
        rows.append([name, share, f"{saved:.1f} MiB", f"{loss:.4f}", f"{right:.1%}"])
    header = ["", "in bfloat16", "saved", "last loss", "test accuracy"]
    _show.table(header, rows)


if __name__ == "__main__":
    main()
