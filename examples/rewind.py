"""A run that diverges goes back to a good checkpoint, and leaves out what spoilt it.

Half-way 60 broken batches come in a row: too many for a `SpikeGuard`, which takes a new
level for normal after 10 skips. They spoil the model for good. Every 50 batches the
loop asks a `HealthLog`; when the loss diverges it goes back to the oldest of its last
three checkpoints, and on with the next data. Whatever decides is in the checkpoint, so
a run that is killed (--kill-at) and started again (--resume) takes the same way.
"""

import _checkpoints
import _digits
import _show
import numpy as np
import optax

import jmp_scale
from jmp_scale import diagnostics

CHUNK = 50  # batches between two looks at the run, and between two checkpoints
DYNAMIC = jmp_scale.DynamicLossScale(period=200)
GUARD = jmp_scale.SpikeGuard(warmup=50)
TX = jmp_scale.with_loss_scale(optax.adam(5e-3), DYNAMIC, guard=GUARD)


def train_step(state, images):
    params, old, history = state["params"], state["opt_state"], state["history"]
    scaled = jmp_scale.value_and_grad(_digits.half_loss, old.loss_scale)
    loss, grads = scaled(params, images)
    updates, new = TX.update(grads, old, params, value=loss)
    history = history.push(old, new, loss=loss)
    params = optax.apply_updates(params, updates)
    return {"params": params, "opt_state": new, "history": history}, loss


def diverges(state):
    log = diagnostics.HealthLog()
    log(state["opt_state"], state["history"])
    return not log.rules.isdisjoint({"loss diverges", "loss blew up"})


def train(state, batches, checkpoints, kill_at):
    """The loss of each batch; a checkpoint has the number of the batch that is next."""
    batch, losses = _checkpoints.latest(checkpoints), np.full(len(batches), np.nan)
    if batch:
        state = _checkpoints.restored(checkpoints, batch, state)
        print(f"batch {batch}: resumed")
    while batch < len(batches):
        if kill_at and batch >= kill_at:
            raise SystemExit(f"batch {batch}: killed")
        part = slice(batch, batch + CHUNK)
        state, losses[part] = _show.run_chunk(train_step)(state, batches[part])
        batch += len(losses[part])
        if diverges(state) and checkpoints.all_steps():
            good = min(checkpoints.all_steps())
            state = _checkpoints.restored(checkpoints, good, state)
            print(f"the loss diverges: leaves out batches {good} to {batch - 1}")
        _checkpoints.save(checkpoints, batch, state)
    return losses


def main(argv=None):
    args = _checkpoints.command_line(__doc__, 900).parse_args(argv)
    batches = _digits.image_batches(args.steps, 64, args.seed)[:]
    batches[args.steps // 2 :][:60] *= 40
    params = _digits.init_autoencoder(args.seed)
    history = diagnostics.LossScaleHistory.create(500)
    start = {"params": params, "opt_state": TX.init(params), "history": history}
    folder = _checkpoints.folder(args.out / "rewind_checkpoints", args.resume)
    with _checkpoints.manager(folder, keep=3) as checkpoints:
        losses = {"with rewind": train(start, batches, checkpoints, args.kill_at)}
    losses["without"] = _show.scan(train_step, start, batches, "without")[1]
    rows = [[name, f"{loss[-CHUNK:].mean():.6f}"] for name, loss in losses.items()]
    _show.table(["", "last loss"], rows)


if __name__ == "__main__":
    main()
