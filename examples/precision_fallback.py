"""A phase that float16 cannot hold is trained in float32, and left as soon as it can.

A classifier multiplies its logits by a learned factor, exp(10 t), which starts too
large: the logits leave float16. No loss scale changes the forward pass, so in float16
alone every step is skipped, for good. Here are two compiled steps with one state: after
many skips in a row the loop takes the float32 step, until `calibrate_loss_scale` finds
loss scales that work in float16 again. Prints a table of both runs, draws their losses.
"""

import dataclasses
import functools

import _show
import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_scale
from jmp_scale import diagnostics

CHUNK = 50  # steps between two looks at the state
LOSS_SCALE = jmp_scale.DynamicLossScale(period=200, min_loss_scale=2.0**-14)
TX = jmp_scale.with_loss_scale(optax.adam(2e-2), LOSS_SCALE)


def loss_fn(params, images, labels, dtype="float16"):
    features = digits.leaky_network(params["layers"], images, dtype)
    logits = features.astype(dtype) * jnp.exp(10 * params["t"]).astype(dtype)
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train_step(carry, batch, dtype):
    params, opt_state = carry
    loss_in_dtype = functools.partial(loss_fn, dtype=dtype)
    value_and_grad = jmp_scale.value_and_grad(loss_in_dtype, opt_state.loss_scale)
    loss, grads = value_and_grad(params, *batch)
    updates, opt_state = TX.update(grads, opt_state, params, value=loss)
    return (optax.apply_updates(params, updates), opt_state), loss


STEPS = {d: functools.partial(train_step, dtype=d) for d in ("float16", "float32")}


def next_dtype(dtype, carry, batch):
    """The dtype of the next steps, and the state to take them from."""
    params, opt_state = carry
    if dtype == "float16" and opt_state.skipped_in_a_row >= CHUNK // 2:
        return "float32", carry
    if dtype == "float32":
        found = diagnostics.calibrate_loss_scale(loss_fn, params, *batch)
        if found.log2_high - found.log2_low >= 4:  # they are NaN where no S works
            s = max(
                2.0 ** float(found.recommended_log2_scale), LOSS_SCALE.min_loss_scale
            )
            scale = dataclasses.replace(opt_state.loss_scale, loss_scale=s)
            return "float16", (params, opt_state._replace(loss_scale=scale))
    return dtype, carry


def train(batches, params, fall_back):
    """The losses, and the last state of the optimizer."""
    carry, dtype, losses = (params, TX.init(params)), "float16", []
    for start in range(0, len(batches[0]), CHUNK):
        part = tuple(x[start : start + CHUNK] for x in batches)
        carry, loss = _show.run_chunk(STEPS[dtype])(carry, part)
        losses.append(np.asarray(loss))
        before = dtype
        if fall_back:
            dtype, carry = next_dtype(dtype, carry, tuple(x[-1] for x in part))
        if dtype != before:
            print(f"step {start + len(loss)}: from {before} to {dtype}")
    return np.concatenate(losses), carry[1]


def main(argv=None):
    args = _show.parser(__doc__, 1000, seed=True, out=True).parse_args(argv)
    data = digits.load_images(args.seed)[0], digits.load_labels(args.seed)[0]
    batches = tuple(digits.Batches(x, args.steps, 64, args.seed) for x in data)
    layers = digits.init_layers((64, 128, 10), jax.random.key(args.seed))
    params, rows, losses = {"layers": layers, "t": jnp.float32(1.2)}, [], {}
    for name, fall_back in {"float16 alone": False, "with float32": True}.items():
        losses[name], state = train(batches, params, fall_back)
        loss, s = losses[name][-20:].mean(), _show.power(state.loss_scale.loss_scale)
        rows.append([name, f"{loss:.4f}", s, state.skipped, state.skipped_in_a_row])
    _show.table(["", "last loss", "S", "skipped", "in a row"], rows)
    means = {
        name: loss[: len(loss) // CHUNK * CHUNK].reshape(-1, CHUNK).mean(1)
        for name, loss in losses.items()
    }
    title = "In float16 alone no step is taken, since the loss is not finite"
    axes = {"xlabel": f"step / {CHUNK}", "yscale": "log"}
    panel = _show.curves(title, f"mean loss of {CHUNK} steps", means, **axes)
    _show.figure(args.out / "precision_fallback.png", [panel], columns=1)


if __name__ == "__main__":
    main()
