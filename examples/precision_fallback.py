"""A phase that float16 cannot hold is trained in float32, and left as soon as it can.

A classifier multiplies its logits by a learned factor, exp(10 t), which starts too
large: the logits leave float16. No loss scale changes the forward pass, so in float16
alone every step is skipped. Here two compiled steps have one state: after many skips in
a row the loop takes the float32 step, until `compare_gradients` finds loss scales
that work in float16 again.
"""

import dataclasses
import functools

import _digits
import _show
import jax.numpy as jnp
import optax

import jmp_scale
from jmp_scale import diagnostics

CHUNK = 50  # steps between two looks at the state
LOSS_SCALE = jmp_scale.DynamicLossScale(period=200, min_loss_scale=2.0**-14)
TX = jmp_scale.with_loss_scale(optax.adam(2e-2), LOSS_SCALE)


def loss_fn(params, images, labels, dtype="float16"):
    features = _digits.network(params["layers"], images, dtype)
    logits = features.astype(dtype) * jnp.exp(10 * params["t"]).astype(dtype)
    return _digits.classification_loss(logits.astype(jnp.float32), labels)


def train_step(carry, batch, dtype="float16"):
    params, opt_state = carry
    value_and_grad = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)
    loss, grads = value_and_grad(params, *batch, dtype)
    updates, opt_state = TX.update(grads, opt_state, params, value=loss)
    return (optax.apply_updates(params, updates), opt_state), loss


def next_dtype(dtype, carry, batch):
    """The dtype of the next steps, and the state to take them from."""
    params, opt_state = carry
    if dtype == "float16" and opt_state.skipped_in_a_row >= CHUNK // 2:
        return "float32", carry
    if dtype == "float32":
        losses = loss_fn, functools.partial(loss_fn, dtype="float32")
        window = diagnostics.compare_gradients(*losses, params, *batch).window
        if window and window.highest / window.lowest >= 16:
            s = max(window.start, 2.0**-14)
            scale = dataclasses.replace(opt_state.loss_scale, loss_scale=s)
            return "float16", (params, opt_state._replace(loss_scale=scale))
    return dtype, carry


def train(carry, batches):
    dtype = "float16"
    for start in range(0, len(batches[0]), CHUNK):
        part = tuple(x[start : start + CHUNK] for x in batches)
        carry, _ = _show.run_chunk(train_step, dtype=dtype)(carry, part)
        before = dtype
        dtype, carry = next_dtype(dtype, carry, tuple(x[-1] for x in part))
        if dtype != before:
            print(f"step {start + len(part[0])}: from {before} to {dtype}")
    return carry


def main(argv=None):
    args = _show.parser(__doc__, 1000, seed=True).parse_args(argv)
    batches = _digits.labelled_batches(args.steps, 64, args.seed)
    params = {"layers": _digits.init_classifier(args.seed), "t": jnp.float32(1.2)}
    start, rows = (params, TX.init(params)), []
    runs = {"float16 alone": _show.scan(train_step, start, batches)[0]}
    runs["with float32"] = train(start, batches)
    for name, (params, state) in runs.items():
        right = f"{_digits.accuracy(params['layers'], batches):.0%}"
        s = _show.power(state.loss_scale.loss_scale)
        rows.append([name, right, s, state.skipped, state.skipped_in_a_row])
    _show.table(["", "right", "last S", "skipped", "in a row"], rows)


if __name__ == "__main__":
    main()
