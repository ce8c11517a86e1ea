"""Train, stop, resume from an Orbax checkpoint: the same bits as without the stop.

S and its counter are in the checkpoint, by name; period and bounds come from this script. The script
trains twice: once straight through, and once with a stop in the middle of a growth period, from which
everything is created anew and restored.
"""

import argparse
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint.experimental.v1 as ocp
from digits import positive_int
from sklearn.datasets import load_digits
from tqdm import tqdm

import jmp_scale

SIZES = (64, 128, 128, 10)
TX = jmp_scale.with_loss_scale(
    optax.adam(1e-3), jmp_scale.DynamicLossScale(2.0**22, period=50)
)


def load_data():
    images, labels = load_digits(return_X_y=True)
    return jnp.asarray(images / 16, jnp.float32), jnp.asarray(labels)


def init():
    keys = jax.random.split(jax.random.key(0), len(SIZES) - 1)
    glorot = jax.nn.initializers.glorot_normal()
    params = [
        {"w": glorot(k, (i, o)), "b": jnp.zeros(o)}
        for k, i, o in zip(keys, SIZES, SIZES[1:], strict=False)
    ]
    return {"params": params, "opt_state": TX.init(params), "step": jnp.int32(0)}


def loss_fn(params, images, labels):
    h = images.astype(jnp.float16)
    params = jmp_scale.Policy(jnp.float32, jnp.float16, jnp.float32).cast_to_compute(
        params
    )
    for layer in params[:-1]:
        h = jax.nn.relu(h @ layer["w"] + layer["b"])
    logits = (h @ params[-1]["w"] + params[-1]["b"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def train_step(state, images, labels):
    key = jax.random.fold_in(
        jax.random.key(1), state["step"]
    )  # the batch follows from the step
    batch = jax.random.randint(key, (128,), 0, len(images))
    value_and_grad = jmp_scale.value_and_grad(loss_fn, state["opt_state"].loss_scale)
    loss, grads = value_and_grad(state["params"], images[batch], labels[batch])
    updates, opt_state = TX.update(
        grads, state["opt_state"], state["params"], value=loss
    )
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss


def train(state, steps, data, description):
    loss = jnp.float32(jnp.nan)
    for _ in tqdm(range(steps), description):
        state, loss = train_step(state, *data)
    return state, float(loss)


def row(name, state, loss):
    loss_scale, opt_state = state["opt_state"].loss_scale, state["opt_state"]
    loss = "" if loss is None else f"{loss:.9f}"
    print(
        f"{name:<24}{int(state['step']):>6}{loss:>16}{np.log2(float(loss_scale.loss_scale)):>8.0f}"
        f"{int(loss_scale.counter):>9}{int(opt_state.skipped):>9}"
    )


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=600,
        help="training steps in all (default 600)",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("out"),
        help="folder (default out)",
    )
    args = parser.parse_args(argv)
    data, stop = load_data(), args.steps // 2 + 7
    path = (args.out / "resume_checkpoint").absolute()
    shutil.rmtree(path, ignore_errors=True)

    straight, straight_loss = train(init(), args.steps, data, "straight through")
    stopped, stopped_loss = train(init(), stop, data, "until the stop")
    ocp.save(path, stopped)
    restored = ocp.load(path, init())
    resumed, resumed_loss = train(restored, args.steps - stop, data, "resumed")

    print(
        f"\n{'run':<24}{'step':>6}{'loss':>16}{'log2 S':>8}{'counter':>9}{'skipped':>9}"
    )
    row("stopped and saved", stopped, stopped_loss)
    row("restored", restored, None)
    row("resumed", resumed, resumed_loss)
    row("straight through", straight, straight_loss)
    pairs = zip(jax.tree.leaves(straight), jax.tree.leaves(resumed), strict=True)
    different = sum(
        np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs
    )
    print(
        f"\n{different} of {len(jax.tree.leaves(straight))} arrays differ in any bit; checkpoint in {path}"
    )
    return different


if __name__ == "__main__":
    main()
