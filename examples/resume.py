"""Train, stop, resume from an Orbax checkpoint: the same bits as without the stop.

S and its counter are in the checkpoint, by name; period and bounds come from this
script. It trains twice: once straight through, and once with a stop in the middle of a
growth period, after which everything is created anew and restored.
"""

import shutil

import _digits
import _show
import jax
import numpy as np
import optax
import orbax.checkpoint.experimental.v1 as ocp
from tqdm import tqdm

import jmp_scale

TX = jmp_scale.with_loss_scale(
    optax.adam(1e-3), jmp_scale.DynamicLossScale(2.0**22, period=50)
)


def init():
    params = _digits.init_layers((64, 128, 128, 10), jax.random.key(0))
    return {"params": params, "opt_state": TX.init(params)}


def loss_fn(params, images, labels):
    return _digits.classification_loss(_digits.network(params, images), labels)


@jax.jit
def train_step(state, batch):
    params, opt_state = state["params"], state["opt_state"]
    value_and_grad = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)
    loss, grads = value_and_grad(params, *batch)
    updates, opt_state = TX.update(grads, opt_state, params, value=loss)
    params = optax.apply_updates(params, updates)
    return {"params": params, "opt_state": opt_state}, loss


def train(name, state, batches, steps):
    loss = np.nan
    for step in tqdm(steps, f"{name:24}"):
        state, loss = train_step(state, tuple(x[step] for x in batches))
    return state, loss


def main(argv=None):
    args = _show.parser(__doc__, 600, out=True).parse_args(argv)
    batches = _digits.labelled_batches(args.steps, 128)
    steps, stop = range(args.steps), args.steps // 2 + 7
    path = (args.out / "resume_checkpoint").absolute()
    shutil.rmtree(path, ignore_errors=True)

    straight = train("straight through", init(), batches, steps)
    stopped = train("until the stop", init(), batches, steps[:stop])
    ocp.save(path, stopped[0])
    resumed = train("resumed", ocp.load(path, init()), batches, steps[stop:])

    runs, rows = {"straight": straight, "stopped": stopped, "resumed": resumed}, []
    for name, (state, loss) in runs.items():
        opt_state = state["opt_state"]
        s, counter = opt_state.loss_scale.loss_scale, opt_state.loss_scale.counter
        rows.append([name, f"{loss:.9f}", _show.power(s), counter, opt_state.skipped])
    _show.table(["run", "last loss", "S", "counter", "skipped"], rows)
    pairs = zip(*(jax.tree.leaves(run[0]) for run in (straight, resumed)), strict=True)
    equal = [np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs]
    print(f"\n{equal.count(False)} of {len(equal)} arrays differ in any bit")
    print(f"checkpoint: {path}")


if __name__ == "__main__":
    main()
