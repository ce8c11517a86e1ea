"""A run that diverges goes back to a good checkpoint, and leaves out what spoilt it.

Half-way 60 broken batches come in a row: too many for a `SpikeGuard`, which takes a new
level for normal after 10 skips. They spoil the model for good. Every 50 batches the
loop asks `health`; when the loss diverges it goes back to the oldest of its last three
checkpoints, and on with the next data. Whatever decides is in the checkpoint, so a run
that is killed (--kill-at) and started again (--resume) takes the same way.
"""

import shutil

import _show
import digits
import numpy as np
import optax
import orbax.checkpoint as ocp

import jmp_scale
from jmp_scale import diagnostics

CHUNK = 50  # batches between two looks at the run, and between two checkpoints
TX = jmp_scale.with_loss_scale(
    optax.adam(5e-3),
    jmp_scale.DynamicLossScale(period=200),
    guard=jmp_scale.SpikeGuard(warmup=50),
)


def train_step(state, images):
    params, old, history = state["params"], state["opt_state"], state["history"]
    value_and_grad = jmp_scale.value_and_grad(
        digits.reconstruction_loss, old.loss_scale
    )
    loss, grads = value_and_grad(params, images)
    updates, new = TX.update(grads, old, params, value=loss)
    history = history.push(
        old.loss_scale, new.grads_finite, applied=new.applied, loss=loss
    )
    params = optax.apply_updates(params, updates)
    return {"params": params, "opt_state": new, "history": history}, loss


def diverges(state):
    findings = diagnostics.health(state["opt_state"], state["history"])
    return any("diverges" in text or "blew up" in text for text in findings)


def train(state, batches, checkpoints, kill_at=None):
    """The last state and the loss of each batch; checkpoints are named by batch."""
    batch, losses = 0, np.full(len(batches), np.nan)
    if checkpoints and checkpoints.latest_step() is not None:
        batch = checkpoints.latest_step()
        state = restore(checkpoints, batch, state)
        print(f"batch {batch}: resumed")
    while batch < len(batches):
        if kill_at is not None and batch >= kill_at:
            raise SystemExit(f"batch {batch}: killed")
        part = slice(batch, batch + CHUNK)
        state, losses[part] = _show.run_chunk(train_step)(state, batches[part])
        batch += len(losses[part])
        if checkpoints:
            if diverges(state) and checkpoints.all_steps():
                good = min(checkpoints.all_steps())
                state = restore(checkpoints, good, state)
                print(f"batch {batch}: the loss diverges, back to the state of {good}")
            checkpoints.save(batch, args=ocp.args.StandardSave(state))
    return losses


def restore(checkpoints, batch, like):
    return checkpoints.restore(batch, args=ocp.args.StandardRestore(like))


def main(argv=None):
    parser = _show.parser(__doc__, 900, seed=True, out=True)
    number = _show.positive_int
    parser.add_argument("--kill-at", type=number, help="batch to stop at (none)")
    parser.add_argument("--resume", action="store_true", help="a run that was killed")
    args = parser.parse_args(argv)
    images, _ = digits.load_images(args.seed)
    batches = digits.Batches(images, args.steps, 64, args.seed)[:]
    batches[args.steps // 2 :][:60] *= 40
    params = digits.init_autoencoder(args.seed)
    history = diagnostics.LossScaleHistory.create(500)
    start = {"params": params, "opt_state": TX.init(params), "history": history}

    folder = (args.out / "rewind_checkpoints").absolute()
    if not args.resume:
        shutil.rmtree(folder, ignore_errors=True)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=3, enable_async_checkpointing=False
    )
    with ocp.CheckpointManager(folder, options=options) as checkpoints:
        losses = {"with rewind": train(start, batches, checkpoints, args.kill_at)}
    losses["without"] = train(start, batches, None)
    rows = [[name, f"{loss[-CHUNK:].mean():.6f}"] for name, loss in losses.items()]
    _show.table(["", "last loss"], rows)
    title, axes = "60 broken batches, with and without a way back", {"yscale": "log"}
    panel = _show.curves(title, "loss", losses, xlabel="batch", **axes)
    _show.figure(args.out / "rewind.png", [panel], columns=1)


if __name__ == "__main__":
    main()
