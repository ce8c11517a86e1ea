"""Weights and moments in bfloat16, to a checkpoint and back, and on in float32.

Weights, their remainders and Adam's averages take 8 bytes a parameter, not 12. A run
that is stopped and restored ends with the same bits, and a run in float32 can take over
its weights, which are exact, and its moments.
"""

import shutil

import _digits
import _show
import jax
import numpy as np
import optax
import orbax.checkpoint.experimental.v1 as ocp

import jmp_scale
from jmp_scale import checkpoints

KEY = jax.random.key(0)
TX = jmp_scale.with_half_storage(optax.adamw(1e-3), averages=("mu", "nu"), key=KEY)


def loss_fn(params, images, labels):  # a float32 program
    x = images
    for layer in params[:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    logits = x @ params[-1]["w"] + params[-1]["b"]
    return _digits.classification_loss(logits, labels)


half_loss = jmp_scale.autocast(loss_fn, "bfloat16")


def init():
    params = _digits.init_layers((64, 128, 128, 10), jax.random.key(1))
    params = jax.tree.map(lambda p: p.astype("bfloat16"), params)
    return params, TX.init(params)


@jax.jit
def train_step(params, opt_state, images, labels):
    loss, grads = jax.value_and_grad(half_loss)(params, images, labels)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def train(state, batches, steps):
    for step in steps:
        *state, loss = train_step(*state, *(x[step] for x in batches))
    return tuple(state), float(loss)


def main(argv=None):
    args = _show.parser(__doc__, 400, out=True).parse_args(argv)
    batches = _digits.labelled_batches(args.steps, 128)
    steps, stop = range(args.steps), args.steps // 2
    path = (args.out / "storage_checkpoint").absolute()
    shutil.rmtree(path, ignore_errors=True)

    straight, loss = train(init(), batches, steps)
    ocp.save(path, train(init(), batches, steps[:stop])[0])
    resumed, _ = train(ocp.load(path, init()), batches, steps[stop:])
    full, adam = checkpoints.without_half_storage(*straight)

    size = sum(x.nbytes for x in jax.tree.leaves(straight))
    size /= sum(x.size for x in jax.tree.leaves(straight[0]))
    pairs = zip(*map(jax.tree.leaves, (straight, resumed)), strict=True)
    differ = sum(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs)
    batch = [x[0] for x in batches]
    half, again = (float(loss_fn(params, *batch)) for params in (straight[0], full))
    print(f"weights, remainders and moments: {size:.1f} bytes a parameter")
    print(f"loss {loss:.4f}; {differ} arrays differ after the restart")
    print(f"first batch: {half:.4f} with the stored weights, {again:.4f} in float32")
    print(f"moments of the float32 run: {adam[0].nu[0]['w'].dtype}")
    print(f"checkpoint: {path}")


if __name__ == "__main__":
    main()
